//go:build unix

package arena

import (
	"errors"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// TestCommitProven fills reserved rooms: with the block that they were reserved for, with
// another block, and with one of another length. Only the first is ever found, and the room
// of the others is free again.
func TestCommitProven(t *testing.T) {
	s := newStore(t, Config{Limit: 1 << 20})
	space := kvcache.NewSpace("m", nil)
	right, other, short := sealed(t, space, space.Root, 1, 600_000), sealed(t, space, space.Root, 2, 600_000), sealed(t, space, space.Root, 3, 1000)
	for _, c := range []struct {
		of, holds *kvcache.Frame
		size      int64
	}{{other, right, right.Total}, {short, short, right.Total}, {right, right, right.Total}} {
		r, err := s.Reserve(t.Context(), c.of.Ref, c.size)
		if err != nil || r == nil {
			t.Fatalf("room for block %d: %v", c.of.IDs[0], err)
		}
		copy(r.Bytes(), c.holds.Bytes())
		put, err := r.CommitProven(c.holds.Header)
		_, refused := errors.AsType[*kvcache.Refusal](err)
		if good := c.of == right; refused == good || good && put.Ref != right.Ref {
			t.Errorf("block %d in room for block %d: %+v, %v", c.holds.IDs[0], c.of.IDs[0], put, err)
		}
		r.Cancel()
		if has(t, s, c.of) != (c.of == right) {
			t.Errorf("block %d is there: %v", c.of.IDs[0], c.of != right)
		}
	}
}
