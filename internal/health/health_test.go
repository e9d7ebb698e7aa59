package health_test

import (
	"math"
	"strings"
	"testing"
	"testing/quick"
	"time"

	"github.com/kvmesh/kvmesh/internal/health"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// usual is a policy with every knob on.
func usual() health.Config {
	return health.Config{
		Blackout: 2 * time.Second, Expiration: 10 * time.Second, Silence: 3 * time.Second,
		ErrorPenalty: 1, Hysteresis: 0.1, MinShare: 0.3, ThrottlePenalty: 1,
	}
}

// fine is a worker at half load, long past its blackout.
func fine() health.Input {
	return health.Input{
		Since: t0.Add(-time.Hour), Heard: t0,
		Report: health.Report{At: t0, Utilization: 0.5, RPS: 10},
	}
}

func TestAssess(t *testing.T) {
	for _, c := range []struct {
		name   string
		edit   func(*health.Config, *health.Input)
		prev   health.Verdict
		status health.Status
		weight uint32
		reason string // contained
	}{
		{name: "half loaded", status: health.Healthy, weight: 200},
		{name: "full", edit: func(_ *health.Config, in *health.Input) { in.Report.Utilization = 1 }, status: health.Healthy, weight: 100},
		{name: "overloaded", edit: func(_ *health.Config, in *health.Input) { in.Report.Utilization = 4 }, status: health.Healthy, weight: 25},
		{name: "hopeless", edit: func(_ *health.Config, in *health.Input) { in.Report.Utilization = 1e9 }, status: health.Healthy, weight: health.MinWeight},
		{name: "idle", edit: func(_ *health.Config, in *health.Input) { in.Report = health.Report{At: t0} }, status: health.Healthy, weight: health.MaxWeight},
		{name: "half of the requests fail", edit: func(_ *health.Config, in *health.Input) { in.Report.EPS = 10 }, status: health.Healthy, weight: 100},
		{name: "failures without penalty", edit: func(c *health.Config, in *health.Input) { in.Report.EPS, c.ErrorPenalty = 10, 0 }, status: health.Healthy, weight: 200},
		{name: "only failures", edit: func(_ *health.Config, in *health.Input) { in.Report.RPS, in.Report.EPS = 0, 1 }, status: health.Healthy, weight: 67},
		{name: "load is no number", edit: func(_ *health.Config, in *health.Input) { in.Report.Utilization = math.NaN() }, status: health.Healthy, weight: 0, reason: "no number"},
		{name: "load below zero", edit: func(_ *health.Config, in *health.Input) { in.Report.Utilization = -1 }, status: health.Healthy, weight: 0, reason: "no number"},
		{name: "endless load", edit: func(_ *health.Config, in *health.Input) { in.Report.Utilization = math.Inf(1) }, status: health.Healthy, weight: health.MinWeight},
		{name: "endless failures", edit: func(_ *health.Config, in *health.Input) { in.Report.EPS = math.Inf(1) }, status: health.Healthy, weight: 0},

		{name: "blackout", edit: func(_ *health.Config, in *health.Input) { in.Since = t0.Add(-time.Second) }, status: health.Healthy, weight: 0},
		{name: "blackout over", edit: func(_ *health.Config, in *health.Input) { in.Since = t0.Add(-2 * time.Second) }, status: health.Healthy, weight: 200},
		{name: "ready in the future", edit: func(_ *health.Config, in *health.Input) { in.Since = t0.Add(time.Hour) }, status: health.Healthy, weight: 200},
		{name: "expired, alive by heartbeat", edit: func(_ *health.Config, in *health.Input) {
			in.Report.At, in.Heartbeat = t0.Add(-11*time.Second), true
		}, status: health.Healthy, weight: 0},
		{name: "silent", edit: func(_ *health.Config, in *health.Input) { in.Report.At = t0.Add(-3001 * time.Millisecond) }, status: health.Timeout, weight: 1, reason: "silent"},
		{name: "not silent yet", edit: func(_ *health.Config, in *health.Input) { in.Report.At = t0.Add(-3 * time.Second) }, status: health.Healthy, weight: 200},
		{name: "registrations are no reports", edit: func(_ *health.Config, in *health.Input) {
			in.Report.At, in.Heard = t0.Add(-4*time.Second), t0
		}, status: health.Timeout, weight: 1},
		{name: "registered, never reported", edit: func(_ *health.Config, in *health.Input) { in.Report = health.Report{} }, status: health.Unhealthy, weight: 1, reason: "no report yet"},
		{name: "never heard", edit: func(_ *health.Config, in *health.Input) { *in = health.Input{} }, status: health.Timeout, weight: 1},
		{name: "heartbeat only", edit: func(_ *health.Config, in *health.Input) { in.Report, in.Heartbeat = health.Report{}, true }, status: health.Healthy, weight: 0},
		{name: "heartbeat stopped", edit: func(_ *health.Config, in *health.Input) {
			in.Report, in.Heartbeat, in.Heard = health.Report{}, true, t0.Add(-4*time.Second)
		}, status: health.Timeout, weight: 1},

		{name: "loading", edit: func(_ *health.Config, in *health.Input) { in.Loading = true }, status: health.Unhealthy, weight: 1, reason: "loading"},
		{name: "failed", edit: func(_ *health.Config, in *health.Input) { in.Failed = "XID 79" }, status: health.Unhealthy, weight: 1, reason: "XID 79"},
		{name: "draining", edit: func(_ *health.Config, in *health.Input) { in.Draining = true }, status: health.Draining, weight: 1, reason: "draining"},
		{name: "draining and failed", edit: func(_ *health.Config, in *health.Input) { in.Draining, in.Failed = true, "XID 79" }, status: health.Draining, weight: 1, reason: "XID 79"},

		{name: "small change", prev: health.Verdict{Status: health.Healthy, Weight: 210}, status: health.Healthy, weight: 210},
		{name: "large change", prev: health.Verdict{Status: health.Healthy, Weight: 250}, status: health.Healthy, weight: 200},
		{name: "small change after an outage", prev: health.Verdict{Status: health.Timeout, Weight: 210}, status: health.Healthy, weight: 200},
		{name: "small change after no data", prev: health.Verdict{Status: health.Healthy}, status: health.Healthy, weight: 200},
		{name: "no hysteresis", prev: health.Verdict{Status: health.Healthy, Weight: 201}, edit: func(c *health.Config, _ *health.Input) { c.Hysteresis = 0 }, status: health.Healthy, weight: 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg, in := usual(), fine()
			if c.edit != nil {
				c.edit(&cfg, &in)
			}
			got := health.Assess(t0, cfg, in, c.prev)
			if got.Status != c.status || got.Weight != c.weight || !strings.Contains(got.Reason, c.reason) {
				t.Errorf("%v, weight %d, %q; want %v, %d, %q", got.Status, got.Weight, got.Reason, c.status, c.weight, c.reason)
			}
		})
	}
}

