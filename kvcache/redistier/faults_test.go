//go:build unix

package redistier

import (
	"bytes"
	"context"
	"errors"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// written are the blocks that a store has acknowledged.
type written struct {
	mu     sync.Mutex
	frames []*kvcache.Frame
	failed int
}

// TestMasterDies kills a master with SIGKILL in the middle of writes. No block that is
// served is wrong, those on the other masters are all there, and when the replica has
// taken over everything can be written again.
func TestMasterDies(t *testing.T) {
	cluster := redistest.StartCluster(t, 2*time.Second)
	s := newStore(t, Config{
		Redis: redislink.Config{URL: cluster.URL()}, PartSize: 100_000, Timeout: 5 * time.Second, PutTimeout: 5 * time.Second, Away: 50 * time.Millisecond,
	})
	space := kvcache.NewSpace("m", nil)
	var acked written
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var writers sync.WaitGroup
	for w := range int32(4) {
		writers.Go(func() {
			for i := int32(0); ctx.Err() == nil && i < 2000; i++ {
				f := sealed(t, space, space.Root, []int32{w, i}, 300_000)
				err := s.Put(ctx, f)
				acked.mu.Lock()
				if err == nil {
					acked.frames = append(acked.frames, f)
				} else {
					acked.failed++
				}
				acked.mu.Unlock()
			}
		})
	}
	count := func() (int, int) {
		acked.mu.Lock()
		defer acked.mu.Unlock()
		return len(acked.frames), acked.failed
	}
	await(t, "writes", func() bool { n, _ := count(); return n >= 30 })
	cluster.Nodes[1].Kill()
	await(t, "a write that fails", func() bool { _, n := count(); return n > 0 })
	before, _ := count()
	// The replica of a third of the keys takes over.
	await(t, "writes again", func() bool {
		stillFailing := false
		for i := range int32(12) {
			f := sealed(t, space, space.Root, []int32{100, i}, 1000)
			stillFailing = stillFailing || s.Put(t.Context(), f) != nil
		}
		return !stillFailing
	})
	stop()
	writers.Wait()
	after, failed := count()
	lost := 0
	for i, f := range acked.frames {
		l, err := s.Get(t.Context(), f.Ref)
		switch {
		case errors.Is(err, kvcache.ErrNotFound):
			lost++ // acknowledged by the master, and not yet on its replica
		case err != nil:
			t.Fatalf("block %d: %v", i, err)
		default:
			if err := l.Verify(); err != nil || !bytes.Equal(l.Bytes(), f.Bytes()) {
				t.Fatalf("block %d is wrong: %v", i, err)
			}
			l.Release()
		}
	}
	t.Logf("%d blocks acknowledged, %d of them before the failover, %d writes failed, %d blocks lost", after, before, failed, lost)
	// A third was on the dead master; of that the last moment may be gone.
	if lost > after/3 {
		t.Errorf("%d of %d blocks are lost", lost, after)
	}
	for _, n := range s.Stats().Refused {
		if n > 0 {
			t.Errorf("refused %d blocks: a half of one was visible", n)
		}
	}
}

// TestServerHangs stops servers with SIGSTOP: a caller's budget is kept, the call is
// counted, and after some of them nobody waits at all until the server is back.
func TestServerHangs(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, Config{
		Redis: redislink.Config{URL: server.URL()}, Single: true, Timeout: 400 * time.Millisecond, PutTimeout: 400 * time.Millisecond, Away: time.Hour,
	})
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, []int32{1}, 1000)
	if err := s.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	server.Pause()
	defer server.Resume()
	calls := map[string]func(context.Context) error{
		"get": func(ctx context.Context) error { _, err := s.Get(ctx, f.Ref); return err },
		"longest": func(ctx context.Context) error {
			m, err := s.Longest(ctx, kvcache.Query{Space: space, IDs: f.IDs})
			if len(m.Blocks) != 0 {
				t.Error("found a block without a server")
			}
			return err
		},
		"put": func(ctx context.Context) error { return s.Put(ctx, sealed(t, space, space.Root, []int32{2}, 1000)) },
	}
	for name, call := range calls {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
	if st := s.Stats(); st.Late != 3 || st.Failed != 0 {
		t.Errorf("%d late and %d failed, want 3 and 0", st.Late, st.Failed)
	}
	for name, call := range calls {
		// Without a deadline of its own, and yet at once.
		if err := call(t.Context()); !errors.Is(err, remote.ErrAway) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if st := s.Stats(); st.Late != 6 {
		t.Errorf("%d late, want 6", st.Late)
	}
}

// TestServerReturns: a server that was killed and comes back empty is one that has
// nothing, and takes blocks again.
func TestServerReturns(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, Config{Redis: redislink.Config{URL: server.URL()}, Single: true, Away: 10 * time.Millisecond})
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, []int32{1}, 1000)
	if err := s.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	server.Kill()
	for range 5 {
		if _, err := s.Get(t.Context(), f.Ref); err == nil || errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("no server: %v", err)
		}
	}
	if st := s.Stats(); st.Failed+st.Late != 5 {
		t.Errorf("%d failed and %d late, want 5", st.Failed, st.Late)
	}
	server.Start()
	await(t, "the server", func() bool { _, err := s.Get(t.Context(), f.Ref); return errors.Is(err, kvcache.ErrNotFound) })
	if err := s.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	if l, err := s.Get(t.Context(), f.Ref); err != nil {
		t.Error(err)
	} else {
		l.Release()
	}
}

