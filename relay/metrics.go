package relay

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

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
	for _, c := range []prometheus.Collector{m.attempts, m.truncated, m.denied, m.streams, m.firstToken, m.duration, m.perToken} {
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
