package stack

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// TestLater: a store that takes long to open is away until it is open, and a stack on it
// serves meanwhile; what is put by then is written when it is there.
func TestLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		far := &labeler{memStore: newMem()}
		slow, err := Later(func() (kvcache.Store, error) {
			<-time.After(time.Minute)
			return far, nil
		}, time.Second, func(err error) { t.Error(err) })
		if err != nil {
			t.Fatal(err)
		}
		s, err := New(Config{Near: newMem(), Far: []Tier{{Name: "far", Store: slow}}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		frames, ids := chainOf(t, 1, 3)
		fill(t, s, frames...)
		q := kvcache.Query{Space: testSpace(), IDs: ids}
		if err := s.Label(t.Context(), q.Fingerprint, kvcache.Label{Model: "m"}); err != nil {
			t.Fatal(err)
		}
		if m, err := s.Longest(t.Context(), q); err != nil || len(m.Blocks) != 3 {
			t.Errorf("%d blocks: %v", len(m.Blocks), err)
		}
		if err := s.Drop(t.Context(), kvcache.Fingerprint{}); !errors.Is(err, remote.ErrAway) {
			t.Errorf("dropped in what is not open: %v", err)
		}
		<-time.After(2 * time.Minute)
		if far.count() != 3 || far.times() != 1 {
			t.Errorf("%d blocks and %d labels when it is open", far.count(), far.times())
		}
		if l, err := slow.Get(t.Context(), frames[0].Ref); err != nil || l.Verify() != nil {
			t.Error(err)
		}
		if err := slow.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestLaterFails: what goes wrong at once is an error, and what goes wrong later is told and
// a tier that is away.
func TestLaterFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad := errors.New("bad")
		if _, err := Later(func() (kvcache.Store, error) { return nil, bad }, time.Second, nil); !errors.Is(err, bad) {
			t.Errorf("at once: %v", err)
		}
		var told error
		s, err := Later(func() (kvcache.Store, error) {
			<-time.After(time.Minute)
			return nil, bad
		}, time.Second, func(err error) { told = err })
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(2 * time.Minute)
		synctest.Wait()
		if _, err := s.Longest(t.Context(), kvcache.Query{}); !errors.Is(told, bad) || !errors.Is(err, remote.ErrAway) || !errors.Is(err, bad) {
			t.Errorf("told %v, called %v", told, err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}
