//go:build unix

package kvrpc

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// sealed makes a block of one token, in parts, with random content.
func sealed(t testing.TB, id int32, size int) *kvcache.Frame {
	t.Helper()
	space := kvcache.NewSpace("m", nil)
	payload := make([]byte, size)
	_, _ = rand.NewChaCha8(space.Key(space.Root, []int32{id})).Read(payload) // never fails
	half := int64(size / 2)
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{id}},
		[]kvcache.Part{{Size: half}, {Size: int64(size) - half}}, payload)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// same fails the test unless a store has a block as it was put.
func same(t testing.TB, s kvcache.Store, f *kvcache.Frame) {
	t.Helper()
	l, err := s.Get(t.Context(), f.Ref)
	if err != nil {
		t.Fatalf("block %d: %v", f.IDs[0], err)
	}
	defer l.Release()
	if err := l.Verify(); err != nil || !bytes.Equal(l.Bytes(), f.Bytes()) {
		t.Fatalf("block %d is not as it was put: %v", f.IDs[0], err)
	}
}

// TestServerKilled kills a server with SIGKILL again and again in the middle of puts, gets
// and appends. What was acknowledged is there when the next one has the arena, nothing that
// is served is wrong, and the tail goes on where it was.
func TestServerKilled(t *testing.T) {
	rounds := 10
	if *kills > 0 {
		rounds = *kills
	}
	_, id := testIdentity(t)
	p := startPeer(t, childSpec{Limit: 8 << 20, Dir: shmDir(t), ID: &id})
	cfg := Config{Addr: p.addr, TLS: clientTLS(t, id), Timeout: 20 * time.Second, PutTimeout: 20 * time.Second, DialTimeout: 20 * time.Second, Away: time.Millisecond}
	w := &writing{t: t, c: newClient(t, cfg)}
	var err error
	if w.tail, err = w.c.OpenTail(t.Context(), w.spec()); err != nil {
		t.Fatal(err)
	}
	for round := range rounds {
		before := w.acked
		done := make(chan struct{})
		ctx, stop := context.WithCancel(t.Context())
		go func() {
			defer close(done)
			w.run(ctx)
		}()
		<-time.After(time.Duration(5+rand.IntN(60)) * time.Millisecond)
		p.kill()
		stop()
		<-done
		p.start(t)
		w.check(round, before)
	}
	if w.acked == 0 || w.appended == 0 {
		t.Errorf("%d blocks and %d ranges were acknowledged: the test proves nothing", w.acked, w.appended)
	}
	t.Logf("%d kills, %d blocks and %d ranges acknowledged", rounds, w.acked, w.appended)
}

// writing is a client that puts, reads and appends until it is told to stop.
type writing struct {
	t      *testing.T
	c      *Client
	next   int32
	recent []*kvcache.Frame // the last that were acknowledged: so few that none has to go
	acked  int

	tail     kvcache.TailWriter
	at       int // position of the next token
	appended int
}

// spec names its tail.
func (w *writing) spec() kvcache.TailSpec {
	space := kvcache.NewSpace("m", nil)
	return kvcache.TailSpec{Space: space, Stream: "s", Parent: space.Root}
}

// state is that of the token at a position.
func (w *writing) state(at int) []byte { return bytes.Repeat([]byte{byte(at)}, 5000) }

// run writes until ctx ends.
func (w *writing) run(ctx context.Context) {
	for ctx.Err() == nil {
		w.next++
		f := sealed(w.t, w.next, 300_000)
		if w.c.Put(ctx, f) == nil {
			w.acked++
			if w.recent = append(w.recent, f); len(w.recent) > 3 {
				w.recent = w.recent[1:]
			}
		}
		if len(w.recent) > 0 {
			if l, err := w.c.Get(ctx, w.recent[0].Ref); err == nil {
				if err := l.Verify(); err != nil || !bytes.Equal(l.Bytes(), w.recent[0].Bytes()) {
					w.t.Errorf("a block is wrong: %v", err)
				}
				l.Release()
			}
		}
		switch err := w.tail.Append(kvcache.Range{First: w.at, IDs: []int32{int32(w.at)}, Data: w.state(w.at)}); {
		case err == nil:
			w.at++
			w.appended++
		case errors.Is(err, kvcache.ErrStale), errors.Is(err, kvcache.ErrGap):
			w.t.Errorf("append: %v", err)
			return
		}
	}
}

