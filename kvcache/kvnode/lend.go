//go:build unix

package kvnode

import (
	"context"
	"encoding/hex"
	"fmt"
	"iter"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
)

// firstLent and mostLent are how many blocks a client asks for at once, in the beginning, so
// that it soon has some, and later.
const firstLent, mostLent = 4, 64

var _ kvcache.Batched = (*Client)(nil)

// GetEach implements kvcache.Batched. Asking the node can take as long as verifying a block of
// a MiB, most of it until a processor is awake, so several are asked for at once, while the
// caller looks at those before.
func (c *Client) GetEach(ctx context.Context, refs []kvcache.Ref) iter.Seq2[*kvcache.Lent, error] {
	return func(yield func(*kvcache.Lent, error) bool) {
		n := min(firstLent, len(refs))
		for next := c.ahead(ctx, refs[:n]); n > 0; {
			some := refs[:n]
			got := <-next
			refs, n = refs[n:], min(2*n, mostLent, len(refs)-n)
			if got.err == nil && n > 0 {
				next = c.ahead(ctx, refs[:n])
			}
			if !c.hand(ctx, some, got, yield) {
				if got.err == nil && n > 0 {
					go func() { c.abandon((<-next).loans) }()
				}
				return
			}
		}
	}
}

// borrowed are the places of the first of some blocks, or why there are none.
type borrowed struct {
	loans []arena.Loan
	err   error
}

// ahead asks for blocks, and gives its answer when it has one.
func (c *Client) ahead(ctx context.Context, refs []kvcache.Ref) <-chan borrowed {
	out := make(chan borrowed, 1)
	go func() {
		loans, err := c.borrow(ctx, refs)
		out <- borrowed{loans, err}
	}()
	return out
}

// hand hands out blocks, and says whether it goes on behind them. What the node did not lend
// with the others is asked for alone, which says why.
func (c *Client) hand(ctx context.Context, refs []kvcache.Ref, got borrowed, yield func(*kvcache.Lent, error) bool) bool {
	if got.err != nil {
		yield(nil, fmt.Errorf("lend blocks: %w", got.err))
		return false
	}
	for i, ref := range refs {
		var l *kvcache.Lent
		var err error
		if i < len(got.loans) {
			l, err = c.look(got.loans[i], ref)
		} else {
			l, err = c.Get(ctx, ref)
		}
		if !yield(l, err) || err != nil {
			c.abandon(got.loans[min(i+1, len(got.loans)):])
			return false
		}
	}
	return true
}

// borrow asks for the places of blocks, and returns those of the first ones, as far as the
// node lends them.
func (c *Client) borrow(ctx context.Context, refs []kvcache.Ref) (loans []arena.Loan, err error) {
	name, err := hex.DecodeString(c.reader.Name())
	if err != nil {
		return nil, err // of this module's own making
	}
	tickets := make([]arena.Ticket, len(refs))
	for i := range refs {
		var slot int
		if slot, tickets[i], err = c.reader.Ask(); err != nil {
			c.abandon(loans)
			return nil, c.counted(err)
		}
		loans = append(loans, arena.Loan{Slot: slot})
	}
	n := 0
	err = c.ask(ctx, opLend,
		func(b []byte) []byte {
			b = append(b, name...)
			for i, ref := range refs {
				b = kvwire.AppendSize(kvwire.AppendU32(kvwire.AppendRef(b, ref), loans[i].Slot), int(tickets[i]))
			}
			return b
		},
		func(cn *conn, body cursor) error {
			id := body.Take(len(loans[0].ID))
			for ; len(body.B) > 0 && n < len(loans); n++ {
				l := &loans[n]
				l.Data = cn.hello.Data
				copy(l.ID[:], id)
				if l.At, l.Size = int64(body.Size()), int64(body.Size()); body.Bad {
					return errShort
				}
			}
			return nil
		})
	if err != nil {
		n = 0
	}
	c.abandon(loans[n:])
	if told(err) {
		err = nil // an older node does not know how
	}
	return loans[:n], err
}

// abandon gives up slots that nothing was lent in, or whose block nobody wants.
func (c *Client) abandon(loans []arena.Loan) {
	for _, l := range loans {
		c.reader.Abandon(l.Slot)
	}
}

// lend lends blocks up to the first that is not there.
func (p *peer) lend(ctx context.Context, c *cursor) ([]byte, error) {
	reader := fmt.Sprintf("%x", c.Take(8))
	id := p.s.store.ID()
	out := id[:]
	for !c.Bad && len(c.B) > 0 {
		ref, slot, ticket := c.Ref(), c.U32(), c.Size()
		if c.Bad {
			break
		}
		at, size, err := p.s.store.Lend(ctx, reader, slot, arena.Ticket(ticket), ref)
		if err != nil {
			break // the client asks for it alone
		}
		out = kvwire.AppendSize(kvwire.AppendSize(out, int(at)), int(size))
	}
	return out, nil
}
