//go:build unix

package arena

import (
	"encoding/binary"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
)

// Watcher is told of blocks as they come and go, under the store's lock: it must not wait, nor
// call the store. Values of clients are no blocks, and it is not told of them.
type Watcher interface {
	// Stored tells of a block that can be found from now on. ids are its tokens, nil where they
	// were not asked for; the watcher may keep them.
	Stored(f kvcache.Found, ids []int32)
	// Removed tells of one that cannot be found any more.
	Removed(key kvcache.Key)
}

// watch is who is told of blocks.
type watch struct {
	to     Watcher // nil: nobody
	tokens bool
	values kvcache.Space
}

// Watch has w told of the blocks that came last, so many at most, and from then on of all that
// come and go; with their tokens, if it says so. There is one watcher; a later one takes its
// place.
func (s *Store) Watch(w Watcher, most int, tokens bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watch = watch{w, tokens, Values()}
	if s.closed {
		return
	}
	for id := max(0, len(s.index.entries)-most); id < len(s.index.entries); id++ {
		if e := &s.index.entries[id]; e.live && !s.index.spaces[e.space].dropped {
			s.tellStoredLocked(evict.ID(id))
		}
	}
}

// tellStoredLocked tells the watcher, if there is one, of a block that has come.
func (s *Store) tellStoredLocked(id evict.ID) {
	if s.watch.to == nil {
		return
	}
	e := &s.index.entries[id]
	ref := s.index.ref(e)
	if ref.Space == s.watch.values {
		return
	}
	var ids []int32
	if s.watch.tokens {
		if !s.checkLocked(e) {
			return // a look-up will find it out, and remove it
		}
		b := s.tokensLocked(id)
		ids = make([]int32, len(b)/4)
		for i := range ids {
			ids[i] = int32(binary.LittleEndian.Uint32(b[4*i:]))
		}
	}
	s.watch.to.Stored(kvcache.Found{Ref: ref, First: int(e.first), Tokens: int(e.tokens), Size: e.size}, ids)
}

// tellRemovedLocked tells the watcher, if there is one, of a block that is about to go.
func (s *Store) tellRemovedLocked(e *entry) {
	if s.watch.to != nil && s.index.spaces[e.space].Space != s.watch.values {
		s.watch.to.Removed(e.key)
	}
}
