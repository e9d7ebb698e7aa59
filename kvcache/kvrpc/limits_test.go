//go:build unix

package kvrpc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// dirNode is a client of a server of a store that can neither lend room nor resume a tail.
type dirNode struct {
	*Client
	close func() error
}

// Close closes all of it.
func (d dirNode) Close() error { return d.close() }

// openDir opens one as kvtest asks for it.
func openDir(dir string, limit int64) (kvcache.Store, error) {
	store, err := dirstore.Open(dirstore.Config{Dir: filepath.Join(dir, "store"), Limit: limit})
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s, ended := NewServer(store, ServerConfig{}), make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	c, err := Dial(suiteConfig(l.Addr().String(), nil))
	if err != nil {
		return nil, err
	}
	return dirNode{c, sync.OnceValue(func() error { return errors.Join(c.Close(), s.Close(), <-ended, store.Close()) })}, nil
}

// TestAnyStore runs the suite on a server of a store that is no arena.
func TestAnyStore(t *testing.T) {
	kvtest.Run(t, kvtest.Harness{Open: openDir})
}

// TestUnknownTail: where a store cannot go on with a tail of a server before it, the tail
// is begun again by its writer.
func TestUnknownTail(t *testing.T) {
	store, err := dirstore.Open(dirstore.Config{Dir: filepath.Join(t.TempDir(), "store")})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	n := &node{s: NewServer(store, ServerConfig{Tails: 1})}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = n.s.Serve(l) }() // until Close
	defer n.s.Close()
	c := newClient(t, suiteConfig(l.Addr().String(), nil))
	space := kvcache.NewSpace("m", nil)
	at := func(first int) kvcache.Range {
		return kvcache.Range{First: first, IDs: []int32{int32(first)}, Data: []byte{1}}
	}
	var writers []kvcache.TailWriter
	for _, stream := range []string{"one", "two"} { // of which the server remembers the last
		w, err := c.OpenTail(t.Context(), kvcache.TailSpec{Space: space, Stream: stream, Parent: space.Root})
		if err != nil {
			t.Fatal(err)
		}
		writers = append(writers, w)
	}
	if err := writers[1].Append(at(0)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := writers[0].Append(at(0)); !errors.Is(err, kvcache.ErrGap) {
			t.Errorf("append to a tail that is not known: %v", err)
		}
	}
	if err := writers[0].Rotate(space.Root, 0); err != nil {
		t.Fatal(err)
	}
	if err := writers[0].Append(at(0)); err != nil {
		t.Fatal(err)
	}
	if tails, err := c.ReadTail(t.Context(), space, "one", 0); err != nil || len(tails) != 2 || len(tails[0].Ranges) != 1 {
		t.Errorf("%+v, %v", tails, err)
	}
	// What was appended, and is sent again because its answer was lost, is there once.
	no := writers[0].(*tail).no
	if err := n.s.tails.append(no, at(0)); err != nil {
		t.Errorf("the same range again: %v", err)
	}
	if err := n.s.tails.append(no, kvcache.Range{IDs: []int32{0}, Data: []byte{2}}); !errors.Is(err, kvcache.ErrGap) {
		t.Errorf("another range in its place: %v", err)
	}
}

// TestConnections: a server has so many connections, and those that it has go on.
func TestConnections(t *testing.T) {
	n := newNode(t, 1<<20, ServerConfig{Connections: 2})
	c := newClient(t, Config{Addr: n.addr, Connections: 1, Timeout: 20 * time.Second, PutTimeout: 20 * time.Second, Away: time.Nanosecond})
	f := sealed(t, 1, 1000)
	if err := c.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Longest(t.Context(), kvcache.Query{Space: f.Space, IDs: f.IDs}); err != nil {
		t.Fatal(err)
	}
	other := newClient(t, Config{Addr: n.addr, Timeout: 20 * time.Second, PutTimeout: 20 * time.Second})
	if err := other.Put(t.Context(), f); err == nil {
		t.Error("one connection too many is served")
	}
	same(t, c, f)
}

// TestMemory: neither side takes more memory than it may, whatever the other one says.
func TestMemory(t *testing.T) {
	n := newNode(t, 8<<20, ServerConfig{Memory: 1000})
	big := sealed(t, 1, 1<<20)
	c := newClient(t, Config{Addr: n.addr, Memory: 1500 << 10, Timeout: 20 * time.Second, PutTimeout: 20 * time.Second})
	if err := c.Put(t.Context(), big); err != nil {
		t.Fatal(err) // straight into the arena
	}
	w, err := c.OpenTail(t.Context(), kvcache.TailSpec{Space: big.Space, Stream: "s"})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Append(kvcache.Range{IDs: []int32{1}, Data: make([]byte, 2000)}); err == nil {
		t.Error("a range larger than the server's memory is taken")
	}
	if err := w.Append(kvcache.Range{IDs: []int32{1}, Data: make([]byte, 500)}); err != nil {
		t.Error(err)
	}
	first, err := c.Get(t.Context(), big.Ref)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Get(ctx, big.Ref); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("get while all memory is lent: %v", err)
	}
	first.Release()
	same(t, c, big)
	small := newClient(t, Config{Addr: n.addr, Memory: 1000, Timeout: 20 * time.Second})
	if _, err := small.Get(t.Context(), big.Ref); !errors.Is(err, kvcache.ErrFull) {
		t.Errorf("get of a block larger than all memory: %v", err)
	}
	if err := c.Put(t.Context(), sealed(t, 2, 9<<20)); !errors.Is(err, kvcache.ErrFull) {
		t.Errorf("put of a block larger than the arena: %v", err)
	}
}

