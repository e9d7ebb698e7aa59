//go:build unix

package arena

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache"
)

// watched is what a watcher was told.
type watched struct {
	there map[kvcache.Key][]int32
	told  int
}

func (w *watched) Stored(f kvcache.Found, ids []int32) { w.there[f.Key] = ids; w.told++ }
func (w *watched) Removed(key kvcache.Key)             { delete(w.there, key); w.told++ }

// TestWatch: a watcher knows at all times what can be found, whatever makes blocks come and go.
func TestWatch(t *testing.T) {
	s := newStore(t, Config{Limit: 128 << 10})
	space := kvcache.NewSpace("m", nil)
	before := sealed(t, space, space.Root, 1, 5000)
	put(t, s, before)
	w := &watched{there: map[kvcache.Key][]int32{}}
	s.Watch(w, 100, true)
	if ids := w.there[before.Key]; !slices.Equal(ids, before.IDs) {
		t.Errorf("what was there before has the tokens %v", ids)
	}
	agree := func(when string) {
		t.Helper()
		s.mu.Lock()
		defer s.mu.Unlock()
		want := map[kvcache.Key][]int32{}
		for key, id := range s.index.byKey {
			want[key] = w.there[key]
			if s.index.entries[id].space != s.index.spaceOf[space] {
				delete(want, key)
			}
		}
		if diff := cmp.Diff(want, w.there); diff != "" {
			t.Errorf("%s: -there +told:\n%s", when, diff)
		}
	}
	for i := range int32(60) {
		put(t, s, sealed(t, space, space.Root, 10+i, 5000))
	}
	if s.Stats().Evictions == 0 {
		t.Fatal("nothing was evicted")
	}
	agree("after evictions")
	last := sealed(t, space, space.Root, 200, 5000)
	put(t, s, last)
	if _, err := s.Remove(t.Context(), last.Ref); err != nil {
		t.Fatal(err)
	}
	agree("after a removal")
	told := w.told
	value := Values()
	put(t, s, sealed(t, value, value.Root, 1, 100))
	if w.told > told+1 { // it may have taken another one's room
		t.Error("it is told of a value")
	}
	agree("after a value")
	if err := s.Drop(t.Context(), space.Fingerprint); err != nil {
		t.Fatal(err)
	}
	if len(w.there) != 0 {
		t.Errorf("%d blocks are there after a drop", len(w.there))
	}
}

// TestWatchNoTokens: tokens are told to those only who ask for them.
func TestWatchNoTokens(t *testing.T) {
	s := newStore(t, Config{Limit: 128 << 10})
	w := &watched{there: map[kvcache.Key][]int32{}}
	s.Watch(w, 0, false)
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 5000)
	put(t, s, f)
	if ids, ok := w.there[f.Key]; !ok || ids != nil {
		t.Errorf("%v %v", ids, ok)
	}
}
