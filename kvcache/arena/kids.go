//go:build unix

package arena

import (
	"encoding/binary"
	"slices"
	"sort"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
)

// kids are the blocks that follow one, in the order of their tokens, so that the one
// that shares most with a query stands beside its place. They are kept for blocks that
// many follow, such as the root, from the first look-up on that needs them.
type kids struct{ chunks [][]evict.ID }

const (
	// fewKids is how many are looked at one by one.
	fewKids = 16
	// mostChunk is when a chunk is split: it bounds what an insertion moves.
	mostChunk = 512
)

// compare is negative for a block before the place that is looked for.
type compare func(evict.ID) int

// sortKids puts blocks in order.
func sortKids(ids []evict.ID, cmp func(a, b evict.ID) int) *kids {
	slices.SortFunc(ids, cmp)
	k := &kids{}
	for part := range slices.Chunk(ids, mostChunk/2) {
		k.chunks = append(k.chunks, slices.Clone(part))
	}
	return k
}

// place is where the first block stands that is not before what cmp looks for; it may
// be behind the last of a chunk.
func (k *kids) place(cmp compare) (chunk, at int) {
	chunk = max(0, sort.Search(len(k.chunks), func(i int) bool { return cmp(k.chunks[i][0]) >= 0 })-1)
	if chunk < len(k.chunks) {
		c := k.chunks[chunk]
		at = sort.Search(len(c), func(i int) bool { return cmp(c[i]) >= 0 })
	}
	return chunk, at
}

// insert adds a block at its place.
func (k *kids) insert(id evict.ID, cmp compare) {
	if len(k.chunks) == 0 {
		k.chunks = [][]evict.ID{{id}}
		return
	}
	i, at := k.place(cmp)
	c := slices.Insert(k.chunks[i], at, id)
	k.chunks[i] = c
	if len(c) > mostChunk {
		k.chunks[i] = slices.Clone(c[:len(c)/2])
		k.chunks = slices.Insert(k.chunks, i+1, slices.Clone(c[len(c)/2:]))
	}
}

// remove takes a block out, and says whether it was at its place.
func (k *kids) remove(id evict.ID, cmp compare) bool {
	i, at := k.place(cmp)
	if i < len(k.chunks) && at == len(k.chunks[i]) {
		i, at = i+1, 0
	}
	if i >= len(k.chunks) || k.chunks[i][at] != id {
		return false
	}
	if k.chunks[i] = slices.Delete(k.chunks[i], at, at+1); len(k.chunks[i]) == 0 {
		k.chunks = slices.Delete(k.chunks, i, i+1)
	}
	return true
}

// beside returns the blocks before and behind a place, of which there may be none.
func (k *kids) beside(cmp compare) (ids []evict.ID) {
	i, at := k.place(cmp)
	if i >= len(k.chunks) {
		return nil
	}
	if at > 0 {
		ids = append(ids, k.chunks[i][at-1])
	}
	if at < len(k.chunks[i]) {
		ids = append(ids, k.chunks[i][at])
	} else if i+1 < len(k.chunks) {
		ids = append(ids, k.chunks[i+1][0])
	}
	return ids
}

// tokensLocked are a block's token ids as they stand in the arena.
func (s *Store) tokensLocked(id evict.ID) []byte {
	e := &s.index.entries[id]
	return s.bytes(e.extent())[kvcache.IDsAt:][:4*e.tokens]
}

// compareTokens orders blocks by their tokens; a beginning comes before the whole.
func compareTokens(a, b []byte) int {
	for i := 0; i < len(a) && i < len(b); i += 4 {
		x, y := int32(binary.LittleEndian.Uint32(a[i:])), int32(binary.LittleEndian.Uint32(b[i:]))
		if x != y {
			if x < y {
				return -1
			}
			return 1
		}
	}
	return len(a) - len(b)
}

// kidsLocked returns the sorted children of a block if they are many, made now if
// there are none; nil if they are few. Those whose header is wrong are added to wrong.
func (s *Store) kidsLocked(parent kvcache.Key, wrong *[]evict.ID) *kids {
	if k := s.index.sorted[parent]; k != nil {
		return k
	}
	n := 0
	id, ok := s.index.children[parent]
	for ; ok && id != evict.None && n <= fewKids; id = s.index.entries[id].next {
		n++
	}
	if n <= fewKids {
		return nil
	}
	all := s.index.after(parent)
	good := all[:0]
	for _, id := range all {
		switch {
		case slices.Contains(*wrong, id):
		case s.checkLocked(&s.index.entries[id]):
			good = append(good, id)
		default:
			*wrong = append(*wrong, id)
		}
	}
	k := sortKids(good, func(a, b evict.ID) int { return compareTokens(s.tokensLocked(a), s.tokensLocked(b)) })
	s.index.sorted[parent] = k
	return k
}

// sortInLocked keeps the order when a block has come. Its header is right.
func (s *Store) sortInLocked(id evict.ID) {
	if k := s.index.sorted[s.index.entries[id].parent]; k != nil {
		own := s.tokensLocked(id)
		k.insert(id, func(o evict.ID) int { return compareTokens(s.tokensLocked(o), own) })
	}
}

// sortOutLocked keeps it when a block is about to go. Where it is not at its place,
// because somebody has changed the arena, the order is made anew when it is needed.
func (s *Store) sortOutLocked(id evict.ID) {
	e := &s.index.entries[id]
	k := s.index.sorted[e.parent]
	if k == nil {
		return
	}
	own := s.tokensLocked(id)
	if !k.remove(id, func(o evict.ID) int { return compareTokens(s.tokensLocked(o), own) }) || len(k.chunks) == 0 {
		delete(s.index.sorted, e.parent)
	}
}
