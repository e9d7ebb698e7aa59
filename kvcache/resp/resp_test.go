//go:build unix

package resp

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/kvcache/arena"
)

// start starts a server of an arena in dir, until end is called or the test ends.
func start(t testing.TB, cfg arena.Config, password string) (s *Server, addr string, end func()) {
	t.Helper()
	store, err := arena.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if s, err = New(Config{Store: store, Password: password}); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	running := true
	end = func() {
		if running {
			running = false
			stop()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			store.Close()
		}
	}
	t.Cleanup(end)
	return s, l.Addr().String(), end
}

func config(t testing.TB) arena.Config {
	return arena.Config{Dir: filepath.Join(t.TempDir(), "store"), Limit: 4 << 20}
}

// client connects go-redis, which asks for version 3 first and takes 2.
func client(t testing.TB, addr, password string) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: addr, Password: password, MaxRetries: -1})
	t.Cleanup(func() { c.Close() })
	return c
}

// TestClient: what a common client does.
func TestClient(t *testing.T) {
	ctx := context.Background()
	cfg := config(t)
	_, addr, end := start(t, cfg, "")
	c := client(t, addr, "")
	if s, err := c.Ping(ctx).Result(); err != nil || s != "PONG" {
		t.Fatalf("%q, %v", s, err)
	}
	if _, err := c.Get(ctx, "k").Result(); !errors.Is(err, redis.Nil) {
		t.Errorf("a value that is not there: %v", err)
	}
	big := make([]byte, 1<<20)
	for i := range big {
		big[i] = byte(rand.Uint32())
	}
	for _, value := range []string{"one", "", "two\r\n", string(big)} { // each over the last
		if err := c.Set(ctx, "k", value, 0).Err(); err != nil {
			t.Fatal(err)
		}
		if got, err := c.Get(ctx, "k").Result(); err != nil || got != value {
			t.Errorf("%d bytes: %d bytes, %v", len(value), len(got), err)
		}
	}
	if n, err := c.Exists(ctx, "k", "none", "k").Result(); err != nil || n != 2 {
		t.Errorf("%d exist, %v", n, err)
	}
	if text, err := c.Info(ctx).Result(); err != nil || !strings.Contains(text, "maxmemory:4194304") {
		t.Errorf("%q, %v", text, err)
	}
	pipe := c.Pipeline()
	pipe.Set(ctx, "a", "1", 0)
	pipe.Get(ctx, "a")
	pipe.Get(ctx, "none")
	got, _ := pipe.Exec(ctx) // the error is of what is not there
	if len(got) != 3 || got[1].(*redis.StringCmd).Val() != "1" || !errors.Is(got[2].Err(), redis.Nil) {
		t.Errorf("a pipeline: %v", got)
	}
	if err := c.Set(ctx, "ttl", "x", time.Second).Err(); err == nil {
		t.Error("a time to live is taken, and not kept")
	}
	if err := c.Set(ctx, "large", string(make([]byte, 8<<20)), 0).Err(); err == nil || !strings.Contains(err.Error(), "OOM") {
		t.Errorf("more than there is room for: %v", err)
	}
	if err := c.Do(ctx, "FLUSHALL").Err(); err == nil || !strings.Contains(err.Error(), "unknown command") {
		t.Errorf("an unknown command: %v", err)
	}
	// Another server of the same memory has the values.
	end()
	_, addr, _ = start(t, cfg, "")
	c = client(t, addr, "")
	if got, err := c.Get(ctx, "k").Result(); err != nil || got != string(big) {
		t.Errorf("after a restart %d bytes, %v", len(got), err)
	}
	if n, err := c.Del(ctx, "k", "a", "none").Result(); err != nil || n != 2 {
		t.Errorf("%d deleted, %v", n, err)
	}
	if n, err := c.Exists(ctx, "k", "a").Result(); err != nil || n != 0 {
		t.Errorf("%d are left, %v", n, err)
	}
}

