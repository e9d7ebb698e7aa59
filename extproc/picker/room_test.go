package picker

import (
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
)

// TestFullLast: where one more request would wait it goes only if it would wait everywhere, whatever the
// weights, and there to the one with the least to do.
func TestFullLast(t *testing.T) {
	weight := func(n uint32, w *fleetpb.Worker) *fleetpb.Worker { w.Weight = n; return w }
	for name, c := range map[string]struct {
		fleet []*fleetpb.Worker
		want  string
	}{
		"heavy and full":     {[]*fleetpb.Worker{weight(1000, testWorker("w1", "a", 10, 10)), weight(1, testWorker("w2", "b", 9, 10))}, "w2 w1"},
		"before a sick one":  {[]*fleetpb.Worker{testWorker("w1", "", 10, 10), with(testWorker("w2", "", 5, 10), status(health.Degraded))}, "w2 w1"},
		"all full":           {[]*fleetpb.Worker{testWorker("w1", "", 14, 10), testWorker("w2", "", 11, 10)}, "w2 w1"},
		"full by its report": {[]*fleetpb.Worker{with(testWorker("w1", "", 0, 0), func(w *fleetpb.Worker) { w.Load.Utilization = 1 }), testWorker("w2", "", 9, 10)}, "w2 w1"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPicker(t, Config{Zone: "a"})
			p.Update(c.fleet)
			if got := ids(p.Pick(t0, Request{Pool: "big"})); got != c.want {
				t.Errorf("order %q, want %q", got, c.want)
			}
		})
	}
}

// TestRoomForMoves: streams that move at once get exactly the sequences that are free, and no one else
// is named to who wants a free one.
func TestRoomForMoves(t *testing.T) {
	ours := func(w *fleetpb.Worker) *fleetpb.Worker { w.RelayMark, w.Fingerprint = "m", "f"; return w }
	p := newPicker(t, Config{})
	p.Update([]*fleetpb.Worker{ours(testWorker("w1", "", 13, 16)), ours(testWorker("w2", "", 16, 16)), ours(testWorker("w3", "", 5, 16))})
	move := Request{Pool: "big", RelayMark: "m", Fingerprint: "f", Room: true}
	var all sync.WaitGroup
	var mu sync.Mutex
	got := map[string]int{}
	for range 20 {
		all.Go(func() {
			d := p.Choose(t0, move)
			mu.Lock()
			defer mu.Unlock()
			if len(d.Candidates) == 0 {
				got[""]++
				return
			}
			got[d.Candidates[0].ID]++
			p.Acquire(d.Candidates[0].ID)
		})
	}
	all.Wait()
	if diff := cmp.Diff(map[string]int{"w1": 3, "w3": 11, "": 6}, got); diff != "" {
		t.Error(diff)
	}
	move.Room = false
	if d := p.Pick(t0, move); len(d.Candidates) != 3 {
		t.Errorf("who would wait is named %+v", d.Candidates)
	}
}

// TestRoomIsHealthy: a worker that fails has no room.
func TestRoomIsHealthy(t *testing.T) {
	p := newPicker(t, Config{})
	p.Update([]*fleetpb.Worker{testWorker("w1", "", 0, 16), testWorker("w2", "", 10, 16), testWorker("w3", "", 16, 16)})
	p.Failed(t0, "w1", true)
	if got := ids(p.Pick(t0, Request{Pool: "big", Room: true})); got != "w2" {
		t.Errorf("room at %q, want w2", got)
	}
}

// TestBreakersOfMost: breakers that would leave out most of a pool leave out nobody but those at which
// nobody listens.
func TestBreakersOfMost(t *testing.T) {
	for _, c := range []struct {
		name    string
		failing []string
		gone    string
		want    string
	}{
		{"one of three", []string{"w1"}, "", "w2 w3 w1"},
		{"two of three", []string{"w1", "w2"}, "", "w1 w2 w3"},
		{"all", []string{"w1", "w2", "w3"}, "", "w1 w2 w3"},
		{"one of them is gone", []string{"w1"}, "w2", "w1 w3 w2"},
		{"one is gone", nil, "w1", "w2 w3 w1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPicker(t, Config{})
			p.Update([]*fleetpb.Worker{testWorker("w1", "", 0, 10), testWorker("w2", "", 4, 10), testWorker("w3", "", 8, 10)})
			for _, id := range c.failing {
				for range 3 {
					p.Failed(t0, id, false)
				}
			}
			if c.gone != "" {
				p.Failed(t0, c.gone, true)
			}
			if got := ids(p.Pick(t0.Add(time.Millisecond), Request{Pool: "big"})); got != c.want {
				t.Errorf("order %q, want %q", got, c.want)
			}
		})
	}
}

// TestForgottenChoices: choices that nobody acquires are forgotten, also while others are made.
func TestForgottenChoices(t *testing.T) {
	var c counters
	now := t0
	for i := range 400 {
		now = now.Add(reservedFor / 4)
		c.reserve(now, uint64(i))
		if n := c.pending(now); n > 8 {
			t.Fatalf("%d choices count after %v", n, now.Sub(t0))
		}
	}
	if n := c.pending(now.Add(reservedFor / 2)); n == 0 {
		t.Error("the last ones are forgotten at once")
	}
	c.acquire()
	if n := c.pending(now.Add(2 * reservedFor)); n != 0 {
		t.Errorf("%d choices count for ever", n)
	}
}

// TestAnyWeights: who has not begun may begin at a worker of other weights.
func TestAnyWeights(t *testing.T) {
	other := func(w *fleetpb.Worker) *fleetpb.Worker { w.RelayMark, w.Fingerprint = "m", "g"; return w }
	p := newPicker(t, Config{})
	p.Update([]*fleetpb.Worker{other(testWorker("w1", "", 0, 16)), testWorker("w2", "", 0, 16)})
	r := Request{Pool: "big", RelayMark: "m", Fingerprint: "f"}
	if got := ids(p.Pick(t0, r)); got != "" {
		t.Errorf("one that has begun goes to %q", got)
	}
	r.AnyWeights = true
	if got := ids(p.Pick(t0, r)); got != "w1" {
		t.Errorf("one that has not begun goes to %q, want w1", got)
	}
}

// TestLeft: Info tells how many requests have left since the load was reported, and not how many came.
func TestLeft(t *testing.T) {
	p := newPicker(t, Config{})
	release := p.Acquire("w1")
	p.Update([]*fleetpb.Worker{testWorker("w1", "", 4, 16)})
	left := func() int64 { info, _ := p.Info("w1"); return info.Left }
	p.Acquire("w1")
	if n := left(); n != 0 {
		t.Errorf("%d left, and one came", n)
	}
	p.Update([]*fleetpb.Worker{testWorker("w1", "", 5, 16)})
	release()
	if n := left(); n != 1 {
		t.Errorf("%d left, want 1", n)
	}
	if info, _ := p.Info("w1"); info.Foreign != 3 { // 5 run, and 2 of them were this gateway's
		t.Errorf("%d are foreign, want 3", info.Foreign)
	}
}
