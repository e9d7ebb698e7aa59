//go:build unix

package arena

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
)

// Put implements kvcache.Store.
func (s *Store) Put(ctx context.Context, f *kvcache.Frame) error {
	r, err := s.Reserve(ctx, f.Ref, f.Total)
	if err != nil || r == nil {
		return err
	}
	if copy(r.Bytes(), f.Bytes()) < int(f.Total) {
		r.Cancel()
		return kvcache.ErrClosed // it was lent and given back
	}
	return r.commit(&f.Header)
}

// Reservation is room for one frame that its owner fills. Nobody else sees the room
// before Commit. It is for one goroutine at a time; Commit or Cancel must follow, and
// the store's mapping stays until then.
type Reservation struct {
	s    *Store
	ref  kvcache.Ref
	size int64
	extent
	done bool
}

// Reserve takes room for the frame of a block, of size bytes. It is nil where the
// block is there already, which counts as a put. The error is ErrFull where there is
// no room and none can be made.
func (s *Store) Reserve(ctx context.Context, ref kvcache.Ref, size int64) (*Reservation, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	if s.hasLocked(ref) {
		s.count.Duplicates.Add(1)
		return nil, nil
	}
	e, err := s.allocLocked(size, ref.Parent, time.Now())
	if err != nil {
		return nil, err
	}
	s.out++
	return &Reservation{s: s, ref: ref, size: size, extent: e}, nil
}

// hasLocked says whether a block is there, and of the same model and tenant.
func (s *Store) hasLocked(ref kvcache.Ref) bool {
	id, ok := s.index.byKey[ref.Key]
	return ok && s.index.ref(&s.index.entries[id]) == ref && !s.index.spaces[s.index.entries[id].space].dropped
}

// Bytes is the room, as long as the frame is to be.
func (r *Reservation) Bytes() []byte { return r.s.bytes(r.extent)[:r.size:r.size] }

// Cancel gives the room back. It may be called after Commit, and then does nothing.
func (r *Reservation) Cancel() {
	if r.done {
		return
	}
	r.done = true
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	r.s.room.release(r.extent)
	r.s.leaveLocked()
}

// leaveLocked ends the use of the mapping by one call or loan.
func (s *Store) leaveLocked() {
	s.out--
	s.unmapLocked()
}

// Commit publishes the frame and says what it is. A *kvcache.Refusal says that the bytes
// are not the frame of the block that room was reserved for; its parts are not looked at.
func (r *Reservation) Commit() (kvcache.Found, error) {
	h, err := kvcache.DecodeHeader(r.Bytes())
	return r.publish(h, err)
}

// CommitProven is Commit for a frame whose header is h, and which the caller has verified as
// it came.
func (r *Reservation) CommitProven(h kvcache.Header) (kvcache.Found, error) { return r.publish(h, nil) }

// publish publishes a frame with a header, unless there is something wrong with it.
func (r *Reservation) publish(h kvcache.Header, err error) (kvcache.Found, error) {
	if err == nil {
		err = h.Check(r.ref)
	}
	if err == nil && h.Total != r.size {
		err = &kvcache.Refusal{Reason: kvcache.ReasonTorn, Detail: "the frame is not as long as its room"}
	}
	if err != nil {
		r.Cancel()
		r.s.count.Refusal(err)
		return kvcache.Found{}, fmt.Errorf("put block %s: %w", r.ref.Key, err)
	}
	return kvcache.Found{Ref: h.Ref, First: h.First, Tokens: len(h.IDs), Size: h.Total}, r.commit(&h)
}

