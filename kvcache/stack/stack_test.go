package stack

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/kvcache"
)

// rig is a stack of a near store and two far ones.
type rig struct {
	*Stack
	near, a, b *memStore
}

// newRig makes one, in a bubble of synctest.
func newRig(t testing.TB, cfg Config) *rig {
	t.Helper()
	r := &rig{near: newMem(), a: newMem(), b: newMem()}
	cfg.Near, cfg.Far = r.near, []Tier{{Name: "a", Store: r.a}, {Name: "b", Store: r.b}}
	var err error
	if r.Stack, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Stack.Close() })
	return r
}

// ask looks ids up within a time, and says how many tokens there are and how long it took.
func (r *rig) ask(t testing.TB, ids []int32, within time.Duration) (tokens int, took time.Duration) {
	t.Helper()
	begin := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	m, err := r.Longest(ctx, kvcache.Query{Space: testSpace(), IDs: ids})
	if err != nil {
		t.Fatal(err)
	}
	return m.Tokens() + m.Common, time.Since(begin)
}

// cut is how often a tier was left out for a reason.
func (r *rig) cut(tier, reason string) float64 {
	return testutil.ToFloat64(r.metrics.cuts.WithLabelValues(tier, reason))
}

// dropped is how many blocks were not written to a tier for a reason.
func (r *rig) droppedFor(tier, reason string) float64 {
	return testutil.ToFloat64(r.metrics.dropped.WithLabelValues(tier, reason))
}

func TestConfig(t *testing.T) {
	m := newMem()
	for name, cfg := range map[string]Config{
		"no near": {}, "no store": {Near: m, Far: []Tier{{Name: "a"}}}, "no name": {Near: m, Far: []Tier{{Store: m}}},
		"twice": {Near: m, Far: []Tier{{Name: "a", Store: m}, {Name: "a", Store: m}}}, "negative": {Near: m, Queue: -1},
	} {
		if s, err := New(cfg); err == nil {
			s.Close()
			t.Errorf("%s: made", name)
		}
	}
}

// TestLongest: what is missing near comes from the tiers, each where it is, and stays.
func TestLongest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		frames, ids := chainOf(t, 1, 12)
		fill(t, r.near, frames[:2]...)
		fill(t, r.a, frames[2:4]...)
		fill(t, r.b, frames[4:6]...)
		fill(t, r.a, frames[6:8]...) // behind a hole that the other tier fills
		fill(t, r.b, frames[11])     // behind one that nobody fills
		if n, _ := r.ask(t, ids, time.Second); n != 8*size {
			t.Errorf("%d tokens, want %d", n, 8*size)
		}
		for _, f := range frames[:8] {
			l, err := r.near.Get(t.Context(), f.Ref)
			if err != nil || !bytes.Equal(l.Bytes(), f.Bytes()) {
				t.Errorf("a block has not come near, or not as it was: %v", err)
			}
		}
		before := r.a.looks
		if n, _ := r.ask(t, ids[:8*size], time.Second); n != 8*size || r.a.looks != before {
			t.Errorf("%d tokens the second time, with %d look-ups of a far tier", n, r.a.looks-before)
		}
		// The beginning of a block is worth as much as its tokens.
		part := append(ids[:11*size:11*size], ids[11*size:11*size+20]...)
		fill(t, r.a, frames[8:11]...)
		if n, _ := r.ask(t, part, time.Second); n != 11*size+20 {
			t.Errorf("%d tokens, want %d", n, 11*size+20)
		}
	})
}

// TestBesideEachOther: slow tiers are asked at the same time, a fast one that has everything
// alone, and the order of the tiers decides who is read.
func TestBesideEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		frames, ids := chainOf(t, 1, 4)
		r.a.delay, r.b.delay = 100*time.Millisecond, 100*time.Millisecond
		if n, took := r.ask(t, ids, time.Second); n != 0 || took > 100*time.Millisecond+moment {
			t.Errorf("%d tokens, and to find that nobody has them took %v", n, took)
		}
		fill(t, r.a, frames...)
		fill(t, r.b, frames...)
		r.a.set(func(m *memStore) { m.delay = 0 })
		looks := r.b.looks
		if n, took := r.ask(t, ids, time.Second); n != 4*size || took != 0 || r.b.looks != looks || len(r.b.reads) != 0 {
			t.Errorf("%d tokens after %v; the slow tier was asked %d times and read %d", n, took, r.b.looks-looks, len(r.b.reads))
		}
		// Both have them, both are slow: the first one's are taken.
		frames, ids = chainOf(t, 2, 4)
		fill(t, r.a, frames...)
		fill(t, r.b, frames...)
		r.a.set(func(m *memStore) { m.delay = 50 * time.Millisecond })
		if n, _ := r.ask(t, ids, time.Second); n != 4*size || len(r.b.reads) != 0 {
			t.Errorf("%d tokens, %d blocks read of the second tier", n, len(r.b.reads))
		}
		<-time.After(time.Second) // the other one's look-up ends, too
	})
}

