//go:build unix

package dirstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// index keeps folders of blocks that this process has read. A listing is never
// changed, only replaced, so look-ups use it without the lock.
type index struct {
	mu sync.RWMutex
	// folders is guarded by mu; nil is empty.
	folders map[folder]*listing
}

// folder names the children of one block.
type folder struct {
	model  kvcache.Fingerprint
	parent kvcache.Key
}

// listing is the content of a folder at one generation. It does not change.
type listing struct {
	generation uint32
	read       time.Time
	children   []*child
}

// child is one block in a folder, as its header says. It is shared by all
// listings of its folder, and but for used it does not change.
type child struct {
	// root is the tenant's; a folder may in theory hold blocks of several.
	root kvcache.Key
	key  kvcache.Key
	// first and ids are the tokens, size the length of the file.
	first int
	ids   []int32
	size  int64
	// used is the Unix second in which this process last marked the file as used.
	used atomic.Int64
}

const (
	// maxFolders bounds the index; beyond it the index starts anew.
	maxFolders = 1 << 16
	// maxListing is the age at which a listing is read again whatever its
	// generation: a process may have died between a change and its word.
	maxListing = 5 * time.Second
)

// Longest implements kvcache.Store.
func (s *Store) Longest(ctx context.Context, q kvcache.Query) (kvcache.Match, error) {
	if err := s.enter(ctx); err != nil {
		return kvcache.Match{}, err
	}
	defer s.leave()
	s.count.Lookups.Add(1)
	if q.From == (kvcache.Key{}) {
		q.From = q.Root
	}
	// What a walk finds before its context ends, or before a folder that cannot be
	// read, is a chain all the same.
	w := walk{ctx: ctx, s: s, q: q, now: time.Now()}
	end := w.from(q.From, 0)
	if w.err != nil && len(end.chain) == 0 {
		return kvcache.Match{}, s.count.Failure(fmt.Errorf("look up: %w", w.err))
	}
	m := w.match(end)
	s.count.LookupTokens.Add(uint64(end.tokens + end.common))
	return m, nil
}

// walk is one look-up.
type walk struct {
	ctx context.Context
	s   *Store
	q   kvcache.Query
	now time.Time
	err error // the first folder that could not be read
}

// reach is how far a look-up got below one block.
type reach struct {
	chain   []*child // deepest first
	partial *child
	common  int // tokens of partial
	tokens  int // of the chain
}

// better says whether r goes further than o: by full blocks, then by the partial
// one, because not every engine can cut a block.
func (r reach) better(o reach) bool {
	return r.tokens > o.tokens || r.tokens == o.tokens && r.common > o.common
}

// from looks at the children of parent for the query's tokens from number at on.
// Blocks of several sizes may lie side by side, so each that fits is followed;
// keys are a tree, hence none is met twice.
func (w *walk) from(parent kvcache.Key, at int) reach {
	var best reach
	if w.ctx.Err() != nil || at == len(w.q.IDs) {
		return best
	}
	children, err := w.s.children(w.q.Fingerprint, parent, w.now)
	if err != nil && w.err == nil {
		w.err = err
	}
	rest := w.q.IDs[at:]
	for _, c := range children {
		if c.root != w.q.Root || c.first != w.q.First+at {
			continue
		}
		var r reach
		if n := common(c.ids, rest); n == len(c.ids) {
			r = w.from(c.key, at+n)
			r.chain = append(r.chain, c)
			r.tokens += n
		} else if n > 0 {
			r = reach{partial: c, common: n}
		}
		if r.better(best) {
			best = r
		}
	}
	return best
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

// match turns the best reach into an answer and marks its end as used, which
// covers the blocks before it too.
func (w *walk) match(end reach) kvcache.Match {
	m := kvcache.Match{Common: end.common}
	parent := w.q.From
	if len(end.chain) > 0 {
		m.Blocks = make([]kvcache.Found, 0, len(end.chain))
	}
	for _, c := range slices.Backward(end.chain) {
		m.Blocks = append(m.Blocks, c.found(w.q.Space, parent))
		parent = c.key
	}
	if n := len(m.Blocks); n > 0 {
		w.s.use(m.Blocks[n-1].Ref, end.chain[0], w.now)
	}
	if end.partial != nil {
		m.Partial = end.partial.found(w.q.Space, parent)
		w.s.use(m.Partial.Ref, end.partial, w.now)
	}
	return m
}

// found writes a child as look-ups return it.
func (c *child) found(space kvcache.Space, parent kvcache.Key) kvcache.Found {
	return kvcache.Found{
		Ref:   kvcache.Ref{Space: space, Parent: parent, Key: c.key},
		First: c.first, Tokens: len(c.ids), Size: c.size,
	}
}

// use marks a block as used now, at most once a second.
func (s *Store) use(ref kvcache.Ref, c *child, now time.Time) {
	if second := now.Unix(); c.used.Swap(second) != second {
		_ = s.root.Chtimes(blockName(ref), now, now) // a hint for eviction only
	}
}

// children returns the blocks that follow parent, from memory where the folder
// has not changed.
func (s *Store) children(model kvcache.Fingerprint, parent kvcache.Key, now time.Time) ([]*child, error) {
	at := folder{model, parent}
	// Before the folder is read: what changes meanwhile makes it old at once.
	generation := s.control.generation(parent)
	s.index.mu.RLock()
	old := s.index.folders[at]
	s.index.mu.RUnlock()
	if old != nil && old.generation == generation && now.Sub(old.read) < maxListing {
		return old.children, nil
	}
	// Without the lock: two look-ups may read the same folder, and both are right.
	fresh, err := s.list(at, old)
	if err != nil {
		return nil, err
	}
	s.index.keep(at, &listing{generation, now, fresh})
	return fresh, nil
}

// keep stores a listing.
func (x *index) keep(at folder, l *listing) {
	x.mu.Lock()
	defer x.mu.Unlock()
	// All at once rather than the oldest: it is rare, and a listing costs some
	// microseconds to read again.
	if x.folders == nil || len(x.folders) >= maxFolders {
		x.folders = map[folder]*listing{}
	}
	x.folders[at] = l
}

// forget makes the next look-up read a folder again.
func (x *index) forget(model kvcache.Fingerprint, parent kvcache.Key) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.folders, folder{model, parent})
}

