//go:build unix

package kvnode

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/privdir"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// kills is how often the crash tests kill a node, or the only process that has one.
var kills = flag.Int("node-kills", 0, "kill the node that often (default 20)")

// nodeEnv makes the test binary a node in the folder that it names, behind its limit.
const nodeEnv = "KVNODE_TEST"

// TestMain makes the test binary a child where a test started it as one.
func TestMain(m *testing.M) {
	nodes := &nodes{of: map[string]*node{}}
	if spec := os.Getenv(kvtest.ChildEnv); spec != "" {
		kvtest.Child(spec, nodes.open)
	}
	if spec := os.Getenv(nodeEnv); spec != "" {
		var dir string
		var limit int64
		if _, err := fmt.Sscan(spec, &limit, &dir); err != nil {
			panic(err)
		}
		epochs, err := OpenEpochs(EpochConfig{File: dir + ".epochs", Every: time.Hour})
		if err != nil {
			panic(err)
		}
		n, err := startNodeOf(arena.Config{Dir: dir, Limit: limit}, ServerConfig{Epochs: epochs})
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		fmt.Println("ready")
		<-n.ended
	}
	suite = nodes
	os.Exit(m.Run())
}

// suite are the nodes of the conformance suite, set once before it runs.
var suite *nodes

// node is a node in this process.
type node struct {
	store  *arena.Store
	below  *stack.Stack // nil = it has no far tiers
	server *Server
	stop   context.CancelFunc
	ended  chan struct{}
	users  int
}

// startNode starts one, with the tiers below it.
func startNode(cfg arena.Config, far ...stack.Tier) (*node, error) {
	return startNodeOf(cfg, ServerConfig{}, far...)
}

// startNodeWith starts one with copies of tails, too.
func startNodeWith(cfg arena.Config, tails FarTails, far ...stack.Tier) (*node, error) {
	return startNodeOf(cfg, ServerConfig{Tails: tails}, far...)
}

// startNodeOf starts one that serves its store, and what else is said.
func startNodeOf(cfg arena.Config, served ServerConfig, far ...stack.Tier) (*node, error) {
	store, err := arena.Open(cfg)
	if err != nil {
		return nil, err
	}
	var below *stack.Stack
	if len(far) > 0 {
		if below, err = stack.New(stack.Config{Near: store, Far: far}); err != nil {
			store.Close()
			return nil, err
		}
	}
	l, err := Listen(cfg.Dir)
	if err != nil {
		store.Close()
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	n := &node{store: store, below: below, stop: stop, ended: make(chan struct{})}
	served.Store, served.Below = store, below
	server := NewServer(served)
	n.server = server
	go func() {
		defer close(n.ended)
		if err := server.Serve(ctx, l); err != nil {
			panic(err)
		}
	}()
	return n, nil
}

// end ends a node.
func (n *node) end() {
	n.stop()
	<-n.ended
	if n.below != nil {
		n.below.Close()
	}
	n.store.Close()
}

// nodes starts a node for each folder that has none, in this process, and ends it with
// its last client here.
type nodes struct {
	mu sync.Mutex
	of map[string]*node
}

// suiteClient is a client that ends the node with it.
type suiteClient struct {
	*Client
	close func() error
}

// Close closes the client, and the node if it was the last one.
func (c suiteClient) Close() error { return c.close() }

// open opens a client as kvtest asks for it.
func (ns *nodes) open(dir string, limit int64) (kvcache.Store, error) {
	dir = filepath.Join(dir, "store")
	ns.mu.Lock()
	defer ns.mu.Unlock()
	n := ns.of[dir]
	if n == nil {
		var err error
		if n, err = startNode(arena.Config{Dir: dir, Limit: limit}); err != nil && !errors.Is(err, privdir.ErrInUse) {
			return nil, err
		}
		if n != nil {
			ns.of[dir] = n
		}
	}
	c, err := Open(dir)
	if err != nil {
		return nil, err
	}
	if n == nil {
		return c, nil // of another process
	}
	n.users++
	return suiteClient{c, sync.OnceValue(func() error {
		err := c.Close()
		ns.mu.Lock()
		defer ns.mu.Unlock()
		if n.users--; n.users == 0 {
			n.end()
			delete(ns.of, dir)
		}
		return err
	})}, nil
}

// tamper rewrites the bytes of a block, which it finds by asking the node.
func tamper(dir string, ref kvcache.Ref, change func([]byte) []byte) error {
	dir = filepath.Join(dir, "store")
	n := suite.of[dir]
	if n == nil {
		// Nobody has it open: for as long as it takes.
		s, err := arena.Open(arena.Config{Dir: dir, Limit: 1 << 30})
		if err != nil {
			return err
		}
		defer s.Close()
		n = &node{store: s}
	}
	l, err := n.store.Get(context.Background(), ref)
	if err != nil {
		return err
	}
	defer l.Release()
	old := bytes.Clone(l.Bytes())
	changed := make([]byte, len(old))
	copy(changed, change(bytes.Clone(old)))
	if bytes.Equal(old, changed) {
		return kvtest.ErrSame
	}
	f, err := os.OpenFile(n.store.Data(), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	all := make([]byte, 8<<20) // what the tests put lies at the beginning
	if _, err := f.ReadAt(all, 0); err != nil {
		return err
	}
	_, err = f.WriteAt(changed, int64(bytes.Index(all, old)))
	return err
}

func TestStore(t *testing.T) {
	kvtest.Run(t, kvtest.Harness{Open: suite.open, Shared: true, Kills: *kills, Tamper: tamper})
}

// newNode starts a node until the test ends.
func newNode(t testing.TB, limit int64) (dir string, n *node) {
	t.Helper()
	dir = nodeDir(t)
	n, err := startNode(arena.Config{Dir: dir, Limit: limit})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.end)
	return dir, n
}

// nodeDir makes a name for a node's folder that is short enough for a socket.
func nodeDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvnode-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "node")
}