// TestHangs: a tier that hangs costs its caller the time that it gave, the next callers
// nothing, and what the others have comes all the same. When it is back, so are its blocks.
func TestHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		frames, ids := chainOf(t, 1, 6)
		fill(t, r.a, frames[:3]...)
		fill(t, r.b, frames[3:]...)
		hang := make(chan struct{})
		r.b.set(func(m *memStore) { m.hang = hang })
		n, took := r.ask(t, ids, 400*time.Millisecond)
		if n != 3*size || took > 400*time.Millisecond {
			t.Errorf("%d tokens after %v", n, took)
		}
		for range 5 {
			if n, took := r.ask(t, ids, 400*time.Millisecond); n != 3*size || took != 0 {
				t.Errorf("%d tokens after %v, and the tier was known to hang", n, took)
			}
		}
		if r.cut("b", cutDeadline) != 1 || r.cut("b", cutAway) < 5 {
			t.Errorf("cut %v by the deadline, %v because it is away", r.cut("b", cutDeadline), r.cut("b", cutAway))
		}
		r.b.set(func(m *memStore) { m.hang = nil })
		close(hang)
		synctest.Wait()
		if n, _ := r.ask(t, ids, 400*time.Millisecond); n != 6*size {
			t.Errorf("%d tokens when it was back", n)
		}
	})
}

// TestDeadline: blocks come in the order of the prefix, and at the end of the time the
// answer is what has come so far. The rest is there for the next one.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Abreast: 2})
		frames, ids := chainOf(t, 1, 20)
		fill(t, r.a, frames...)
		r.a.delay = 40 * time.Millisecond
		n, took := r.ask(t, ids, 200*time.Millisecond)
		// 40 ms to look it up, and then two blocks in each 40 ms.
		if n != 6*size || took > 200*time.Millisecond {
			t.Errorf("%d tokens after %v", n, took)
		}
		if r.cut("a", cutDeadline) == 0 {
			t.Error("not counted")
		}
		<-time.After(time.Second)
		if got := r.near.count(); got > 8 {
			t.Errorf("%d blocks were brought for somebody who had left", got)
		}
	})
}

// TestSlower: a tier that takes longer than to compute the tokens is not waited for, once
// that is known, but for a try now and then.
func TestSlower(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Abreast: 1})
		r.a.delay = 30 * time.Millisecond
		for i := range int32(8) {
			frames, ids := chainOf(t, i, 4)
			fill(t, r.a, frames...)
			// 80 ms for all tokens, 20 for a block's.
			_, took := r.ask(t, ids, 80*time.Millisecond)
			if i >= 2 && took > 30*time.Millisecond {
				t.Errorf("look-up %d took %v", i, took)
			}
			<-time.After(time.Second) // nobody's call runs any more
		}
		if r.cut("a", cutSlower) < 4 {
			t.Errorf("%v left out as slower", r.cut("a", cutSlower))
		}
		r.a.set(func(m *memStore) { m.delay = time.Millisecond })
		<-time.After(again)
		for i := range int32(8) { // it is found out
			frames, ids := chainOf(t, 100+i, 4)
			fill(t, r.a, frames...)
			if n, _ := r.ask(t, ids, 80*time.Millisecond); n == 4*size {
				return
			}
			<-time.After(again)
		}
		t.Error("a tier that is fast again is not asked")
	})
}

