package stack

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// TestWriteBehind: a put costs what the near store costs, whatever the others do, and the
// block is in all of them after a while.
func TestWriteBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		r.a.delay, r.b.delay = time.Second, 3*time.Second
		frames, _ := chainOf(t, 1, 8)
		begin := time.Now()
		fill(t, r, frames...)
		if took := time.Since(begin); took != 0 {
			t.Errorf("eight puts took %v", took)
		}
		if n := r.tiers[0].behind.tokens.Load(); n != 8*size {
			t.Errorf("%d tokens behind, want %d", n, 8*size)
		}
		<-time.After(10 * time.Second)
		if r.a.count() != 8 || r.b.count() != 8 || r.tiers[0].behind.tokens.Load() != 0 || r.tiers[1].behind.bytes.Load() != 0 {
			t.Errorf("%d and %d blocks, %d tokens behind", r.a.count(), r.b.count(), r.tiers[0].behind.tokens.Load())
		}
	})
}

// TestQueueIsBounded: ten times as many blocks as may wait, for a tier that hangs: puts do
// not wait, what is too much is dropped and counted, and the other tier has everything.
func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Queue: 10, Abreast: 2})
		r.a.set(func(m *memStore) { m.hang = make(chan struct{}) })
		frames, _ := chainOf(t, 1, 100)
		for _, f := range frames {
			fill(t, r, f)
			synctest.Wait()
		}
		if got := r.droppedFor("a", "full"); got != 88 {
			t.Errorf("%v dropped, want 88: 10 wait and 2 are being written", got)
		}
		if b := r.BehindIn("a"); b.GivenUp != 88 || b.Blocks != 12 || b.Tokens != 12*size || b.Bytes <= 12*1000 {
			t.Errorf("what the tier does not have: %+v", b)
		}
		if r.b.count() != 100 || r.tiers[0].behind.blocks.Load() != 12 {
			t.Errorf("the other tier has %d blocks; %d behind", r.b.count(), r.tiers[0].behind.blocks.Load())
		}
		close(r.a.hang)
		<-time.After(time.Second)
		if r.a.count() != 12 {
			t.Errorf("%d blocks after it has come back", r.a.count())
		}
	})
}

// TestGoneBeforeItsTurn: what the near store has given up is not written, and counted.
func TestGoneBeforeItsTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Abreast: 1})
		r.near.most = 3
		r.a.delay = time.Second
		frames, _ := chainOf(t, 1, 20)
		fill(t, r, frames...)
		<-time.After(30 * time.Second)
		if gone, there := r.droppedFor("a", "gone"), r.a.count(); gone == 0 || int(gone)+there != 20 {
			t.Errorf("%v gone and %d written, of 20", gone, there)
		}
	})
}

// TestTierAway: a tier that is away is waited for; one that fails is tried again, and then
// the block is dropped.
func TestTierAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		r.a.err, r.b.err = remote.ErrAway, errors.New("broken")
		frames, _ := chainOf(t, 1, 3)
		fill(t, r, frames...)
		<-time.After(time.Minute)
		if got := r.droppedFor("b", "failed"); got != 3 {
			t.Errorf("%v dropped by a broken tier, want 3", got)
		}
		r.a.set(func(m *memStore) { m.err = nil })
		<-time.After(2 * time.Second)
		if r.a.count() != 3 || r.droppedFor("a", "failed") != 0 {
			t.Errorf("%d blocks after the tier was away", r.a.count())
		}
	})
}

// TestTierLate: a tier that does not answer in its own time is about to be away: its blocks
// wait, and are given up in the end only.
func TestTierLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		r.a.err, r.b.err = fmt.Errorf("late: %w", context.DeadlineExceeded), context.DeadlineExceeded
		frames, _ := chainOf(t, 1, 3)
		fill(t, r, frames...)
		<-time.After(lateTries / 2 * awayLook)
		r.a.set(func(m *memStore) { m.err = nil })
		<-time.After(lateTries * awayLook)
		if r.a.count() != 3 || r.droppedFor("a", "failed") != 0 || r.droppedFor("b", "failed") != 3 {
			t.Errorf("%d blocks, %v given up", r.a.count(), r.droppedFor("b", "failed"))
		}
	})
}

// TestOffer: old blocks are written too, in their order, and leave room for new ones while
// the tier does not answer.
func TestOffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Queue: 8, Abreast: 1, Flush: time.Minute})
		old, _ := chainOf(t, 1, 20)
		fill(t, r.near, old...)
		hang := make(chan struct{})
		r.a.hang = hang
		var list []kvcache.Found
		for _, f := range old {
			list = append(list, kvcache.Found{Ref: f.Ref, First: f.First, Tokens: len(f.IDs), Size: f.Total})
		}
		r.OfferIn("a", list[:5])
		r.Offer(list)
		r.OfferIn("a", list) // waits already
		<-time.After(time.Second)
		if n := r.tiers[0].behind.blocks.Load(); n != 20 || r.b.count() != 20 {
			t.Errorf("%d blocks wait for the tier that hangs, the other one has %d", n, r.b.count())
		}
		fresh, _ := chainOf(t, 2, 4)
		fill(t, r, fresh...)
		if n := r.droppedFor("a", "full"); n != 0 {
			t.Errorf("%v new blocks were dropped for old ones", n)
		}
		r.a.set(func(m *memStore) { m.hang = nil })
		close(hang)
		if err := r.Close(); err != nil || r.a.count() != 24 || r.Behind() != 0 {
			t.Errorf("%d of 24 blocks, %d wait: %v", r.a.count(), r.Behind(), err)
		}
	})
}

// losing is a store that loses the first block that is put.
type losing struct {
	*memStore
	puts int
}

// Put implements kvcache.Store.
func (l *losing) Put(ctx context.Context, f *kvcache.Frame) error {
	l.mu.Lock()
	l.puts++
	lost := l.puts == 1
	l.mu.Unlock()
	if lost {
		return l.enter()
	}
	return l.memStore.Put(ctx, f)
}

// TestOfferMeanwhile: a block that is offered while it is being written, since what was written may
// be lost already, is written once more, and counted until then; one that waits is not.
func TestOfferMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		far := &losing{memStore: newMem()}
		far.delay = time.Second
		s, err := New(Config{Near: newMem(), Far: []Tier{{Name: "far", Store: far}}, Abreast: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		frames, _ := chainOf(t, 1, 2)
		var list []kvcache.Found
		for _, f := range frames {
			fill(t, s, f)
			list = append(list, kvcache.Found{Ref: f.Ref, First: f.First, Tokens: len(f.IDs), Size: f.Total})
		}
		<-time.After(500 * time.Millisecond)
		s.Offer(list)
		<-time.After(time.Second)
		if b := s.BehindIn("far"); b.Blocks != 2 || b.Tokens != 2*size || !s.Waits("far", frames[0].Key) {
			t.Errorf("when the first is lost %+v wait", b)
		}
		<-time.After(2 * time.Second)
		if b := s.BehindIn("far"); far.count() != 2 || far.puts != 3 || b != (Backlog{}) || s.Waits("far", frames[0].Key) {
			t.Errorf("%d of 2 blocks with %d writes of 3, and %+v wait", far.count(), far.puts, b)
		}
	})
}
