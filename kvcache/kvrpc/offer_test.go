//go:build unix

package kvrpc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
)

// offering is an offer of a frame of size bytes, and the first n of b behind it.
func offering(ref kvcache.Ref, size int64, b []byte, n int) []byte {
	head := message(uint8(opOffer), n, kvwire.AppendRef(nil, ref), kvwire.AppendU64(nil, uint64(size)))
	return append(head, b[:n]...)
}

// asking is a request for the first byte of a block.
func asking(ref kvcache.Ref) []byte {
	return message(uint8(opGet), 0, kvwire.AppendRef(nil, ref), kvwire.AppendU64(nil, 0), kvwire.AppendU64(nil, 1))
}

// answers reads what a server has said: for each answer its status and body.
func answers(t *testing.T, b []byte) (list []string) {
	t.Helper()
	for len(b) > 0 {
		h, err := parseHead(b, mostIndex)
		if err != nil || headLen+int(h.body)+int(h.data) > len(b) {
			t.Fatalf("% x is no answer: %v", b[:min(len(b), headLen)], err)
		}
		what := "other"
		switch body := b[headLen : headLen+int(h.body)]; {
		case status(h.what) == statusDone && h.data > 0:
			what = "data"
		case status(h.what) == statusDone && len(body) == 0:
			what = "done"
		case status(h.what) == statusDone && len(body) == 1:
			what = "wanted"[:6*int(body[0])] // or nothing
		case status(h.what) == statusRefused:
			what = "refused"
		case status(h.what) == statusFull:
			what = "full"
		case status(h.what) == statusFailed:
			what = "failed"
		case status(h.what) == statusNotFound:
			what = "none"
		}
		list = append(list, what)
		b = b[headLen+int(h.body)+int(h.data):]
	}
	return list
}

// TestOffers sends whole frames, beginnings of them and nothing of them ahead, of blocks
// that are new, there already, wrong and too large: each gets its answers, and the
// connection stands where the next request begins.
func TestOffers(t *testing.T) {
	n := newNode(t, 8<<20, ServerConfig{})
	disk, err := openDir(t.TempDir(), 8<<20) // which cannot lend room
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	for addr, store := range map[string]kvcache.Store{n.addr: n.store, disk.(dirNode).cfg.Addr: disk} {
		there := sealed(t, 1, 100_000)
		if err := store.Put(t.Context(), there); err != nil {
			t.Fatal(err)
		}
		wrong := bytes.Clone(sealed(t, 2, 100_000).Bytes())
		wrong[len(wrong)-1]++
		big := make([]byte, mostAhead)
		whole, half, none := sealed(t, 3, 100_000), sealed(t, 4, 3_000_000), sealed(t, 5, 100_000)
		for name, c := range map[string]struct {
			ref   kvcache.Ref
			say   [][]byte
			want  []string
			after string // of a request for the block behind it
		}{
			"whole": {whole.Ref, [][]byte{offering(whole.Ref, whole.Total, whole.Bytes(), int(whole.Total))}, []string{"wanted"}, "data"},
			"half": {
				half.Ref,
				[][]byte{offering(half.Ref, half.Total, half.Bytes(), 1_234_567), half.Bytes()[1_234_567:]},
				[]string{"wanted", "done"},
				"data",
			},
			"nothing":               {none.Ref, [][]byte{offering(none.Ref, none.Total, none.Bytes(), 0), none.Bytes()}, []string{"wanted", "done"}, "data"},
			"there":                 {there.Ref, [][]byte{offering(there.Ref, there.Total, there.Bytes(), int(there.Total))}, []string{""}, "data"},
			"half of what is there": {there.Ref, [][]byte{offering(there.Ref, there.Total, there.Bytes(), 70_001)}, []string{""}, "data"},
			"nothing of it":         {there.Ref, [][]byte{offering(there.Ref, there.Total, nil, 0)}, []string{""}, "data"},
			"wrong": {
				sealed(t, 2, 100_000).Ref,
				[][]byte{offering(sealed(t, 2, 100_000).Ref, int64(len(wrong)), wrong, len(wrong))},
				[]string{"refused"},
				"none",
			},
			"another block": {
				sealed(t, 6, 1).Ref,
				[][]byte{offering(sealed(t, 6, 1).Ref, there.Total, there.Bytes(), int(there.Total))},
				[]string{"refused"},
				"none",
			},
			"too large": {goldenRef(), [][]byte{offering(goldenRef(), 1<<30, big, len(big))}, []string{"full"}, "none"},
			"no size":   {goldenRef(), [][]byte{offering(goldenRef(), 0, nil, 0)}, []string{"failed"}, "none"},
			// As peers do that are older.
			"put": {sealed(t, 7, 100_000).Ref, [][]byte{
				message(uint8(opPut), 0, kvwire.AppendRef(nil, sealed(t, 7, 100_000).Ref), kvwire.AppendU64(nil, uint64(sealed(t, 7, 100_000).Total))),
				sealed(t, 7, 100_000).Bytes(),
			}, []string{"wanted", "done"}, "data"},
		} {
			got := answers(t, speak(t, addr, append(bytes.Join(c.say, nil), asking(c.ref)...)))
			if diff := cmp.Diff(append(c.want, c.after), got); diff != "" {
				t.Errorf("%s, to %T: %s", name, store, diff)
			}
		}
	}
}