// TestPassword: nobody is let in without it.
func TestPassword(t *testing.T) {
	ctx := context.Background()
	_, addr, _ := start(t, config(t), "secret")
	for _, wrong := range []string{"", "secret2", "Secret"} {
		if err := client(t, addr, wrong).Set(ctx, "k", "v", 0).Err(); err == nil {
			t.Errorf("password %q is let in", wrong)
		}
	}
	if err := client(t, addr, "secret").Set(ctx, "k", "v", 0).Err(); err != nil {
		t.Error(err)
	}
}

// TestLease: a value that EXISTS has told of stays for its lease; when it has gone after
// that, who asks for it is not left waiting for the rest of an answer.
func TestLease(t *testing.T) {
	ctx := context.Background()
	s, addr, _ := start(t, config(t), "")
	c := client(t, addr, "")
	full := func() {
		t.Helper()
		for range 3 { // twice for those that were used before
			if err := s.cfg.Store.MakeRoom(ctx, 1); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, key := range []string{"leased", "other"} {
		if err := c.Set(ctx, key, strings.Repeat("v", 100_000), 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := c.Exists(ctx, "leased").Result(); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	full()
	if v, err := c.Get(ctx, "leased").Result(); err != nil || len(v) != 100_000 {
		t.Errorf("during its lease %d bytes, %v", len(v), err)
	}
	if err := c.Get(ctx, "other").Err(); !errors.Is(err, redis.Nil) {
		t.Errorf("what has gone and nobody was told of: %v", err)
	}
	s.sweep(time.Now().Add(s.cfg.Lease))
	full()
	if err := c.Get(ctx, "leased").Err(); err == nil || errors.Is(err, redis.Nil) {
		t.Errorf("after its lease: %v, want a connection that ends", err)
	}
	s.sweep(time.Now().Add(promised * s.cfg.Lease))
	if err := c.Get(ctx, "leased").Err(); !errors.Is(err, redis.Nil) {
		t.Errorf("long after: %v", err)
	}
}

// TestLeasesAreBounded: leases hold a quarter of the memory at most, so that writers have
// room; a value that is promised only, and has gone, is no answer that somebody waits for.
func TestLeasesAreBounded(t *testing.T) {
	ctx := context.Background()
	s, addr, _ := start(t, config(t), "")
	c := client(t, addr, "")
	limit := s.cfg.Store.Stats().Limit
	size := int(limit / 20)
	for i := range 12 {
		key := fmt.Sprint("key ", i)
		if err := c.Set(ctx, key, strings.Repeat("v", size), 0).Err(); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if n, err := c.Exists(ctx, key).Result(); err != nil || n != 1 {
				t.Fatal(n, err)
			}
		}
	}
	s.mu.Lock()
	held := s.held
	s.mu.Unlock()
	if held > limit/heldShare || held < int64(4*size) {
		t.Errorf("leases hold %d bytes of %d", held, limit)
	}
	for range 3 { // twice for those that were used before
		if err := s.cfg.Store.MakeRoom(ctx, 1); err != nil {
			t.Fatal(err)
		}
	}
	if v, err := c.Get(ctx, "key 0").Result(); err != nil || len(v) != size {
		t.Errorf("during its lease %d bytes, %v", len(v), err)
	}
	if err := c.Get(ctx, "key 11").Err(); err == nil || errors.Is(err, redis.Nil) {
		t.Errorf("promised, not held and gone: %v, want a connection that ends", err)
	}
	s.sweep(time.Now().Add(promised * s.cfg.Lease))
	if s.held != 0 {
		t.Errorf("%d bytes are held by no lease", s.held)
	}
}

// TestMute: a client that knows nothing but a few commands, and how long values are, is not
// left waiting for one that is not there.
func TestMute(t *testing.T) {
	_, addr, _ := start(t, config(t), "secret")
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "*2\r\n$4\r\nAUTH\r\n$6\r\nsecret\r\n*2\r\n$6\r\nEXISTS\r\n$1\r\nk\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != "+OK\r\n:0\r\n" {
		t.Errorf("%q, %v, and no end", got, err)
	}
}

// lacking is a listener that lacks a file descriptor the first time.
type lacking struct {
	net.Listener
	met bool
}

// Accept implements net.Listener.
func (l *lacking) Accept() (net.Conn, error) {
	if !l.met {
		l.met = true
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	return l.Listener.Accept()
}

// TestLacking: too many open files are no end.
func TestLacking(t *testing.T) {
	s, _, _ := start(t, config(t), "")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	again, err := New(s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- again.Serve(ctx, &lacking{Listener: l}) }()
	if err := client(t, l.Addr().String(), "").Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestBeforeLogin: who has not given the password cannot have the server keep much for it.
func TestBeforeLogin(t *testing.T) {
	_, addr, _ := start(t, config(t), "secret")
	for name, sent := range map[string]string{
		"many strings": "*1024\r\n$4\r\nAUTH\r\n", "a long one": "*2\r\n$4\r\nAUTH\r\n$65536\r\n", "QUIT": "*3\r\n$4\r\nQUIT\r\n$1\r\nx\r\n$4096\r\n",
	} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, sent); err != nil {
			t.Fatal(err)
		}
		// The end comes before the strings do.
		if got, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(got), "-ERR protocol error") {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		c.Close()
	}
	if err := client(t, addr, "secret").Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
}

// TestTorn: a client that dies in the middle of a value leaves nothing.
func TestTorn(t *testing.T) {
	s, addr, _ := start(t, config(t), "")
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100000\r\nhalf"); err != nil {
		t.Fatal(err)
	}
	c.Close()
	for deadline := time.Now().Add(time.Minute); ; <-time.After(5 * time.Millisecond) {
		s.mu.Lock()
		n := len(s.conns)
		s.mu.Unlock()
		if n == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the connection never ends")
		}
	}
	if err := client(t, addr, "").Get(context.Background(), "k").Err(); !errors.Is(err, redis.Nil) {
		t.Errorf("half a value is there: %v", err)
	}
	if used := s.cfg.Store.Stats().Used; used > 4096 {
		t.Errorf("%d bytes are used", used)
	}
}

