//go:build unix

package arena

import (
	"cmp"
	"encoding/binary"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
)

// entry is one block. It has no pointers, so that a million of them cost the garbage
// collector nothing; its tokens are in the arena.
type entry struct {
	key, parent kvcache.Key
	at          uint32 // first grain
	n           uint32
	size        int64 // of the frame in bytes
	first       int64
	tokens      uint32
	space       uint32
	next, prev  evict.ID // among the children of parent
	refs        uint32   // who reads it at the moment
	gen         uint32   // of the place, which is used again
	lease       int64    // until when it is spared after a look-up, in Unix milliseconds
	fresh       int64    // until when it is spared after it was put
	live        bool
	checked     bool // its header has been read and is right
}

func (e *entry) extent() extent { return extent{e.at, e.n} }

// index finds blocks by key and by parent. It is guarded by the store's lock.
type index struct {
	entries  []entry
	spare    []evict.ID
	byKey    map[kvcache.Key]evict.ID
	children map[kvcache.Key]evict.ID // the first one, by parent
	sorted   map[kvcache.Key]*kids    // by parent, where they are many
	spaces   []space
	spaceOf  map[kvcache.Space]uint32
	// spareSpaces are numbers of spaces that are free.
	spareSpaces []uint32
}

// space is one model and tenant. A number is given once per journal.
type space struct {
	kvcache.Space
	dropped bool
	spare   bool // its number is free
	// lengths are those of its blocks in tokens, longest first, and how many of each
	// there are. There are few.
	lengths []length
}

type length struct{ tokens, blocks uint32 }

// count notes a block more or less of a length.
func (sp *space) count(tokens uint32, blocks int32) {
	i, ok := slices.BinarySearchFunc(sp.lengths, tokens, func(l length, tokens uint32) int { return cmp.Compare(tokens, l.tokens) })
	if !ok {
		sp.lengths = slices.Insert(sp.lengths, i, length{tokens: tokens})
	}
	if sp.lengths[i].blocks += uint32(blocks); sp.lengths[i].blocks == 0 {
		sp.lengths = slices.Delete(sp.lengths, i, i+1)
	}
}

func newIndex() index {
	return index{byKey: map[kvcache.Key]evict.ID{}, children: map[kvcache.Key]evict.ID{}, sorted: map[kvcache.Key]*kids{}, spaceOf: map[kvcache.Space]uint32{}}
}

// reserve makes an empty index ready for some blocks.
func (x *index) reserve(blocks int) {
	x.entries = make([]entry, 0, blocks)
	x.byKey = make(map[kvcache.Key]evict.ID, blocks)
	x.children = make(map[kvcache.Key]evict.ID, blocks)
}

// insert puts a block into the index and returns its number. The key is not there.
func (x *index) insert(e entry) evict.ID {
	var id evict.ID
	if n := len(x.spare); n > 0 {
		id = x.spare[n-1]
		x.spare = x.spare[:n-1]
	} else {
		id = evict.ID(len(x.entries))
		x.entries = append(x.entries, entry{})
	}
	e.live, e.gen, e.prev, e.next = true, x.entries[id].gen, evict.None, evict.None
	if old, ok := x.children[e.parent]; ok {
		e.next = old
		x.entries[old].prev = id
	}
	x.children[e.parent] = id
	x.entries[id] = e
	x.byKey[e.key] = id
	x.spaces[e.space].count(e.tokens, 1)
	return id
}

// remove takes a block out.
func (x *index) remove(id evict.ID) {
	e := x.entries[id]
	if e.next != evict.None {
		x.entries[e.next].prev = e.prev
	}
	switch {
	case e.prev != evict.None:
		x.entries[e.prev].next = e.next
	case e.next != evict.None:
		x.children[e.parent] = e.next
	default:
		delete(x.children, e.parent)
	}
	delete(x.byKey, e.key)
	x.spaces[e.space].count(e.tokens, -1)
	x.entries[id] = entry{gen: e.gen + 1}
	x.spare = append(x.spare, id)
}

// after lists the blocks that follow one.
func (x *index) after(parent kvcache.Key) (ids []evict.ID) {
	id, ok := x.children[parent]
	for ; ok && id != evict.None; id = x.entries[id].next {
		ids = append(ids, id)
	}
	return ids
}

// ref is the full name of a block.
func (x *index) ref(e *entry) kvcache.Ref {
	return kvcache.Ref{Space: x.spaces[e.space].Space, Parent: e.parent, Key: e.key}
}

// walk is one look-up, under the store's lock.
type walk struct {
	s     *Store
	q     kvcache.Query
	space uint32
	wrong []evict.ID // blocks whose header is not right, found on the way
}

