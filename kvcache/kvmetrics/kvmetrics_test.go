package kvmetrics

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/kvcache"
)

// fixed is a store with counters.
type fixed kvcache.Stats

// Stats implements kvcache.Counted.
func (f fixed) Stats() kvcache.Stats { return kvcache.Stats(f) }

// TestCollector: two tiers side by side, each with its label, and every refusal by reason.
func TestCollector(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	st := fixed{Puts: 3, Used: -5, Limit: 100, Evictions: 7, Late: 2}
	st.Refused[kvcache.ReasonChecksum] = 4
	reg.MustRegister(New("memory", st), New("redis", fixed{Puts: 1}))
	want := `
# HELP kvmesh_kv_tier_evictions_total Blocks evicted by this process.
# TYPE kvmesh_kv_tier_evictions_total counter
kvmesh_kv_tier_evictions_total{tier="memory"} 7
kvmesh_kv_tier_evictions_total{tier="redis"} 0
# HELP kvmesh_kv_tier_puts_total Blocks written.
# TYPE kvmesh_kv_tier_puts_total counter
kvmesh_kv_tier_puts_total{tier="memory"} 3
kvmesh_kv_tier_puts_total{tier="redis"} 1
# HELP kvmesh_kv_tier_used_bytes Bytes that the tier holds, as far as this process knows.
# TYPE kvmesh_kv_tier_used_bytes gauge
kvmesh_kv_tier_used_bytes{tier="memory"} 0
kvmesh_kv_tier_used_bytes{tier="redis"} 0
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "kvmesh_kv_tier_evictions_total", "kvmesh_kv_tier_puts_total", "kvmesh_kv_tier_used_bytes"); err != nil {
		t.Error(err)
	}
	n, err := testutil.GatherAndCount(reg, "kvmesh_kv_tier_refused_total")
	if want := 2 * len(kvcache.Reasons()); err != nil || n != want {
		t.Errorf("%d refusals, want %d: %v", n, want, err)
	}
}
