package peers_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
	"github.com/kvmesh/kvmesh/kvcache/peers"
	"github.com/kvmesh/kvmesh/kvcache/placement"
)

// host is the memory of one host that can be slow, away, hanging or full.
type host struct {
	*dirstore.Store

	mu     sync.Mutex
	err    error         // of every call
	full   bool          // of every put
	bad    error         // of every put
	delay  time.Duration // of every call
	hang   bool          // calls wait until their context ends
	gets   int
	late   time.Duration // of every put, when it is through
	puts   []kvcache.Ref
	told   []int  // to forget something, when so many had been put
	memory string // its name
	open   int    // tails, whose writers have not been closed
}

// set changes what a host does.
func (h *host) set(change func(*host)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(h)
}

// enter is the beginning of every call.
func (h *host) enter(ctx context.Context) error {
	h.mu.Lock()
	err, delay, hang := h.err, h.delay, h.hang
	h.mu.Unlock()
	if hang {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second) // the wire has an end of its own
		defer cancel()
		<-ctx.Done()
		return ctx.Err()
	}
	select {
	case <-time.After(delay):
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (h *host) Put(ctx context.Context, f *kvcache.Frame) error {
	if err := h.enter(ctx); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.bad != nil {
		return h.bad
	}
	if h.full {
		return kvcache.ErrFull
	}
	h.puts = append(h.puts, f.Ref)
	if late := h.late; late > 0 {
		h.mu.Unlock()
		<-time.After(late)
		h.mu.Lock()
	}
	return h.Store.Put(ctx, f)
}

func (h *host) Longest(ctx context.Context, q kvcache.Query) (kvcache.Match, error) {
	if err := h.enter(ctx); err != nil {
		return kvcache.Match{}, err
	}
	return h.Store.Longest(ctx, q)
}

func (h *host) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	h.set(func(h *host) { h.gets++ })
	if err := h.enter(ctx); err != nil {
		return nil, err
	}
	return h.Store.Get(ctx, ref)
}

func (h *host) OpenTail(ctx context.Context, spec kvcache.TailSpec) (kvcache.TailWriter, error) {
	if err := h.enter(ctx); err != nil {
		return nil, err
	}
	w, err := h.Store.OpenTail(ctx, spec)
	if err == nil {
		h.set(func(h *host) { h.open++ })
	}
	return &tailOn{h, w}, err
}

func (h *host) ReadTail(ctx context.Context, s kvcache.Space, stream string, choice int) ([]kvcache.Tail, error) {
	if err := h.enter(ctx); err != nil {
		return nil, err
	}
	return h.Store.ReadTail(ctx, s, stream, choice)
}

// Close leaves the content to other users of the host.
func (h *host) Close() error { return nil }

// tailOn is a tail on a host.
type tailOn struct {
	h *host
	kvcache.TailWriter
}

func (t *tailOn) Append(r kvcache.Range) error {
	if err := t.h.enter(context.Background()); err != nil {
		return err
	}
	return t.TailWriter.Append(r)
}

func (t *tailOn) Close() error {
	t.h.set(func(h *host) { h.open-- })
	return t.TailWriter.Close()
}

// site is some hosts.
type site struct {
	testing.TB
	hosts map[string]*host
	list  []placement.Member
}

// newSite makes n hosts in so many zones, a, b, c and so on.
func newSite(t testing.TB, n, zones int) *site {
	t.Helper()
	s := &site{TB: t, hosts: map[string]*host{}}
	for i := range n {
		s.add(string(rune('a'+i)), fmt.Sprint("zone-", i%zones))
	}
	return s
}

func (s *site) add(id, zone string) {
	s.Helper()
	store, err := dirstore.Open(dirstore.Config{Dir: s.TempDir()})
	if err != nil {
		s.Fatal(err)
	}
	s.hosts[id] = &host{Store: store}
	s.list = append(s.list, placement.Member{ID: id, Zone: zone, Addr: "10.0.0.1:1"})
}

// close closes the hosts; it is to be called in a bubble's own time.
func (s *site) close() {
	for _, h := range s.hosts {
		h.Store.Close()
	}
}

// store is what the host with an id sees of the others.
func (s *site) store(id string, change func(*peers.Config)) *peers.Store {
	s.Helper()
	cfg := peers.Config{Open: func(m placement.Member) (peers.Peer, error) {
		if h := s.hosts[m.ID]; h != nil {
			return h, nil
		}
		return nil, errors.New("there is no such host")
	}}
	for _, m := range s.list {
		if m.ID == id {
			cfg.Self = m
		}
	}
	if h := s.hosts[id]; h != nil {
		cfg.Near = h.Store
	}
	if change != nil {
		change(&cfg)
	}
	p, err := peers.New(cfg)
	if err != nil {
		s.Fatal(err)
	}
	p.SetMembers(s.list)
	return p
}

// chain is a chain of blocks of 8 tokens and its tokens.
func chain(t testing.TB, seed int32, blocks int) (frames []*kvcache.Frame, ids []int32) {
	t.Helper()
	space := kvcache.NewSpace("m", []byte("t"))
	parent := space.Root
	for i := range blocks {
		own := make([]int32, 8)
		for j := range own {
			own[j] = seed*1_000_000 + int32(8*i+j)
		}
		payload := bytes.Repeat([]byte{byte(i + 1)}, 10_000)
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: 8 * i, IDs: own}, []kvcache.Part{{Size: int64(len(payload))}}, payload)
		if err != nil {
			t.Fatal(err)
		}
		frames, ids, parent = append(frames, f), append(ids, own...), f.Key
	}
	return frames, ids
}

// put puts blocks.
func put(t testing.TB, s *peers.Store, frames []*kvcache.Frame) {
	t.Helper()
	for _, f := range frames {
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
}

// found is how many blocks a look-up finds, of which all can be read.
func found(t testing.TB, s *peers.Store, ids []int32) int {
	t.Helper()
	m, err := s.Longest(t.Context(), kvcache.Query{Space: kvcache.NewSpace("m", []byte("t")), IDs: ids})
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range m.Blocks {
		l, err := s.Get(t.Context(), b.Ref)
		if err != nil {
			t.Fatalf("block %d: %v", i, err)
		}
		if err := l.Verify(); err != nil || l.First != 8*i {
			t.Errorf("block %d at %d: %v", i, l.First, err)
		}
		l.Release()
	}
	return len(m.Blocks)
}