// newClient opens a client until the test ends.
func newClient(t testing.TB, dir string) *Client {
	t.Helper()
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// sealed makes a block of one token at the root, with a payload that follows from it.
func sealed(t testing.TB, id int32, size int) *kvcache.Frame {
	t.Helper()
	space := kvcache.NewSpace("m", nil)
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{id}},
		[]kvcache.Part{{Size: int64(size)}}, bytes.Repeat([]byte{byte(id), byte(id >> 8), 3}, size/3+1)[:size])
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// has says whether a block is there, and fails the test if it is wrong.
func has(t testing.TB, c *Client, f *kvcache.Frame) bool {
	t.Helper()
	l, err := c.Get(context.Background(), f.Ref)
	if errors.Is(err, kvcache.ErrNotFound) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	if err := l.Verify(); err != nil || !bytes.Equal(l.Bytes(), f.Bytes()) {
		t.Fatalf("a block is not what was put: %v", err)
	}
	return true
}

// TestPrivate: nobody else can reach the socket, and one that a dead node left is no
// obstacle.
func TestPrivate(t *testing.T) {
	dir, n := newNode(t, 1<<20)
	st, err := os.Stat(filepath.Join(dir, SocketName))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	n.end()
	if err := os.WriteFile(filepath.Join(dir, SocketName), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := startNode(arena.Config{Dir: dir, Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	again.end()
}

// TestStrangers: whoever sends something else is cut off, and nobody else notices.
func TestStrangers(t *testing.T) {
	dir, n := newNode(t, 1<<20)
	c := newClient(t, dir)
	f := sealed(t, 1, 10_000)
	if err := c.Put(context.Background(), f); err != nil {
		t.Fatal(err)
	}
	bad := func(what op, body []byte) []byte {
		b := make([]byte, headLen)
		head{what: uint8(what), body: uint32(len(body))}.put(b)
		return append(b, body...)
	}
	put := kvwire.AppendSize(kvwire.AppendRef(nil, sealed(t, 2, 10_000).Ref), 10_304)
	for name, send := range map[string][]byte{
		"text": []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), "nothing": {}, "half a head": []byte("KVN1"),
		"half a body": bad(opGet, make([]byte, 30))[:20],
		// A frame that was announced and is none, or not all of one.
		"half a frame": append(bad(opPut, put), make([]byte, 5000)...), "no frame": append(bad(opPut, put), make([]byte, 10_304)...),
	} {
		nc, err := net.Dial("unix", filepath.Join(dir, SocketName))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := nc.Write(send); err != nil {
			t.Fatal(name, err)
		}
		if u := nc.(*net.UnixConn); u.CloseWrite() != nil {
			t.Fatal("close")
		}
		_, _ = bytes.NewBuffer(nil).ReadFrom(nc) // until the node has ended it
		nc.Close()
		if !has(t, c, f) {
			t.Errorf("%s: the block is gone", name)
		}
	}
	// Requests that are whole and make no sense are answered.
	for what := range op(30) {
		for _, body := range [][]byte{nil, {1}, make([]byte, 100), bytes.Repeat([]byte{0xff}, 300)} {
			_, err := c.askOnce(context.Background(), what, func(b []byte) []byte { return append(b, body...) }, nil)
			if err != nil && !told(err) {
				t.Fatalf("operation %d with %d bytes: %v", what, len(body), err)
			}
		}
	}
	if used := n.store.Stats().Used; used > 32<<10 {
		t.Errorf("%d bytes in use: what was announced and never came keeps its room", used)
	}
}

// FuzzWire feeds bodies to everything that reads them: nothing crashes, and what is read
// is written the same.
func FuzzWire(f *testing.F) {
	sp := kvcache.NewSpace("m", nil)
	ids := []int32{1, -2, 3}
	ref := sp.Child(sp.Root, ids)
	m := kvcache.Match{Blocks: []kvcache.Found{{Ref: ref, Tokens: 3, Size: 4000}}, Partial: kvcache.Found{Ref: ref, First: 3, Tokens: 9, Size: 1}, Common: 2}
	f.Add(appendMatch(nil, m))
	f.Add(appendTails(nil, []kvcache.Tail{{Ranges: []kvcache.Range{{IDs: ids, Data: []byte("x")}}}, {}}))
	f.Add(appendSpec(nil, kvcache.TailSpec{Space: sp, Stream: "s", Choice: 1, Attempt: 2, First: 3}))
	f.Add(kvwire.AppendIDs(append(kvwire.AppendSpace(nil, sp), make([]byte, 40)...), ids))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c := cursorOf(b); len(b) >= headLen {
			if h, err := parseHead(b, mostBody); err == nil {
				again := make([]byte, headLen)
				if h.put(again); !bytes.Equal(again, b[:headLen]) {
					t.Errorf("head %x reads as %+v", b[:headLen], h)
				}
			}
			if m := c.match(sp); !c.Bad && !bytes.Equal(appendMatch(nil, m), b) {
				t.Errorf("match %x reads as %+v", b, m)
			}
		}
		if c := cursorOf(b); true {
			if tails := c.tails(sp, "s", 0); !c.Bad && !bytes.Equal(appendTails(nil, tails), b) {
				t.Errorf("tails %x read as %+v", b, tails)
			}
		}
		if c := cursorOf(b); true {
			if spec := c.spec(); !c.Bad && !bytes.Equal(appendSpec(nil, spec), b) {
				t.Errorf("spec %x reads as %+v", b, spec)
			}
		}
		if c := cursorOf(b); true {
			q := c.query()
			if again := kvwire.AppendIDs(kvwire.AppendSize(append(kvwire.AppendSpace(nil, q.Space), q.From[:]...), q.First), q.IDs); !c.Bad && !bytes.HasPrefix(b, again) {
				t.Errorf("query %x reads as %+v", b, q)
			}
		}
	})
}

