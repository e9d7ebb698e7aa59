//go:build unix

package kvrpc

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"flag"
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
)

// kills is how often the crash tests kill a process.
var kills = flag.Int("peer-kills", 0, "kill a process that often (default 20)")

// certEnv names the folder of the certificates for children of the suite, if there are any.
const certEnv = "KVRPC_TEST_CERTS"

// TestMain makes the test binary a child where a test started it as one.
func TestMain(m *testing.M) {
	ns := &nodes{of: map[string]*node{}}
	if spec := os.Getenv(kvtest.ChildEnv); spec != "" {
		kvtest.Child(spec, ns.open)
	}
	if spec := os.Getenv(peerEnv); spec != "" {
		serveChild(spec)
	}
	suite = ns
	os.Exit(m.Run())
}

// suite are the nodes of the conformance suite, set once before it runs.
var suite *nodes

// node is an arena in this process with a server of it.
type node struct {
	store *arena.Store
	s     *Server
	addr  string
	ended chan error
	users int
}

// certs are both sides of TLS as certEnv says; nil = none.
func certs() (server, client *tls.Config, err error) {
	dir := os.Getenv(certEnv)
	if dir == "" {
		return nil, nil, nil
	}
	id := Identity{CertFile: filepath.Join(dir, "node.pem"), KeyFile: filepath.Join(dir, "node.key"), CAFile: filepath.Join(dir, "ca.pem")}
	if server, err = id.Server(); err == nil {
		client, err = id.Client()
	}
	return server, client, err
}

// startNode opens an arena and serves it at an address, whose port may be 0.
func startNode(cfg arena.Config, addr string, sc ServerConfig) (*node, error) {
	store, err := arena.Open(cfg)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		store.Close()
		return nil, err
	}
	n := &node{store: store, s: NewServer(store, sc), addr: l.Addr().String(), ended: make(chan error, 1)}
	go func() { n.ended <- n.s.Serve(l) }()
	return n, nil
}

// end ends a node.
func (n *node) end() error {
	err := n.s.Close()
	return errors.Join(err, <-n.ended, n.store.Close())
}

// nodes starts a node for each folder that has none, in this process, and ends it with its
// last client here.
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

// addrName is the file that tells other processes where the node of a folder is.
const addrName = "addr"

// open opens a client as kvtest asks for it.
func (ns *nodes) open(dir string, limit int64) (kvcache.Store, error) {
	server, client, err := certs()
	if err != nil {
		return nil, err
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	n := ns.of[dir]
	if n == nil {
		n, err = startNode(arena.Config{Dir: filepath.Join(dir, "store"), Limit: limit}, "127.0.0.1:0", ServerConfig{TLS: server})
		switch {
		case errors.Is(err, privdir.ErrInUse):
			addr, err := os.ReadFile(filepath.Join(dir, addrName))
			if err != nil {
				return nil, err
			}
			return Dial(suiteConfig(string(addr), client)) // of another process
		case err != nil:
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(dir, addrName), []byte(n.addr), 0o600); err != nil {
			return nil, err
		}
		ns.of[dir] = n
	}
	c, err := Dial(suiteConfig(n.addr, client))
	if err != nil {
		return nil, err
	}
	n.users++
	return suiteClient{c, sync.OnceValue(func() error {
		err := c.Close()
		ns.mu.Lock()
		defer ns.mu.Unlock()
		if n.users--; n.users == 0 {
			err = errors.Join(err, n.end())
			delete(ns.of, dir)
		}
		return err
	})}, nil
}

// suiteConfig is that of a client for which nothing is late on a busy machine.
func suiteConfig(addr string, c *tls.Config) Config {
	return Config{Addr: addr, TLS: c, Timeout: time.Minute, PutTimeout: time.Minute, DialTimeout: time.Minute, Away: time.Millisecond}
}

// tamper rewrites the bytes of a block, which it finds by asking the arena.
func tamper(dir string, ref kvcache.Ref, change func([]byte) []byte) error {
	store := (*arena.Store)(nil)
	if n := suite.of[dir]; n != nil {
		store = n.store
	} else {
		// Nobody has it open: for as long as it takes.
		s, err := arena.Open(arena.Config{Dir: filepath.Join(dir, "store"), Limit: 1 << 30})
		if err != nil {
			return err
		}
		defer s.Close()
		store = s
	}
	l, err := store.Get(context.Background(), ref)
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
	f, err := os.OpenFile(store.Data(), os.O_RDWR, 0)
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

// TestStore runs the conformance suite over loopback TCP with mutual TLS.
func TestStore(t *testing.T) {
	a, _ := testIdentity(t)
	t.Setenv(certEnv, a.dir)
	// The answer on this side is a record, and the request on the other two, each of which
	// is read in up to two steps.
	kvtest.Run(t, kvtest.Harness{Open: suite.open, Shared: true, Kills: *kills, Tamper: tamper, AppendAllocates: 6, Ranged: true})
}

// TestPlainStore runs the parts of it that depend on the channel without TLS.
func TestPlainStore(t *testing.T) {
	kvtest.Run(t, kvtest.Harness{Open: suite.open, Shared: true, Kills: 2, Tamper: tamper, Ranged: true})
}
