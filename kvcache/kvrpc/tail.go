//go:build unix

package kvrpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvrpc/kvrpcpb"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
	"github.com/kvmesh/kvmesh/kvcache/tailrec"
)

// tail is an open tail of a client. The peer knows it by a number; where that outlives the
// peer's process, the tail goes on after a restart where it was.
type tail struct {
	c    *Client
	spec kvcache.TailSpec
	no   uint64
	next int
	// lost says that the peer has no tail of this number, or may have none.
	lost bool
	// stale says that a higher attempt has taken over, which is final.
	stale bool
	done  bool
}

// OpenTail implements kvcache.Tails. Appends have Config.Timeout each.
func (c *Client) OpenTail(ctx context.Context, spec kvcache.TailSpec) (kvcache.TailWriter, error) {
	if spec.Stream == "" || spec.Choice < 0 || spec.Choice > math.MaxInt32 || spec.Attempt < 0 || spec.First < 0 {
		return nil, fmt.Errorf("open tail: bad choice %d, attempt %d or position %d, or no stream", spec.Choice, spec.Attempt, spec.First)
	}
	t := &tail{c: c, spec: spec}
	if err := t.open(ctx); err != nil {
		return nil, fmt.Errorf("open tail: %w", err)
	}
	return t, nil
}

// The names of calls about tails.
const (
	opOpenTail   = "open"
	opRotateTail = "rotate"
	opCloseTail  = "close"
	opReadTails  = "tails"
	opDropTail   = "forget"
)

// open opens a tail where the spec says.
func (t *tail) open(ctx context.Context) error {
	s := &t.spec
	return t.c.call(ctx, opOpenTail, func(ctx context.Context) error {
		a, err := t.c.control.OpenTail(ctx, &kvrpcpb.OpenTailRequest{
			Space: spaceTo(s.Space), Stream: []byte(s.Stream), Choice: uint32(s.Choice), Attempt: uint64(s.Attempt), Parent: s.Parent[:], First: uint64(s.First),
		})
		if err == nil {
			t.no, t.next, t.lost = a.Tail, s.First, false
		}
		return err
	})
}

// Append implements kvcache.TailWriter.
func (t *tail) Append(r kvcache.Range) error {
	switch {
	case t.done:
		return kvcache.ErrClosed
	case t.stale:
		return t.counted(kvcache.ErrStale)
	case t.lost || r.First != t.next:
		return kvcache.ErrGap
	}
	if err := tailrec.Check(r); err != nil {
		return err
	}
	begin := time.Now()
	if err := t.c.ops.Admit(begin); err != nil {
		return err
	}
	err := t.append(r, begin.Add(t.c.cfg.Timeout))
	t.c.ops.Done(err, begin)
	if err != nil {
		return t.counted(err)
	}
	t.next += len(r.IDs)
	t.c.ops.Count.Appends.Add(1)
	t.c.ops.Count.AppendBytes.Add(uint64(len(r.Data)))
	return nil
}

// append sends a range until end. It allocates nothing where all is well.
func (t *tail) append(r kvcache.Range, end time.Time) error {
	p := t.c.appends
	for {
		l, used, err := p.take(context.Background(), end)
		if err != nil {
			return err
		}
		l.begin()
		l.out = kvwire.AppendU64(kvwire.AppendU64(l.out, t.no), uint64(r.First))
		l.out = append(kvwire.AppendU64(l.out, kvcache.Sum(r.Data)), byte(r.Codec))
		l.out = kvwire.AppendIDs(l.out, r.IDs)
		if err = l.c.SetDeadline(end); err == nil {
			var h head
			if h, err = l.ask(opAppend, r.Data); err == nil && (h.body != 0 || h.data != 0) {
				err = errNonsense
			}
		}
		p.give(l, err == nil || told(err))
		if err == nil || !used || !left(err) {
			return ended(context.Background(), err)
		}
	}
}

// counted counts an error of the tail and returns it as callers compare it.
func (t *tail) counted(err error) error {
	switch {
	case errors.Is(err, errUnknown):
		t.lost = true
		return kvcache.ErrGap
	case errors.Is(err, kvcache.ErrGap):
		return kvcache.ErrGap
	case errors.Is(err, kvcache.ErrStale):
		t.stale = true
		t.c.ops.Count.Stale.Add(1)
		return kvcache.ErrStale
	case errors.Is(err, kvcache.ErrFull):
		t.c.ops.Count.Full.Add(1)
		return kvcache.ErrFull
	}
	return fmt.Errorf("append to tail: %w", err)
}