// check looks for what was acknowledged.
func (w *writing) check(round, before int) {
	w.t.Helper()
	// The gate lets the first call through when the millisecond is over.
	awaitPeer(w.t, w.c)
	for _, f := range w.recent {
		same(w.t, w.c, f)
	}
	tails, err := w.c.ReadTail(w.t.Context(), w.spec().Space, "s", 0)
	if err != nil || len(tails) != 1 {
		w.t.Fatalf("round %d: %d tails, %v", round, len(tails), err)
	}
	// The last append may have been done without its answer.
	if n := len(tails[0].Ranges); n != w.at && n != w.at+1 {
		w.t.Fatalf("round %d: %d ranges of a tail of %d", round, n, w.at)
	}
	for i, r := range tails[0].Ranges {
		if r.First != i || !bytes.Equal(r.Data, w.state(i)) {
			w.t.Fatalf("round %d: range %d is wrong", round, i)
		}
	}
	w.t.Logf("round %d: %d blocks", round, w.acked-before)
}

// awaitPeer waits until a peer answers.
func awaitPeer(t testing.TB, c *Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		if _, err := c.PeerStats(ctx); err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatal("the peer does not answer")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// TestServerHangs stops a server with SIGSTOP: a caller's budget is kept, then nobody waits
// at all, and when the server goes on it is used again.
func TestServerHangs(t *testing.T) {
	p := startPeer(t, childSpec{Limit: 8 << 20, Dir: shmDir(t)})
	c := newClient(t, Config{Addr: p.addr, Timeout: 400 * time.Millisecond, PutTimeout: 400 * time.Millisecond, Away: 300 * time.Millisecond})
	f := sealed(t, 1, 3<<20)
	if err := c.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	w, err := c.OpenTail(t.Context(), kvcache.TailSpec{Space: f.Space, Stream: "s"})
	if err != nil {
		t.Fatal(err)
	}
	p.stop(t)
	calls := map[string]func(context.Context) error{
		"get": func(ctx context.Context) error { _, err := c.Get(ctx, f.Ref); return err },
		"longest": func(ctx context.Context) error {
			_, err := c.Longest(ctx, kvcache.Query{Space: f.Space, IDs: f.IDs})
			return err
		},
		"put":   func(ctx context.Context) error { return c.Put(ctx, sealed(t, 2, 8<<20)) },
		"tails": func(ctx context.Context) error { _, err := c.ReadTail(ctx, f.Space, "s", 0); return err },
		"append": func(context.Context) error {
			return w.Append(kvcache.Range{IDs: []int32{1}, Data: []byte{1}})
		},
	}
	for name, call := range calls {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, remote.ErrAway) {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
	if st := c.ops.Stats(); st.Late != uint64(len(calls)) || st.Failed != 0 {
		t.Errorf("%d late and %d failed, want %d and 0", st.Late, st.Failed, len(calls))
	}
	if err := p.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	awaitPeer(t, c)
	same(t, c, f)
}

// TestServerAway: where nobody listens calls fail at once, then without a try, and the
// peer is used as soon as it is there.
func TestServerAway(t *testing.T) {
	p := startPeer(t, childSpec{Limit: 8 << 20, Dir: shmDir(t)})
	p.kill()
	c := newClient(t, Config{Addr: p.addr, Timeout: time.Minute, PutTimeout: time.Minute, DialTimeout: time.Minute, Away: 50 * time.Millisecond})
	f := sealed(t, 1, 1000)
	away := 0
	for range 50 {
		err := c.Put(t.Context(), f)
		if err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("put without a peer: %v", err)
		}
		if errors.Is(err, remote.ErrAway) {
			away++
		}
	}
	if away == 0 {
		t.Error("a peer that is away is tried each time")
	}
	p.start(t)
	awaitPeer(t, c)
	if err := c.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	same(t, c, f)
}
