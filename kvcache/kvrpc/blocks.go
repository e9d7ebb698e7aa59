//go:build unix

package kvrpc

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// Put implements kvcache.Store. The frame goes from where it lies to the socket, unless the
// peer has it already.
func (c *Client) Put(ctx context.Context, f *kvcache.Frame) error {
	if int64(len(f.Bytes())) != f.Total {
		return kvcache.ErrClosed // it was lent and given back
	}
	ctx, call, err := c.ops.Begin(ctx, remote.OpPut)
	if err != nil {
		return err
	}
	wanted := false
	err = do(ctx, c.blocks, func(l *link) (err error) {
		wanted, err = l.put(f)
		return err
	})
	switch {
	case err == nil && wanted:
		c.ops.Count.Puts.Add(1)
		c.ops.Count.PutBytes.Add(uint64(f.Total))
	case err == nil:
		c.ops.Count.Duplicates.Add(1)
	case errors.Is(err, kvcache.ErrFull):
		c.ops.Count.Full.Add(1)
	}
	if err = call.End(err); err != nil {
		return fmt.Errorf("put block %s: %w", f.Key, err)
	}
	return nil
}

// ahead is how much of a frame is sent before it is known whether it is wanted: less time
// than the answer takes on most networks.
const ahead = 2 << 20

// put sends a frame if it is wanted, and the beginning of it in any case to a peer that is
// known to take it.
func (l *link) put(f *kvcache.Frame) (wanted bool, err error) {
	b, what, n := f.Bytes(), opOffer, 0
	switch l.offers {
	case yes:
		n = min(ahead, len(b))
	case no:
		what = opPut
	}
	l.begin()
	l.out = kvwire.AppendU64(kvwire.AppendRef(l.out, f.Ref), uint64(f.Total))
	h, err := l.ask(what, b[:n])
	if l.offers == unknown && (err == nil || told(err)) {
		l.offers = yes
		if status(h.what) == statusFailed {
			l.offers = no
			return l.put(f)
		}
	}
	if err != nil {
		return false, err
	}
	if h.body != 1 || h.data != 0 || l.body[0] > 1 {
		return false, errNonsense
	}
	if l.body[0] == 0 || n == len(b) {
		return l.body[0] == 1, nil
	}
	if err := l.write(b[n:]); err != nil {
		return true, err
	}
	if h, err = l.answer(); err == nil && (h.body != 0 || h.data != 0) {
		err = errNonsense
	}
	return true, err
}

// Get implements kvcache.Store. The block's bytes are this process's own, and verified.
func (c *Client) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	ctx, call, err := c.ops.Begin(ctx, remote.OpGet)
	if err != nil {
		return nil, err
	}
	var b []byte
	h, err := c.read(ctx, ref, func(n int64) (_ []byte, err error) {
		if b != nil {
			c.memory.give(b) // of a connection that was left
		}
		b, err = c.memory.get(ctx, n)
		return b, err
	})
	if err = call.End(err); err != nil {
		if b != nil {
			c.memory.give(b)
		}
		return nil, fmt.Errorf("block %s: %w", ref.Key, err)
	}
	return kvcache.NewLent(kvcache.Proven(b, h), func() { c.memory.give(b) }, nil), nil
}

// Fetch reads a block into room of the caller's own, for which it is asked when the length
// of the frame is known, in bytes, and which may be asked for twice. All of the frame is
// verified when it returns. The errors are those of Get, and those of room.
func (c *Client) Fetch(ctx context.Context, ref kvcache.Ref, room func(size int64) ([]byte, error)) (kvcache.Header, error) {
	ctx, call, err := c.ops.Begin(ctx, remote.OpGet)
	if err != nil {
		return kvcache.Header{}, err
	}
	h, err := c.read(ctx, ref, room)
	if err = call.End(err); err != nil {
		return kvcache.Header{}, fmt.Errorf("block %s: %w", ref.Key, err)
	}
	return h, nil
}

// roomError is an error of who was asked for room: the peer has no part in it.
type roomError struct{ error }

// Unwrap lets errors.Is see what it is.
func (e roomError) Unwrap() error { return e.error }

// read reads a block, counts, and tells the peer if it was wrong.
func (c *Client) read(ctx context.Context, ref kvcache.Ref, room func(int64) ([]byte, error)) (h kvcache.Header, err error) {
	var wrong error
	err = do(ctx, c.blocks, func(l *link) (err error) {
		h, wrong, err = l.get(ref, room)
		return err
	})
	switch {
	case wrong != nil:
		c.refused(ctx, ref, wrong)
		return h, wrong
	case err == nil:
		c.ops.Count.Hits.Add(1)
		c.ops.Count.HitBytes.Add(uint64(h.Total))
	case errors.Is(err, kvcache.ErrNotFound):
		c.ops.Count.Misses.Add(1)
	}
	return h, err
}

// get reads a block. wrong is a refusal of what came, after which the connection is well.
func (l *link) get(ref kvcache.Ref, room func(int64) ([]byte, error)) (h kvcache.Header, wrong, err error) {
	l.begin()
	l.out = kvwire.AppendU64(kvwire.AppendU64(kvwire.AppendRef(l.out, ref), 0), 0)
	a, err := l.ask(opGet, nil)
	if err != nil {
		return h, nil, err
	}
	body := cursorOf(l.body)
	if total := body.U64(); !body.Whole() || total != a.data {
		return h, nil, errNonsense
	}
	b, err := room(int64(a.data))
	if err == nil && uint64(len(b)) != a.data {
		err = errors.New("the room is not as long as the frame")
	}
	if err != nil {
		return h, nil, roomError{err}
	}
	h, err = receive(l, b, ref, func() error { return nil })
	if _, ok := errors.AsType[*kvcache.Refusal](err); ok {
		return h, err, nil
	}
	return h, nil, err
}

// refused tells the peer of a block that came wrong, and counts it unless the peer has.
func (c *Client) refused(ctx context.Context, ref kvcache.Ref, wrong error) {
	// If it does not hear of it, the next reader finds it as well.
	if known, err := c.tellRefused(ctx, ref); err != nil || !known {
		c.ops.Refused(wrong)
	}
}