// TestOneFlight: many that want the same blocks at once read each once.
func TestOneFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		frames, ids := chainOf(t, 1, 4)
		fill(t, r.a, frames...)
		r.a.delay = 10 * time.Millisecond
		var all sync.WaitGroup
		for i := range 10 {
			all.Go(func() {
				if i%2 == 0 {
					if n, _ := r.ask(t, ids, time.Second); n != 4*size {
						t.Errorf("%d tokens", n)
					}
					return
				}
				l, err := r.Get(t.Context(), frames[3].Ref)
				if err != nil {
					t.Error(err)
					return
				}
				l.Release()
			})
		}
		all.Wait()
		for _, f := range frames {
			if n := r.a.reads[f.Key]; n != 1 {
				t.Errorf("a block was read %d times", n)
			}
		}
		if testutil.ToFloat64(r.metrics.shared.WithLabelValues("a")) == 0 || len(r.flights) != 0 {
			t.Errorf("%d flights are left", len(r.flights))
		}
	})
}

// TestRot: what is wrong in a far tier does not come near, and the other tier is asked.
func TestRot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		frames, ids := chainOf(t, 1, 2)
		fill(t, r.a, frames...)
		r.a.rot = true
		if n, _ := r.ask(t, ids, time.Second); n != 0 || r.near.count() != 0 {
			t.Errorf("%d tokens of what is wrong", n)
		}
		fill(t, r.b, frames...)
		l, err := r.Get(t.Context(), frames[0].Ref)
		if err != nil || l.Verify() != nil {
			t.Errorf("a good copy in the other tier: %v", err)
		}
	})
}

// TestGet: one block, from wherever it is, also where it has no room near.
func TestGet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Usual: 50 * time.Millisecond})
		frames, _ := chainOf(t, 1, 3)
		fill(t, r.b, frames...)
		if l, err := r.Get(t.Context(), frames[0].Ref); err != nil || l.Verify() != nil || r.near.count() != 1 {
			t.Errorf("%v, %d blocks near", err, r.near.count())
		}
		r.near.most = -1
		if l, err := r.Get(t.Context(), frames[1].Ref); err != nil || l.Verify() != nil {
			t.Errorf("no room near: %v", err)
		}
		missing, _ := chainOf(t, 2, 1)
		if _, err := r.Get(t.Context(), missing[0].Ref); !errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("nobody has it: %v", err)
		}
		hang := make(chan struct{})
		r.a.set(func(m *memStore) { m.hang = hang })
		begin := time.Now()
		if _, err := r.Get(t.Context(), frames[2].Ref); !errors.Is(err, kvcache.ErrNotFound) || time.Since(begin) != 50*time.Millisecond {
			t.Errorf("a tier that hangs: %v after %v", err, time.Since(begin))
		}
		close(hang)
		r.Close()
		if _, err := r.Get(t.Context(), frames[0].Ref); !errors.Is(err, kvcache.ErrClosed) {
			t.Errorf("closed: %v", err)
		}
	})
}

// TestDrop: a dropped model is in no tier, and what was on its way comes to nothing.
func TestDrop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		frames, ids := chainOf(t, 1, 6)
		others, _ := chainOf(t, 2, 3)
		fill(t, r.b, frames...)
		r.a.delay, r.b.delay = 30*time.Millisecond, 30*time.Millisecond
		r.a.late, r.b.late = 200*time.Millisecond, 200*time.Millisecond
		looking := make(chan struct{})
		go func() {
			defer close(looking)
			r.ask(t, ids, time.Second)
		}()
		<-time.After(50 * time.Millisecond)
		fill(t, r, others...)
		synctest.Wait()
		if err := r.Drop(t.Context(), testSpace().Fingerprint); err != nil {
			t.Fatal(err)
		}
		r.mu.Lock()
		flights := len(r.flights)
		r.mu.Unlock()
		if flights == 0 || r.Behind() == 0 || r.b.count() != 0 {
			t.Errorf("%d flights and %d blocks to be written at the end of the drop, %d in the tier", flights, r.Behind(), r.b.count())
		}
		<-looking
		<-time.After(time.Second)
		if r.near.count()+r.a.count()+r.b.count() != 0 || len(r.b.reads) == 0 {
			t.Errorf("%d, %d and %d blocks after the drop", r.near.count(), r.a.count(), r.b.count())
		}
		r.b.set(func(m *memStore) { m.err = errors.New("away") })
		if err := r.Drop(t.Context(), testSpace().Fingerprint); err == nil {
			t.Error("a tier could not drop, and nobody is told")
		}
	})
}

