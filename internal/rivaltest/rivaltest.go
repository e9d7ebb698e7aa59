// Package rivaltest starts the key-value servers that benchmarks compare this module
// with, Redis, Valkey and memcached, and has the clients that take least from them.
package rivaltest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fetch"
)

// Server is another server, in a process of its own, that keeps everything in memory. It
// ends with the test.
type Server struct {
	// Network is tcp or unix, and Addr where it listens there.
	Network, Addr string
	// Pid is the process.
	Pid int
}

// StartRedis starts a redis-server or a valkey-server on loopback, or, where network is
// unix, on a Unix socket. Where path is "" there is none, and the result is nil.
func StartRedis(tb testing.TB, path, network string) *Server {
	tb.Helper()
	if path == "" {
		return nil
	}
	return start(tb, path, network, func(s *Server) []string {
		at := []string{"--port", "0", "--unixsocket", s.Addr, "--unixsocketperm", "700"}
		if host, port, err := net.SplitHostPort(s.Addr); network == "tcp" && err == nil {
			at = []string{"--bind", host, "--port", port}
		}
		return append(at, "--save", "", "--appendonly", "no")
	})
}

// StartMemcached starts a memcached with 4 GiB of memory for values of up to 512 MiB. Where
// there is none at path, a file or a name in PATH, the result is nil.
func StartMemcached(tb testing.TB, path, network string) *Server {
	tb.Helper()
	found, err := exec.LookPath(path)
	if err != nil {
		return nil
	}
	return start(tb, found, network, func(s *Server) []string {
		at := []string{"-s", s.Addr, "-a", "700"}
		if host, port, err := net.SplitHostPort(s.Addr); network == "tcp" && err == nil {
			at = []string{"-l", host, "-p", port}
		}
		return append(at, "-m", "4096", "-I", "512m", "-u", "root")
	})
}

// start runs a server and waits until it listens.
func start(tb testing.TB, path, network string, args func(*Server) []string) *Server {
	tb.Helper()
	for range 20 {
		// A port may be somebody else's: then the server ends, and another one is tried. They
		// are below those that the system gives out.
		s := &Server{Network: network, Addr: fmt.Sprintf("127.0.0.1:%d", 15000+rand.IntN(17000))}
		dir := tb.TempDir()
		if network == "unix" {
			s.Addr = filepath.Join(socketDir(tb), "s")
		}
		cmd := exec.Command(path, args(s)...)
		cmd.Dir = dir
		if err := cmd.Start(); err != nil {
			tb.Fatal(err)
		}
		s.Pid = cmd.Process.Pid
		tb.Cleanup(func() {
			_ = cmd.Process.Kill() // it may have ended
			_ = cmd.Wait()
		})
		for range 100 {
			if c, err := net.Dial(network, s.Addr); err == nil {
				c.Close()
				return s
			}
			<-time.After(20 * time.Millisecond)
		}
	}
	tb.Fatalf("%s does not listen", path)
	return nil
}

// socketDir is a folder with a short path, which sockets need.
func socketDir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "kv")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// Redis is where redis-server is; "" = nowhere.
func Redis() string {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return ""
	}
	return path
}

// Valkey is where valkey-server is: the named file, the one in PATH, or what kvmesh fetch
// redis has fetched; "" = nowhere.
func Valkey(named string) string {
	if named != "" {
		return named
	}
	if path, err := exec.LookPath("valkey-server"); err == nil {
		return path
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	paths, err := fetch.Locate(fetch.Config{CacheDir: filepath.Join(cache, "kvmesh"), SystemRedis: "-"}, fetch.Redis)
	if err != nil {
		return ""
	}
	return paths.Redis
}
