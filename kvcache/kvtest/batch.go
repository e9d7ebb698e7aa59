package kvtest

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// testBatch: the blocks of a chain are lent in order, as far as they are there; a caller that
// ends early, over and over, leaves nothing behind that would be missed later.
func testBatch(t *testing.T, h Harness) {
	ctx := context.Background()
	s := h.open(t, newDir(t), plenty)
	space := kvcache.NewSpace("model", nil)
	frames := chain(space, tokens(3, 16*30), 16, 5000)
	put(t, s, frames...)
	refs := make([]kvcache.Ref, len(frames))
	for i, f := range frames {
		refs[i] = f.Ref
	}
	n := 0
	for l, err := range kvcache.GetEach(ctx, s, refs) {
		if err == nil {
			err = l.Verify()
		}
		if err != nil || !bytes.Equal(l.Bytes(), frames[n].Bytes()) {
			t.Fatalf("block %d: %v, or other bytes", n, err)
		}
		l.Release()
		n++
	}
	if n != len(refs) {
		t.Errorf("%d blocks of %d", n, len(refs))
	}
	for l, err := range kvcache.GetEach(ctx, s, nil) {
		t.Errorf("of no blocks: %v, %v", l, err)
	}
	const gone = 7
	refs[gone] = block(space, space.Root, 0, tokens(4, 16), 100).Ref
	n = 0
	var last error
	for l, err := range kvcache.GetEach(ctx, s, refs) {
		if last = err; err == nil {
			l.Release()
			n++
		}
	}
	if n != gone || !errors.Is(last, kvcache.ErrNotFound) {
		t.Errorf("%d blocks before one that is missing, want %d: %v", n, gone, last)
	}
	for range 20 {
		for l, err := range kvcache.GetEach(ctx, s, refs) {
			if err != nil {
				t.Fatal(err)
			}
			l.Release()
			break
		}
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	for l, err := range kvcache.GetEach(ended, s, refs) {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("after the end of the context: %v", err)
		}
		if err == nil {
			l.Release()
		}
	}
}
