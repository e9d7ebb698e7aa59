package checkpoint

import (
	"context"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// seen is a store that remembers how many parts blocks had.
type seen struct {
	Store
	mu    sync.Mutex
	parts []int
}

// Put implements kvcache.Store.
func (s *seen) Put(ctx context.Context, f *kvcache.Frame) error {
	s.mu.Lock()
	s.parts = append(s.parts, len(f.Parts))
	s.mu.Unlock()
	return s.Store.Put(ctx, f)
}

// TestBlocksInParts: blocks are stored in the parts that the engine's format has, also
// when their number changes or there are none, and restored as a whole.
func TestBlocksInParts(t *testing.T) {
	var sees *seen
	calls := 0
	cut := func(data []byte, _ int) []kvcache.Part {
		calls++
		switch {
		case calls == 3:
			return nil
		case calls > 4:
			return []kvcache.Part{{Size: int64(len(data) - 1), Layers: 1}, {Layer: 1, Layers: 1}, {Layer: 2, Layers: 1, Size: 1}}
		}
		return []kvcache.Part{{Size: 5, Plane: kvcache.PlaneMeta}, {Size: int64(len(data) - 5), Layers: 1}}
	}
	dir := filepath.Join(t.TempDir(), "kv")
	one := newRig(t, dir, "m", Config{Block: 16, Parts: cut}, func(s Store) Store {
		sees = &seen{Store: s}
		return sees
	})
	ids := one.prompt(20)
	want, _ := one.generate(ids, params(90), 90)
	one.generate(ids, one.with(params(90), stream(1)), 90)
	one.flush()
	if n := len(sees.parts); n < 6 || !slices.Equal(sees.parts[:6], []int{2, 2, 1, 2, 3, 3}) {
		t.Fatalf("blocks have %v parts", sees.parts)
	}
	two := newRig(t, dir, "m", Config{Block: 16}, nil)
	given := slices.Concat(ids, want[:80])
	got, first := two.generate(given, two.with(resumed(params(90), 80), stream(2)), 90)
	if !slices.Equal(got, want[80:]) || first.Restored < 16*6 {
		t.Errorf("%d tokens were restored; %v, want %v", first.Restored, got, want[80:])
	}
}