// commit publishes a frame whose header is right. The order is what a crash at any line
// may leave behind: the bytes are in the arena already, then the journal says so, and
// only then can anybody find the block, so that none is found that would not be there
// after a restart.
func (r *Reservation) commit(h *kvcache.Header) error {
	s := r.s
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.leaveLocked()
	r.done = true
	if s.closed {
		s.room.release(r.extent)
		return kvcache.ErrClosed
	}
	if s.hasLocked(h.Ref) {
		// Another writer of the same block was faster.
		s.room.release(r.extent)
		s.count.Duplicates.Add(1)
		return nil
	}
	if id, ok := s.index.byKey[h.Key]; ok {
		s.removeLocked(id) // of a space that was dropped
	}
	e := entry{
		key: h.Key, parent: h.Parent, at: r.at, n: r.n, size: h.Total,
		first: int64(h.First), tokens: uint32(len(h.IDs)), space: s.spaceLocked(h.Space), checked: true,
		fresh: time.Now().Add(s.cfg.Lease).UnixMilli(),
	}
	s.usedLocked(h.Fingerprint)
	s.log.add(e.record())
	if err := s.log.flush(); err != nil {
		// It may be in the journal all the same: then the journal says so again.
		s.log.add(record{kind: kindRemove, at: int64(e.at) * grain})
		s.room.release(r.extent)
		return s.count.Failure(err)
	}
	s.log.live += putRecord
	s.insertLocked(e)
	s.count.Puts.Add(1)
	s.count.PutBytes.Add(uint64(h.Total))
	return nil
}

// putRecord is the length of the record of a block.
const putRecord = recordFixed + 4 + 4 + 3*8 + 2*32

// record is what the journal says of a block.
func (e *entry) record() record {
	return record{
		kind: kindPut, space: e.space, tokens: e.tokens, at: int64(e.at) * grain, size: e.size,
		first: e.first, parent: e.parent, key: e.key,
	}
}

// spaceLocked returns the number of a space, given to it if it has none.
func (s *Store) spaceLocked(sp kvcache.Space) uint32 {
	no, ok := s.index.spaceOf[sp]
	if !ok {
		no = s.index.number()
		s.addSpaceLocked(no, sp)
		s.log.add(record{kind: kindSpace, space: no, in: sp})
	}
	return no
}

// addSpaceLocked gives a space a number.
func (s *Store) addSpaceLocked(no uint32, sp kvcache.Space) {
	s.index.spaces[no] = space{Space: sp}
	s.index.spaceOf[sp] = no
	s.policy.SetDead(evict.Owner(no), false)
	m := s.modelLocked(sp.Fingerprint)
	m.spaces = append(m.spaces, no)
}

// insertLocked puts a block into index and policy. Blocks may come in any order: those that
// follow this one are joined to it, and tails that wait for it pin it.
func (s *Store) insertLocked(e entry) {
	id := s.index.insert(e)
	s.tellStoredLocked(id)
	s.sortInLocked(id)
	parent := evict.None
	if p, ok := s.index.byKey[e.parent]; ok && s.index.entries[p].space == e.space {
		parent = p
	}
	s.policy.Add(id, evict.Item{
		Name: binary.LittleEndian.Uint64(e.key[:]), Size: int64(e.n) * grain, Parent: parent, Owner: evict.Owner(e.space),
	})
	for _, child := range s.index.after(e.key) {
		if s.index.entries[child].space == e.space {
			s.policy.Adopt(child, id)
		}
	}
	for range s.tails.anchors[e.key] {
		s.policy.Pin(id)
	}
}

// removeLocked takes a block out of index, policy and journal, and frees its room as
// soon as nobody reads it. The journal is not written yet.
func (s *Store) removeLocked(id evict.ID) {
	s.forgetLocked(id)
	s.policy.Remove(id)
}

// forgetLocked does all of it but for the policy.
func (s *Store) forgetLocked(id evict.ID) {
	e := s.index.entries[id]
	s.tellRemovedLocked(&e)
	for _, child := range s.index.after(e.key) {
		if s.index.entries[child].space == e.space {
			s.policy.Adopt(child, evict.None)
		}
	}
	s.sortOutLocked(id)
	s.index.remove(id)
	s.log.add(record{kind: kindRemove, at: int64(e.at) * grain})
	s.log.live -= putRecord
	if e.refs > 0 {
		s.limbo[e.at] = &limbo{e.extent(), int(e.refs)}
		return
	}
	s.room.release(e.extent())
}

// Get implements kvcache.Store. The frame's bytes are the arena's own.
func (s *Store) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	l, err := s.lend(ctx, ref, true)
	if err == nil {
		s.count.Hits.Add(1)
		s.count.HitBytes.Add(uint64(l.Total))
	}
	return l, err
}

// Peek lends a block as Get does, but that is no use of the block, and not counted.
func (s *Store) Peek(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	return s.lend(ctx, ref, false)
}

