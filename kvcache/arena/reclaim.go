//go:build unix

package arena

import (
	"context"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
)

// Left is what is still there of an old version of a model, and what has just gone.
type Left struct {
	Blocks int
	Bytes  int64
	// Tails are the open ends of streams.
	Tails int
	// Freed blocks have gone, of so many bytes.
	Freed      int
	FreedBytes int64
}

// Reclaim removes the blocks of a fingerprint that no stream needs: all but those before a
// tail, or a tail that has just ended, and those that have just come or were just named by a
// look-up. Tails go by age. It may be called again until nothing is left, and takes some
// blocks at a time so that others get their turn.
//
// What is kept is decided once, at the beginning, and looked at again for each block alone. A
// tail that is opened in between may therefore find a block before it gone: its stream, if it
// has to go on elsewhere, computes from there. So may whoever was told of a block longer ago
// than a lease. Both get less than there could be, and nothing wrong.
//
// Each removal is in the journal before its room is given out, so an owner that dies in the
// middle has the rest again, and the next call goes on with it.
func (s *Store) Reclaim(ctx context.Context, f kvcache.Fingerprint, now time.Time) (Left, error) {
	if err := s.enter(ctx); err != nil {
		return Left{}, err
	}
	defer s.walkLocked()()
	var l Left
	spaces, keep := map[uint32]bool{}, map[evict.ID]bool{}
	if m := s.models[f]; m != nil {
		for _, no := range m.spaces {
			spaces[no] = true
		}
	}
	for _, t := range s.tails.byNo {
		if spaces[t.key.space] {
			l.Tails++
		}
	}
	for i := range s.index.entries {
		if e := &s.index.entries[i]; e.live && spaces[e.space] {
			l.Blocks++
			l.Bytes += e.size
			s.keepLocked(evict.ID(i), now, keep)
		}
	}
	s.mu.Unlock()
	const batch = 4096
	for from := 0; l.Blocks > len(keep); from += batch {
		if err := s.enter(ctx); err != nil {
			return l, err
		}
		to := min(from+batch, len(s.index.entries))
		for i := from; i < to; i++ {
			id, e := evict.ID(i), &s.index.entries[i]
			if !e.live || !spaces[e.space] || keep[id] || s.policy.Pinned(id) || e.spared(now) {
				continue
			}
			l.Blocks, l.Bytes = l.Blocks-1, l.Bytes-e.size
			l.Freed, l.FreedBytes = l.Freed+1, l.FreedBytes+e.size
			s.removeLocked(id)
		}
		done := to == len(s.index.entries)
		err := s.count.Failure(s.log.flush())
		s.mu.Unlock()
		if done || err != nil {
			return l, err
		}
	}
	return l, nil
}

// spared says whether a block has just come, or was just named by a look-up.
func (e *entry) spared(now time.Time) bool { return max(e.lease, e.fresh) > now.UnixMilli() }

// keepLocked notes a block, and those before it, where a stream needs it.
func (s *Store) keepLocked(id evict.ID, now time.Time, keep map[evict.ID]bool) {
	e := &s.index.entries[id]
	if !s.policy.Pinned(id) && !e.spared(now) {
		return
	}
	for ok := true; ok && !keep[id]; id, ok = s.index.byKey[e.parent] {
		next := &s.index.entries[id]
		if next.space != e.space {
			return
		}
		keep[id], e = true, next
	}
}