// worth orders verdicts: more is better. No data counts as the best weight, for
// the mean of the others may be that.
func worth(v health.Verdict) int {
	switch {
	case v.Status.Takes() && v.Weight == 0:
		return health.MaxWeight
	case v.Status.Takes():
		return int(v.Weight)
	case v.Status == health.Timeout:
		return 0
	}
	return -1
}

// More of any fault never makes a worker look better.
func TestMonotonicInEachFault(t *testing.T) {
	faults := map[string]func(in *health.Input, amount float64){
		"utilization": func(in *health.Input, x float64) { in.Report.Utilization = 3 * x },
		"errors":      func(in *health.Input, x float64) { in.Report.EPS = 100 * x },
		"silence":     func(in *health.Input, x float64) { in.Report.At = t0.Add(-time.Duration(x * 5e9)) },
		"failure": func(in *health.Input, x float64) {
			if x > 0.5 {
				in.Failed = "broken"
			}
		},
		"drain":      func(in *health.Input, x float64) { in.Draining = x > 0.5 },
		"sickness":   func(in *health.Input, x float64) { in.Sick = []string{"", "self-check failed"}[int(x+0.5)] },
		"self-check": func(in *health.Input, x float64) { in.Report.SelfCheckFailed = x > 0.5 },
		"XID":        func(in *health.Input, x float64) { in.Report.GPU.XID = 79 * int(x+0.5) },
		"ECC":        func(in *health.Input, x float64) { in.Report.GPU.ECC = math.Floor(3 * x) },
		"row remap":  func(in *health.Input, x float64) { in.Report.GPU.RemapFailed = x > 0.5 },
		"lost GPU":   func(in *health.Input, x float64) { in.Report.GPU.Lost = x > 0.5 },
		"throttling": func(in *health.Input, x float64) { in.Report.GPU.Throttled = 1.5 * x },
		"loading":    func(in *health.Input, x float64) { in.Loading = x > 0.5 },
	}
	for name, apply := range faults {
		check := func(base uint8, a, b uint16) bool {
			lo, hi := float64(min(a, b))/math.MaxUint16, float64(max(a, b))/math.MaxUint16
			less, more := fine(), fine()
			less.Report.Utilization = float64(base) / 64
			more.Report.Utilization = less.Report.Utilization
			apply(&less, lo)
			apply(&more, hi)
			cfg := usual()
			cfg.Expiration = cfg.Silence // a forgotten weight is better than a bad one, by design
			return worth(health.Assess(t0, cfg, more, health.Verdict{})) <= worth(health.Assess(t0, cfg, less, health.Verdict{}))
		}
		if err := quick.Check(check, &quick.Config{MaxCount: 5000}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whatever a worker reports, the verdict can be sent to Envoy.
func FuzzAssess(f *testing.F) {
	f.Add(0.5, 1.0, 0.0, int64(0))
	f.Add(math.NaN(), math.Inf(1), -1.0, int64(1e18))
	f.Fuzz(func(t *testing.T, utilization, rps, eps float64, age int64) {
		in := fine()
		in.Report = health.Report{At: t0.Add(-time.Duration(age)), Utilization: utilization, RPS: rps, EPS: eps}
		vs := []health.Verdict{health.Assess(t0, usual(), in, health.Verdict{}), health.Assess(t0, usual(), fine(), health.Verdict{})}
		health.Pool(usual(), vs)
		for _, v := range vs {
			if v.Weight < health.MinWeight || v.Weight > health.MaxWeight || v.Status < health.Unknown || v.Status > health.Degraded {
				t.Errorf("%+v", v)
			}
		}
	})
}

func TestStatusWords(t *testing.T) {
	for s, word := range map[health.Status]string{
		health.Unknown: "UNKNOWN", health.Healthy: "HEALTHY", health.Unhealthy: "UNHEALTHY",
		health.Draining: "DRAINING", health.Timeout: "TIMEOUT", health.Degraded: "DEGRADED", 99: "UNKNOWN",
	} {
		if s.String() != word {
			t.Errorf("%d is %q, want %q", s, s, word)
		}
		if want := s == health.Healthy || s == health.Degraded; s.Takes() != want {
			t.Errorf("%v takes requests: %v", s, s.Takes())
		}
	}
}
