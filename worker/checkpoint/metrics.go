package checkpoint

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/kvcache"
)

// metrics counts what a keeper does. Safe for concurrent use.
type metrics struct {
	blocks, appends, stale, restored, left prometheus.Counter

	bytes    *prometheus.CounterVec // written, by kind
	skipped  *prometheus.CounterVec // by kind
	failed   *prometheus.CounterVec // by operation
	restores *prometheus.CounterVec // by result
	refused  *prometheus.CounterVec // by reason

	copyTime, restoreTime prometheus.Histogram
}

// newMetrics makes the metrics and registers them with reg, unless that is nil.
func newMetrics(reg prometheus.Registerer, k *Keeper, store kvcache.Store) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "kvmesh_kv_" + name, Help: help})
	}
	vec := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvmesh_kv_" + name, Help: help}, []string{label})
	}
	times := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvmesh_kv_" + name, Help: help,
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5},
		})
	}
	m := &metrics{
		blocks:   counter("blocks_total", "Full blocks of KV published."),
		appends:  counter("tail_appends_total", "Ranges of KV appended to the open ends of streams."),
		stale:    counter("stale_total", "Writes refused because a higher attempt has taken the stream over."),
		restored: counter("restored_tokens_total", "Tokens whose KV was restored."),
		left:     counter("abandoned_total", "Look-ups that were left at their deadline, or with their client, while the store had not answered."),
		bytes:    vec("written_bytes_total", "Bytes of KV stored.", "kind"),
		skipped:  vec("skipped_total", "Checkpoints skipped because the store was slow or had just failed.", "kind"),
		failed:   vec("failed_total", "Operations that failed.", "op"),
		restores: vec("restores_total", "Generations that looked for stored KV, by what came of it.", "result"),
		refused:  vec("refused_total", "Stored KV that was not used, by reason.", "reason"),

		copyTime:    times("copy_seconds", "Time that a step of the engine spent on copying KV out."),
		restoreTime: times("restore_seconds", "Time to look up, verify and load stored KV."),
	}
	for _, r := range kvcache.Reasons() {
		m.refused.WithLabelValues(r.String())
	}
	if reg == nil {
		return m
	}
	reg.MustRegister(m.blocks, m.appends, m.stale, m.restored, m.left, m.bytes, m.skipped, m.failed, m.restores, m.refused, m.copyTime, m.restoreTime,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvmesh_kv_queue_bytes", Help: "Copies of KV that wait to be stored."},
			func() float64 { return float64(k.queued.Load()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvmesh_kv_degraded", Help: "1 while the store hangs, is too slow, or takes no checkpoints, and the worker goes on without it."},
			func() float64 {
				if k.Degraded() != "" {
					return 1
				}
				return 0
			}))
	if c, ok := store.(kvcache.Counted); ok {
		reg.MustRegister(storeCollector{c})
	}
	return m
}

// storeCollector turns a store's own counters into metrics at each scrape.
type storeCollector struct{ store kvcache.Counted }

// storeMetrics lists them.
func storeMetrics() []struct {
	name, help string
	kind       prometheus.ValueType
	value      func(kvcache.Stats) float64
} {
	type row = struct {
		name, help string
		kind       prometheus.ValueType
		value      func(kvcache.Stats) float64
	}
	return []row{
		{"kvmesh_kv_store_used_bytes", "Bytes that the store holds, of all processes.", prometheus.GaugeValue, func(s kvcache.Stats) float64 { return float64(s.Used) }},
		{"kvmesh_kv_store_limit_bytes", "Bytes that the store may hold.", prometheus.GaugeValue, func(s kvcache.Stats) float64 { return float64(s.Limit) }},
		{"kvmesh_kv_store_hits_total", "Blocks read.", prometheus.CounterValue, func(s kvcache.Stats) float64 { return float64(s.Hits) }},
		{"kvmesh_kv_store_misses_total", "Blocks that were not there.", prometheus.CounterValue, func(s kvcache.Stats) float64 { return float64(s.Misses) }},
		{"kvmesh_kv_store_duplicates_total", "Blocks that were there already.", prometheus.CounterValue, func(s kvcache.Stats) float64 { return float64(s.Duplicates) }},
		{"kvmesh_kv_store_stale_total", "Writes of attempts that had been overtaken.", prometheus.CounterValue, func(s kvcache.Stats) float64 { return float64(s.Stale) }},
		{"kvmesh_kv_store_full_total", "Writes that found no room.", prometheus.CounterValue, func(s kvcache.Stats) float64 { return float64(s.Full) }},
		{"kvmesh_kv_store_evictions_total", "Blocks evicted.", prometheus.CounterValue, func(s kvcache.Stats) float64 { return float64(s.Evictions) }},
	}
}

const storeRefused = "kvmesh_kv_store_refused_total"

func storeRefusedDesc() *prometheus.Desc {
	return prometheus.NewDesc(storeRefused, "Blocks and tails that the store did not serve, by reason.", []string{"reason"}, nil)
}

// Describe implements prometheus.Collector.
func (c storeCollector) Describe(out chan<- *prometheus.Desc) {
	for _, m := range storeMetrics() {
		out <- prometheus.NewDesc(m.name, m.help, nil, nil)
	}
	out <- storeRefusedDesc()
}

// Collect implements prometheus.Collector.
func (c storeCollector) Collect(out chan<- prometheus.Metric) {
	s := c.store.Stats()
	for _, m := range storeMetrics() {
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc(m.name, m.help, nil, nil), m.kind, m.value(s))
	}
	for i, r := range kvcache.Reasons() {
		out <- prometheus.MustNewConstMetric(storeRefusedDesc(), prometheus.CounterValue, float64(s.Refused[i]), r.String())
	}
}