// TestOfferNonsense: who sends more ahead than there is of the frame, or than may be sent,
// loses the connection before anything is kept of it.
func TestOfferNonsense(t *testing.T) {
	n := newNode(t, 16<<20, ServerConfig{})
	b := make([]byte, mostAhead+1)
	for name, m := range map[string][]byte{
		"more than the frame": offering(goldenRef(), 100, b, 101),
		"more than may be":    offering(goldenRef(), mostAhead+1, b, mostAhead+1)[:1000],
		"behind a bad size":   offering(goldenRef(), kvcache.MaxSize+1, b, 1),
		"behind no size":      offering(goldenRef(), 0, b, 1),
		"behind a bad body":   append(message(uint8(opOffer), 1, make([]byte, 5)), 0),
		"behind a put":        append(message(uint8(opPut), 1, kvwire.AppendRef(nil, goldenRef()), kvwire.AppendU64(nil, 1)), 0),
	} {
		if got := speak(t, n.addr, m); len(got) != 0 {
			t.Errorf("%s: answered % x", name, got)
		}
	}
}

// older is a peer that does not know offers: it answers puts as the first version did.
type older struct {
	addr         string
	puts, offers atomic.Int64
}

// newOlder starts one, which keeps nothing.
func newOlder(t *testing.T) *older {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lis.Close() })
	o := &older{addr: lis.Addr().String()}
	go func() {
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			go o.serve(newLink(c))
		}
	}()
	return o
}

// serve answers until the client says what the first version did not understand.
func (o *older) serve(l *link) {
	defer l.c.Close()
	answer := func(what status, body ...byte) error {
		l.begin()
		l.out = append(l.out, body...)
		return l.send(uint8(what), nil)
	}
	for {
		h, err := l.receive(mostBody)
		if err != nil || h.data != 0 {
			return
		}
		c := cursorOf(l.body)
		ref, size := c.Ref(), c.Size()
		if op(h.what) != opPut {
			o.offers.Add(1)
			err = answer(statusFailed, []byte("operation 5 is not known")...)
		} else if err = answer(statusDone, 1); err == nil {
			b := make([]byte, size)
			if _, err = receive(l, b, ref, func() error { return nil }); err == nil {
				o.puts.Add(1)
				err = answer(statusDone)
			}
		}
		if err != nil {
			return
		}
	}
}

// TestOlderPeer puts blocks to a peer that does not know offers: they arrive, and it is
// asked once for each connection.
func TestOlderPeer(t *testing.T) {
	o := newOlder(t)
	c := newClient(t, suiteConfig(o.addr, nil))
	for id := range int32(5) {
		if err := c.Put(t.Context(), sealed(t, id, 100_000)); err != nil {
			t.Fatal(err)
		}
	}
	if p, n := o.puts.Load(), o.offers.Load(); p != 5 || n != 1 {
		t.Errorf("%d puts and %d offers, want 5 and 1", p, n)
	}
}

// slow is a connection that counts what is written to it.
type slow struct {
	net.Conn
	written *atomic.Int64
}

// Write implements net.Conn.
func (s slow) Write(b []byte) (int, error) {
	n, err := s.Conn.Write(b)
	s.written.Add(int64(n))
	return n, err
}

// TestAhead: what a client sends before it knows whether a block is wanted is bounded, and
// a block that is there is not sent beyond that.
func TestAhead(t *testing.T) {
	n := newNode(t, 64<<20, ServerConfig{})
	var written atomic.Int64
	cfg := suiteConfig(n.addr, nil)
	cfg.Connections = 1
	cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		return slow{c, &written}, err
	}
	c := newClient(t, cfg)
	big, small := sealed(t, 1, 12<<20), sealed(t, 2, 500_000)
	for _, f := range []*kvcache.Frame{big, small} {
		if err := c.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		same(t, c, f)
	}
	for f, want := range map[*kvcache.Frame]int64{big: ahead, small: small.Total} {
		before := written.Load()
		if err := c.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		if n := written.Load() - before; n < want || n > want+1000 {
			t.Errorf("%d bytes are sent of a block of %d that is there, want %d", n, f.Total, want)
		}
		same(t, c, f)
	}
	if st := c.Stats(); st.Puts != 2 || st.Duplicates != 2 {
		t.Errorf("%d puts and %d duplicates, want 2 and 2", st.Puts, st.Duplicates)
	}
}

// TestOfferStalls: who offers a frame and sends only a part of it is cut off, and its room
// is free again.
func TestOfferStalls(t *testing.T) {
	n := newNode(t, 1<<20, ServerConfig{Stall: 100 * time.Millisecond})
	f := sealed(t, 1, 600_000)
	c, err := net.Dial("tcp", n.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(offering(f.Ref, f.Total, f.Bytes(), int(f.Total))[:300_000]); err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(c); len(b) != 0 { // until the server closes
		t.Errorf("answered % x", b)
	}
	if err := newClient(t, suiteConfig(n.addr, nil)).Put(t.Context(), sealed(t, 2, 600_000)); err != nil {
		t.Error(err)
	}
}

// TestOfferCancelled ends a call in the middle of an offer, while the server has no room yet:
// the call returns, nothing of the block is kept, and the next one is done.
func TestOfferCancelled(t *testing.T) {
	var store atomic.Pointer[arena.Store]
	late := sealed(t, 2, 1_000_000)
	asked, cancelled := make(chan bool), make(chan bool)
	n := newNode(t, 8<<20, ServerConfig{Reserve: func(ctx context.Context, ref kvcache.Ref, size int64) (Room, error) {
		if ref == late.Ref {
			asked <- true
			<-cancelled
		}
		return store.Load().Reserve(ctx, ref, size)
	}})
	store.Store(n.store)
	c := newClient(t, suiteConfig(n.addr, nil))
	if err := c.Put(t.Context(), sealed(t, 1, 1000)); err != nil { // so that the peer is known
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- c.Put(ctx, late) }()
	<-asked
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("a call that was cancelled: %v", err)
	}
	close(cancelled)
	f := sealed(t, 3, 1_000_000)
	if err := c.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	same(t, c, f)
}
