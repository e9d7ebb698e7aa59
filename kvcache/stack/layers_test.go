package stack

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// rangedMem is a store that can read layers alone.
type rangedMem struct {
	*memStore
	asked int
}

// GetLayers implements kvcache.Ranged.
func (m *rangedMem) GetLayers(ctx context.Context, ref kvcache.Ref, l kvcache.Layers) (*kvcache.Lent, error) {
	m.asked++
	return m.Get(ctx, ref)
}

// TestLayers: layers that are not near come from the first tier that reads them alone and has them,
// and the block stays there; where no tier can, it is brought near.
func TestLayers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		frames, _ := chainOf(t, 1, 3)
		far := &rangedMem{memStore: r.b}
		r.tiers[1].Store = far
		layers := func(i int) {
			t.Helper()
			l, err := r.GetLayers(t.Context(), frames[i].Ref, kvcache.Layers{To: 1})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := l.Part(0); err != nil {
				t.Error(err)
			}
			l.Release()
		}
		fill(t, r.near, frames[0])
		fill(t, r.b, frames[1])
		fill(t, r.a, frames[2])
		if layers(0); far.asked != 0 {
			t.Error("a tier is asked for what is near")
		}
		if layers(1); far.asked != 1 || r.near.blocks[frames[1].Key] != nil {
			t.Errorf("asked %d times, near %v", far.asked, r.near.blocks[frames[1].Key] != nil)
		}
		if layers(2); r.near.blocks[frames[2].Key] == nil {
			t.Error("a block of a tier that has only whole ones is not near")
		}
		r.b.stuck = make(chan struct{})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		begin := time.Now()
		_, err := r.GetLayers(ctx, frames[1].Ref, kvcache.Layers{To: 1})
		if took := time.Since(begin); !errors.Is(err, kvcache.ErrNotFound) || took != 100*time.Millisecond || r.tiers[1].left.Load() != 1 {
			t.Errorf("%v after %v, %d calls left", err, took, r.tiers[1].left.Load())
		}
		close(r.b.stuck)
		synctest.Wait()
		if r.tiers[1].left.Load() != 0 || len(r.tiers[1].slots) != 0 {
			t.Errorf("%d calls left, %d slots taken when all have ended", r.tiers[1].left.Load(), len(r.tiers[1].slots))
		}
	})
}
