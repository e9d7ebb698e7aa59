package remote

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/kvcache"
)

// register makes the metrics of a store, in its registry if it has one.
func register(cfg OpsConfig, o *Ops) *prometheus.HistogramVec {
	tier := prometheus.Labels{"tier": cfg.Tier}
	took := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "kvmesh_kv_tier_seconds", Help: "Time that calls of a tier took, by what they did.", ConstLabels: tier,
		Buckets: prometheus.ExponentialBuckets(0.0005, 2, 15),
	}, []string{"op"})
	if cfg.Registry != nil {
		cfg.Registry.MustRegister(took, collector{o, tier})
	}
	return took
}

// collector shows the counters of a store.
type collector struct {
	o    *Ops
	tier prometheus.Labels
}

// row is one metric of the counters.
type row struct {
	name, help string
	kind       prometheus.ValueType
	value      func(kvcache.Stats) uint64
}

// rows are the metrics of the counters, but for refusals, which have a label.
func rows() []row {
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	return []row{
		{"used_bytes", "Bytes that the tier holds, as far as this process knows.", gauge, func(s kvcache.Stats) uint64 { return uint64(max(0, s.Used)) }},
		{"limit_bytes", "Bytes that the tier may hold.", gauge, func(s kvcache.Stats) uint64 { return uint64(s.Limit) }},
		{"puts_total", "Blocks written.", counter, func(s kvcache.Stats) uint64 { return s.Puts }},
		{"put_bytes_total", "Bytes of the blocks that were written.", counter, func(s kvcache.Stats) uint64 { return s.PutBytes }},
		{"duplicates_total", "Blocks that were there already.", counter, func(s kvcache.Stats) uint64 { return s.Duplicates }},
		{"hits_total", "Blocks read.", counter, func(s kvcache.Stats) uint64 { return s.Hits }},
		{"hit_bytes_total", "Bytes of the blocks that were read.", counter, func(s kvcache.Stats) uint64 { return s.HitBytes }},
		{"misses_total", "Blocks that were not there.", counter, func(s kvcache.Stats) uint64 { return s.Misses }},
		{"late_total", "Calls that were given up because the server was slow, or not tried because it had been.", counter, func(s kvcache.Stats) uint64 { return s.Late }},
		{"failed_total", "Calls that failed otherwise.", counter, func(s kvcache.Stats) uint64 { return s.Failed }},
		{"full_total", "Writes that found no room.", counter, func(s kvcache.Stats) uint64 { return s.Full }},
		{"evictions_total", "Blocks evicted by this process.", counter, func(s kvcache.Stats) uint64 { return s.Evictions }},
	}
}

const refusedName = "refused_total"

// desc describes a metric.
func (c collector) desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvmesh_kv_tier_"+name, help, labels, c.tier)
}

// refused describes the refusals.
func (c collector) refused() *prometheus.Desc {
	return c.desc(refusedName, "Blocks that the tier did not serve, by reason.", "reason")
}

// Describe implements prometheus.Collector.
func (c collector) Describe(out chan<- *prometheus.Desc) {
	for _, r := range rows() {
		out <- c.desc(r.name, r.help)
	}
	out <- c.refused()
}

// Collect implements prometheus.Collector.
func (c collector) Collect(out chan<- prometheus.Metric) {
	s := c.o.Stats()
	for _, r := range rows() {
		out <- prometheus.MustNewConstMetric(c.desc(r.name, r.help), r.kind, float64(r.value(s)))
	}
	for i, r := range kvcache.Reasons() {
		out <- prometheus.MustNewConstMetric(c.refused(), prometheus.CounterValue, float64(s.Refused[i]), r.String())
	}
}
