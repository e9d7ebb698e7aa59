// Package kvmetrics shows the counters of a KV store as metrics, under the same names
// for every tier: kvmesh_kv_tier_*, with the tier as a label. What a store counts, and
// since when, is its own matter; see kvcache.Stats.
package kvmetrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/kvcache"
)

// New returns a collector of the metrics kvmesh_kv_tier_* of a store, with the tier's
// name as their label. It reads the counters at each scrape.
func New(tier string, store kvcache.Counted) prometheus.Collector {
	return collector{store, prometheus.Labels{"tier": tier}}
}

// collector shows the counters of a store.
type collector struct {
	store kvcache.Counted
	tier  prometheus.Labels
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
		{"stale_total", "Writes of attempts that had been overtaken.", counter, func(s kvcache.Stats) uint64 { return s.Stale }},
		{"lookups_total", "Look-ups of chains.", counter, func(s kvcache.Stats) uint64 { return s.Lookups }},
		{"lookup_tokens_total", "Tokens that look-ups found.", counter, func(s kvcache.Stats) uint64 { return s.LookupTokens }},
		{"append_bytes_total", "Bytes appended to the open ends of streams.", counter, func(s kvcache.Stats) uint64 { return s.AppendBytes }},
		{"evicted_bytes_total", "Bytes of the blocks that were evicted by this process.", counter, func(s kvcache.Stats) uint64 { return s.EvictedBytes }},
		{"expired_total", "Open ends of streams that were dropped by age.", counter, func(s kvcache.Stats) uint64 { return s.Expired }},
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
	s := c.store.Stats()
	for _, r := range rows() {
		out <- prometheus.MustNewConstMetric(c.desc(r.name, r.help), r.kind, float64(r.value(s)))
	}
	for i, r := range kvcache.Reasons() {
		out <- prometheus.MustNewConstMetric(c.refused(), prometheus.CounterValue, float64(s.Refused[i]), r.String())
	}
}