// TestReclaim: an old version goes from the tiers below, also what is on its way to them, but
// not from memory or where others reclaim it themselves.
func TestReclaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, own, apart := newMem(), newMem(), newMem()
		s, err := New(Config{Near: near, Far: []Tier{{Name: "own", Store: own}, {Name: "apart", Store: apart, Apart: true}}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		frames, _ := chainOf(t, 1, 6)
		fill(t, s, frames[:3]...)
		synctest.Wait()
		own.late, apart.late = 200*time.Millisecond, 200*time.Millisecond
		fill(t, s, frames[3:]...)
		synctest.Wait()
		if err := s.Reclaim(t.Context(), testSpace().Fingerprint); err != nil || s.Behind() == 0 {
			t.Fatalf("%d blocks on their way: %v", s.Behind(), err)
		}
		<-time.After(time.Second)
		if near.count() != 6 || own.count() != 0 || apart.count() != 6 {
			t.Errorf("%d, %d and %d blocks", near.count(), own.count(), apart.count())
		}
		own.set(func(m *memStore) { m.err = errors.New("away") })
		if err := s.Reclaim(t.Context(), testSpace().Fingerprint); err == nil {
			t.Error("a tier could not, and nobody is told")
		}
	})
}

// TestSlowDrop: what a tier takes its time to drop is found by nobody meanwhile, but where it is
// other hosts' memory; what came from there is gone at the end.
func TestSlowDrop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for apart, want := range map[bool]int{false: 0, true: 6 * size} {
			r := newRig(t, Config{})
			r.tiers[1].Apart = apart
			frames, ids := chainOf(t, 1, 6)
			fill(t, r.b, frames...)
			r.b.slow = 20 * time.Second
			dropped := make(chan error)
			go func() { dropped <- r.Drop(t.Context(), testSpace().Fingerprint) }()
			<-time.After(time.Second)
			if n, _ := r.ask(t, ids, time.Second); n != want {
				t.Errorf("%d tokens while the tier still has them, want %d", n, want)
			}
			if err := <-dropped; err != nil || r.near.count() != 0 {
				t.Errorf("%d blocks near at the end of the drop: %v", r.near.count(), err)
			}
		}
	})
}

// TestLabel: the near store is told each time, a far one that remembers labels once, and
// again after the model was dropped; nobody waits for it.
func TestLabel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := &labeler{memStore: newMem()}, &labeler{memStore: newMem()}
		far.delay = time.Second
		s, err := New(Config{Near: near, Far: []Tier{{Name: "far", Store: far}, {Name: "plain", Store: newMem()}}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		f, begin := testSpace().Fingerprint, time.Now()
		for range 3 {
			if err := s.Label(t.Context(), f, kvcache.Label{Model: "m"}); err != nil {
				t.Fatal(err)
			}
		}
		if time.Since(begin) != 0 {
			t.Errorf("took %v", time.Since(begin))
		}
		<-time.After(2 * time.Second)
		if err := s.Drop(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		if err := s.Label(t.Context(), f, kvcache.Label{Model: "m"}); err != nil {
			t.Fatal(err)
		}
		<-time.After(2 * time.Second)
		if near.times() != 4 || far.times() != 2 {
			t.Errorf("near was told %d times, far %d", near.times(), far.times())
		}
	})
}

// TestClose: what waits is written first, for a while, and a tier that hangs holds nobody up.
func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		r.a.delay = 500 * time.Millisecond
		frames, _ := chainOf(t, 1, 8)
		fill(t, r, frames...)
		if err := r.Close(); err != nil || r.a.count() != 8 {
			t.Errorf("%d of 8 blocks: %v", r.a.count(), err)
		}
		hung := newRig(t, Config{Flush: time.Second})
		hang := make(chan struct{})
		hung.a.hang = hang
		fill(t, hung, frames...)
		begin := time.Now()
		if err := hung.Close(); err == nil || time.Since(begin) > 3*time.Second {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		close(hang)
	})
}

// TestMetrics: every one has its tier, and the registry takes them.
func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := prometheus.NewPedanticRegistry()
		r := newRig(t, Config{Registry: reg})
		frames, ids := chainOf(t, 1, 2)
		fill(t, r.b, frames...)
		r.ask(t, ids, time.Second)
		if n, err := testutil.GatherAndCount(reg, "kvmesh_kv_stack_behind_tokens", "kvmesh_kv_stack_left", "kvmesh_kv_stack_cuts_total"); err != nil || n != 2+2+8 {
			t.Errorf("%d samples: %v", n, err)
		}
		if n := testutil.ToFloat64(r.metrics.tokens.WithLabelValues("b")); n != 2*size {
			t.Errorf("%v tokens brought near", n)
		}
	})
}
