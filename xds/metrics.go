package xds

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/internal/health"
)

// metrics are the control plane's own, in a registry of their own.
type metrics struct {
	registry *prometheus.Registry
	reports  prometheus.Counter     // taken in, from all workers
	pushes   *prometheus.CounterVec // by "endpoints" or "fleet"
	nacks    *prometheus.CounterVec // by resource type
	streams  prometheus.Gauge       // of Envoys and gateways
}

// newMetrics makes and registers all but what needs a state.
func newMetrics() *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		reports: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvmesh_xds_load_reports_total", Help: "Load reports taken in from workers.",
		}),
		pushes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvmesh_xds_pushes_total", Help: "Changes published, by what changed.",
		}, []string{"resource"}),
		nacks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvmesh_xds_refused_total", Help: "Updates a client refused, by resource type.",
		}, []string{"type"}),
		streams: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvmesh_xds_streams", Help: "Envoys and gateways connected now.",
		}),
	}
	m.registry.MustRegister(m.reports, m.pushes, m.nacks, m.streams)
	return m
}

// workers adds the count of workers by pool and status.
func (m *metrics) workers(s *state) { m.registry.MustRegister(workerCount{s}) }

// workerCount counts at each scrape, so no gauge can be left behind.
type workerCount struct{ state *state }

// desc is built anew each time, for there are no package variables.
func (workerCount) desc() *prometheus.Desc {
	return prometheus.NewDesc("kvmesh_workers", "Workers by pool and status.", []string{"pool", "status"}, nil)
}

// Describe implements prometheus.Collector.
func (c workerCount) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc() }

// Collect implements prometheus.Collector.
func (c workerCount) Collect(ch chan<- prometheus.Metric) {
	type key struct{ pool, status string }
	// Every pair is shown, zeros too, so that a rate over a status never has gaps.
	counts := map[key]int{}
	for _, p := range c.state.all() {
		for s := health.Unknown; s <= health.Degraded; s++ {
			counts[key{p.name, s.String()}] = 0
		}
	}
	c.state.mu.Lock()
	for _, w := range c.state.workers {
		counts[key{w.pool.name, w.shown.Status.String()}]++
	}
	c.state.mu.Unlock()
	for k, n := range counts {
		ch <- prometheus.MustNewConstMetric(c.desc(), prometheus.GaugeValue, float64(n), k.pool, k.status)
	}
}
