package remote

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/kvcache/kvmetrics"
)

// register makes the metrics of a store, in its registry if it has one.
func register(cfg OpsConfig, o *Ops) *prometheus.HistogramVec {
	took := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "kvmesh_kv_tier_seconds", Help: "Time that calls of a tier took, by what they did.", ConstLabels: prometheus.Labels{"tier": cfg.Tier},
		Buckets: prometheus.ExponentialBuckets(0.0005, 2, 15),
	}, []string{"op"})
	if cfg.Registry != nil {
		cfg.Registry.MustRegister(took, kvmetrics.New(cfg.Tier, o))
	}
	return took
}
