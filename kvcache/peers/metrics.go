package peers

import "github.com/prometheus/client_golang/prometheus"

// metrics counts what goes to and comes from the members. Safe for concurrent use.
type metrics struct {
	store *Store
	// What was written: blocks, bytes by kind, and tokens of tails.
	blocks     prometheus.Counter
	bytes      *prometheus.CounterVec
	tailTokens prometheus.Counter
	// What went wrong: growths of tails that nobody follows, reads that were asked of
	// another member too, and by member calls without an answer and blocks without room.
	dropped, around prometheus.Counter
	failed, full    *prometheus.CounterVec
}

// newMetrics makes the metrics, and registers them unless reg is nil.
func newMetrics(reg prometheus.Registerer, s *Store) *metrics {
	one := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "kvmesh_kv_peer_" + name, Help: help})
	}
	vec := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvmesh_kv_peer_" + name, Help: help}, []string{label})
	}
	m := &metrics{
		store:      s,
		blocks:     one("replicated_blocks_total", "Blocks that were written to other hosts, each copy once."),
		bytes:      vec("replicated_bytes_total", "Bytes that were written to other hosts, of blocks and of tails.", "kind"),
		tailTokens: one("replicated_tail_tokens_total", "Tokens of the open ends of streams that were written to other hosts."),
		dropped:    one("tails_dropped_total", "Growths of tails of which nothing is copied, because too many are."),
		around:     one("reads_around_total", "Reads of a block that went on to another host, because one did not have it, failed or did not answer at once."),
		failed:     vec("failed_total", "Calls that a peer did not answer.", "peer"),
		full:       vec("full_total", "Blocks for which a peer had no room.", "peer"),
	}
	m.bytes.WithLabelValues("block")
	m.bytes.WithLabelValues("tail")
	if reg != nil {
		reg.MustRegister(m, m.blocks, m.bytes, m.tailTokens, m.dropped, m.around, m.failed, m.full)
	}
	return m
}

// up describes the gauge of each member; it is built anew each time, for there are no
// package variables.
func (m *metrics) up() *prometheus.Desc {
	return prometheus.NewDesc("kvmesh_kv_peer_up", "1 for a member that answered when it was last called or probed, or has not been yet, 0 for one that fails.", []string{"peer", "zone"}, nil)
}

// owed describes the gauge of those that have something to forget, in the same way.
func (m *metrics) owed() *prometheus.Desc {
	return prometheus.NewDesc("kvmesh_kv_peer_owed", "Tenants and models that a member which was away is still to forget.", []string{"peer"}, nil)
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(out chan<- *prometheus.Desc) {
	out <- m.up()
	out <- m.owed()
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(out chan<- prometheus.Metric) {
	for _, st := range m.store.States() {
		if st.Owed > 0 {
			out <- prometheus.MustNewConstMetric(m.owed(), prometheus.GaugeValue, float64(st.Owed), st.ID)
		}
		if st.Gone {
			continue
		}
		up := 1.0
		if st.Trouble != "" {
			up = 0
		}
		out <- prometheus.MustNewConstMetric(m.up(), prometheus.GaugeValue, up, st.ID, st.Zone)
	}
}
