package extproc

import "github.com/prometheus/client_golang/prometheus"

// Outcomes of a request, the values of the label "outcome".
const (
	outcomeRelay       = "relay"       // to the relay
	outcomeResume      = "resume"      // to the relay, for the rest of a stream that it has
	outcomeDirect      = "direct"      // to a pool, because its route has no relay
	outcomePassthrough = "passthrough" // unparsed, to the default pool
	outcomeModels      = "models"      // answered from policy
	outcomeRefused     = "refused"     // answered with the client's error
	outcomeUnavailable = "unavailable" // answered 503
	outcomeUndecided   = "undecided"   // passed on unchanged: no fleet yet, or a fault of ours
)

// metrics are the counters of a Server; label values are constants, whatever
// clients send.
type metrics struct {
	requests    *prometheus.CounterVec
	passthrough *prometheus.CounterVec
	panics      prometheus.Counter
	steps       prometheus.Histogram
	held        prometheus.Counter
	heldTokens  prometheus.Counter
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvmesh_extproc_requests_total",
			Help: "Requests that Envoy asked the external processor about, by outcome.",
		}, []string{"outcome"}),
		passthrough: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvmesh_passthrough_requests_total",
			Help: "Requests on paths whose body is not parsed, by class of path.",
		}, []string{"path"}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvmesh_extproc_panics_total",
			Help: "Requests passed on unchanged because deciding them panicked.",
		}),
		steps: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "kvmesh_extproc_step_seconds",
			Help:    "Time to decide about one message of Envoy.",
			Buckets: prometheus.ExponentialBuckets(2e-6, 4, 9),
		}),
		held: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvmesh_prefix_requests_total",
			Help: "Requests whose first choice holds the beginning of their prompt, as KV events tell.",
		}),
		heldTokens: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvmesh_prefix_tokens_total",
			Help: "Tokens that it holds of them.",
		}),
	}
	for _, c := range []prometheus.Collector{m.requests, m.passthrough, m.panics, m.steps, m.held, m.heldTokens} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}
