package stack

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// memStore is a plain store in memory that can be slow, away and wrong. It is safe for
// concurrent use.
type memStore struct {
	mu     sync.Mutex
	blocks map[kvcache.Key]*kvcache.Frame
	order  []kvcache.Key // as they came
	reads  map[kvcache.Key]int
	looks  int
	most   int // blocks; beyond it the oldest goes. 0 = no limit, -1 = always full

	delay time.Duration // of every call
	late  time.Duration // of a block, on its way from or to the store
	slow  time.Duration // of Drop, until the blocks go
	hang  chan struct{} // calls wait until it is closed, whatever their context says; nil = they do not
	stuck chan struct{} // likewise, but only Get
	err   error         // of every call
	rot   bool          // what is read is flipped
}

func newMem() *memStore {
	return &memStore{blocks: map[kvcache.Key]*kvcache.Frame{}, reads: map[kvcache.Key]int{}}
}

// enter is the beginning of every call.
func (m *memStore) enter() error {
	m.mu.Lock()
	delay, hang, err := m.delay, m.hang, m.err
	m.mu.Unlock()
	if delay > 0 {
		<-time.After(delay)
	}
	if hang != nil {
		<-hang
	}
	return err
}

// wait lets the time pass that the store takes for something.
func (m *memStore) wait(of func(*memStore) time.Duration) {
	m.mu.Lock()
	d := of(m)
	m.mu.Unlock()
	if d > 0 {
		<-time.After(d)
	}
}

// set changes the store's ways.
func (m *memStore) set(change func(*memStore)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(m)
}

// Put implements kvcache.Store.
func (m *memStore) Put(_ context.Context, f *kvcache.Frame) error {
	if err := m.enter(); err != nil {
		return err
	}
	m.wait(func(m *memStore) time.Duration { return m.late })
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.blocks[f.Key] != nil {
		return nil
	}
	if m.most < 0 {
		return kvcache.ErrFull
	}
	own, err := kvcache.Decode(bytes.Clone(f.Bytes()), f.Ref)
	if err != nil {
		return err
	}
	m.blocks[f.Key] = own
	m.order = append(m.order, f.Key)
	if m.most > 0 && len(m.order) > m.most {
		delete(m.blocks, m.order[0])
		m.order = m.order[1:]
	}
	return nil
}

// Longest implements kvcache.Store.
func (m *memStore) Longest(_ context.Context, q kvcache.Query) (match kvcache.Match, err error) {
	if err := m.enter(); err != nil {
		return match, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.looks++
	if q.From == (kvcache.Key{}) {
		q.From = q.Root
	}
	for at := 0; ; {
		found := false
		for _, f := range m.blocks {
			if f.Parent != q.From || f.Space != q.Space {
				continue
			}
			n := 0
			for n < len(f.IDs) && at+n < len(q.IDs) && f.IDs[n] == q.IDs[at+n] {
				n++
			}
			b := kvcache.Found{Ref: f.Ref, First: f.First, Tokens: len(f.IDs), Size: f.Total}
			if n == len(f.IDs) {
				match.Blocks, match.Common = append(match.Blocks, b), 0
				at, q.From, found = at+n, f.Key, true
				break
			} else if n > match.Common {
				match.Common, match.Partial = n, b
			}
		}
		if !found {
			return match, nil
		}
	}
}

// Get implements kvcache.Store.
func (m *memStore) Get(_ context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	if err := m.enter(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	stuck := m.stuck
	m.mu.Unlock()
	if stuck != nil {
		<-stuck
	}
	l, err := m.lend(ref)
	m.wait(func(m *memStore) time.Duration { return m.late })
	return l, err
}

// lend reads a block.
func (m *memStore) lend(ref kvcache.Ref) (*kvcache.Lent, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reads[ref.Key]++
	f := m.blocks[ref.Key]
	if f == nil || f.Ref != ref {
		return nil, fmt.Errorf("block %s: %w", ref.Key, kvcache.ErrNotFound)
	}
	b := bytes.Clone(f.Bytes())
	if m.rot {
		b[len(b)-1] ^= 1
	}
	own, err := kvcache.Decode(b, ref)
	if err != nil {
		return nil, err
	}
	return kvcache.NewLent(own, nil, nil), nil
}

// Drop implements kvcache.Store.
func (m *memStore) Drop(_ context.Context, f kvcache.Fingerprint) error {
	if err := m.enter(); err != nil {
		return err
	}
	m.wait(func(m *memStore) time.Duration { return m.slow })
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, b := range m.blocks {
		if b.Fingerprint == f {
			delete(m.blocks, key)
		}
	}
	return nil
}

// labeler is a store that remembers labels.
type labeler struct {
	*memStore
	told []string
}

// Label implements kvcache.Labeled.
func (l *labeler) Label(_ context.Context, _ kvcache.Fingerprint, label kvcache.Label) error {
	if err := l.enter(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.told = append(l.told, label.Model)
	return nil
}

// times is how often it was told one.
func (l *labeler) times() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.told)
}

// Close implements kvcache.Store.
func (m *memStore) Close() error { return nil }

// count is how many blocks there are.
func (m *memStore) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.blocks)
}

// size is the tokens of each block of a chain.
const size = 32

// chainOf makes a chain of blocks with random content, and its tokens.
func chainOf(t testing.TB, seed int32, blocks int) (frames []*kvcache.Frame, ids []int32) {
	t.Helper()
	space := testSpace()
	parent := space.Root
	for i := range blocks {
		own := make([]int32, size)
		for j := range own {
			own[j] = seed<<16 + int32(i*size+j)
		}
		payload := make([]byte, 1000)
		_, _ = rand.NewChaCha8(space.Key(parent, own)).Read(payload) // never fails
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: i * size, IDs: own}, []kvcache.Part{{Size: 1000}}, payload)
		if err != nil {
			t.Fatal(err)
		}
		frames, ids, parent = append(frames, f), append(ids, own...), f.Key
	}
	return frames, ids
}

func testSpace() kvcache.Space { return kvcache.NewSpace("m", []byte("tenant")) }

// fill puts blocks into a store.
func fill(t testing.TB, s kvcache.Store, frames ...*kvcache.Frame) {
	t.Helper()
	for _, f := range frames {
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
}
