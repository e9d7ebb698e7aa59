//go:build unix

package kvrpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// GetLayers implements kvcache.Ranged: only the bytes of the layers, and the header, come from the peer.
// They are verified by whoever reads them.
func (c *Client) GetLayers(ctx context.Context, ref kvcache.Ref, l kvcache.Layers) (*kvcache.Lent, error) {
	outer := ctx
	ctx, call, err := c.ops.Begin(ctx, remote.OpGet)
	if err != nil {
		return nil, err
	}
	var room []byte
	var bytes atomic.Uint64
	f, err := remote.ReadLayers(ctx, remote.LayerRead{
		Ref: ref, Layers: l,
		Room: func(ctx context.Context, n int64) (_ []byte, err error) {
			room, err = c.memory.get(ctx, n)
			return room, err
		},
		Read: func(ctx context.Context, b []byte, from int64) (total int64, err error) {
			err = do(ctx, c.blocks, func(l *link) (err error) {
				total, err = l.part(ref, b, from)
				return err
			})
			bytes.Add(uint64(len(b)))
			return total, err
		},
	})
	free := func() {
		if room != nil {
			c.memory.give(room)
		}
	}
	switch {
	case err == nil:
		c.ops.Count.Hits.Add(1)
		c.ops.Count.HitBytes.Add(bytes.Load())
	case errors.Is(err, kvcache.ErrNotFound):
		c.ops.Count.Misses.Add(1)
	}
	if _, refused := errors.AsType[*kvcache.Refusal](err); refused {
		c.refused(ctx, ref, err)
	}
	if err = call.End(err); err != nil {
		free()
		return nil, fmt.Errorf("block %s: %w", ref.Key, err)
	}
	// Who finds out that a part is wrong has no more time for it than for the part.
	return kvcache.NewLent(f, free, func(err error) { c.refused(outer, ref, err) }), nil
}

// part reads the bytes of a block's frame from a place on into b, as far as it goes, and says how
// long the frame is.
func (l *link) part(ref kvcache.Ref, b []byte, from int64) (int64, error) {
	l.begin()
	l.out = kvwire.AppendU64(kvwire.AppendU64(kvwire.AppendRef(l.out, ref), uint64(from)), uint64(len(b)))
	a, err := l.ask(opGet, nil)
	if err != nil {
		return 0, err
	}
	body := cursorOf(l.body)
	total := body.U64()
	if !body.Whole() || total > kvcache.MaxSize || a.data != min(uint64(len(b)), total-min(total, uint64(from))) {
		return 0, errNonsense
	}
	if _, err := io.ReadFull(l.r, b[:a.data]); err != nil {
		return 0, err
	}
	if from > 0 && a.data < uint64(len(b)) {
		return 0, toldError{fmt.Errorf("the frame is a shorter one now: %w", kvcache.ErrNotFound)}
	}
	return int64(total), nil
}

var _ kvcache.Ranged = (*Client)(nil)