// TestStall: who announces a frame and does not send it is cut off, and its room is free
// again.
func TestStall(t *testing.T) {
	n := newNode(t, 1<<20, ServerConfig{Stall: 100 * time.Millisecond})
	f := sealed(t, 1, 600_000)
	got := make(chan []byte)
	c, err := net.Dial("tcp", n.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() {
		b, _ := io.ReadAll(c) // until the server closes
		got <- b
	}()
	if _, err := c.Write(message(uint8(opPut), 0, kvwire.AppendRef(nil, f.Ref), kvwire.AppendU64(nil, uint64(f.Total)))); err != nil {
		t.Fatal(err)
	}
	if b := <-got; len(b) != headLen+1 || b[headLen] != 1 {
		t.Errorf("answered % x", b)
	}
	other := newClient(t, Config{Addr: n.addr, Timeout: 20 * time.Second, PutTimeout: 20 * time.Second})
	// It fits only where the other's room is free; the server frees it before it closes.
	if err := other.Put(t.Context(), sealed(t, 2, 600_000)); err != nil {
		t.Error(err)
	}
}

// TestTwoClients: the first writer of a block wins, whoever it is, and a block that is there
// is not sent again.
func TestTwoClients(t *testing.T) {
	var wrote sync.Map
	n := newNode(t, 64<<20, ServerConfig{Wrote: func(f kvcache.Found) { wrote.Store(f.Key, f.Size) }})
	var clients []*Client
	for range 2 {
		clients = append(clients, newClient(t, suiteConfig(n.addr, nil)))
	}
	var all sync.WaitGroup
	for _, c := range clients {
		all.Go(func() {
			for id := range int32(50) {
				if err := c.Put(t.Context(), sealed(t, id, 100_000)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	f := sealed(t, 49, 100_000)
	for _, c := range clients {
		same(t, c, f)
	}
	if size, ok := wrote.Load(f.Key); !ok || size != f.Total {
		t.Error("nobody was told of a block")
	}
	if st := n.store.Stats(); st.Puts != 50 {
		t.Errorf("%d blocks were put, want 50", st.Puts)
	}
	before := clients[0].Stats().Duplicates
	if err := clients[0].Put(t.Context(), f); err != nil || clients[0].Stats().Duplicates != before+1 {
		t.Errorf("a block that is there: %v", err)
	}
}

// TestFetch reads a block into room in another arena, which then has it.
func TestFetch(t *testing.T) {
	n := newNode(t, 8<<20, ServerConfig{})
	c := newClient(t, suiteConfig(n.addr, nil))
	f := sealed(t, 1, 1<<20)
	if err := c.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	here, err := arena.Open(arena.Config{Dir: shmDir(t), Limit: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	var room *arena.Reservation
	_, err = c.Fetch(t.Context(), f.Ref, func(size int64) ([]byte, error) {
		room, err = here.Reserve(t.Context(), f.Ref, size)
		if err != nil {
			return nil, err
		}
		return room.Bytes(), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := room.Commit(); err != nil {
		t.Fatal(err)
	}
	l, err := here.Get(t.Context(), f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	if err := l.Verify(); err != nil || !bytes.Equal(l.Bytes(), f.Bytes()) {
		t.Errorf("the block has changed: %v", err)
	}
	no := errors.New("no room")
	if _, err := c.Fetch(t.Context(), f.Ref, func(int64) ([]byte, error) { return nil, no }); !errors.Is(err, no) {
		t.Errorf("fetch without room: %v", err)
	}
	same(t, c, f)
}

// TestTier puts a client below an arena: what only the peer has comes near.
func TestTier(t *testing.T) {
	n := newNode(t, 8<<20, ServerConfig{})
	c := newClient(t, suiteConfig(n.addr, nil))
	here, err := arena.Open(arena.Config{Dir: shmDir(t), Limit: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	s, err := stack.New(stack.Config{Near: here, Far: []stack.Tier{{Name: "peer", Store: c}}, Usual: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	space := kvcache.NewSpace("m", nil)
	parent, ids := space.Root, []int32(nil)
	for i := range int32(4) {
		block := make([]int32, 16)
		for j := range block {
			block[j] = 100*i + int32(j)
		}
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: 16 * int(i), IDs: block}, []kvcache.Part{{Size: 1000}}, make([]byte, 1000))
		if err != nil {
			t.Fatal(err)
		}
		if err := n.store.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		parent, ids = f.Key, append(ids, block...)
	}
	if m, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: ids}); err != nil || len(m.Blocks) != 4 {
		t.Errorf("%d blocks, %v", len(m.Blocks), err)
	}
	if m, err := here.Longest(t.Context(), kvcache.Query{Space: space, IDs: ids}); err != nil || len(m.Blocks) != 4 {
		t.Errorf("%d blocks are near, %v", len(m.Blocks), err)
	}
}
