package stack

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// TestHungReads: reads of the first tier hang, and the one behind it has the same blocks:
// only the first look-up waits, and only the first tier is left alone.
func TestHungReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		frames, ids := chainOf(t, 1, 6)
		fill(t, r.a, frames...)
		fill(t, r.b, frames...)
		stuck := make(chan struct{})
		r.a.stuck = stuck
		if n, took := r.ask(t, ids, 400*time.Millisecond); n != 0 || took > 400*time.Millisecond {
			t.Errorf("%d tokens after %v, and the tier that is asked hangs", n, took)
		}
		if a, b := r.tiers[0].left.Load(), r.tiers[1].left.Load(); a == 0 || b != 0 {
			t.Errorf("%d calls of the tier that hangs and %d of the good one were left", a, b)
		}
		if n, took := r.ask(t, ids, 400*time.Millisecond); n != 6*size || took != 0 {
			t.Errorf("%d tokens after %v the second time", n, took)
		}
		if l, err := r.Get(t.Context(), frames[0].Ref); err != nil {
			t.Error(err)
		} else {
			l.Release()
		}
		if n := r.tiers[1].left.Load(); n != 0 || r.cut("b", cutDeadline) != 0 {
			t.Errorf("%d calls of the good tier left", n)
		}
		close(stuck)
		synctest.Wait()
		if n := r.tiers[0].left.Load(); n != 0 || len(r.flights) != 0 {
			t.Errorf("%d calls left and %d flights when all have returned", n, len(r.flights))
		}
	})
}

// TestJoinedFlight: who waits for a block that comes from another tier, which hangs, leaves
// that one alone.
func TestJoinedFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Usual: time.Second})
		frames, _ := chainOf(t, 1, 1)
		fill(t, r.a, frames...)
		fill(t, r.b, frames...)
		stuck := make(chan struct{})
		defer close(stuck)
		r.a.stuck = stuck
		b := kvcache.Found{Ref: frames[0].Ref, Size: frames[0].Total}
		first := r.bring(t.Context(), r.tiers[0], b)
		if f := r.bring(t.Context(), r.tiers[1], b); f != first {
			t.Error("read twice, and nobody knows yet that the first read hangs")
		}
		if _, err := r.Get(t.Context(), b.Ref); err == nil {
			t.Error("a block from a tier that hangs")
		}
		if a, b := r.tiers[0].left.Load(), r.tiers[1].left.Load(); a != 1 || b != 0 {
			t.Errorf("%d calls of the tier that hangs and %d of the good one were left", a, b)
		}
		if f := r.bring(t.Context(), r.tiers[1], b); f == first || !f.wait(t.Context()) || f.err != nil {
			t.Error("waits for a tier that hangs, and another one has it")
		}
	})
}

// TestHungLooks: look-ups of a tier hang, and the one before it, which is slow enough for it
// to be asked, has everything, so that nobody waits for them: they are few all the same.
func TestHungLooks(t *testing.T) {
	for name, within := range map[string]time.Duration{"their time is over": 400 * time.Millisecond, "they have time": time.Hour} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, Config{})
				hang := make(chan struct{})
				r.a.delay, r.b.hang = 2*moment, hang
				free := sync.OnceFunc(func() { close(hang) })
				defer free()
				before, most := runtime.NumGoroutine(), 0
				for i := range int32(1000) {
					frames, ids := chainOf(t, i, 1)
					fill(t, r.a, frames...)
					if n, took := r.ask(t, ids, within); n != size || took > 4*moment {
						t.Fatalf("%d tokens after %v", n, took)
					}
					most = max(most, runtime.NumGoroutine()-before)
				}
				// Not all other goroutines of the process are of this test.
				if n := r.tiers[1].looks.Load(); n > mostLooks || most > mostLooks+100 {
					t.Errorf("%d look-ups run, and up to %d goroutines more than before", n, most)
				}
				if within < time.Second && r.tiers[1].left.Load() == 0 {
					t.Error("the time of those that hang is over, and the tier is still asked")
				}
				free()
				synctest.Wait()
				if n := r.tiers[1].looks.Load() + r.tiers[1].left.Load(); n != 0 {
					t.Errorf("%d look-ups run when all have returned", n)
				}
			})
		})
	}
}