// Rotate implements kvcache.TailWriter.
func (t *tail) Rotate(parent kvcache.Key, first int) error {
	switch {
	case t.done:
		return kvcache.ErrClosed
	case t.stale:
		return t.counted(kvcache.ErrStale)
	case first < 0:
		return fmt.Errorf("rotate tail to position %d", first)
	}
	ctx := context.Background()
	if !t.lost {
		err := t.rotate(ctx, parent, first)
		if err == nil {
			t.spec.Parent, t.spec.First, t.next = parent, first, first
			return nil
		}
		t.stale = errors.Is(err, kvcache.ErrStale)
		if t.stale || errors.Is(err, kvcache.ErrFull) {
			return fmt.Errorf("rotate tail: %w", err)
		}
		// A peer that has gone may have done it, or not.
		t.lost = true
		if !errors.Is(err, errUnknown) && !errors.Is(err, kvcache.ErrGap) {
			return fmt.Errorf("rotate tail: %w", err)
		}
	}
	// A new tail of the same attempt is right either way.
	t.spec.Parent, t.spec.First = parent, first
	err := t.open(ctx)
	t.stale = errors.Is(err, kvcache.ErrStale)
	return err
}

// rotate has the peer begin the tail anew.
func (t *tail) rotate(ctx context.Context, parent kvcache.Key, first int) error {
	return t.c.call(ctx, opRotateTail, func(ctx context.Context) error {
		a, err := t.c.control.RotateTail(ctx, &kvrpcpb.RotateTailRequest{Tail: t.no, Next: uint64(t.next), Parent: parent[:], First: uint64(first)})
		if err == nil {
			t.no = a.Tail
		}
		return err
	})
}

// Close implements kvcache.TailWriter. A peer that does not hear of it forgets the writer
// by itself.
func (t *tail) Close() error {
	if t.done {
		return nil
	}
	t.done = true
	if !t.lost && !t.stale {
		_ = t.c.call(context.Background(), opCloseTail, func(ctx context.Context) error {
			_, err := t.c.control.CloseTail(ctx, &kvrpcpb.CloseTailRequest{Tail: t.no})
			return err
		})
	}
	return nil
}

// ReadTail implements kvcache.Tails.
func (c *Client) ReadTail(ctx context.Context, s kvcache.Space, stream string, choice int) (list []kvcache.Tail, err error) {
	if choice < 0 || choice > math.MaxInt32 || len(stream) > mostBody/2 {
		return nil, nil
	}
	ctx, call, err := c.ops.Begin(ctx, opReadTails)
	if err != nil {
		return nil, err
	}
	var wrong error
	err = do(ctx, c.blocks, func(l *link) (err error) {
		l.begin()
		l.out = append(kvwire.AppendU32(kvwire.AppendSpace(l.out, s), choice), stream...)
		list, wrong, err = c.readTails(ctx, l, kvcache.TailSpec{Space: s, Stream: stream, Choice: choice})
		return err
	})
	if wrong != nil {
		c.ops.Refused(wrong)
	}
	if err = call.End(err); err != nil {
		return nil, fmt.Errorf("read tail: %w", err)
	}
	return list, nil
}

// readTails sends the request that was begun and reads the tails. wrong is what was refused.
func (c *Client) readTails(ctx context.Context, l *link, spec kvcache.TailSpec) (list []kvcache.Tail, wrong, err error) {
	h, err := l.ask(opTails, nil)
	if err != nil {
		return nil, nil, err
	}
	data, err := c.memory.get(ctx, int64(h.data))
	if err != nil {
		return nil, nil, roomError{err}
	}
	defer c.memory.give(data)
	if _, err := io.ReadFull(l.r, data); err != nil {
		return nil, nil, err
	}
	body := cursorOf(l.body)
	list, wrong = body.tails(spec, slices.Clone(data)) // the caller's own, for good
	if body.Bad {
		return nil, nil, errNonsense
	}
	return list, wrong, nil
}

// DropTail implements kvcache.Tails.
func (c *Client) DropTail(ctx context.Context, s kvcache.Space, stream string) error {
	return c.call(ctx, opDropTail, func(ctx context.Context) error {
		_, err := c.control.DropTail(ctx, &kvrpcpb.DropTailRequest{Space: spaceTo(s), Stream: []byte(stream)})
		return err
	})
}
