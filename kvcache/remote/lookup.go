package remote

import (
	"context"
	"errors"
	"sync"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Page is the most children that one ask is answered with.
const Page = 1000

// Ask is for the children of a block whose names begin with a prefix.
type Ask struct {
	Parent kvcache.Key
	Prefix string
}

// Child is an entry with its parent.
type Child struct {
	Parent kvcache.Key
	Entry
}

// Source reads what look-ups need of a store, each call as few round trips as it can.
type Source interface {
	// List answers each ask with at most Page entries, in the order of their names.
	List(ctx context.Context, space kvcache.Space, asks []Ask) ([][]Entry, error)
	// Headers reads and verifies the headers of blocks that listings name. nil stands
	// for one that is not there or was refused, which the source deals with.
	Headers(ctx context.Context, space kvcache.Space, children []Child) ([]*kvcache.Header, error)
}

// Finder looks up chains in a source. It is safe for concurrent use.
type Finder struct {
	Source Source
	// Ahead is how many blocks ahead the first batch asks for; later ones ask for more.
	Ahead int

	mu   sync.Mutex
	size int // tokens of the last block that was followed; 0 is 64
	// wide are blocks with more children than a page.
	wide map[kvcache.Key]bool
}

// The limits of what a look-up asks for.
const (
	maxAhead  = 128  // blocks in one batch
	maxWide   = 4096 // parents that are remembered as wide
	maxShared = 64   // headers that are read to find the best partial block
)

// Longest looks up as kvcache.Store.Longest does. Where ctx ends, or the source fails,
// it returns what is verified by then, and the error only if that is nothing.
func (f *Finder) Longest(ctx context.Context, q kvcache.Query) (kvcache.Match, error) {
	if q.From == (kvcache.Key{}) {
		q.From = q.Root
	}
	w := walk{ctx: ctx, f: f, q: q, lists: map[kvcache.Key][]*child{}, ahead: f.Ahead}
	for w.err == nil {
		w.missing, w.shared = w.missing[:0], w.shared[:0]
		end := w.from(q.From, 0, 0)
		if len(w.missing) > 0 {
			w.err = w.list()
		} else if need := w.unread(end); len(need) > 0 {
			w.err = w.read(need)
		} else {
			f.learn(end)
			return w.match(end), nil
		}
	}
	w.final = true
	m := w.match(w.from(q.From, 0, 0))
	if len(m.Blocks) == 0 && m.Common == 0 {
		return m, w.err
	}
	return m, nil
}

// learn remembers the size of blocks for the next guess.
func (f *Finder) learn(end reach) {
	if len(end.chain) > 0 {
		f.mu.Lock()
		f.size = end.chain[0].Tokens
		f.mu.Unlock()
	}
}

// guess is the size of the next block.
func (f *Finder) guess() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.size == 0 {
		return 64
	}
	return f.size
}

// prefixes are what to ask for of a parent's children: all, or where they are too many
// those that share the most tokens with ids.
func (f *Finder) prefixes(q *kvcache.Query, parent kvcache.Key, at int) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.wide[parent] {
		return []string{""}
	}
	ids := q.Behind(parent, at, min(MaxBegin, len(q.IDs)-at))
	var list []string
	for n := MaxBegin; n > 0; n /= 2 {
		list = append(list, Prefix(ids, n))
	}
	return list
}

// widen notes that a parent has more children than a page.
func (f *Finder) widen(parent kvcache.Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.wide == nil || len(f.wide) >= maxWide {
		f.wide = map[kvcache.Key]bool{}
	}
	f.wide[parent] = true
}

// child is one block below a parent, as far as it is known.
type child struct {
	Child
	header *kvcache.Header // nil until it was read
	bad    bool            // it was not there, or not good
	seen   bool            // the next two are known
	full   bool            // all of its tokens are in the query
	common int             // how many are, as far as the name tells
}

// walk is one look-up.
type walk struct {
	ctx   context.Context
	f     *Finder
	q     kvcache.Query
	lists map[kvcache.Key][]*child
	ahead int
	err   error
	// final leaves out what was not verified.
	final bool

	missing []place  // parents that were met and not listed yet
	shared  []shared // children of which the name tells too little
}

// place is a block of the chain and where in the query the tokens after it begin.
type place struct {
	key kvcache.Key
	at  int
}

// shared is a child that may share more tokens than its name tells.
type shared struct {
	c      *child
	tokens int // of the chain before it
}

// reach is how far a look-up got below one block.
type reach struct {
	chain   []*child // deepest first
	partial *child
	common  int // tokens of partial
	tokens  int // of the chain
}

// better says whether r goes further than o: by full blocks, then by the partial one.
func (r reach) better(o reach) bool {
	return r.tokens > o.tokens || r.tokens == o.tokens && r.common > o.common
}

