package redistest

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/redislink"
)

// MasterName is what Sentinel calls the server that it watches.
const MasterName = "kv"

// Watched is a master with a replica and a Sentinel that watches them.
type Watched struct {
	Master, Replica, Sentinel *Server
}

// StartSentinel runs them, each a real process; a master that says nothing for the given
// silence is replaced. They end with the test, which is skipped where there is no
// redis-server.
func StartSentinel(t testing.TB, silence time.Duration) *Watched {
	t.Helper()
	w := &Watched{Master: Start(t, "--repl-diskless-sync-delay", "0")}
	host, port, err := net.SplitHostPort(w.Master.Addr)
	if err != nil {
		t.Fatal(err)
	}
	w.Replica = Start(t, "--replicaof", host+" "+port, "--repl-diskless-sync-delay", "0")
	w.Sentinel = startSentinel(t, fmt.Sprintf("sentinel monitor %s %s %s 1\nsentinel down-after-milliseconds %s %d\nsentinel failover-timeout %s 5000\n",
		MasterName, host, port, MasterName, silence.Milliseconds(), MasterName))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		info, err := w.Sentinel.Client.Info(ctx, "sentinel").Result()
		role, err2 := w.Replica.Client.Info(ctx, "replication").Result()
		if err == nil && err2 == nil && strings.Contains(info, "status=ok") && strings.Contains(info, "slaves=1") && strings.Contains(role, "master_link_status:up") {
			return w
		}
		select {
		case <-ctx.Done():
			t.Fatalf("Sentinel does not know its servers: %s %v %v", info, err, err2)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// startSentinel runs a Sentinel, which wants its settings in a file that it changes.
func startSentinel(t testing.TB, settings string) *Server {
	t.Helper()
	s := &Server{t: t, path: find(t), dir: t.TempDir(), Addr: freeAddrs(t, 1)[0]}
	_, port, err := net.SplitHostPort(s.Addr)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(s.dir, "sentinel.conf")
	if err := os.WriteFile(file, []byte("bind 127.0.0.1\nport "+port+"\ndir "+s.dir+"\n"+settings), 0o600); err != nil {
		t.Fatal(err)
	}
	if s.Client, err = redislink.Open(redislink.Config{URL: s.URL()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.Client.Close() // its server may be gone
		s.Kill()
	})
	s.run(exec.Command(s.path, file, "--sentinel"))
	return s
}

// URL is the Sentinel's, for redislink.
func (w *Watched) URL() string {
	u := url.URL{Scheme: "redis+sentinel", Host: w.Sentinel.Addr, Path: "/" + MasterName}
	return u.String()
}
