package stack

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache"
)

// TestOwed: what a tier that is away has of a model that was dropped is found by nobody when
// it is back, until it has dropped it; what was computed since is.
func TestOwed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		f := testSpace().Fingerprint
		frames, ids := chainOf(t, 1, 4)
		fill(t, r, frames...)
		<-time.After(time.Second)
		r.a.set(func(m *memStore) { m.err = errors.New("away") })
		if err := r.Drop(t.Context(), f); err == nil {
			t.Fatal("a drop that a tier could not do is no error")
		}
		if d := cmp.Diff([]Owed{{"a", f}}, r.Owing()); d != "" {
			t.Error(d)
		}
		r.a.set(func(m *memStore) { m.err = nil })
		if n, _ := r.ask(t, ids, time.Second); n != 0 || r.a.count() != 4 || r.b.count() != 0 {
			t.Errorf("%d tokens are found of what was dropped; the tiers have %d and %d blocks", n, r.a.count(), r.b.count())
		}
		if _, err := r.Get(t.Context(), frames[0].Ref); !errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("a block that was dropped: %v", err)
		}
		if _, err := r.GetLayers(t.Context(), frames[0].Ref, kvcache.Layers{}); !errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("layers of a block that was dropped: %v", err)
		}
		if r.cut("a", cutDropped) == 0 {
			t.Error("nobody counted that a tier was left out")
		}
		fill(t, r, frames[0])
		if n, _ := r.ask(t, ids, time.Second); n != size {
			t.Errorf("%d tokens of what was computed since", n)
		}
		<-time.After(time.Second)
		if err := r.DropOwed(t.Context()); err != nil || len(r.Owing()) != 0 || r.a.count() != 0 || r.near.count() != 1 {
			t.Errorf("%v; %d blocks are left in the tier and %d near, and %v is owed", err, r.a.count(), r.near.count(), r.Owing())
		}
		fill(t, r.a, frames[1:]...)
		if n, _ := r.ask(t, ids, time.Second); n != 4*size {
			t.Errorf("%d tokens when nothing is owed any more", n)
		}
	})
}

// TestOwedHangs: a tier that hangs keeps no other one from doing what it owes, and is not
// asked twice; what tiers owe that are not there is kept.
func TestOwedHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		f := testSpace().Fingerprint
		frames, _ := chainOf(t, 1, 2)
		fill(t, r.a, frames...)
		fill(t, r.b, frames...)
		hang := make(chan struct{})
		r.a.set(func(m *memStore) { m.hang = hang })
		r.Owe(Owed{"a", f}, Owed{"b", f}, Owed{"gone", f}, Owed{"b", f})
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_ = r.DropOwed(ctx) // nothing has failed yet
			cancel()
		}
		if d := cmp.Diff([]Owed{{"a", f}, {"gone", f}}, r.Owing()); d != "" || r.b.count() != 0 {
			t.Errorf("%d blocks in the tier that is well; %s", r.b.count(), d)
		}
		close(hang)
		synctest.Wait()
		if d := cmp.Diff([]Owed{{"gone", f}}, r.Owing()); d != "" || r.a.count() != 0 {
			t.Errorf("%d blocks in the tier that hung; %s", r.a.count(), d)
		}
	})
}

// TestOwedMeanwhile: a look-up and a read of layers that were under way when a tier failed to
// drop the model bring back nothing of it, neither then nor later.
func TestOwedMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		f := testSpace().Fingerprint
		frames, ids := chainOf(t, 1, 4)
		fill(t, r.a, frames...)
		r.tiers[0].Store = &rangedMem{memStore: r.a}
		r.a.set(func(m *memStore) { m.delay = 500 * time.Millisecond })
		found, layers := make(chan int, 1), make(chan error, 1)
		go func() {
			n, _ := r.ask(t, ids, 5*time.Second)
			found <- n
		}()
		go func() {
			_, err := r.GetLayers(t.Context(), frames[0].Ref, kvcache.Layers{To: 1})
			layers <- err
		}()
		<-time.After(100 * time.Millisecond)
		// Refused at once; the others have their answers 400 ms later.
		r.a.set(func(m *memStore) { m.delay, m.err = 0, errors.New("away") })
		if err := r.Drop(t.Context(), f); err == nil || len(r.Owing()) != 1 {
			t.Fatalf("%v; %v is owed", err, r.Owing())
		}
		r.a.set(func(m *memStore) { m.err = nil })
		if n := <-found; n != 0 {
			t.Errorf("%d tokens are found of what was dropped meanwhile", n)
		}
		if err := <-layers; !errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("layers of what was dropped meanwhile: %v", err)
		}
		if err := r.DropOwed(t.Context()); err != nil || r.near.count() != 0 {
			t.Errorf("%v; %d blocks are near", err, r.near.count())
		}
	})
}

// listing is a tier whose first drop takes what was there when it began, as a bucket does that is
// listed, and whose others fail.
type listing struct {
	*memStore
	listed, goes chan struct{} // the first has listed; it may go on
	calls        int
}

// Drop implements kvcache.Store.
func (l *listing) Drop(context.Context, kvcache.Fingerprint) error {
	l.mu.Lock()
	l.calls++
	calls, old := l.calls, slices.Collect(maps.Keys(l.blocks))
	l.mu.Unlock()
	if calls > 1 {
		return errors.New("away")
	}
	close(l.listed)
	<-l.goes
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range old {
		delete(l.blocks, key)
	}
	return nil
}

// TestOwedTwice: a drop that fails while an earlier one of the same model is under way is owed,
// although that one goes well.
func TestOwedTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		far := &listing{memStore: newMem(), listed: make(chan struct{}), goes: make(chan struct{})}
		s, err := New(Config{Near: newMem(), Far: []Tier{{Name: "far", Store: far}}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		f := testSpace().Fingerprint
		s.Owe(Owed{"far", f})
		first := make(chan error, 1)
		go func() { first <- s.DropOwed(t.Context()) }()
		<-far.listed
		frames, ids := chainOf(t, 1, 2)
		fill(t, s, frames...)
		<-time.After(time.Second)
		if err := s.Drop(t.Context(), f); err == nil || far.count() != 2 {
			t.Fatalf("the second drop: %v, with %d blocks there", err, far.count())
		}
		close(far.goes)
		if err := <-first; err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff([]Owed{{"far", f}}, s.Owing()); d != "" {
			t.Error(d)
		}
		if m, err := s.Longest(t.Context(), kvcache.Query{Space: testSpace(), IDs: ids}); err != nil || len(m.Blocks) != 0 {
			t.Errorf("%d blocks are found that were dropped, %v", len(m.Blocks), err)
		}
	})
}
