//go:build unix

package kvrpc

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// tailTable has the tails that peers have opened, by the numbers that peers know them by.
// It is safe for concurrent use.
type tailTable struct {
	store  kvcache.Tails // nil = the store has no tails
	resume func(context.Context, uint64, int) (kvcache.TailWriter, error)
	most   int

	mu   sync.Mutex
	open map[uint64]*openTail
	// last is the last number that was given to a tail of a store that numbers none. It
	// begins at random: a number of a server before this one is not known.
	last uint64
}

// openTail is one tail with its writer.
type openTail struct {
	mu   sync.Mutex // held while the writer works
	w    kvcache.TailWriter
	next int // position behind the last range
	// first, sum and the length of what was appended last: it may be sent again by who has
	// not heard of it.
	last struct {
		first, tokens int
		sum           uint64
	}

	used time.Time // guarded by the table
}

// numbered is a writer of a tail that its store has numbered.
type numbered interface{ No() uint64 }

// errNoTails says that the store has no tails.
var errNoTails = errors.New("the store keeps no tails")

func newTailTable(store kvcache.Tails, cfg ServerConfig) *tailTable {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return &tailTable{store: store, resume: cfg.Resume, most: cfg.Tails, open: map[uint64]*openTail{}, last: binary.LittleEndian.Uint64(b[:])}
}

// close closes all writers.
func (t *tailTable) close() {
	t.mu.Lock()
	open := t.open
	t.open = map[uint64]*openTail{}
	t.mu.Unlock()
	for _, o := range open {
		o.end()
	}
}

// end closes a writer.
func (o *openTail) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	_ = o.w.Close() // what was written stays
}

// add remembers a writer that goes on at a position, and returns its tail's number.
func (t *tailTable) add(w kvcache.TailWriter, next int) (no uint64, o *openTail) {
	o = &openTail{w: w, next: next, used: time.Now()}
	t.mu.Lock()
	var oldest *openTail
	if len(t.open) >= t.most {
		oldest = t.oldestLocked()
	}
	if n, ok := w.(numbered); ok && t.resume != nil {
		no = n.No()
	} else {
		t.last++
		no = t.last
	}
	t.open[no] = o
	t.mu.Unlock()
	if oldest != nil {
		oldest.end()
	}
	return no, o
}

// oldestLocked forgets the tail that has not been used for longest.
func (t *tailTable) oldestLocked() *openTail {
	var oldest *openTail
	var no uint64
	for n, o := range t.open {
		if oldest == nil || o.used.Before(oldest.used) {
			oldest, no = o, n
		}
	}
	delete(t.open, no)
	return oldest
}

// get returns the tail of a number, at a position if it is not known and its store can
// have that.
func (t *tailTable) get(ctx context.Context, no uint64, next int) (*openTail, error) {
	t.mu.Lock()
	o := t.open[no]
	if o != nil {
		o.used = time.Now()
	}
	t.mu.Unlock()
	if o != nil {
		return o, nil
	}
	if t.resume == nil {
		return nil, errUnknown
	}
	w, err := t.resume(ctx, no, next)
	if err != nil {
		return nil, err
	}
	_, o = t.add(w, next)
	return o, nil
}

// begin opens a tail.
func (t *tailTable) begin(ctx context.Context, spec kvcache.TailSpec) (uint64, error) {
	if t.store == nil {
		return 0, errNoTails
	}
	w, err := t.store.OpenTail(ctx, spec)
	if err != nil {
		return 0, err
	}
	no, _ := t.add(w, spec.First)
	return no, nil
}

// append appends a range at the place that the peer knows. Usually that is where the
// writer is; else the peer has not heard of its last append, which is then replaced, or
// recognized.
func (t *tailTable) append(no uint64, r kvcache.Range) error {
	ctx := context.Background()
	o, err := t.get(ctx, no, r.First)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if r.First == o.next {
		err = o.append(r)
	} else if r.First == o.last.first && o.last.tokens == len(r.IDs) && o.last.sum == kvcache.Sum(r.Data) {
		return nil
	} else {
		err = kvcache.ErrGap
	}
	if !errors.Is(err, kvcache.ErrGap) || t.resume == nil {
		return err
	}
	w, err := t.resume(ctx, no, r.First)
	if err != nil {
		return err
	}
	o.w, o.next = w, r.First
	return o.append(r)
}

// append appends a range where the writer is.
func (o *openTail) append(r kvcache.Range) error {
	err := o.w.Append(r)
	if err == nil {
		o.next = r.First + len(r.IDs)
		o.last.first, o.last.tokens, o.last.sum = r.First, len(r.IDs), kvcache.Sum(r.Data)
	}
	return err
}

// rotate begins a tail anew and returns its number from here on.
func (t *tailTable) rotate(ctx context.Context, no uint64, next int, parent kvcache.Key, first int) (uint64, error) {
	o, err := t.get(ctx, no, next)
	if err != nil {
		return 0, err
	}
	o.mu.Lock()
	err = o.w.Rotate(parent, first)
	if err == nil {
		o.next, o.last.tokens = first, 0
	}
	n, ok := o.w.(numbered)
	o.mu.Unlock()
	if err != nil || !ok || t.resume == nil {
		return no, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.open, no)
	t.open[n.No()] = o
	return n.No(), nil
}

// end ends the writing to a tail. One that is not known has ended already.
func (t *tailTable) end(no uint64) {
	t.mu.Lock()
	o := t.open[no]
	delete(t.open, no)
	t.mu.Unlock()
	if o != nil {
		o.end()
	}
}

// read returns what is whole of the tails of a choice.
func (t *tailTable) read(ctx context.Context, s kvcache.Space, stream string, choice int) ([]kvcache.Tail, error) {
	if t.store == nil {
		return nil, nil
	}
	return t.store.ReadTail(ctx, s, stream, choice)
}

// drop forgets all tails of a stream.
func (t *tailTable) drop(ctx context.Context, s kvcache.Space, stream string) error {
	if t.store == nil {
		return nil
	}
	return t.store.DropTail(ctx, s, stream)
}
