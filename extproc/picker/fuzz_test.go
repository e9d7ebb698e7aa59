package picker

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
)

// fleetOf makes a fleet out of bytes, four for each worker: status, zone and pool,
// load, weight.
func fleetOf(data []byte) []*fleetpb.Worker {
	var out []*fleetpb.Worker
	for i := 0; i+4 <= len(data) && len(out) < 40; i += 4 {
		w := &fleetpb.Worker{
			Id: fmt.Sprintf("w%d", len(out)), Address: fmt.Sprintf("10.0.0.%d:80", len(out)), Pool: "big", Incarnation: uint64(data[i] >> 4),
			Status: int32(data[i] % 6), Zone: string(rune('a' + data[i+1]%3)), Weight: uint32(data[i+3]),
			Load: &fleetpb.Load{Running: uint32(data[i+2] % 16), Waiting: uint32(data[i+2] >> 6), MaxRunning: uint32(data[i+1] >> 4), Utilization: float64(data[i+2]) / 100},
		}
		if data[i+1]&4 != 0 {
			w.Pool = "small"
		}
		if data[i+2] == 0 {
			w.Load = nil
		}
		out = append(out, w)
	}
	return out
}

// FuzzPick holds every choice against the contract of the package comment, whatever
// the fleet.
func FuzzPick(f *testing.F) {
	f.Add([]byte{1, 0x40, 3, 100, 1, 0x41, 0, 100, 3, 0x40, 1, 1}, "", uint8(0))
	f.Add([]byte{5, 0x10, 9, 1, 1, 0x12, 9, 255, 1, 0x10, 9, 0}, "session", uint8(1))
	f.Fuzz(func(t *testing.T, data []byte, session string, broken uint8) {
		fleet := fleetOf(data)
		p := newPicker(t, Config{Zone: "a"})
		p.Update(fleet)
		if len(fleet) > 0 {
			p.Failed(t0, fleet[int(broken)%len(fleet)].GetId(), true)
		}
		d := p.Pick(t0, Request{Model: "chat", Session: session})
		takers := map[string]int{}
		for _, w := range fleet {
			if health.Status(w.GetStatus()).Takes() {
				takers[w.GetPool()]++
			}
		}
		want := "big"
		if takers["big"] == 0 && takers["small"] > 0 {
			want = "small"
		}
		if d.Pool != want || len(d.Candidates) != min(takers[want], 5) || (d.Why == "") != (len(d.Candidates) > 0) {
			t.Fatalf("pool %s, %d candidates, why %q; want %s, %d", d.Pool, len(d.Candidates), d.Why, want, min(takers[want], 5))
		}
		checkOrder(t, d)
		// The same fleet in another order is the same fleet.
		slices.Reverse(fleet)
		q := newPicker(t, Config{Zone: "a"})
		q.Update(fleet)
		if len(fleet) > 0 {
			q.Failed(t0, fleet[len(fleet)-1-int(broken)%len(fleet)].GetId(), true)
		}
		if diff := cmp.Diff(d, q.Pick(t0, Request{Model: "chat", Session: session})); diff != "" {
			t.Errorf("order of the list matters: %s", diff)
		}
	})
}

// checkOrder checks that candidates differ and, after the session's own, go down
// the lines of the order, and within a line from the best score to the worst, near
// ties of the first aside.
func checkOrder(t *testing.T, d Decision) {
	t.Helper()
	seen := map[string]bool{}
	rest := d.Candidates
	for _, c := range d.Candidates {
		if seen[c.ID] {
			t.Errorf("%s twice", c.ID)
		}
		seen[c.ID] = true
	}
	if d.Affinity {
		if first := d.Candidates[0]; first.Order == orderBroken {
			t.Errorf("the session stays with %s behind an open breaker", first.ID)
		}
		rest = rest[1:]
	}
	if len(rest) == 0 {
		return
	}
	best := rest[0].Score
	for _, c := range rest {
		if c.Order == rest[0].Order {
			best = min(best, c.Score)
		}
	}
	for i := 1; i < len(rest); i++ {
		a, b := rest[i-1], rest[i]
		near := a.Order == rest[0].Order && b.Order == a.Order && a.Score <= nearTie*best && b.Score <= nearTie*best
		if a.Order > b.Order || a.Order == b.Order && a.Score > b.Score && !near && !d.Affinity {
			t.Errorf("%+v before %+v", a, b)
		}
	}
}

// TestBurst: requests that arrive faster than any report are spread by what this
// gateway itself has sent, over capacity.
func TestBurst(t *testing.T) {
	p := newPicker(t, Config{})
	p.Update([]*fleetpb.Worker{testWorker("w1", "", 0, 30), testWorker("w2", "", 0, 10), testWorker("w3", "", 0, 10)})
	got := map[string]int{}
	for i := range 50 {
		now := t0.Add(time.Duration(i) * time.Millisecond)
		id := p.Choose(now, Request{Pool: "big"}).Candidates[0].ID
		p.Acquire(id)
		got[id]++
	}
	if got["w1"] < 28 || got["w1"] > 32 || got["w2"] < 9 || got["w2"] > 11 {
		t.Errorf("50 requests over capacities 30, 10, 10 went %v", got)
	}
}
