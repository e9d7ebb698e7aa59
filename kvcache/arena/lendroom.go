//go:build unix

package arena

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
)

// LendRoom takes room for the frame of a block, of size bytes, which a process that has
// the arena mapped writes in place: its slot, which must hold the ticket, then holds the
// extent. The room is that process's until Publish, or until it clears the slot or ends;
// an owner that comes after this one takes it over with the slot. It returns where the
// room begins, or 0 where the block is there already.
func (s *Store) LendRoom(ctx context.Context, reader string, slot int, ticket Ticket, ref kvcache.Ref, size int64) (at int64, err error) {
	if slot < 0 || slot >= Slots || ticket&1 == 0 {
		return 0, fmt.Errorf("lend room: slot %d, ticket %d", slot, ticket)
	}
	if err := s.enter(ctx); err != nil {
		return 0, err
	}
	defer s.mu.Unlock()
	if s.hasLocked(ref) {
		s.count.Duplicates.Add(1)
		return 0, nil
	}
	p, err := s.peerLocked(reader)
	if err != nil {
		return 0, s.count.Failure(fmt.Errorf("lend room: %w", err))
	}
	if !s.waitsLocked(p, slot, ticket) {
		return 0, fmt.Errorf("lend room: %w", context.Canceled)
	}
	e, err := s.allocLocked(size, ref.Parent, time.Now())
	if err != nil {
		return 0, err
	}
	if !p.words.slot(slot).CompareAndSwap(uint64(ticket), e.word()) {
		s.room.release(e) // it does not wait any more
		return 0, fmt.Errorf("lend room: %w", context.Canceled)
	}
	// Room that is lent is what a block is that has left the index while somebody reads
	// it: the slot keeps it, nothing else does.
	s.limbo[e.at] = &limbo{e, 1}
	p.held[slot] = pin{hold{extent: e, id: evict.None}, e.word(), ticket}
	return int64(e.at) * grain, nil
}

// Publish makes what was written into room that LendRoom gave, also that of an owner
// before this one, a block, and says what it is. Like Reservation.Commit it looks at the
// header only. The slot must still hold the extent that was lent for the ticket, or, where
// that is 0, any; it is to be cleared afterwards, whatever the outcome.
func (s *Store) Publish(ctx context.Context, reader string, slot int, ticket Ticket, ref kvcache.Ref, size int64) (kvcache.Found, error) {
	if slot < 0 || slot >= Slots || size < 1 {
		return kvcache.Found{}, fmt.Errorf("publish: slot %d, %d bytes", slot, size)
	}
	if err := s.enter(ctx); err != nil {
		return kvcache.Found{}, err
	}
	r, err := s.lentRoomLocked(reader, slot, ticket, ref, size)
	if errors.Is(err, kvcache.ErrNotFound) && s.hasLocked(ref) {
		// It was published, and the answer got lost.
		e := &s.index.entries[s.index.byKey[ref.Key]]
		found := kvcache.Found{Ref: ref, First: int(e.first), Tokens: int(e.tokens), Size: e.size}
		s.mu.Unlock()
		return found, nil
	}
	s.mu.Unlock()
	if err != nil {
		return kvcache.Found{}, fmt.Errorf("publish block %s: %w", ref.Key, err)
	}
	return r.Commit()
}

// lentRoomLocked makes a reservation of the room that a slot holds, which is then that
// one's alone. A request that was given up may come when the slot holds other room, which
// somebody fills.
func (s *Store) lentRoomLocked(reader string, slot int, ticket Ticket, ref kvcache.Ref, size int64) (*Reservation, error) {
	p, err := s.peerLocked(reader)
	if err != nil {
		return nil, err
	}
	held, ok := p.held[slot]
	l := s.limbo[held.at]
	late := ticket != 0 && held.ticket != 0 && held.ticket != ticket
	if late || !ok || p.words.slot(slot).Load() != held.word || l == nil || l.extent != held.extent || l.refs != 1 {
		return nil, kvcache.ErrNotFound
	}
	if grains(size) > held.n {
		return nil, &kvcache.Refusal{Reason: kvcache.ReasonTorn, Detail: "the frame is longer than its room"}
	}
	delete(p.held, slot)
	delete(s.limbo, held.at)
	s.out++
	return &Reservation{s: s, ref: ref, size: size, extent: held.extent}, nil
}