// reach is how far a look-up got below one block.
type reach struct {
	chain   []evict.ID // deepest first
	partial evict.ID   // counts where common > 0
	common  int        // tokens of partial
	tokens  int        // of the chain
}

// better says whether r goes further than o: by full blocks, then by the partial one,
// because not every engine can cut a block.
func (r reach) better(o reach) bool {
	return r.tokens > o.tokens || r.tokens == o.tokens && r.common > o.common
}

// from looks for blocks behind parent that the query's tokens from number at on begin
// with. Full ones are found by their key, for each length that there is; keys are a tree,
// hence none is met twice. Without one, a child that shares the most tokens is looked for.
func (w *walk) from(parent kvcache.Key, at int) (best reach) {
	rest := w.q.IDs[at:]
	for _, l := range w.s.index.spaces[w.space].lengths {
		if int(l.tokens) > len(rest) {
			continue
		}
		n := int(l.tokens)
		key := w.q.Key(parent, rest[:n])
		id, ok := w.s.index.byKey[key]
		if !ok || !w.isChild(id, parent, at) {
			continue
		}
		r := w.from(key, at+n)
		r.chain = append(r.chain, id)
		r.tokens += n
		if r.better(best) {
			best = r
		}
	}
	if best.tokens == 0 && len(rest) > 0 {
		return w.partial(parent, at)
	}
	return best
}

// isChild says whether a block follows parent at this place of the query, and is right.
func (w *walk) isChild(id evict.ID, parent kvcache.Key, at int) bool {
	e := &w.s.index.entries[id]
	if e.space != w.space || e.parent != parent || e.first != int64(w.q.First+at) || slices.Contains(w.wrong, id) {
		return false
	}
	if !w.s.checkLocked(e) {
		w.wrong = append(w.wrong, id)
		return false
	}
	return true
}

// partial looks for the child that shares the most tokens with the query.
func (w *walk) partial(parent kvcache.Key, at int) (best reach) {
	rest := w.q.IDs[at:]
	k := w.s.kidsLocked(parent, &w.wrong)
	var near []evict.ID
	if k == nil {
		near = w.s.index.after(parent)
	} else {
		own := make([]byte, 0, 4*len(rest))
		for _, id := range rest {
			own = binary.LittleEndian.AppendUint32(own, uint32(id))
		}
		near = k.beside(func(id evict.ID) int { return compareTokens(w.s.tokensLocked(id), own) })
	}
	for _, id := range near {
		if !w.isChild(id, parent, at) {
			continue
		}
		if n := w.s.commonLocked(&w.s.index.entries[id], rest); n > best.common {
			best = reach{partial: id, common: n}
		}
	}
	return best
}

// commonLocked counts the tokens that a block and a query begin with, by the block's
// header in the arena.
func (s *Store) commonLocked(e *entry, ids []int32) int {
	b := s.bytes(e.extent())[kvcache.IDsAt:]
	n := min(int(e.tokens), len(ids))
	for i := range n {
		if int32(binary.LittleEndian.Uint32(b[4*i:])) != ids[i] {
			return i
		}
	}
	return n
}

// checkLocked reads a block's header once per process: the index comes from a journal,
// and the arena may have been changed since.
func (s *Store) checkLocked(e *entry) bool {
	if e.checked {
		return true
	}
	h, err := kvcache.DecodeHeader(s.bytes(e.extent())[:e.size])
	if err == nil {
		err = h.Check(s.index.ref(e))
	}
	if err == nil && (h.Total != e.size || int64(h.First) != e.first || len(h.IDs) != int(e.tokens)) {
		err = &kvcache.Refusal{Reason: kvcache.ReasonTorn, Detail: "journal and frame differ"}
	}
	s.count.Refusal(err)
	e.checked = err == nil
	return e.checked
}

// matchLocked turns the best reach into an answer and notes the use of every block
// in it.
func (w *walk) matchLocked(end reach, now time.Time) kvcache.Match {
	m := kvcache.Match{Common: end.common}
	if len(end.chain) > 0 {
		m.Blocks = make([]kvcache.Found, 0, len(end.chain))
	}
	for _, id := range slices.Backward(end.chain) {
		m.Blocks = append(m.Blocks, w.foundLocked(id, now))
	}
	if end.common > 0 {
		m.Partial = w.foundLocked(end.partial, now)
	}
	return m
}

// foundLocked writes a block as look-ups return it, and spares it for a while.
func (w *walk) foundLocked(id evict.ID, now time.Time) kvcache.Found {
	e := &w.s.index.entries[id]
	w.s.policy.Use(id)
	e.lease = now.Add(w.s.cfg.Lease).UnixMilli()
	return kvcache.Found{Ref: w.s.index.ref(e), First: int(e.first), Tokens: int(e.tokens), Size: e.size}
}
