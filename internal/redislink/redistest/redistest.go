// Package redistest runs a real Redis or Valkey server for a test, on a loopback
// port, and kills it in the ways servers die.
package redistest

import (
	"context"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/internal/fetch"
	"github.com/kvmesh/kvmesh/internal/redislink"
)

// Server is one server process. Its methods are for the test's own goroutine.
type Server struct {
	Addr   string        // 127.0.0.1:port, the same after a restart
	Client *redis.Client // for the test's own look at the data

	t    testing.TB
	path string // of the executable
	dir  string
	args []string
	cmd  *exec.Cmd
}

// Start runs a server with further arguments, for instance --requirepass; it ends
// with the test. The test is skipped where there is no redis-server.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return startAt(t, freeAddrs(t, 1)[0], args...)
}

// startAt runs a server at an address.
func startAt(t testing.TB, addr string, args ...string) *Server {
	t.Helper()
	s := &Server{t: t, path: find(t), dir: t.TempDir(), args: args, Addr: addr}
	var err error
	if s.Client, err = redislink.Open(redislink.Config{URL: s.URL()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.Client.Close() // its server may be gone
		s.Kill()
	})
	s.Start()
	return s
}

// freeAddrs are addresses on loopback that nobody listens on. Their ports are below those
// that the system gives out, so that nobody gets one before the server does.
func freeAddrs(t testing.TB, n int) (addrs []string) {
	t.Helper()
	for range 1000 {
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(15000+rand.IntN(17000)))
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			continue
		}
		defer ln.Close() // with the others: each is given out once
		if addrs = append(addrs, addr); len(addrs) == n {
			return addrs
		}
	}
	t.Fatal("no free port")
	return nil
}

// URL is the server's, without password and TLS.
func (s *Server) URL() string { return "redis://" + s.Addr }

// find returns the executable: redis-server of the system, else the fetched one.
func find(t testing.TB) string {
	t.Helper()
	if path, err := exec.LookPath("redis-server"); err == nil {
		return path
	}
	cache, err := os.UserCacheDir()
	if err == nil {
		var paths fetch.Paths
		paths, err = fetch.Locate(fetch.Config{CacheDir: filepath.Join(cache, "kvmesh")}, fetch.Redis)
		if err == nil {
			return paths.Redis
		}
	}
	t.Skipf("no redis-server: %v (kvmesh fetch redis)", err)
	return ""
}

// Start starts the server, again after Kill. It keeps no data on disk, so it comes
// back empty.
func (s *Server) Start() {
	s.t.Helper()
	_, port, err := net.SplitHostPort(s.Addr)
	if err != nil {
		s.t.Fatal(err)
	}
	args := append([]string{"--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no", "--dir", s.dir}, s.args...)
	s.run(exec.Command(s.path, args...))
}

// run starts a process and returns when it listens.
func (s *Server) run(cmd *exec.Cmd) {
	s.t.Helper()
	s.cmd = cmd
	s.cmd.Stdout, s.cmd.Stderr = s.t.Output(), s.t.Output()
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.Addr)
		if err == nil {
			_ = conn.Close() // it was only to see that somebody listens
			return
		}
		select {
		case <-ctx.Done():
			s.t.Fatalf("redis-server does not listen: %v", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Kill ends the server with SIGKILL and waits until it is gone.
func (s *Server) Kill() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill() // it may be dead already
	_ = s.cmd.Wait()         // and then its status says so
	s.cmd = nil
}
