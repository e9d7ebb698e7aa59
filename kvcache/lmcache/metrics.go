//go:build unix

package lmcache

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// counters are of this process; all of them only grow.
type counters struct {
	stored, storedBytes, late, unstored, full atomic.Uint64
	lookups, lookupChunks, foundChunks        atomic.Uint64
	read, readBytes, unread                   atomic.Uint64
	unknown, refused, abandoned               atomic.Uint64
}

// row is one metric.
type row struct {
	name, help string
	value      *atomic.Uint64
}

func (c *counters) rows() []row {
	return []row{
		{"stored_chunks_total", "Chunks of engines that have become blocks.", &c.stored},
		{"stored_bytes_total", "Bytes of them.", &c.storedBytes},
		{"late_chunks_total", "Chunks that were written while the node was away, and waited for it.", &c.late},
		{"unstored_chunks_total", "Chunks that were not stored because the node was away, had no room or had lost it.", &c.unstored},
		{"full_total", "Stores that were cut because the engine has too much in writing.", &c.full},
		{"lookups_total", "Look-ups of engines.", &c.lookups},
		{"lookup_chunks_total", "Chunks that they asked for.", &c.lookupChunks},
		{"found_chunks_total", "Chunks that they found.", &c.foundChunks},
		{"read_chunks_total", "Chunks that engines were given to read.", &c.read},
		{"read_bytes_total", "Bytes of them.", &c.readBytes},
		{"unread_total", "Reads that got nothing although a look-up had found it.", &c.unread},
		{"unknown_total", "Calls of engines that are not registered, or whose weights are not known.", &c.unknown},
		{"refused_total", "Calls that cannot be served.", &c.refused},
		{"abandoned_total", "Reads and writes that were given up because their engine has gone.", &c.abandoned},
	}
}

// Describe implements prometheus.Collector.
func (s *Server) Describe(ch chan<- *prometheus.Desc) {
	for _, r := range s.count.rows() {
		ch <- descOf(r)
	}
	ch <- instancesDesc()
}

// Collect implements prometheus.Collector: kvmesh_lmcache_*.
func (s *Server) Collect(ch chan<- prometheus.Metric) {
	for _, r := range s.count.rows() {
		ch <- prometheus.MustNewConstMetric(descOf(r), prometheus.CounterValue, float64(r.value.Load()))
	}
	s.mu.Lock()
	connected := 0
	for _, i := range s.instances {
		if i.conn != nil {
			connected++
		}
	}
	s.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(instancesDesc(), prometheus.GaugeValue, float64(connected))
}

func descOf(r row) *prometheus.Desc {
	return prometheus.NewDesc("kvmesh_lmcache_"+r.name, r.help, nil, nil)
}

func instancesDesc() *prometheus.Desc {
	return prometheus.NewDesc("kvmesh_lmcache_engines", "Engines, by rank, that are registered and connected.", nil, nil)
}
