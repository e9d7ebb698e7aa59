package health_test

import (
	"math"
	"strings"
	"testing"
	"testing/quick"

	"github.com/kvmesh/kvmesh/internal/health"
)

func TestAssessGPU(t *testing.T) {
	for _, c := range []struct {
		name   string
		edit   func(*health.Config, *health.Input)
		status health.Status
		weight uint32
		reason string // contained
	}{
		{"nothing wrong", func(_ *health.Config, in *health.Input) { in.Report.GPU = health.GPU{} }, health.Healthy, 200, ""},
		{"fell off the bus", func(_ *health.Config, in *health.Input) { in.Report.GPU.XID = 79 }, health.Unhealthy, 1, "XID 79, the GPU has fallen off the bus"},
		{"unknown fatal XID of a newer worker", func(_ *health.Config, in *health.Input) { in.Report.GPU.XID = 999 }, health.Unhealthy, 1, "XID 999"},
		{"uncorrectable ECC", func(_ *health.Config, in *health.Input) { in.Report.GPU.ECC = 1 }, health.Unhealthy, 1, "uncorrectable memory error"},
		{"no spare rows", func(_ *health.Config, in *health.Input) { in.Report.GPU.RemapFailed = true }, health.Unhealthy, 1, "could not be replaced"},
		{"lost", func(_ *health.Config, in *health.Input) { in.Report.GPU.Lost = true }, health.Unhealthy, 1, "lost"},
		{"ECC is no number", func(_ *health.Config, in *health.Input) { in.Report.GPU.ECC = math.NaN() }, health.Healthy, 200, ""},
		{"slowed all the time", func(_ *health.Config, in *health.Input) { in.Report.GPU.Throttled = 1 }, health.Healthy, 100, ""},
		{"slowed half of the time", func(_ *health.Config, in *health.Input) { in.Report.GPU.Throttled = 0.5 }, health.Healthy, 133, ""},
		{"slowed and idle", func(_ *health.Config, in *health.Input) {
			in.Report.Utilization, in.Report.GPU.Throttled = 0, 1
		}, health.Healthy, 500, ""},
		{"slowed, without penalty", func(c *health.Config, in *health.Input) {
			c.ThrottlePenalty, in.Report.GPU.Throttled = 0, 1
		}, health.Healthy, 200, ""},
		{"slowed by more than all", func(_ *health.Config, in *health.Input) { in.Report.GPU.Throttled = 7 }, health.Healthy, 100, ""},
		{"slowed by less than nothing", func(_ *health.Config, in *health.Input) { in.Report.GPU.Throttled = -7 }, health.Healthy, 200, ""},
		{"slowed by no number", func(_ *health.Config, in *health.Input) { in.Report.GPU.Throttled = math.NaN() }, health.Healthy, 200, ""},
		{"self-check", func(_ *health.Config, in *health.Input) { in.Report.SelfCheckFailed = true }, health.Unhealthy, 1, "self-check failed"},
		{"says it is sick", func(_ *health.Config, in *health.Input) { in.Sick = "no token in 30s" }, health.Unhealthy, 1, "no token in 30s"},
		{"the GPU is the cause of the sickness", func(_ *health.Config, in *health.Input) {
			in.Sick, in.Report.GPU.XID = "no token in 30s", 79
		}, health.Unhealthy, 1, "XID 79"},
		{"draining with a broken GPU", func(_ *health.Config, in *health.Input) {
			in.Draining, in.Report.GPU.XID = true, 79
		}, health.Draining, 1, "draining; GPU: XID 79"},
		{"a fault outlives the reports", func(_ *health.Config, in *health.Input) {
			in.Report.At, in.Report.GPU.XID = t0.Add(-1e12), 79
		}, health.Unhealthy, 1, "XID 79"},
	} {
		cfg, in := usual(), fine()
		c.edit(&cfg, &in)
		got := health.Assess(t0, cfg, in, health.Verdict{})
		if got.Status != c.status || got.Weight != c.weight || !strings.Contains(got.Reason, c.reason) || (c.reason == "") != (got.Reason == "") {
			t.Errorf("%s: %v, weight %d, %q; want %v, %d, %q", c.name, got.Status, got.Weight, got.Reason, c.status, c.weight, c.reason)
		}
	}
}

// A broken GPU does not come back by the pool's minimum share.
func TestBrokenGPUStaysOut(t *testing.T) {
	in := fine()
	in.Report.GPU.XID = 48
	vs := []health.Verdict{health.Assess(t0, usual(), in, health.Verdict{})}
	health.Pool(usual(), vs)
	if vs[0].Status.Takes() {
		t.Errorf("%+v", vs[0])
	}
}

func TestFatalXID(t *testing.T) {
	for _, xid := range []int{48, 64, 74, 79, 95, 119, 140} {
		if means, fatal := health.FatalXID(xid); !fatal || means == "" {
			t.Errorf("XID %d is not fatal", xid)
		}
	}
	for _, xid := range []int{0, -1, 13, 31, 43, 45, 63, 68, 92, 109, 154} {
		if _, fatal := health.FatalXID(xid); fatal {
			t.Errorf("XID %d is fatal", xid)
		}
	}
}

// The worse of two GPUs is at least as bad as each, in either order.
func TestWorseGPU(t *testing.T) {
	xids := []int{0, 48, 79}
	make := func(bits uint8, ecc, throttled uint8) health.GPU {
		return health.GPU{
			Lost: bits&1 != 0, RemapFailed: bits&2 != 0, XID: xids[int(bits>>2)%3],
			ECC: float64(ecc % 3), Throttled: float64(throttled) / 255,
		}
	}
	if err := quick.Check(func(b1, e1, t1, b2, e2, t2 uint8) bool {
		a, b := make(b1, e1, t1), make(b2, e2, t2)
		w := a.Worse(b)
		bad := func(g health.GPU) bool { return g.Fault() != "" }
		return bad(w) == (bad(a) || bad(b)) && w.Throttled >= a.Throttled && w.Throttled >= b.Throttled && bad(b.Worse(a)) == bad(w)
	}, nil); err != nil {
		t.Error(err)
	}
}
