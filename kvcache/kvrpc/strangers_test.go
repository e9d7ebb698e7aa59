//go:build unix

package kvrpc

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
)

// newNode starts a server of an arena in this process until the test ends.
func newNode(t testing.TB, limit int64, sc ServerConfig) *node {
	t.Helper()
	n, err := startNode(arena.Config{Dir: shmDir(t), Limit: limit}, "127.0.0.1:0", sc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.end(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// serverTLS is an identity's side of a server.
func serverTLS(t testing.TB, id Identity) *tls.Config {
	t.Helper()
	c, err := id.Server()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestStrangers: whoever has no certificate of the nodes' authority gets nothing, on either
// channel, and a client gives nothing to a server that has none.
func TestStrangers(t *testing.T) {
	ours, id := testIdentity(t)
	_, foreign := testIdentity(t)
	onlyServer, err := ours.issue("server", x509.ExtKeyUsageServerAuth)
	if err != nil {
		t.Fatal(err)
	}
	onlyClient, err := ours.issue("client", x509.ExtKeyUsageClientAuth)
	if err != nil {
		t.Fatal(err)
	}
	mixed := foreign
	mixed.CAFile = id.CAFile // believes the server, and has a certificate of another authority
	none := clientTLS(t, id)
	none.GetClientCertificate = nil
	named := clientTLS(t, id)
	named.ServerName = "another.example"
	n := newNode(t, 1<<20, ServerConfig{TLS: serverTLS(t, id)})
	plain := newNode(t, 1<<20, ServerConfig{})
	strange := newNode(t, 1<<20, ServerConfig{TLS: serverTLS(t, foreign)})
	role := newNode(t, 1<<20, ServerConfig{TLS: serverTLS(t, onlyClient)})
	for name, c := range map[string]struct {
		addr string
		tls  *tls.Config
		good bool
	}{
		"a node":                          {n.addr, clientTLS(t, id), true},
		"another authority":               {n.addr, clientTLS(t, foreign), false},
		"a certificate of another":        {n.addr, clientTLS(t, mixed), false},
		"no certificate":                  {n.addr, none, false},
		"a certificate for servers":       {n.addr, clientTLS(t, onlyServer), false},
		"another name":                    {n.addr, named, false},
		"no TLS":                          {n.addr, nil, false},
		"a server without TLS":            {plain.addr, clientTLS(t, id), false},
		"a server of another authority":   {strange.addr, clientTLS(t, id), false},
		"a server with a client's papers": {role.addr, clientTLS(t, id), false},
	} {
		t.Run(name, func(t *testing.T) {
			client := newClient(t, Config{Addr: c.addr, TLS: c.tls, Timeout: 20 * time.Second, PutTimeout: 20 * time.Second, Away: time.Nanosecond})
			f := sealed(t, 1, 1000)
			if err := client.Put(t.Context(), f); (err == nil) != c.good {
				t.Errorf("put: %v", err)
			}
			if _, err := client.Longest(t.Context(), kvcache.Query{Space: f.Space, IDs: f.IDs}); (err == nil) != c.good {
				t.Errorf("longest: %v", err)
			}
		})
	}
	if st := n.store.Stats(); st.Puts != 1 || st.Lookups != 1 {
		t.Errorf("the store was reached: %+v", st)
	}
}

// TestRenewed: a certificate that is renewed is used from the next connection on.
func TestRenewed(t *testing.T) {
	a, id := testIdentity(t)
	n := newNode(t, 1<<20, ServerConfig{TLS: serverTLS(t, id)})
	cfg := Config{Addr: n.addr, TLS: clientTLS(t, id), Timeout: 20 * time.Second, PutTimeout: 20 * time.Second}
	if _, err := a.issue("node", x509.ExtKeyUsageClientAuth); err != nil { // of no use for servers
		t.Fatal(err)
	}
	if err := newClient(t, cfg).Put(t.Context(), sealed(t, 1, 1000)); err == nil {
		t.Error("a server uses a certificate that was replaced")
	}
	if _, err := a.node("node"); err != nil {
		t.Fatal(err)
	}
	if err := newClient(t, cfg).Put(t.Context(), sealed(t, 1, 1000)); err != nil {
		t.Error(err)
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []Config{
		{},
		{Addr: "host"},
		{Addr: "10.0.0.1:1"},
		{Addr: "a.example:1"},
		{Addr: "127.0.0.1:1", Timeout: -1},
		{Addr: "127.0.0.1:1", Memory: -1},
		{Addr: "127.0.0.1:1", Connections: -1},
	} {
		if _, err := Dial(c); err == nil {
			t.Errorf("%+v is valid", c)
		}
	}
	for _, c := range []Config{{Addr: "localhost:1"}, {Addr: "[::1]:1"}, {Addr: "10.0.0.1:1", Plain: true}, {Addr: "10.0.0.1:1", TLS: &tls.Config{}}} {
		if err := c.Validate(); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
	near, far := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, &net.TCPAddr{IP: net.IPv4zero}
	if (ServerConfig{}).Validate(near) != nil || (ServerConfig{Plain: true}).Validate(far) != nil {
		t.Error("a server without TLS on loopback, or as it was told, is refused")
	}
	if (ServerConfig{}).Validate(far) == nil || (ServerConfig{TLS: &tls.Config{}}).Validate(near) == nil || (ServerConfig{Memory: -1}).Validate(near) == nil {
		t.Error("a server that cannot work is valid")
	}
	s := NewServer(nil, ServerConfig{})
	defer s.Close()
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Serve(l); err == nil {
		t.Error("a server without TLS listens on all addresses")
	}
	if _, err := (Identity{}).Server(); err == nil {
		t.Error("no files are an identity")
	}
	if _, err := (Identity{CertFile: "/none", KeyFile: "/none", CAFile: "/none"}).Client(); err == nil {
		t.Error("files that are not there are an identity")
	}
}
