package stack

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// EraseTenant implements kvcache.Eraser.
func (m *memStore) EraseTenant(_ context.Context, e kvcache.Erasure) (n int, err error) {
	if err := m.enter(); err != nil {
		return 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, f := range m.blocks {
		if e.Has(f.Space) {
			delete(m.blocks, key)
			n++
		}
	}
	e.Looked(n)
	return n, nil
}

// TestPart: what is forgotten in a part of the tiers stays in the others, and what is on its
// way to those is not called back, for nobody has asked.
func TestPart(t *testing.T) {
	for _, what := range []string{"drop", "erase"} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, Config{})
			frames, _ := chainOf(t, 1, 6)
			fill(t, r, frames...)
			<-time.After(time.Second)
			part := r.Part("a", "nobody")
			var err error
			if what == "drop" {
				r.b.set(func(m *memStore) { m.late = time.Second })
				more, _ := chainOf(t, 2, 1)
				fill(t, r, more...)
				synctest.Wait()
				err = part.Drop(t.Context(), testSpace().Fingerprint)
				<-time.After(5 * time.Second)
			} else {
				e := kvcache.ErasureOf("t", func(int) {})
				e.Roots = func(kvcache.Fingerprint) []kvcache.Key { return []kvcache.Key{testSpace().Root} }
				_, err = part.EraseTenant(t.Context(), e)
			}
			if err != nil || r.near.count() != 0 || r.a.count() != 0 || r.b.count() < 6 {
				t.Errorf("%s: %d, %d and %d blocks, %v", what, r.near.count(), r.a.count(), r.b.count(), err)
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			if err := part.Drop(t.Context(), testSpace().Fingerprint); !errors.Is(err, kvcache.ErrClosed) {
				t.Errorf("closed: %v", err)
			}
		})
	}
}
