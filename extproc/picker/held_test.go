package picker

import (
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
)

// TestHeld: of workers that are as healthy, the one that holds the prompt's beginning goes first,
// unless others have much less to do.
func TestHeld(t *testing.T) {
	long := Prompt{IDs: make([]int32, 4000), Tokens: 4000}
	for name, c := range map[string]struct {
		prompt Prompt
		held   map[string]int
		change func(holder *fleetpb.Worker, p *Picker)
		want   string // who goes first
	}{
		"all of a long one":         {prompt: long, held: map[string]int{"w2": 4000}, want: "w2"},
		"the longest":               {prompt: long, held: map[string]int{"w1": 1000, "w2": 3000}, want: "w2"},
		"a little more load":        {prompt: long, held: map[string]int{"w2": 4000}, want: "w2", change: func(w *fleetpb.Worker, _ *Picker) { w.Load.Running = 12 }},
		"much more load":            {prompt: long, held: map[string]int{"w2": 4000}, want: "w1", change: func(w *fleetpb.Worker, _ *Picker) { w.Load.Running = 20 }},
		"no room":                   {prompt: long, held: map[string]int{"w2": 4000}, want: "w1", change: func(w *fleetpb.Worker, _ *Picker) { w.Load.MaxRunning, w.Load.Running = 4, 4 }},
		"degraded":                  {prompt: long, held: map[string]int{"w2": 4000}, want: "w1", change: func(w *fleetpb.Worker, _ *Picker) { w.Status = int32(health.Degraded) }},
		"broken":                    {prompt: long, held: map[string]int{"w2": 4000}, want: "w1", change: func(w *fleetpb.Worker, p *Picker) { p.Failed(t0, w.GetId(), true) }},
		"unhealthy":                 {prompt: long, held: map[string]int{"w2": 4000}, want: "w1", change: func(w *fleetpb.Worker, _ *Picker) { w.Status = int32(health.Unhealthy) }},
		"another zone":              {prompt: long, held: map[string]int{"w2": 4000}, want: "w1", change: func(w *fleetpb.Worker, _ *Picker) { w.Zone = "b" }},
		"somebody who is not there": {prompt: long, held: map[string]int{"w7": 4000}, want: "w1"},
		"more than there is":        {prompt: long, held: map[string]int{"w2": 1 << 40}, want: "w2"},
		"a negative number":         {prompt: long, held: map[string]int{"w2": -5}, want: "w1"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPicker(t, Config{Zone: "a", Held: func(Prompt) map[string]int { return c.held }})
			one, two := testWorker("w1", "a", 4, 64), testWorker("w2", "a", 4, 64)
			p.Update([]*fleetpb.Worker{one, two})
			if c.change != nil {
				c.change(two, p)
			}
			p.Update([]*fleetpb.Worker{one, two})
			d := p.Pick(t0, Request{Model: "chat", Prompt: c.prompt})
			if len(d.Candidates) == 0 || d.Candidates[0].ID != c.want {
				t.Errorf("%+v", d.Candidates)
			}
			// Without anything known of the prompt nobody is preferred, and nobody asked.
			p.cfg.Held = func(Prompt) map[string]int { t.Error("asked"); return nil }
			p.Pick(t0, Request{Model: "chat"})
		})
	}
}

// TestHeldLittle: a short prompt moves nobody: workers take turns as ever.
func TestHeldLittle(t *testing.T) {
	p := newPicker(t, Config{Held: func(Prompt) map[string]int { return map[string]int{"w1": 20} }})
	p.Update([]*fleetpb.Worker{testWorker("w1", "", 4, 64), testWorker("w2", "", 4, 64)})
	got := map[string]int{}
	for range 4 {
		got[p.Choose(t0, Request{Pool: "big", Prompt: Prompt{IDs: make([]int32, 20), Tokens: 20}}).Candidates[0].ID]++
	}
	if got["w1"] != 2 || got["w2"] != 2 {
		t.Errorf("4 requests went %v", got)
	}
}

// TestHeldShares: many requests for one prompt at once do not all go to its holder.
func TestHeldShares(t *testing.T) {
	p := newPicker(t, Config{Held: func(Prompt) map[string]int { return map[string]int{"w1": 4000} }})
	p.Update([]*fleetpb.Worker{testWorker("w1", "", 0, 100), testWorker("w2", "", 0, 100)})
	got := map[string]int{}
	for i := range 80 {
		id := p.Choose(t0.Add(time.Duration(i)*time.Millisecond), Request{Pool: "big", Prompt: Prompt{IDs: make([]int32, 4000), Tokens: 4000}}).Candidates[0].ID
		p.Acquire(id)
		got[id]++
	}
	if got["w1"] < 50 || got["w2"] < 15 {
		t.Errorf("80 requests went %v, want about three of four to the holder", got)
	}
}
