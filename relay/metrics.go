package relay

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// Results of an attempt, the values of the label "result".
const (
	resultOK        = "ok"           // a complete answer
	resultRefused   = "refused"      // a 4xx of the worker, passed on
	resultEgress    = "egress"       // Envoy's egress listener is away
	resultConnect   = "connect"      // the worker could not be reached
	resultStatus    = "status"       // a 5xx of the worker
	resultWrong     = "wrong_worker" // another worker than the one named
	resultBroken    = "broken"       // ended before the first byte
	resultTruncated = "truncated"    // ended between first byte and end
	resultTimeout   = "timeout"      // a time-out of the route
	resultGone      = "client_gone"  // the client left, or the gateway stops
	resultLost      = "lost"         // another attempt answered
	resultStalled   = "stalled"      // replaced because of its silence
	resultQueued    = "queued"       // waited for a sequence at a full worker, and another one was free
)

// metrics are the relay's; label values come from the policy and from constants,
// never from clients. The gen_ai histograms have the names and meanings of
// OpenTelemetry's conventions for servers, in seconds, with buckets that reach to
// the slow end of the time-outs.
type metrics struct {
	attempts  *prometheus.CounterVec
	truncated prometheus.Counter
	denied    prometheus.Counter
	streams   prometheus.Gauge

	moves    *prometheus.CounterVec
	held     prometheus.Counter
	gap      *prometheus.HistogramVec // s
	restored prometheus.Counter
	computed prometheus.Counter

	firstToken *prometheus.HistogramVec // s
	duration   *prometheus.HistogramVec // s
	perToken   *prometheus.HistogramVec // s
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	gen := []string{"gen_ai_operation_name", "gen_ai_request_model"}
	m := &metrics{
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvmesh_relay_attempts_total", Help: "Attempts to have a request served by one worker, by result.",
		}, []string{"result"}),
		truncated: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvmesh_relay_truncated_total", Help: "Streams that ended with an error event after their first token.",
		}),
		denied: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvmesh_relay_retry_budget_exhausted_total", Help: "Further attempts not made because too many requests were being repeated.",
		}),
		streams: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvmesh_relay_streams", Help: "Streamed answers being carried.",
		}),
		moves: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvmesh_relay_moves_total", Help: "Answers that went on at another worker, by cause and by how: exact, restored, quantized, replayed, text.",
		}, []string{"cause", "kind"}),
		held: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvmesh_relay_moves_held_total", Help: "Answers that stayed with a sick worker because most of its pool was sick.",
		}),
		gap: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kvmesh_relay_move_gap_seconds", Help: "Seconds from the last token before a move to the first after it.",
			Buckets: []float64{.005, .01, .02, .04, .06, .08, .1, .15, .25, .5, 1, 2, 4, 8, 16, 32},
		}, []string{"cause"}),
		restored: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvmesh_relay_restored_tokens_total", Help: "Tokens whose KV was restored for answers that moved.",
		}),
		computed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvmesh_relay_replayed_tokens_total", Help: "Tokens that were computed again for answers that moved.",
		}),
		firstToken: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "gen_ai_server_time_to_first_token", Help: "Seconds from the request to the first token of a streamed answer.",
			Buckets: []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 30, 60, 180, 600},
		}, gen),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "gen_ai_server_request_duration", Help: "Seconds from the request to the end of its answer.",
			Buckets: []float64{.01, .02, .04, .08, .16, .32, .64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68, 655.36},
		}, gen),
		perToken: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "gen_ai_server_time_per_output_token", Help: "Seconds per token after the first, of a complete streamed answer.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5},
		}, gen),
	}
	for _, c := range []prometheus.Collector{m.attempts, m.truncated, m.denied, m.streams, m.moves, m.held, m.gap, m.restored, m.computed, m.firstToken, m.duration, m.perToken} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// operation is the value of gen_ai_operation_name.
func operation(ep openai.Endpoint) string {
	if ep == openai.Chat {
		return "chat"
	}
	return "text_completion"
}

// answered records a complete answer. first is the time to the first token,
// negative for an answer that was not streamed.
func (m *metrics) answered(op, model string, first, total time.Duration, tokens int) {
	m.duration.WithLabelValues(op, model).Observe(total.Seconds())
	if first < 0 {
		return
	}
	m.firstToken.WithLabelValues(op, model).Observe(first.Seconds())
	if tokens > 1 {
		m.perToken.WithLabelValues(op, model).Observe((total - first).Seconds() / float64(tokens-1))
	}
}

// moved records an answer that has its first token from another worker. The pen is held.
func (j *job) moved(a *attempt, got spliced, now time.Time) {
	kind := got.kv
	if kind == "" {
		kind = kvReplayed
	}
	gap := now.Sub(j.last)
	a.took = takeover{kind, got.restored, got.computed, gap}
	j.state.move(fleet.MoveView{
		From: j.from, To: a.w.id, Cause: a.cause, KV: kind, Restored: got.restored, Computed: got.computed, GapSeconds: gap.Seconds(),
	})
	m := j.r.metrics
	m.moves.WithLabelValues(a.cause, kind).Inc()
	m.gap.WithLabelValues(a.cause).Observe(gap.Seconds())
	m.restored.Add(float64(got.restored))
	m.computed.Add(float64(got.computed))
	j.r.cfg.Log.Info("answer moved", "request", j.in.Header.Get(names.RequestID), "cause", a.cause, "kind", kind, "from", j.from, "to", a.w.id,
		"attempt", a.n, "gap", gap, "tokens", j.led.tokens, "restored", got.restored, "computed", got.computed)
}