// lend lends a block, which may count as its use.
func (s *Store) lend(ctx context.Context, ref kvcache.Ref, use bool) (*kvcache.Lent, error) {
	h, err := s.holdRef(ctx, ref, use)
	if err != nil {
		return nil, err
	}
	f, err := kvcache.Decode(s.bytes(h.extent)[:h.size:h.size], ref)
	if err != nil {
		s.spoiled(h, err)
		s.drop(h)
		return nil, fmt.Errorf("block %s: %w", ref.Key, err)
	}
	return kvcache.NewLent(f, func() { s.drop(h) }, func(err error) { s.spoiled(h, err) }), nil
}

// hold is one use of a block's bytes: they stay until it is dropped. It names the place in
// the index by number and generation, because the block may leave, and another one take
// the number, while it is read; then its extent waits in limbo.
type hold struct {
	extent
	id   evict.ID
	gen  uint32
	size int64
}

// holdRef takes a hold of a block, which may count as its use. Of its bytes nothing is
// known yet.
func (s *Store) holdRef(ctx context.Context, ref kvcache.Ref, use bool) (hold, error) {
	if err := s.enter(ctx); err != nil {
		return hold{}, err
	}
	defer s.mu.Unlock()
	h, err := s.holdLocked(ref, use)
	if err == nil {
		s.out++
	}
	return h, err
}

// holdLocked takes one under the lock.
func (s *Store) holdLocked(ref kvcache.Ref, use bool) (hold, error) {
	id, ok := s.index.byKey[ref.Key]
	if !ok || s.index.spaces[s.index.entries[id].space].dropped {
		if use {
			s.count.Misses.Add(1)
		}
		return hold{}, fmt.Errorf("block %s: %w", ref.Key, kvcache.ErrNotFound)
	}
	e := &s.index.entries[id]
	if have := s.index.ref(e); have != ref {
		// It is right, only the asker is not.
		why := kvcache.ReasonKey
		if have.Space != ref.Space {
			why = kvcache.ReasonForeign
		}
		err := &kvcache.Refusal{Reason: why, Detail: "of another model, tenant or parent"}
		s.count.Refusal(err)
		return hold{}, fmt.Errorf("block %s: %w", ref.Key, err)
	}
	e.refs++
	if use {
		s.policy.Use(id)
		s.usedLocked(ref.Fingerprint)
	}
	return hold{e.extent(), id, e.gen, e.size}, nil
}

// drop ends a hold that holdRef gave.
func (s *Store) drop(h hold) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropLocked(h)
	s.leaveLocked()
}

// dropLocked gives a block's room back if this was the last use of one that has left.
func (s *Store) dropLocked(h hold) {
	if e := s.entryLocked(h); e != nil {
		e.refs--
		return
	}
	if l := s.limbo[h.at]; l != nil {
		if l.refs--; l.refs == 0 {
			delete(s.limbo, h.at)
			s.room.release(l.extent)
		}
	}
}

// entryLocked is the block of a hold, or nil if it has left.
func (s *Store) entryLocked(h hold) *entry {
	if int(h.id) >= len(s.index.entries) {
		return nil
	}
	if e := &s.index.entries[h.id]; e.live && e.gen == h.gen {
		return e
	}
	return nil
}

// spoiled removes a block whose bytes are wrong: whoever comes next shall not try again.
func (s *Store) spoiled(h hold, err error) {
	s.count.Refusal(err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && s.entryLocked(h) != nil {
		s.removeLocked(h.id)
		s.count.Failure(s.log.flush())
	}
}

// Longest implements kvcache.Store.
func (s *Store) Longest(ctx context.Context, q kvcache.Query) (kvcache.Match, error) {
	if err := s.enter(ctx); err != nil {
		return kvcache.Match{}, err
	}
	defer s.mu.Unlock()
	s.count.Lookups.Add(1)
	if q.From == (kvcache.Key{}) {
		q.From = q.Root
	}
	no, ok := s.index.spaceOf[q.Space]
	if !ok {
		return kvcache.Match{}, nil
	}
	s.usedLocked(q.Fingerprint)
	w := walk{s: s, q: q, space: no}
	end := w.from(q.From, 0)
	m := w.matchLocked(end, time.Now())
	for _, id := range w.wrong {
		if s.index.entries[id].live { // it may have been met twice
			s.removeLocked(id)
		}
	}
	s.count.LookupTokens.Add(uint64(end.tokens + end.common))
	return m, nil
}
