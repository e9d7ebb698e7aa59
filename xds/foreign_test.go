package xds

import (
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/xds/registry"
)

// A worker known from Redis alone is judged by the pace of its entries: 15 s of
// silence are TIMEOUT. Load counts until it reports load itself.
func TestForeignSilence(t *testing.T) {
	s := twoPools(t)
	m := member("w", "a", fleet.ForeignIncarnation)
	m.Via = fleet.ViaRedis
	if !foreign(m) || foreign(member("w", "a", fleet.ForeignIncarnation)) {
		t.Error("foreign")
	}
	s.put(m, origin{foreign: true})
	s.tell("w", fleet.ForeignIncarnation, t0, registry.Load{Running: 2, Waiting: 2})
	shown := func(at time.Duration) health.Verdict {
		s.decide(s.pools["a"], t0.Add(at), true)
		return s.workers["w"].shown
	}
	if v := shown(time.Second); v.Status != health.Healthy || v.Weight != 100 {
		t.Errorf("%+v", v)
	}
	if v := shown(14 * time.Second); v.Status != health.Healthy {
		t.Errorf("after 14 s: %+v", v)
	}
	s.heartbeat("w", fleet.ForeignIncarnation, t0.Add(14*time.Second))
	if v := shown(28 * time.Second); v.Status != health.Healthy {
		t.Errorf("14 s after its last entry: %+v", v)
	}
	// The only member of its pool comes back by the minimum share; its reason tells.
	s.pools["a"].health.MinShare = 0
	if v := shown(30 * time.Second); v.Status != health.Timeout {
		t.Errorf("16 s after its last entry: %+v", v)
	}

	loaded(s, "w", fleet.ForeignIncarnation, t0.Add(30*time.Second), 1)
	s.update("w", fleet.ForeignIncarnation, t0, func(w *worker) { w.in.Heartbeat = false })
	s.tell("w", fleet.ForeignIncarnation, t0.Add(30*time.Second), registry.Load{})
	if got := s.workers["w"].in.Report.Utilization; got != 1 {
		t.Errorf("Redis won over its own load report: %v", got)
	}
}

// A worker that names no pool is in that of its model.
func TestPoolOf(t *testing.T) {
	cp := &ControlPlane{policy: policies(t, "a", "b")}
	cp.policy.Pools[1].Model = "n"
	for model, want := range map[string]string{"m": "a", "n": "b", "x": ""} {
		if got, ok := cp.poolOf(model); got != want || ok != (want != "") {
			t.Errorf("%s: %q, %v", model, got, ok)
		}
	}
	cp.policy.Pools[0].Model = ""
	if got, _ := cp.poolOf("x"); got != "a" {
		t.Errorf("a pool of any model: %q", got)
	}
	if got, _ := cp.poolOf("n"); got != "b" {
		t.Errorf("before one of any model: %q", got)
	}
}
