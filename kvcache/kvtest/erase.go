package kvtest

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// testErase erases one of three tenants of two models: nothing of it is left, and nothing
// else is missing.
func testErase(t *testing.T, h Harness) {
	dir := newDir(t)
	s := h.open(t, dir, plenty)
	e, ok := s.(kvcache.Eraser)
	if !ok {
		t.Skip("the store cannot erase a tenant")
	}
	ids, spaces := tokens(1, 64*3), []kvcache.Space{}
	for _, model := range []string{"model", "model 2"} {
		for _, tenant := range []string{"", "a", "b"} {
			spaces = append(spaces, kvcache.NewSpace(model, []byte(tenant)))
		}
	}
	for _, space := range spaces {
		put(t, s, chain(space, ids, 64, 200)...)
		openTailOf(t, s, space)
	}
	for round, want := range []int{6, 0} {
		var looked atomic.Int64
		n, err := e.EraseTenant(context.Background(), kvcache.ErasureOf("a", func(n int) { looked.Add(int64(n)) }))
		// A stack counts the blocks of each tier.
		if err != nil || n%6 != 0 || (n > 0) != (want > 0) || want > 0 && looked.Load() < int64(want) {
			t.Fatalf("round %d: erased %d of %d blocks, %v", round, n, looked.Load(), err)
		}
		checkErased(t, s, spaces, ids)
	}
	if h.Shared || h.Lasting {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		checkErased(t, h.open(t, dir, plenty), spaces, ids)
	}
	s = h.fresh(t)
	s.Close()
	_, err := s.(kvcache.Eraser).EraseTenant(context.Background(), kvcache.ErasureOf("a", func(int) {}))
	if !errors.Is(err, kvcache.ErrClosed) {
		t.Errorf("a closed store: %v", err)
	}
}

// openTailOf leaves a tail with a range in a space, where the store has tails.
func openTailOf(t *testing.T, s kvcache.Store, space kvcache.Space) {
	t.Helper()
	ts, ok := s.(kvcache.Tails)
	if !ok {
		return
	}
	w, err := ts.OpenTail(context.Background(), kvcache.TailSpec{Space: space, Stream: "s", Parent: space.Root})
	if err == nil {
		err = errors.Join(w.Append(kvcache.Range{IDs: []int32{1}, Data: []byte("kv")}), w.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// checkErased checks that the second of each three spaces is empty and the others are not.
func checkErased(t *testing.T, s kvcache.Store, spaces []kvcache.Space, ids []int32) {
	t.Helper()
	for i, space := range spaces {
		want := 3
		if i%3 == 1 {
			want = 0
		}
		if m := longest(t, s, space, ids); len(m.Blocks) != want || m.Common != 0 {
			t.Errorf("space %d: %d blocks and %d tokens, want %d", i, len(m.Blocks), m.Common, want)
		}
		for _, f := range chain(space, ids, 64, 200) {
			if has(t, s, f.Ref) != (want > 0) {
				t.Errorf("space %d: a block is there, or is not", i)
			}
		}
		ts, ok := s.(kvcache.Tails)
		if !ok {
			continue
		}
		tails, err := ts.ReadTail(context.Background(), space, "s", 0)
		if err != nil || (len(tails) > 0) != (want > 0) {
			t.Errorf("space %d: %d tails, %v", i, len(tails), err)
		}
	}
}