// TestErrors: every error that callers act on arrives as what it is.
func TestErrors(t *testing.T) {
	for _, err := range []error{
		kvcache.ErrNotFound, kvcache.ErrStale, kvcache.ErrFull, kvcache.ErrGap, kvcache.ErrClosed,
	} {
		s, body := statusOf(fmt.Errorf("op: %w", err))
		if got := errorOf(s, body); !errors.Is(got, err) {
			t.Errorf("%v arrives as %v", err, got)
		}
	}
	s, body := statusOf(fmt.Errorf("op: %w", &kvcache.Refusal{Reason: kvcache.ReasonForeign, Detail: "why"}))
	if r, ok := errors.AsType[*kvcache.Refusal](errorOf(s, body)); !ok || r.Reason != kvcache.ReasonForeign || r.Detail != "why" {
		t.Errorf("a refusal arrives as %v", errorOf(s, body))
	}
	if s, body := statusOf(nil); errorOf(s, body) != nil {
		t.Error("success arrives as an error")
	}
	for _, body := range [][]byte{nil, {200}} {
		if err := errorOf(statusRefused, body); err == nil {
			t.Error("a refusal without a reason is none")
		}
	}
}

// TestModels: what the node has is listed by its clients.
func TestModels(t *testing.T) {
	dir, _ := newNode(t, 1<<20)
	c := newClient(t, dir)
	ctx := context.Background()
	f := sealed(t, 1, 10_000)
	if err := errors.Join(c.Label(ctx, f.Fingerprint, kvcache.Label{Model: "name"}), c.Put(ctx, f)); err != nil {
		t.Fatal(err)
	}
	models, err := c.Models(ctx)
	if err != nil || len(models) != 1 || models[0].Label.Model != "name" || models[0].Blocks != 1 || models[0].Tokens != 1 {
		text, _ := json.Marshal(models)
		t.Errorf("%s, %v", text, err)
	}
	for id := int32(2); c.Stats().Evictions == 0; id++ {
		if err := c.Put(ctx, sealed(t, id, 50_000)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.MakeRoom(ctx, 1<<20); err != nil {
		t.Fatal(err)
	}
	if st := c.Stats(); st.Used > st.Limit-st.Limit/8 {
		t.Errorf("%d of %d bytes in use", st.Used, st.Limit)
	}
}
