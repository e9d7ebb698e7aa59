//go:build unix

package kvrpc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
)

// withStore fills in what an arena can do.
func withStore(c ServerConfig, store kvcache.Store) ServerConfig {
	a, ok := store.(*arena.Store)
	if !ok {
		return c
	}
	if c.MemoryID == "" {
		id := a.ID()
		c.MemoryID = string(id[:])
	}
	if c.Reserve == nil {
		c.Reserve = func(ctx context.Context, ref kvcache.Ref, size int64) (Room, error) {
			r, err := a.Reserve(ctx, ref, size)
			if err != nil || r == nil {
				return nil, err
			}
			return r, nil
		}
	}
	if c.Resume == nil {
		c.Resume = func(ctx context.Context, no uint64, next int) (kvcache.TailWriter, error) {
			w, err := a.Writer(ctx, no, next)
			if err != nil {
				return nil, err
			}
			return w, nil
		}
	}
	return c
}

// peer is one connection of the data channel, served by one goroutine.
type peer struct {
	s    *Server
	l    *link
	data []byte // the last state that came, kept for its memory
	ids  []int32
}

// serve answers requests until the connection ends, and says why it did.
func (p *peer) serve() error {
	for {
		if err := p.one(); err != nil {
			return err
		}
		p.l.trim()
		if cap(p.data) > 4<<20 {
			p.data = nil
		}
		// The next request may take for ever to come.
		if err := p.l.c.SetDeadline(time.Time{}); err != nil {
			return err
		}
		if _, err := p.l.r.Peek(1); err != nil {
			return err
		}
	}
}

// step gives the peer time for one step.
func (p *peer) step() error { return p.l.c.SetDeadline(time.Now().Add(p.s.cfg.Stall)) }

// one reads one request and answers it.
func (p *peer) one() error {
	if err := p.step(); err != nil {
		return err
	}
	h, err := p.l.receive(mostBody)
	if errors.Is(err, errVersion) {
		_ = p.reply(err) // the reason counts
		return err
	}
	if err != nil {
		return err
	}
	what := op(h.what)
	if what != opAppend && what != opOffer && h.data != 0 {
		return fmt.Errorf("%w: %d bytes behind a request of operation %d", errNonsense, h.data, what)
	}
	c := cursorOf(p.l.body)
	switch what {
	case opGet:
		return p.get(&c)
	case opPut:
		return p.put(&c)
	case opOffer:
		return p.offer(&c, h.data)
	case opAppend:
		return p.append(&c, h.data)
	case opTails:
		return p.tails(&c)
	}
	return p.reply(fmt.Errorf("operation %d is not known", what))
}

// reply sends an answer that has an error, or nothing, to tell.
func (p *peer) reply(err error) error {
	what, text := statusOf(err)
	if errors.Is(err, errVersion) {
		what, text = statusVersion, nil
	}
	p.l.begin()
	p.l.out = append(p.l.out, text...)
	return p.l.send(uint8(what), nil)
}

// get sends a frame from where it lies.
func (p *peer) get(c *cursor) error {
	ref, from, most := c.Ref(), c.Size(), c.Size()
	if !c.Whole() {
		return p.reply(errBad)
	}
	lent, err := p.s.store.Get(p.s.ctx, ref)
	if err != nil {
		return p.reply(err)
	}
	defer lent.Release()
	b := lent.Bytes()
	total := uint64(len(b))
	b = b[min(from, len(b)):]
	if most > 0 {
		b = b[:min(most, len(b))]
	}
	p.l.begin()
	p.l.out = kvwire.AppendU64(p.l.out, total)
	putHead(p.l.out, uint8(statusDone), uint64(len(b)))
	return p.write(b)
}

// stride is how much is sent to a peer in one step: more than sockets hold, because the
// kernel fills them best in one call.
const stride = 32 << 20

// write sends the message that was begun and has its head, and data, a part at a time: a
// peer that takes none of it for long is given up, so that it does not hold what is lent.
func (p *peer) write(data []byte) error {
	n := min(stride, len(data))
	if err := p.l.push(data[:n]); err != nil {
		return err
	}
	for data = data[n:]; len(data) > 0; data = data[n:] {
		if err := p.step(); err != nil {
			return err
		}
		n = min(stride, len(data))
		if err := p.l.write(data[:n]); err != nil {
			return err
		}
	}
	return nil
}

// append reads a state and appends it to a tail.
func (p *peer) append(c *cursor, size uint64) error {
	no, r, sum := c.U64(), kvcache.Range{First: c.Size()}, c.U64()
	r.Codec = kvcache.Codec(c.U8())
	p.ids = c.IDs(len(c.B)/4, p.ids)
	r.IDs = p.ids
	if size > uint64(p.s.cfg.Memory) {
		return fmt.Errorf("%w: a range of %d bytes", errNonsense, size)
	}
	if err := p.s.memory.room.Acquire(p.s.ctx, int64(size)); err != nil {
		return err
	}
	defer p.s.memory.room.Release(int64(size))
	if uint64(cap(p.data)) < size {
		p.data = make([]byte, size)
	}
	r.Data = p.data[:size]
	for at := 0; at < len(r.Data); {
		if err := p.step(); err != nil {
			return err
		}
		end := min(at+stride, len(r.Data))
		n, err := p.l.fill(r.Data[at:end], len(r.Data)-end)
		if at += n; err != nil {
			return err
		}
	}
	if !c.Whole() {
		return p.reply(errBad)
	}
	if kvcache.Sum(r.Data) != sum {
		err := kvcache.Refuse(kvcache.ReasonChecksum, "range of a tail on its way")
		p.s.count.Refusal(err)
		return p.reply(err)
	}
	return p.reply(p.s.tails.append(no, r))
}

// tails sends all tails of a choice.
func (p *peer) tails(c *cursor) error {
	space, choice, stream := c.Space(), c.U32(), string(c.Rest())
	if c.Bad {
		return p.reply(errBad)
	}
	list, err := p.s.tails.read(p.s.ctx, space, stream, choice)
	if err != nil {
		return p.reply(err)
	}
	p.l.begin()
	p.l.out = appendTails(p.l.out, list)
	if len(p.l.out)-headLen > mostIndex {
		return p.reply(errors.New("too many tails"))
	}
	size := uint64(0)
	for _, t := range list {
		for _, r := range t.Ranges {
			size += uint64(len(r.Data))
		}
	}
	putHead(p.l.out, uint8(statusDone), size)
	if err := p.l.push(nil); err != nil {
		return err
	}
	for _, t := range list {
		for _, r := range t.Ranges {
			if err := p.step(); err != nil {
				return err
			}
			if err := p.l.write(r.Data); err != nil {
				return err
			}
		}
	}
	return nil
}
