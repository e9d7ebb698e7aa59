//go:build unix

package nvmetier

import (
	"cmp"
	"encoding/binary"
	"slices"
	"sort"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// placed is a block with its space.
type placed struct {
	space kvcache.Space
	block
}

// ref is the block's full name.
func (p *placed) ref() kvcache.Ref {
	return kvcache.Ref{Space: p.space, Parent: p.parent, Key: p.key}
}

// entry is one block in the index. It has no pointers, so that a million of them cost the
// garbage collector little.
type entry struct {
	block
	space evict.Owner
	fresh int64 // until when it is spared, in ms since 1970
	live  bool
}

// index knows which blocks there are, and which leaves first. It does no I/O and is guarded
// by the store's lock.
type index struct {
	entries  []entry
	spare    []evict.ID
	byKey    map[kvcache.Key]evict.ID
	children map[kvcache.Key][]evict.ID // by parent, in the order of their first tokens
	spaces   []kvcache.Space
	spaceOf  map[kvcache.Space]evict.Owner
	policy   *evict.Policy
	used     int64 // bytes, with what is being written
	// headers are those that were read, without their parts. Beyond mostHeaders it is
	// begun anew.
	headers map[kvcache.Key]*kvcache.Header
	models  map[kvcache.Fingerprint]*model
	judged  time.Time // when dead versions were last looked for
}

const (
	mostHeaders = 1 << 16
	// freshFor is how long a block that has just come is spared while there are others.
	freshFor = 2 * time.Second
	// passed is how many blocks that are spared a search passes over.
	passed = 128
)

func newIndex(quota int64) index {
	return index{
		byKey: map[kvcache.Key]evict.ID{}, children: map[kvcache.Key][]evict.ID{}, spaceOf: map[kvcache.Space]evict.Owner{},
		policy: evict.New(evict.Config{Quota: quota}), headers: map[kvcache.Key]*kvcache.Header{},
		models: map[kvcache.Fingerprint]*model{},
	}
}

// fill takes in what was found, in the order in which it was written, and returns what is
// there twice.
func (x *index) fill(found []placed) (twice []placed) {
	slices.SortFunc(found, func(a, b placed) int { return cmp.Or(cmp.Compare(a.put, b.put), cmp.Compare(a.first, b.first)) })
	for _, p := range found {
		if _, ok := x.byKey[p.key]; ok {
			twice = append(twice, p)
			continue
		}
		x.used += pages(p.size)
		x.insert(p, time.Time{})
	}
	return twice
}

// get returns the entry of a key, nil if there is none.
func (x *index) get(key kvcache.Key) *entry {
	if id, ok := x.byKey[key]; ok {
		return &x.entries[id]
	}
	return nil
}

// placed is an entry with its space.
func (x *index) placed(e *entry) placed { return placed{x.spaces[e.space], e.block} }

// insert puts a block in, whose bytes are counted already. Blocks may come in any order.
func (x *index) insert(p placed, now time.Time) {
	owner, ok := x.spaceOf[p.space]
	if !ok {
		owner = evict.Owner(len(x.spaces))
		x.spaces = append(x.spaces, p.space)
		x.spaceOf[p.space] = owner
	}
	var id evict.ID
	if n := len(x.spare); n > 0 {
		id, x.spare = x.spare[n-1], x.spare[:n-1]
	} else {
		id = evict.ID(len(x.entries))
		x.entries = append(x.entries, entry{})
	}
	x.entries[id] = entry{block: p.block, space: owner, fresh: now.Add(freshFor).UnixMilli(), live: true}
	x.byKey[p.key] = id
	kids := x.children[p.parent]
	at := x.place(kids, p.begin[:p.n])
	x.children[p.parent] = slices.Insert(kids, at, id)
	parent := evict.None
	if up, ok := x.byKey[p.parent]; ok && x.entries[up].space == owner {
		parent = up
	}
	x.policy.Add(id, evict.Item{Name: binary.LittleEndian.Uint64(p.key[:]), Size: pages(p.size), Parent: parent, Owner: owner})
	for _, child := range x.children[p.key] {
		if x.entries[child].space == owner {
			x.policy.Adopt(child, id)
		}
	}
}

// place is where among children the first stands that does not come before some tokens.
func (x *index) place(kids []evict.ID, begin []int32) int {
	return sort.Search(len(kids), func(i int) bool {
		e := &x.entries[kids[i]]
		return compareBegin(e.begin[:e.n], begin) >= 0
	})
}

// take takes a block out, and its bytes with it. The policy is told whether it was evicted.
func (x *index) take(id evict.ID, evicted bool) placed {
	e := x.entries[id]
	p := x.placed(&e)
	for _, child := range x.children[e.key] {
		if x.entries[child].space == e.space {
			x.policy.Adopt(child, evict.None)
		}
	}
	kids := x.children[e.parent]
	at := slices.Index(kids[x.place(kids, e.begin[:e.n]):], id) + x.place(kids, e.begin[:e.n])
	if kids = slices.Delete(kids, at, at+1); len(kids) == 0 {
		delete(x.children, e.parent)
	} else {
		x.children[e.parent] = kids
	}
	delete(x.byKey, e.key)
	delete(x.headers, e.key)
	if evicted {
		x.policy.Evict(id)
	} else {
		x.policy.Remove(id)
	}
	x.entries[id] = entry{}
	x.spare = append(x.spare, id)
	x.used -= pages(e.size)
	return p
}

// victim takes out the block that is to leave next, but not the one that is to be followed.
func (x *index) victim(follow kvcache.Key, now time.Time) (placed, bool) {
	keep, ok := x.byKey[follow]
	if !ok {
		keep = evict.None
	}
	x.judge(now)
	ms := now.UnixMilli()
	id, ok := x.policy.Victim(evict.Filter{Most: passed, Busy: func(id evict.ID) bool { return id == keep || x.entries[id].fresh > ms }})
	if !ok {
		id, ok = x.policy.Victim(evict.Filter{Busy: func(id evict.ID) bool { return id == keep }})
	}
	if !ok {
		return placed{}, false
	}
	return x.take(id, true), true
}

// use notes a use of a block.
func (x *index) use(key kvcache.Key, now time.Time) {
	id, ok := x.byKey[key]
	if !ok {
		return
	}
	x.policy.Use(id)
	if m := x.models[x.spaces[x.entries[id].space].Fingerprint]; m != nil {
		m.used = now
	}
}

// drop takes out all blocks of a model.
func (x *index) drop(f kvcache.Fingerprint) {
	for id := range x.entries {
		if e := &x.entries[id]; e.live && x.spaces[e.space].Fingerprint == f {
			x.take(evict.ID(id), false)
		}
	}
	delete(x.models, f)
}

// learn remembers a header, without its parts, which look-ups do not need.
func (x *index) learn(h *kvcache.Header) {
	if len(x.headers) >= mostHeaders {
		clear(x.headers)
	}
	short := *h
	short.Parts = nil
	x.headers[h.Key] = &short
}

// list answers an ask for children: those in a space whose first tokens begin with some,
// at most remote.Page.
func (x *index) list(space kvcache.Space, parent kvcache.Key, begin []int32) (found []remote.Entry) {
	kids := x.children[parent]
	for _, id := range kids[x.place(kids, begin):] {
		e := &x.entries[id]
		if e.n < len(begin) || !slices.Equal(e.begin[:len(begin)], begin) || len(found) == remote.Page {
			break
		}
		if x.spaces[e.space] == space {
			found = append(found, e.entry())
		}
	}
	return found
}
