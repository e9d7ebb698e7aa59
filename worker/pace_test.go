package worker

import (
	"math"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/health"
)

func TestAverage(t *testing.T) {
	a := average{share: 0.5}
	for _, c := range []struct{ add, want float64 }{{8, 8}, {4, 6}, {6, 6}, {0, 3}} {
		if a.add(c.add); a.value() != c.want {
			t.Errorf("after %v: %v, want %v", c.add, a.value(), c.want)
		}
	}
	b := average{share: 0.1}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				b.add(5)
			}
		})
	}
	if wg.Wait(); b.value() != 5 {
		t.Errorf("%v", b.value())
	}
}

// The time between tokens is the engine's, not that of a client that reads slowly.
func TestInterTokenTime(t *testing.T) {
	p := newPace()
	observed := 0
	p.observe = func(float64) { observed++ }
	c := choicePace{of: p}
	now := time.Unix(100, 0)
	token := func(wait, send time.Duration) {
		now = now.Add(wait)
		c.token(now)
		now = now.Add(send)
		c.sent(now)
	}
	token(3*time.Second, time.Millisecond) // the prefill is none
	for range 300 {
		token(19*time.Millisecond, time.Millisecond)
	}
	if got := p.interToken.value(); math.Abs(got-0.02) > 1e-9 || observed != 300 {
		t.Errorf("%v s after %d gaps, want 0.02", got, observed)
	}
	token(19*time.Millisecond, time.Minute)
	token(time.Millisecond, time.Millisecond)
	if got := p.interToken.value(); math.Abs(got-0.02) > 1e-9 {
		t.Errorf("a client that slept counts as %v s", got)
	}
	for range 1000 {
		token(49*time.Millisecond, time.Millisecond)
	}
	if got := p.interToken.value(); math.Abs(got-0.05) > 1e-4 {
		t.Errorf("%v s after the engine slowed down to 0.05", got)
	}
	var unobserved choicePace
	unobserved.token(now)
}

func TestReportOfGPUs(t *testing.T) {
	f := facts{
		hasGPU: true, sick: true, memory: 0.5, busy: 0.7, interToken: 0.02,
		gpu: health.GPU{Lost: true, XID: 79, ECC: 2, RemapFailed: true, Throttled: 0.3},
	}
	got := report(f, rates{requests: 10, errors: 4, tokens: 50}, time.Unix(7, 0)).NamedMetrics
	for name, want := range map[string]float64{
		fleet.MetricGPULost: 1, fleet.MetricGPUXID: 79, fleet.MetricGPUECC: 2, fleet.MetricGPURemapFailed: 1,
		fleet.MetricGPUThrottled: 0.3, fleet.MetricGPUMemory: 0.5, fleet.MetricGPUUtilization: 0.7,
		fleet.MetricSelfCheck: 1, fleet.MetricErrorRate: 0.4, fleet.MetricInterTokenS: 0.02, fleet.MetricTokensPerS: 50,
	} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
	none := report(facts{}, rates{errors: 1}, time.Unix(7, 0)).NamedMetrics
	if _, ok := none[fleet.MetricGPUXID]; ok || none[fleet.MetricErrorRate] != 0 {
		t.Errorf("without GPUs and requests: %v", none)
	}
	// A GPU's end is told at once, a load that stays is not.
	if !differ(facts{}, f) || differ(f, f) {
		t.Error("differ")
	}
}