// from looks at the children of a parent for the query's tokens from number at on.
func (w *walk) from(parent kvcache.Key, at, tokens int) (best reach) {
	if at == len(w.q.IDs) {
		return best
	}
	children, listed := w.lists[parent]
	if !listed {
		w.missing = append(w.missing, place{parent, at})
	}
	for _, c := range children {
		if c.bad || c.First != w.q.First+at || w.final && c.header == nil {
			continue
		}
		c.compare(&w.q, at)
		var r reach
		switch {
		case c.full:
			r = w.from(c.Key, at+c.Tokens, tokens+c.Tokens)
			r.chain = append(r.chain, c)
			r.tokens += c.Tokens
		case c.common > 0:
			r = reach{partial: c, common: c.common}
			if c.header == nil && c.common == len(c.Begin) {
				w.shared = append(w.shared, shared{c, tokens})
			}
		}
		if r.better(best) {
			best = r
		}
	}
	return best
}

// compare finds out what a child has in common with the query's tokens from at on. That
// a child has all its tokens in common is proved by its key.
func (c *child) compare(q *kvcache.Query, at int) {
	rest := len(q.IDs) - at
	if c.seen && (c.full || c.header == nil) {
		return
	}
	c.seen = true
	if c.common = common(c.Begin, q.Behind(c.Parent, at, min(len(c.Begin), rest))); c.common < len(c.Begin) {
		return
	}
	if c.Tokens <= rest && q.KeyBehind(c.Parent, at, c.Tokens) == c.Key {
		c.full, c.common = true, c.Tokens
	} else if c.header != nil {
		c.common = common(c.header.IDs, q.Behind(c.Parent, at, min(c.Tokens, rest)))
	} else if c.Tokens == len(c.Begin) {
		c.common = 0 // its name does not tell its tokens: it lies
	}
}

// common counts the tokens that two runs begin with.
func common(a, b []int32) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// list reads the children of the parents that were met, and of those that will be if
// blocks go on to be as long as they were.
func (w *walk) list() error {
	var asks []Ask
	asked := map[kvcache.Key]bool{}
	size := w.f.guess()
	for _, p := range w.missing {
		key := p.key
		for at := p.at; at < len(w.q.IDs) && len(asked) < w.ahead+len(w.missing); at += size {
			if _, listed := w.lists[key]; !listed && !asked[key] {
				asked[key] = true
				for _, prefix := range w.f.prefixes(&w.q, key, at) {
					asks = append(asks, Ask{key, prefix})
				}
			}
			if at+size > len(w.q.IDs) {
				break
			}
			key = w.q.KeyBehind(key, at, size)
		}
	}
	w.ahead = min(4*w.ahead, maxAhead)
	answers, err := w.f.Source.List(w.ctx, w.q.Space, asks)
	if err != nil {
		return err
	}
	for key := range asked {
		w.lists[key] = nil
	}
	for i, entries := range answers {
		parent := asks[i].Parent
		if len(entries) >= Page && asks[i].Prefix == "" {
			w.f.widen(parent)
			delete(w.lists, parent) // and asked again, for less
			continue
		}
		w.add(parent, entries)
	}
	return nil
}

// add notes children of a parent; asks that overlap name some of them twice.
func (w *walk) add(parent kvcache.Key, entries []Entry) {
	have := map[kvcache.Key]bool{}
	for _, c := range w.lists[parent] {
		have[c.Key] = true
	}
	for _, e := range entries {
		if !have[e.Key] {
			w.lists[parent] = append(w.lists[parent], &child{Child: Child{parent, e}})
		}
	}
}

// unread are the blocks whose headers are to be read before the answer is one.
func (w *walk) unread(end reach) (need []*child) {
	for _, c := range end.chain {
		if c.header == nil {
			need = append(need, c)
		}
	}
	if end.partial != nil && end.partial.header == nil {
		need = append(need, end.partial)
	}
	for _, s := range w.shared {
		if s.tokens == end.tokens && s.c != end.partial && len(need) < len(end.chain)+maxShared {
			need = append(need, s.c)
		}
	}
	return need
}

// read reads headers.
func (w *walk) read(need []*child) error {
	children := make([]Child, len(need))
	for i, c := range need {
		children[i] = c.Child
	}
	headers, err := w.f.Source.Headers(w.ctx, w.q.Space, children)
	if err != nil {
		return err
	}
	if len(headers) != len(need) {
		return errors.New("headers of another number of blocks")
	}
	for i, h := range headers {
		c := need[i]
		ref := kvcache.Ref{Space: w.q.Space, Parent: c.Parent, Key: c.Key}
		// A name that says something else than its block would lead astray.
		c.header, c.bad = h, h == nil || h.Check(ref) != nil || EntryOf(h).Name() != c.Name()
	}
	return nil
}

// match turns the best reach into an answer.
func (w *walk) match(end reach) kvcache.Match {
	m := kvcache.Match{}
	for i := len(end.chain) - 1; i >= 0; i-- {
		m.Blocks = append(m.Blocks, end.chain[i].found())
	}
	if end.partial != nil {
		m.Partial, m.Common = end.partial.found(), end.common
	}
	return m
}

// found is a child as look-ups return it.
func (c *child) found() kvcache.Found {
	return kvcache.Found{Ref: c.header.Ref, First: c.First, Tokens: c.Tokens, Size: c.header.Total}
}
