//go:build unix

package kvnode

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
	"github.com/kvmesh/kvmesh/kvcache/tailrec"
)

// tail is an open tail of a client. The node knows it by a number that outlives the node,
// so a tail goes on after a restart where it was.
type tail struct {
	c    *Client
	spec kvcache.TailSpec
	no   uint64
	next int
	// lost says that a rotation had no answer: whether the tail of this number is still
	// there is not known.
	lost bool
	// stale says that a higher attempt has taken over, which is final.
	stale bool
	done  bool
}

// OpenTail implements kvcache.Tails.
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

// open opens a tail where the spec says.
func (t *tail) open(ctx context.Context) error {
	err := t.c.ask(ctx, opOpen, func(b []byte) []byte { return appendSpec(b, t.spec) }, t.numbered)
	if err == nil {
		t.next, t.lost = t.spec.First, false
	}
	return err
}

// numbered takes the tail's number from an answer.
func (t *tail) numbered(_ *conn, body cursor) error {
	no := body.Size()
	if body.Bad {
		return errShort
	}
	t.no = uint64(no)
	return nil
}

// Append implements kvcache.TailWriter.
func (t *tail) Append(r kvcache.Range) error {
	switch {
	case t.done:
		return kvcache.ErrClosed
	case t.stale:
		return t.c.counted(kvcache.ErrStale)
	case t.lost || r.First != t.next:
		return kvcache.ErrGap
	}
	if err := tailrec.Check(r); err != nil {
		return err
	}
	for {
		cn, used, err := t.c.take(context.Background())
		if err != nil {
			return t.c.counted(err)
		}
		cn.begin()
		cn.out = kvwire.AppendSize(kvwire.AppendSize(cn.out, int(t.no)), r.First)
		cn.out = kvwire.AppendIDs(append(cn.out, byte(r.Codec)), r.IDs)
		body, err := t.c.talk(context.Background(), cn, opAppend, r.Data)
		unknown := len(body) > 0
		t.c.give(cn, err)
		if err == nil {
			if unknown {
				t.name()
			}
			t.next += len(r.IDs)
			t.c.count.Appends.Add(1)
			t.c.count.AppendBytes.Add(uint64(len(r.Data)))
			return nil
		}
		if !used || !left(err) {
			return t.ended(err)
		}
	}
}

// name tells a node that has restarted what the tail is. If it does not hear it, the next
// append asks again.
func (t *tail) name() {
	_ = t.c.ask(context.Background(), opName, func(b []byte) []byte { return appendSpec(kvwire.AppendSize(b, int(t.no)), t.spec) }, nil)
}

// ended counts an error of the tail and returns it as callers compare it.
func (t *tail) ended(err error) error {
	t.stale = t.stale || errors.Is(err, kvcache.ErrStale)
	return t.c.counted(plain(err))
}

// plain is the error that callers compare, where it is one of those.
func plain(err error) error {
	for _, known := range known() {
		if errors.Is(err, known) {
			return known
		}
	}
	return err
}

// Rotate implements kvcache.TailWriter.
func (t *tail) Rotate(parent kvcache.Key, first int) error {
	switch {
	case t.done:
		return kvcache.ErrClosed
	case t.stale:
		return t.c.counted(kvcache.ErrStale)
	case first < 0:
		return fmt.Errorf("rotate tail to position %d", first)
	}
	ctx, before := context.Background(), t.spec
	t.spec.Parent, t.spec.First = parent, first
	if !t.lost {
		_, err := t.c.askOnce(ctx, opRotate, func(b []byte) []byte {
			b = kvwire.AppendSize(kvwire.AppendSize(b, int(t.no)), t.next)
			return kvwire.AppendSize(append(b, parent[:]...), first)
		}, t.numbered)
		if err == nil {
			t.next = first
			return nil
		}
		if told(err) {
			t.spec = before
			return t.ended(err)
		}
		// The node that has gone may have done it, or not. A tail of the same attempt is
		// right either way.
		t.lost = true
	}
	return plain(t.open(ctx))
}

// Close implements kvcache.TailWriter.
func (t *tail) Close() error {
	t.done = true
	return nil
}

// ReadTail implements kvcache.Tails. Where other hosts have copies of tails, they are asked
// too, for which there is half of the time of ctx.
func (c *Client) ReadTail(ctx context.Context, s kvcache.Space, stream string, choice int) ([]kvcache.Tail, error) {
	spec := kvcache.TailSpec{Space: s, Stream: stream, Choice: choice}
	list, far, err := c.readTail(ctx, opRead, 0, spec)
	if err == nil && far {
		if within := timeFor(ctx) / 2; within > 0 {
			// Without an answer the first one still holds.
			if more, _, err := c.readTail(ctx, opTails, within, spec); err == nil {
				list = more
			}
		}
	}
	return list, err
}

// readTail reads tails here, or, in a time, on all hosts, and says whether others have some.
func (c *Client) readTail(ctx context.Context, what op, within time.Duration, spec kvcache.TailSpec) (list []kvcache.Tail, far bool, err error) {
	err = c.ask(ctx, what,
		func(b []byte) []byte {
			if what == opTails {
				b = kvwire.AppendSize(b, int(within))
			}
			return append(kvwire.AppendU32(kvwire.AppendSpace(b, spec.Space), spec.Choice), spec.Stream...)
		},
		func(cn *conn, body cursor) error {
			far = cn.hello.Tails
			// The connection's memory is used again.
			own := cursorOf(slices.Clone(body.Rest()))
			if list = own.tails(spec.Space, spec.Stream, spec.Choice); own.Bad {
				list = nil
				return errShort
			}
			return nil
		})
	return list, far, err
}

// DropTail implements kvcache.Tails.
func (c *Client) DropTail(ctx context.Context, s kvcache.Space, stream string) error {
	return c.ask(ctx, opForget, func(b []byte) []byte { return append(kvwire.AppendSpace(b, s), stream...) }, nil)
}
