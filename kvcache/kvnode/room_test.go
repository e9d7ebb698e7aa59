//go:build unix

package kvnode

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
)

// TestWriter: room in the arena is filled and published through the socket, by the node that
// lent it or the next one; not in another arena.
func TestWriter(t *testing.T) {
	ctx, dir := context.Background(), filepath.Join(t.TempDir(), "node")
	cfg := arena.Config{Dir: dir, Limit: 1 << 20}
	start := func() *node {
		t.Helper()
		n, err := startNode(cfg)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	n := start()
	w, err := OpenWriter(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	space := kvcache.NewSpace("m", nil)
	frame := func(id int32) *kvcache.Frame {
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{id}}, []kvcache.Part{{Size: 9000}}, make([]byte, 9000))
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	one, two, three := frame(1), frame(2), frame(3)
	room := func(f *kvcache.Frame) *Room {
		t.Helper()
		r, err := w.Reserve(ctx, f.Ref, f.Total)
		if err != nil || r == nil {
			t.Fatalf("%v, %v", r, err)
		}
		copy(r.Bytes(), f.Bytes())
		return r
	}
	if err := room(one).Publish(ctx); err != nil {
		t.Fatal(err)
	}
	if r, err := w.Reserve(ctx, one.Ref, one.Total); err != nil || r != nil {
		t.Errorf("room for what is there: %v, %v", r, err)
	}
	placed, err := w.Place(ctx, one.Ref)
	if err != nil {
		t.Fatal(err)
	}
	path, id, err := w.Arena(ctx)
	if err != nil || path != filepath.Join(dir, "arena") || id != placed.Arena || placed.At == 0 {
		t.Errorf("the arena is %s %x, the block at %d in %x: %v", path, id, placed.At, placed.Arena, err)
	}
	placed.Release()
	r := room(two)
	n.end()
	if err := r.Publish(ctx); err == nil || Lost(err) {
		t.Errorf("while the node is away: %v", err)
	}
	n = start()
	if err := r.Publish(ctx); err != nil {
		t.Errorf("by the next node: %v", err)
	}
	if err := r.Publish(ctx); !errors.Is(err, kvcache.ErrClosed) {
		t.Errorf("a second time: %v", err)
	}
	r = room(three)
	n.end()
	cfg.Limit *= 2
	n = start()
	defer n.end()
	if err := r.Publish(ctx); !Lost(err) {
		t.Errorf("in another arena: %v", err)
	}
	r.Cancel()
	r.Cancel()
}