// FuzzCommand: whatever is sent is read as commands or refused, and ends.
func FuzzCommand(f *testing.F) {
	for _, s := range []string{"*1\r\n$4\r\nPING\r\n", "*2\r\n$3\r\nGET\r\n$1\r\nk\r\n", "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\nab\r\n", "*-1\r\n", "*1\r\n$-1\r\n", "PING\r\n", "*+1\r\n$4\r\nPING\r\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := reader{r: bufio.NewReader(bytes.NewReader(b))}
		for {
			name, err := r.next()
			if err != nil {
				return
			}
			args, err := r.args()
			if err != nil {
				return
			}
			if len(name) > len(b) || len(args) > mostArgs {
				t.Fatalf("%q, %d strings", name, len(args))
			}
		}
	})
}

// TestTellsNothing: what is sent in a form that the node does not take is not in the error,
// which goes to the log: it may be a password, or a prompt.
func TestTellsNothing(t *testing.T) {
	for _, sent := range []string{
		"AUTH hunter2\r\n", "SET hunter2 1\r\n", "hunter2\r\n", "*2\r\n$hunter2\r\n", "*hunter2\r\n", "*1\r\n$4\r\nAUTHhunter2\r\n", "*2\r\n$4\r\nAUTH\r\nhunter2\r\n",
	} {
		r := reader{r: bufio.NewReader(strings.NewReader(sent))}
		_, err := r.next()
		if err == nil {
			_, err = r.args()
		}
		if !errors.Is(err, errProtocol) || strings.Contains(err.Error(), "hunter") {
			t.Errorf("%q: %v", sent, err)
		}
	}
}
