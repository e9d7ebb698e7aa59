//go:build unix

package kvnode

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
)

// errShort says that an answer is not what its operation gives.
var errShort = errors.New("the KV node gives an answer that cannot be read")

// Put implements kvcache.Store. The frame goes through the socket into the arena.
func (c *Client) Put(ctx context.Context, f *kvcache.Frame) error {
	if int64(len(f.Bytes())) != f.Total {
		return kvcache.ErrClosed // it was lent and given back
	}
	dup := false
	err := c.ask(ctx, opPut, func(b []byte) []byte { return kvwire.AppendSize(kvwire.AppendRef(b, f.Ref), int(f.Total)) },
		func(cn *conn, body cursor) error {
			want := body.Take(1)
			if want == nil {
				return errShort
			}
			if dup = want[0] == 0; dup {
				return nil
			}
			return c.sendFrame(ctx, cn, f.Bytes())
		})
	switch {
	case err != nil:
		return fmt.Errorf("put block %s: %w", f.Key, err)
	case dup:
		c.count.Duplicates.Add(1)
	default:
		c.count.Puts.Add(1)
		c.count.PutBytes.Add(uint64(f.Total))
	}
	return nil
}

// sendFrame sends the frame that the node waits for, and reads its answer.
func (c *Client) sendFrame(ctx context.Context, cn *conn, frame []byte) error {
	stop := context.AfterFunc(ctx, func() { _ = cn.c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err := cn.c.Write(frame)
	if err == nil {
		_, err = cn.receive()
	}
	if err != nil && !told(err) {
		err = c.late(ctx, opPut, err)
	}
	return err
}

// Longest implements kvcache.Store. Where the node has far tiers and its arena does not
// have everything, it has until the end of ctx, less a little, to bring more.
func (c *Client) Longest(ctx context.Context, q kvcache.Query) (kvcache.Match, error) {
	return c.LongestWithin(ctx, 0, q)
}

// LongestWithin is Longest for one of several look-ups that share the time of ctx: far tiers
// have a time of so much to bring more, or, if it is 0, all of ctx. What the arena has is
// found in the time of ctx all the same.
func (c *Client) LongestWithin(ctx context.Context, most time.Duration, q kvcache.Query) (kvcache.Match, error) {
	c.count.Lookups.Add(1)
	m, far, err := c.longest(ctx, opLongest, 0, q)
	if err == nil && far && m.Tokens() < len(q.IDs) {
		if most > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, most)
			defer cancel()
		}
		if within := timeFor(ctx); within > 0 {
			// Without an answer the first one still holds.
			if more, _, err := c.longest(ctx, opFetch, within, q); err == nil {
				m = more
			}
		}
	}
	if err != nil {
		return m, fmt.Errorf("look up: %w", err)
	}
	c.count.LookupTokens.Add(uint64(m.Tokens() + m.Common))
	return m, nil
}

const (
	// fetchTime is what far tiers are given where the caller does not say.
	fetchTime = 2 * time.Second
	// fetchSpare is how long before its caller's end the node's answer is wanted: an
	// eighth of the time, and at most this. It covers a node that is not run at once.
	fetchSpare = 50 * time.Millisecond
)

// timeFor is how long the node may take for a fetch.
func timeFor(ctx context.Context) time.Duration {
	end, ok := ctx.Deadline()
	if !ok {
		return fetchTime
	}
	left := time.Until(end)
	return left - min(left/8, fetchSpare)
}

// longest asks for a match, in the arena or, in a time, in all tiers, and says whether
// there are any but the arena.
func (c *Client) longest(ctx context.Context, what op, within time.Duration, q kvcache.Query) (m kvcache.Match, far bool, err error) {
	if q.Resume {
		what = opResume
	}
	err = c.ask(ctx, what,
		func(b []byte) []byte {
			if what != opLongest {
				b = kvwire.AppendSize(b, int(within))
			}
			return kvwire.AppendIDs(kvwire.AppendSize(append(kvwire.AppendSpace(b, q.Space), q.From[:]...), q.First), q.IDs)
		},
		func(cn *conn, body cursor) error {
			far = cn.hello.Far
			if m = body.match(q.Space); body.Bad {
				m = kvcache.Match{}
				return errShort
			}
			return nil
		})
	return m, far, err
}

// Get implements kvcache.Store. The frame's bytes are the arena's own.
func (c *Client) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	l, _, err := c.get(ctx, ref)
	return l, err
}

// get is Get that says where the block lies.
func (c *Client) get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, arena.Loan, error) {
	slot, ticket, err := c.reader.Ask()
	if err != nil {
		return nil, arena.Loan{}, c.counted(err)
	}
	name, err := hex.DecodeString(c.reader.Name())
	if err != nil {
		return nil, arena.Loan{}, err // of this module's own making
	}
	loan := arena.Loan{Slot: slot}
	err = c.ask(ctx, opGet,
		func(b []byte) []byte {
			return kvwire.AppendSize(kvwire.AppendU32(append(kvwire.AppendRef(b, ref), name...), slot), int(ticket))
		},
		func(cn *conn, body cursor) error {
			loan.Data = cn.hello.Data
			copy(loan.ID[:], body.Take(len(loan.ID)))
			if loan.At, loan.Size = int64(body.Size()), int64(body.Size()); body.Bad {
				return errShort
			}
			return nil
		})
	if err != nil {
		c.reader.Abandon(slot)
		if errors.Is(err, kvcache.ErrNotFound) {
			c.count.Misses.Add(1)
		}
		return nil, loan, fmt.Errorf("block %s: %w", ref.Key, err)
	}
	l, err := c.look(loan, ref)
	return l, loan, err
}