// forgetModel does it for all folders of a model.
func (x *index) forgetModel(model kvcache.Fingerprint) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for at := range x.folders {
		if at.model == model {
			delete(x.folders, at)
		}
	}
}

// list reads a folder. Headers that an older listing has are not read again,
// since files never change.
func (s *Store) list(at folder, old *listing) ([]*child, error) {
	dir, err := s.root.Open(childrenDir(at.model, at.parent))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // removed after it was opened
	}
	if err != nil {
		return nil, err
	}
	known := map[kvcache.Key]*child{}
	if old != nil {
		for _, c := range old.children {
			known[c.key] = c
		}
	}
	var children []*child
	for _, name := range names {
		key, err := kvcache.ParseKey(name)
		if err != nil {
			continue // not ours; no look-up finds it
		}
		c := known[key]
		if c == nil {
			c = s.readChild(at, key)
		}
		if c != nil {
			children = append(children, c)
		}
	}
	return children, nil
}

// readChild reads the header of a block's file, or returns nil if there is none
// that can be used.
func (s *Store) readChild(at folder, key kvcache.Key) *child {
	ref := kvcache.Ref{Space: kvcache.Space{Fingerprint: at.model}, Parent: at.parent, Key: key}
	file, err := s.openRegular(blockName(ref), os.O_RDONLY)
	if _, refused := errors.AsType[*kvcache.Refusal](err); refused {
		s.count.Refusal(err)
		s.removeBlock(ref, 0)
		return nil
	}
	if err != nil {
		return nil // evicted meanwhile
	}
	defer file.Close()
	h, size, err := readHeader(file)
	if err == nil {
		// Tenants share a folder only by chance of a hash, so the root is taken
		// from the file and compared by each look-up.
		ref.Root = h.Root
		err = h.Check(ref)
	}
	if err == nil {
		return &child{root: h.Root, key: key, first: h.First, ids: h.IDs, size: size}
	}
	// A header that is wrong, or lies under another's name, makes its file useless
	// for everybody. A file that cannot be read may be readable later.
	if _, ok := s.count.Refusal(err); ok {
		s.removeBlock(ref, size)
	} else {
		s.count.Failure(err)
	}
	return nil
}

// readHeader reads the header of a frame and the size of its file, which must be
// that of the frame.
func readHeader(file *os.File) (kvcache.Header, int64, error) {
	st, err := file.Stat()
	if err != nil {
		return kvcache.Header{}, 0, err
	}
	size := st.Size()
	var first [2048]byte // enough for blocks of the usual size
	n, err := file.ReadAt(first[:], 0)
	if err != nil && err != io.EOF {
		return kvcache.Header{}, size, err
	}
	b := first[:n]
	need, err := kvcache.HeaderNeed(b)
	if err == nil && need > len(b) && int64(need) <= size {
		b = make([]byte, need)
		if _, err := file.ReadAt(b, 0); err != nil {
			return kvcache.Header{}, size, err
		}
	}
	h, err := kvcache.DecodeHeader(b)
	if err == nil && h.Total != size {
		err = &kvcache.Refusal{Reason: kvcache.ReasonTorn, Detail: "file and frame differ in length"}
	}
	return h, size, err
}
