//go:build unix

package kvevents

import "github.com/prometheus/client_golang/prometheus"

// published is one metric of a publisher.
type published struct {
	name, help string
	kind       prometheus.ValueType
	value      func(PublisherStats) uint64
}

// publishedMetrics are all of them.
func publishedMetrics() []published {
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	return []published{
		{"published_batches_total", "Batches of events that were told.", counter, func(s PublisherStats) uint64 { return s.Batches }},
		{"lost_total", "Events that came faster than they were told, and were told as that all is gone.", counter, func(s PublisherStats) uint64 { return s.Lost }},
		{"dropped_batches_total", "Batches that one subscriber or another did not take in time.", counter, func(s PublisherStats) uint64 { return s.Dropped }},
		{"subscribers", "Subscribers that are there.", gauge, func(s PublisherStats) uint64 { return uint64(s.Subscribers) }},
	}
}

func (m published) desc() *prometheus.Desc {
	return prometheus.NewDesc("kvmesh_kv_events_"+m.name, m.help, nil, nil)
}

// Describe implements prometheus.Collector: the counters are the metrics kvmesh_kv_events_*.
func (p *Publisher) Describe(out chan<- *prometheus.Desc) {
	for _, m := range publishedMetrics() {
		out <- m.desc()
	}
}

// Collect implements prometheus.Collector.
func (p *Publisher) Collect(out chan<- prometheus.Metric) {
	st := p.Stats()
	for _, m := range publishedMetrics() {
		out <- prometheus.MustNewConstMetric(m.desc(), m.kind, float64(m.value(st)))
	}
}