// await waits until something is true, a minute at most.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for !ok() {
		select {
		case <-ctx.Done():
			t.Fatalf("no %s", what)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// TestSecured: the tier works for a user whose ACL has its prefix and no more, by TLS with a
// client's certificate, on a real server.
func TestSecured(t *testing.T) {
	cert, key := redistest.Certificate(t)
	_, addr := redistest.StartTLS(t, cert, key, "--user", "kv", "on", ">secret", "~kvmesh:*", "+@read", "+@write", "+@scripting", "+@connection", "+time", "-@dangerous")
	files := url.Values{"ca": {cert}, "cert": {cert}, "key": {key}}
	s := newStore(t, Config{
		Redis: redislink.Config{URL: "rediss://kv:secret@" + addr + "?" + files.Encode()}, Single: true, PartSize: 10_000, Limit: 100_000,
		Timeout: 20 * time.Second, PutTimeout: 20 * time.Second,
	})
	space := kvcache.NewSpace("m", nil)
	var last *kvcache.Frame
	for i := range int32(10) { // more than the limit
		last = sealed(t, space, space.Root, []int32{i}, 25_000)
		if err := s.Put(t.Context(), last); err != nil {
			t.Fatal(err)
		}
	}
	m, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: last.IDs})
	if err != nil || len(m.Blocks) != 1 || s.Stats().Evictions == 0 {
		t.Fatalf("%+v, %v", m, err)
	}
	l, err := s.Get(t.Context(), last.Ref)
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	if err := s.Drop(t.Context(), space.Fingerprint); err != nil {
		t.Error(err)
	}
}

// TestFailover: after the death of the master that a real Sentinel watches, blocks are kept
// again, and what the replica had is found.
func TestFailover(t *testing.T) {
	w := redistest.StartSentinel(t, time.Second)
	s := newStore(t, Config{
		Redis: redislink.Config{URL: w.URL()}, Single: true, Away: 50 * time.Millisecond, Timeout: 20 * time.Second, PutTimeout: 20 * time.Second,
	})
	space := kvcache.NewSpace("m", nil)
	before, after := sealed(t, space, space.Root, []int32{1}, 1000), sealed(t, space, space.Root, []int32{2}, 1000)
	if err := s.Put(t.Context(), before); err != nil {
		t.Fatal(err)
	}
	// The replica has the block when it has acknowledged.
	conn := w.Master.Client.Conn()
	defer conn.Close()
	if err := conn.Set(t.Context(), "last", 1, 0).Err(); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Wait(t.Context(), 1, 0).Result(); err != nil || n != 1 {
		t.Fatalf("%d replicas, %v", n, err)
	}
	w.Master.Kill()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for s.Put(ctx, after) != nil {
		select {
		case <-ctx.Done():
			t.Fatal("nothing was kept after the master's death")
		case <-time.After(50 * time.Millisecond):
		}
	}
	for _, f := range []*kvcache.Frame{before, after} {
		l, err := s.Get(t.Context(), f.Ref)
		if err != nil {
			t.Fatal(err)
		}
		l.Release()
	}
}