// look looks at a block that the node has lent.
func (c *Client) look(loan arena.Loan, ref kvcache.Ref) (*kvcache.Lent, error) {
	l, err := c.reader.Take(loan, ref, func(err error) { c.refused(ref, err) })
	if err != nil {
		return nil, c.counted(err)
	}
	c.count.Hits.Add(1)
	c.count.HitBytes.Add(uint64(loan.Size))
	return l, nil
}

// Fill has the node's arena entered into this process's page tables, now and whenever the node
// comes back with another one, so that no read pays for that; see arena.Reader.FillLater. It
// returns when it is done, with an error where the node is away: then it is done in the
// background once something is read.
func (c *Client) Fill(ctx context.Context) error {
	c.reader.FillLater()
	var l arena.Loan
	err := c.ask(ctx, opHello, nil, func(cn *conn, _ cursor) error {
		l.Data, l.ID = cn.hello.Data, cn.hello.ID
		return nil
	})
	if err != nil {
		return fmt.Errorf("fill the mapping of the arena: %w", err)
	}
	return c.reader.Fill(ctx, l)
}

// refuseTime bounds how long a reader waits for the node to hear of a wrong block.
const refuseTime = time.Second

// refused tells the node of a block whose bytes are wrong: it looks itself, and counts.
func (c *Client) refused(ref kvcache.Ref, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), refuseTime)
	defer cancel()
	// If it does not hear of it, the next reader finds it as well.
	if c.ask(ctx, opRefused, func(b []byte) []byte { return kvwire.AppendRef(b, ref) }, nil) != nil {
		if r, ok := errors.AsType[*kvcache.Refusal](err); ok {
			c.count.Refused[r.Reason].Add(1)
		}
	}
}

// Drop implements kvcache.Store.
func (c *Client) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	return c.ask(ctx, opDrop, func(b []byte) []byte { return append(b, f[:]...) }, nil)
}

// Label implements kvcache.Labeled.
func (c *Client) Label(ctx context.Context, f kvcache.Fingerprint, l kvcache.Label) error {
	text, err := json.Marshal(l)
	if err != nil {
		return fmt.Errorf("label model %s: %w", f, err)
	}
	return c.ask(ctx, opLabel, func(b []byte) []byte { return append(append(b, f[:]...), text...) }, nil)
}

// Models lists what the node has.
func (c *Client) Models(ctx context.Context) (models []arena.Model, err error) {
	err = c.ask(ctx, opModels, nil, func(_ *conn, body cursor) error { return json.Unmarshal(body.Rest(), &models) })
	return models, err
}

// MakeRoom has the node drop old tails, and evict until seven eighths of limit bytes are
// used at most.
func (c *Client) MakeRoom(ctx context.Context, limit int64) error {
	return c.ask(ctx, opRoom, func(b []byte) []byte { return kvwire.AppendSize(b, int(limit)) }, nil)
}

// NodeStats are the counters of the node, of all its clients together.
func (c *Client) NodeStats(ctx context.Context) (st kvcache.Stats, err error) {
	err = c.ask(ctx, opStats, nil, func(_ *conn, body cursor) error { return json.Unmarshal(body.Rest(), &st) })
	return st, err
}

// counted counts an error by what it is, and returns it.
func (c *Client) counted(err error) error {
	_, refused := errors.AsType[*kvcache.Refusal](err) // the node has counted it
	switch {
	case err == nil, refused, errors.Is(err, kvcache.ErrNotFound), errors.Is(err, kvcache.ErrGap), errors.Is(err, kvcache.ErrClosed),
		errors.Is(err, context.Canceled):
	case errors.Is(err, kvcache.ErrStale):
		c.count.Stale.Add(1)
	case errors.Is(err, kvcache.ErrFull):
		c.count.Full.Add(1)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, errDown):
		c.count.Late.Add(1)
	default:
		c.count.Failed.Add(1)
	}
	return err
}

// statsTime bounds how long the node is asked for its counters.
const statsTime = time.Second

// Stats implements kvcache.Counted. What the node alone knows (room, evictions, refusals)
// is of all its clients, since it started; while it is away it is what it said last.
func (c *Client) Stats() kvcache.Stats {
	ctx, cancel := context.WithTimeout(context.Background(), statsTime)
	defer cancel()
	node, err := c.NodeStats(ctx)
	c.mu.Lock()
	if err == nil {
		c.last = node
	}
	node = c.last
	c.mu.Unlock()
	st := c.count.Stats()
	st.Evictions, st.EvictedBytes, st.Expired, st.Swept = node.Evictions, node.EvictedBytes, node.Expired, node.Swept
	st.Used, st.Limit = node.Used, node.Limit
	for i := range st.Refused {
		st.Refused[i] += node.Refused[i]
	}
	return st
}
