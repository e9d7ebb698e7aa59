package stack

import "github.com/prometheus/client_golang/prometheus"

// metrics counts what a stack does. Safe for concurrent use.
type metrics struct {
	dropped               *prometheus.CounterVec // by tier and reason
	blocks, bytes, tokens *prometheus.CounterVec // brought near, by tier
	shared                *prometheus.CounterVec // by tier
	cuts                  *prometheus.CounterVec // by tier and reason
}

// The reasons for which a tier did not contribute to a read.
const (
	cutDeadline = "deadline" // the caller's time was over
	cutSlower   = "slower"   // computing is expected to be faster
	cutAway     = "away"     // a call that somebody left still runs, or too many do
	cutDropped  = "dropped"  // it still has to drop the model
)

// newMetrics makes the metrics, and registers them unless reg is nil.
func newMetrics(reg prometheus.Registerer, tiers []*tier) *metrics {
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvmesh_kv_stack_" + name, Help: help}, append([]string{"tier"}, labels...))
	}
	m := &metrics{
		dropped: vec("dropped_total", "Blocks that were not written to a far tier, by reason.", "reason"),
		blocks:  vec("promoted_blocks_total", "Blocks brought from a far tier into the near store."),
		bytes:   vec("promoted_bytes_total", "Bytes of the blocks that were brought near."),
		tokens:  vec("promoted_tokens_total", "Tokens of the blocks that were brought near."),
		shared:  vec("promotions_shared_total", "Reads that waited for a block which another was bringing already."),
		cuts:    vec("cuts_total", "Reads that went on without what a far tier may have had, by reason.", "reason"),
	}
	for _, t := range tiers {
		for _, reason := range []string{"full", "gone", "no_room", "failed"} {
			m.dropped.WithLabelValues(t.Name, reason)
		}
		for _, reason := range []string{cutDeadline, cutSlower, cutAway, cutDropped} {
			m.cuts.WithLabelValues(t.Name, reason)
		}
		for _, v := range []*prometheus.CounterVec{m.blocks, m.bytes, m.tokens, m.shared} {
			v.WithLabelValues(t.Name)
		}
	}
	if reg == nil {
		return m
	}
	reg.MustRegister(m.dropped, m.blocks, m.bytes, m.tokens, m.shared, m.cuts)
	for _, t := range tiers {
		gauge := func(name, help string, value func() int64) {
			reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "kvmesh_kv_stack_" + name, Help: help, ConstLabels: prometheus.Labels{"tier": t.Name},
			}, func() float64 { return float64(value()) }))
		}
		gauge("behind_blocks", "Blocks that wait to be written to a far tier.", t.behind.blocks.Load)
		gauge("behind_bytes", "Bytes of the blocks that wait; they are in the near store.", t.behind.bytes.Load)
		gauge("behind_tokens", "Tokens of the blocks that wait: lost if the host is lost now, where no other tier has them.", t.behind.tokens.Load)
		gauge("left", "Calls of a far tier that still run after whoever made them had no more time.", t.left.Load)
	}
	return m
}

// cut counts a read that went on without a tier.
func (m *metrics) cut(t *tier, reason string) { m.cuts.WithLabelValues(t.Name, reason).Inc() }

// brought counts a block that has come near.
func (m *metrics) brought(t *tier, tokens int, bytes int64) {
	m.blocks.WithLabelValues(t.Name).Inc()
	m.bytes.WithLabelValues(t.Name).Add(float64(bytes))
	m.tokens.WithLabelValues(t.Name).Add(float64(tokens))
}
