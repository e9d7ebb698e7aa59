//go:build unix

package kvrpc

import (
	"context"
	"fmt"

	"github.com/kvmesh/kvmesh/kvcache"
)

// put takes a frame in: first whether it is wanted, so that a shared prefix that is there
// already is not sent, then the frame, into the place where it stays if the store can have
// that.
func (p *peer) put(c *cursor) error {
	ref, size := c.Ref(), int64(c.Size())
	if !c.Whole() || size == 0 || size > kvcache.MaxSize {
		return p.reply(errBad)
	}
	room, err := p.s.reserve(ref, size)
	if err != nil {
		return p.reply(err)
	}
	if room == nil {
		return p.want(0)
	}
	defer room.Cancel()
	if err := p.want(1); err != nil {
		return err
	}
	told, err := p.take(ref, room)
	if err != nil {
		return err
	}
	return p.reply(told)
}

// offer is put with the beginning of the frame, or all of it, behind the request.
func (p *peer) offer(c *cursor, ahead uint64) error {
	ref, size := c.Ref(), uint64(c.Size())
	switch bad := !c.Whole() || size == 0 || size > kvcache.MaxSize; {
	case ahead > mostAhead || ahead > 0 && bad || ahead > size:
		return fmt.Errorf("%w: an offer of %d bytes with %d", errNonsense, size, ahead)
	case bad:
		return p.reply(errBad)
	}
	room, err := p.s.reserve(ref, int64(size))
	switch {
	case err != nil:
		err = p.reply(err)
	case room == nil:
		err = p.want(0)
	default:
		defer room.Cancel()
		return p.accept(ref, room, ahead == size)
	}
	if err != nil {
		return err
	}
	return p.skip(int(ahead))
}

// accept takes an offer. Where all of it is coming already there is one answer, at its end.
func (p *peer) accept(ref kvcache.Ref, room Room, whole bool) error {
	if !whole {
		if err := p.want(1); err != nil {
			return err
		}
	}
	told, err := p.take(ref, room)
	switch {
	case err != nil:
		return err
	case whole && told == nil:
		return p.want(1)
	}
	return p.reply(told)
}

// take reads a frame into its room and publishes it. told is what the peer is to hear.
func (p *peer) take(ref kvcache.Ref, room Room) (told, err error) {
	h, err := receive(p.l, room.Bytes(), ref, p.step)
	if _, wrong := p.s.count.Refusal(err); wrong {
		return err, nil
	}
	if err != nil {
		return nil, err
	}
	put, told := room.CommitProven(h)
	if told == nil && p.s.cfg.Wrote != nil {
		p.s.cfg.Wrote(put)
	}
	return told, nil
}

// skipRoom is how much is read at once of what nobody wants.
const skipRoom = 64 << 10

// skip reads what nobody wants, in one step as it is no more than mostAhead.
func (p *peer) skip(n int) error {
	if n == 0 {
		return nil
	}
	if err := p.step(); err != nil {
		return err
	}
	if cap(p.data) < skipRoom {
		p.data = make([]byte, skipRoom)
	}
	for n > 0 {
		k, err := p.l.fill(p.data[:min(n, skipRoom)], n-min(n, skipRoom))
		if n -= k; err != nil {
			return err
		}
	}
	return nil
}

// want says whether a frame is wanted.
func (p *peer) want(n byte) error {
	p.l.begin()
	p.l.out = append(p.l.out, n)
	return p.l.send(uint8(statusDone), nil)
}

// reserve takes room for a frame, in the store or else in memory.
func (s *Server) reserve(ref kvcache.Ref, size int64) (Room, error) {
	if s.cfg.Reserve != nil {
		return s.cfg.Reserve(s.ctx, ref, size)
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.cfg.Stall)
	defer cancel()
	if l, err := s.store.Get(ctx, ref); err == nil {
		l.Release()
		return nil, nil
	}
	b, err := s.memory.get(ctx, size)
	if err != nil {
		return nil, err
	}
	return &heapRoom{s, ref, b}, nil
}

// heapRoom is room for a frame on its way to a store that has none to lend.
type heapRoom struct {
	s   *Server
	ref kvcache.Ref
	b   []byte
}

// Bytes implements Room.
func (r *heapRoom) Bytes() []byte { return r.b }

// CommitProven implements Room.
func (r *heapRoom) CommitProven(h kvcache.Header) (kvcache.Found, error) {
	if err := r.s.store.Put(r.s.ctx, kvcache.Proven(r.b, h)); err != nil {
		return kvcache.Found{}, err
	}
	return kvcache.Found{Ref: h.Ref, First: h.First, Tokens: len(h.IDs), Size: h.Total}, nil
}

// Cancel implements Room.
func (r *heapRoom) Cancel() {
	if r.b != nil {
		r.s.memory.give(r.b)
		r.b = nil
	}
}
