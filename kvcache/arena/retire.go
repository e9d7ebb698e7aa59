//go:build unix

package arena

import (
	"slices"

	"github.com/kvmesh/kvmesh/kvcache/evict"
)

// Spaces have numbers, which a journal gives once. There is one for each tenant of each
// version of a model, so those of tenants who have nothing here any more are given again:
// what has neither blocks nor streams is left out of the journal when that is written anew
// (retireLocked), and once the new one is in place its number is free (releaseLocked). From
// the old one a number that means two spaces could not be told apart.

// retireLocked forgets the spaces that have nothing, at the beginning of a compaction. While
// somebody walks through the blocks of spaces by number, it does nothing.
func (s *Store) retireLocked() {
	s.retired = s.retired[:0]
	if s.walks > 0 {
		return
	}
	streams := map[uint32]bool{}
	for key := range s.tails.streams {
		streams[key.space] = true
	}
	for i := range s.index.spaces {
		sp, no := &s.index.spaces[i], uint32(i)
		if len(sp.lengths) > 0 || streams[no] || sp.spare {
			continue
		}
		if !sp.dropped {
			s.forgetSpaceLocked(no)
		}
		*sp = space{dropped: true}
		s.retired = append(s.retired, no)
	}
}

// walkLocked begins a walk through the blocks of spaces by number, which lets others in
// between; what it returns ends it, without the lock.
func (s *Store) walkLocked() (end func()) {
	s.walks++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.walks--
	}
}

// forgetSpaceLocked takes a space from its model, and the model too if it has neither
// another one nor a label.
func (s *Store) forgetSpaceLocked(no uint32) {
	sp := s.index.spaces[no].Space
	delete(s.index.spaceOf, sp)
	s.policy.SetDead(evict.Owner(no), false)
	m := s.models[sp.Fingerprint]
	if m == nil {
		return
	}
	m.spaces = slices.DeleteFunc(m.spaces, func(n uint32) bool { return n == no })
	if len(m.spaces) == 0 && m.named == 0 {
		delete(s.models, sp.Fingerprint)
	}
}

// releaseLocked frees the numbers of the spaces that the journal does not have any more.
func (s *Store) releaseLocked() {
	for _, no := range s.retired {
		s.index.spaces[no].spare = true
	}
	s.index.spareSpaces = append(s.index.spareSpaces, s.retired...)
	s.retired = s.retired[:0]
}

// number is the number of the next space.
func (x *index) number() uint32 {
	if n := len(x.spareSpaces); n > 0 {
		no := x.spareSpaces[n-1]
		x.spareSpaces = x.spareSpaces[:n-1]
		return no
	}
	x.spaces = append(x.spaces, space{})
	return uint32(len(x.spaces) - 1)
}
