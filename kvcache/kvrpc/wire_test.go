//go:build unix

package kvrpc

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
)

var update = flag.Bool("update", false, "write the golden files")

// goldenSpace and the like are what the golden messages are about: each byte tells where it
// belongs.
func goldenRef() kvcache.Ref {
	fill := func(b byte) (k kvcache.Key) {
		copy(k[:], bytes.Repeat([]byte{b}, len(k)))
		return k
	}
	return kvcache.Ref{Space: kvcache.Space{Fingerprint: kvcache.Fingerprint(fill(0xf0)), Root: fill(0xf1)}, Parent: fill(0xf2), Key: fill(0xf3)}
}

// goldenTails are the tails of an answer.
func goldenTails() []kvcache.Tail {
	r := goldenRef()
	return []kvcache.Tail{{
		TailSpec: kvcache.TailSpec{Space: r.Space, Stream: "stream", Choice: 1, Attempt: 2, Parent: r.Parent, First: 64},
		Ranges:   []kvcache.Range{{First: 64, IDs: []int32{7, -1}, Data: []byte("state")}, {First: 66, IDs: []int32{8}, Data: []byte("more")}},
	}, {
		TailSpec: kvcache.TailSpec{Space: r.Space, Stream: "stream", Choice: 1, Attempt: 1, Parent: r.Root, First: 0},
	}}
}

// message makes one as it goes over the wire, without its data.
func message(what uint8, data int, body ...[]byte) []byte {
	b := append(make([]byte, headLen), bytes.Join(body, nil)...)
	putHead(b, what, uint64(data))
	return b
}

// TestGolden compares the bytes of each message with those that the other version of a
// peer sends and expects. A change is a new version; see the package comment.
func TestGolden(t *testing.T) {
	ref := goldenRef()
	state := []byte("state")
	u64 := func(n ...uint64) (b []byte) {
		for _, n := range n {
			b = kvwire.AppendU64(b, n)
		}
		return b
	}
	wrong, text := statusOf(kvcache.Refuse(kvcache.ReasonChecksum, "part 3"))
	failed, reason := statusOf(errors.New("disk is gone"))
	var out strings.Builder
	for _, m := range []struct {
		name string
		b    []byte
	}{
		{"get", message(uint8(opGet), 0, kvwire.AppendRef(nil, ref), u64(4096, 1<<20))},
		{"put", message(uint8(opPut), 0, kvwire.AppendRef(nil, ref), u64(8<<20))},
		{"append", message(uint8(opAppend), len(state), u64(77, 64, kvcache.Sum(state)), []byte{0}, kvwire.AppendIDs(nil, []int32{7, -1}))},
		{"tails", message(uint8(opTails), 0, kvwire.AppendU32(kvwire.AppendSpace(nil, ref.Space), 1), []byte("stream"))},
		{"offer", message(uint8(opOffer), 2<<20, kvwire.AppendRef(nil, ref), u64(8<<20))},
		{"answer to get", message(uint8(statusDone), 1<<20, u64(8<<20))},
		{"wanted", message(uint8(statusDone), 0, []byte{1})},
		{"answer to tails", message(uint8(statusDone), 9, appendTails(nil, goldenTails()))},
		{"not found", message(uint8(statusNotFound), 0)},
		{"stale", message(uint8(statusStale), 0)},
		{"full", message(uint8(statusFull), 0)},
		{"gap", message(uint8(statusGap), 0)},
		{"unknown", message(uint8(statusUnknown), 0)},
		{"refused", message(uint8(wrong), 0, text)},
		{"failed", message(uint8(failed), 0, reason)},
		{"version", message(uint8(statusVersion), 0)},
	} {
		fmt.Fprintf(&out, "%s\n%s\n", m.name, hex.Dump(m.b))
	}
	name := filepath.Join("testdata", "messages.txt")
	if *update {
		if err := os.WriteFile(name, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), out.String()); diff != "" {
		t.Error(diff)
	}
}

// TestTailsIndex reads tails back, and ends one before the range whose state is wrong.
func TestTailsIndex(t *testing.T) {
	want := goldenTails()
	spec := kvcache.TailSpec{Space: want[0].Space, Stream: "stream", Choice: 1}
	body, data := appendTails(nil, want), []byte("statemore")
	c := cursorOf(body)
	got, wrong := c.tails(spec, data)
	if diff := cmp.Diff(want, got); diff != "" || wrong != nil || c.Bad {
		t.Errorf("%v %v %s", wrong, c.Bad, diff)
	}
	c = cursorOf(body)
	got, wrong = c.tails(spec, []byte("stateMore"))
	want[0].Ranges = want[0].Ranges[:1]
	if diff := cmp.Diff(want, got); diff != "" || wrong == nil || c.Bad {
		t.Errorf("a wrong state: %v %v %s", wrong, c.Bad, diff)
	}
	for n := range body {
		if n == len(appendTails(nil, goldenTails()[:1])) {
			continue // a list of one tail
		}
		c = cursorOf(body[:n])
		if list, _ := c.tails(spec, data); !c.Bad {
			t.Errorf("%d bytes of an index are read as %d tails", n, len(list))
		}
	}
	c = cursorOf(body)
	if _, _ = c.tails(spec, append(data, 0)); !c.Bad {
		t.Error("a state that belongs to no range")
	}
}

// flipper is a proxy that flips one bit of what goes one way on the data channel.
type flipper struct {
	addr string
	// at counts down the bytes to the client, or to the server: at 0 a bit is flipped.
	toClient, toServer atomic.Int64
}

// newFlipper makes one before an address, which flips nothing yet.
func newFlipper(t *testing.T, addr string) *flipper {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	f := &flipper{addr: l.Addr().String()}
	f.toClient.Store(-1)
	f.toServer.Store(-1)
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", addr)
			if err != nil {
				a.Close()
				return
			}
			go func() {
				r := bufio.NewReader(a)
				toServer, toClient := &f.toServer, &f.toClient
				if first, err := r.Peek(len(magic)); err != nil || string(first) != magic {
					toServer, toClient = &atomic.Int64{}, &atomic.Int64{} // of the control channel
					toServer.Store(-1)
					toClient.Store(-1)
				}
				go pass(a, b, b, toClient)
				pass(b, a, r, toServer)
			}()
		}
	}()
	return f
}

// pass copies what is read from one connection to the other.
func pass(to, from net.Conn, r io.Reader, at *atomic.Int64) {
	defer to.Close()
	defer from.Close()
	b := make([]byte, 32<<10)
	for {
		n, err := r.Read(b)
		if err != nil {
			return
		}
		if left := at.Load(); left >= 0 {
			if left < int64(n) {
				b[left] ^= 1 << (left % 8)
			}
			at.Add(int64(-n))
		}
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

// sumRefused adds up what was refused.
func sumRefused(st kvcache.Stats) (n uint64) {
	for _, c := range st.Refused {
		n += c
	}
	return n
}

// TestFlippedBits flips single bits of what is on its way, where TLS would have noticed:
// nothing wrong is ever seen, it is counted, and what is right stays.
func TestFlippedBits(t *testing.T) {
	n := newNode(t, 64<<20, ServerConfig{})
	f := newFlipper(t, n.addr)
	c := newClient(t, Config{Addr: f.addr, Timeout: 20 * time.Second, PutTimeout: 20 * time.Second, Away: time.Nanosecond})
	stored := sealed(t, 1, 100_000)
	if err := c.Put(t.Context(), stored); err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 1))
	w, err := c.OpenTail(t.Context(), kvcache.TailSpec{Space: stored.Space, Stream: "s"})
	if err != nil {
		t.Fatal(err)
	}
	next := 0
	for i := range int32(60) {
		before := sumRefused(c.Stats())
		at := r.Int64N(stored.Total + headLen) // in head, body or frame
		if i%4 == 0 {
			at = r.Int64N(700)
		}
		f.toClient.Store(at)
		_, err := c.Get(t.Context(), stored.Ref)
		f.toClient.Store(-1)
		_, refused := errors.AsType[*kvcache.Refusal](err)
		if err == nil || at >= headLen+8 && (!refused || sumRefused(c.Stats()) != before+1) {
			t.Errorf("get with byte %d flipped: %v", at, err)
		}
		same(t, c, stored) // the peer's own was right, and stays

		put := sealed(t, 100+i, 100_000)
		at = r.Int64N(put.Total + headLen + 128)
		before = n.s.Stats().Refused[kvcache.ReasonChecksum]
		f.toServer.Store(at)
		err = c.Put(t.Context(), put)
		f.toServer.Store(-1)
		if at < headLen+136 && err == nil {
			continue // the server has closed the connection, and it was tried again
		}
		if err == nil {
			t.Errorf("put with byte %d flipped was done", at)
		}
		if at > headLen+136+put.Len && n.s.Stats().Refused[kvcache.ReasonChecksum] != before+1 {
			t.Errorf("put with byte %d flipped: %v, not counted", at, err)
		}
		if _, err := n.store.Get(t.Context(), put.Ref); !errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("put with byte %d flipped is there: %v", at, err)
		}

		state := kvcache.Range{First: next, IDs: []int32{i}, Data: bytes.Repeat([]byte{byte(i)}, 500)}
		at = r.Int64N(headLen + 29 + 500)
		f.toServer.Store(at)
		err = w.Append(state)
		f.toServer.Store(-1)
		if err == nil && at >= headLen+29 {
			t.Error("an append with a flipped bit was done")
		}
		if err != nil {
			err = w.Append(state)
		}
		if err != nil {
			t.Fatalf("append after one that failed: %v", err)
		}
		next++
	}
	f.toClient.Store(headLen + 400)
	tails, err := c.ReadTail(t.Context(), stored.Space, "s", 0)
	f.toClient.Store(-1)
	if err == nil && (len(tails) != 1 || len(tails[0].Ranges) >= next) {
		t.Errorf("tails with a flipped bit: %d", len(tails))
	}
	if tails, err = c.ReadTail(t.Context(), stored.Space, "s", 0); err != nil || len(tails) != 1 || len(tails[0].Ranges) != next {
		t.Fatalf("tails: %d, %v", len(tails), err)
	}
	for i, r := range tails[0].Ranges {
		if !bytes.Equal(r.Data, bytes.Repeat([]byte{byte(i)}, 500)) {
			t.Errorf("range %d is wrong", i)
		}
	}
}

// speak sends bytes to a server and returns all that it answers until it closes.
func speak(t *testing.T, addr string, b []byte) []byte {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
	_ = c.(*net.TCPConn).CloseWrite()
	got, _ := io.ReadAll(c) // until it closes, or resets
	return got
}

// TestNonsense: a client that does not speak the protocol loses its connection, and one of
// another version is told so.
func TestNonsense(t *testing.T) {
	n := newNode(t, 1<<20, ServerConfig{})
	good := message(uint8(opGet), 0, kvwire.AppendRef(nil, goldenRef()), make([]byte, 16))
	changed := func(at int, to byte) []byte {
		b := bytes.Clone(good)
		b[at] = to
		return b
	}
	for name, b := range map[string][]byte{
		"HTTP": []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), "zeros": make([]byte, 1000), "sum": changed(8, good[8]+1), "flags": changed(5, 1),
		"body": changed(100, 1), "long body": changed(15, 1), "data": message(uint8(opGet), 7, kvwire.AppendRef(nil, goldenRef()), make([]byte, 16)),
		"much data": message(uint8(opAppend), 1<<39, make([]byte, 29)), "short": good[:20],
	} {
		if got := speak(t, n.addr, b); len(got) != 0 {
			t.Errorf("%s: answered % x", name, got)
		}
	}
	if got := speak(t, n.addr, changed(3, '2')); len(got) != headLen || status(got[4]) != statusVersion {
		t.Errorf("another version: % x", got)
	}
	for name, b := range map[string][]byte{
		"operation": message(99, 0), "body of get": message(uint8(opGet), 0, make([]byte, 5)), "size of put": message(uint8(opPut), 0, make([]byte, 136)),
		"ids": message(uint8(opAppend), 0, make([]byte, 26)),
	} {
		if got := speak(t, n.addr, b); len(got) < headLen || status(got[4]) != statusFailed {
			t.Errorf("%s: % x", name, got)
		}
	}
	if got := speak(t, n.addr, append(bytes.Clone(good), good...)); len(got) != 2*headLen || status(got[4]) != statusNotFound {
		t.Errorf("two requests at once: % x", got)
	}
}

// script is a connection whose other side says what was written down, listens to nothing,
// and leaves.
type script struct {
	net.Conn
	r *bytes.Reader
}

// Read implements net.Conn, and the others, too.
func (s script) Read(b []byte) (int, error)  { return s.r.Read(b) }
func (s script) Write(b []byte) (int, error) { return len(b), nil }
func (s script) SetDeadline(time.Time) error { return nil }
func (s script) Close() error                { return nil }

// FuzzServer: whatever comes, the server neither crashes nor keeps what is wrong.
func FuzzServer(f *testing.F) {
	ref := goldenRef()
	f.Add(message(uint8(opGet), 0, kvwire.AppendRef(nil, ref), make([]byte, 16)))
	f.Add(append(message(uint8(opPut), 0, kvwire.AppendRef(nil, ref), []byte{200, 0, 0, 0, 0, 0, 0, 0}), make([]byte, 200)...))
	f.Add(append(message(uint8(opOffer), 200, kvwire.AppendRef(nil, ref), []byte{200, 0, 0, 0, 0, 0, 0, 0}), make([]byte, 200)...))
	f.Add(append(message(uint8(opAppend), 5, make([]byte, 29)), "state"...))
	f.Add(message(uint8(opTails), 0, kvwire.AppendU32(kvwire.AppendSpace(nil, ref.Space), 1), []byte("stream")))
	n := newNode(f, 1<<20, ServerConfig{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= headLen {
			// A right sum, so that more than the sum is looked at.
			h, err := parseHead(b, mostBody)
			if err == nil && headLen+int(h.body) <= len(b) {
				b = bytes.Clone(b)
				putHead(b[:headLen+int(h.body)], h.what, h.data)
			}
		}
		p := &peer{s: n.s, l: newLink(script{r: bytes.NewReader(b)})}
		if err := p.serve(); err == nil {
			t.Error("a connection ended without a reason")
		}
		if n.store.Stats().Puts > 0 {
			t.Error("something was put")
		}
	})
}

// FuzzClient: whatever a server answers, the client neither crashes nor believes it.
func FuzzClient(f *testing.F) {
	space := kvcache.NewSpace("m", nil)
	frame, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{1}}, []kvcache.Part{{Size: 3}}, []byte("abc"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(append(message(0, len(frame.Bytes()), kvwire.AppendU64(nil, uint64(frame.Total))), frame.Bytes()...))
	f.Add(message(uint8(statusNotFound), 0))
	f.Add(message(uint8(statusFailed), 0))
	f.Add(append(message(0, 0, []byte{1}), message(0, 0)...))
	f.Add(append(message(0, 9, appendTails(nil, goldenTails())), "statemore"...))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := newMemory(1 << 20)
		h, wrong, err := newLink(script{r: bytes.NewReader(b)}).get(frame.Ref, func(n int64) ([]byte, error) { return m.get(context.Background(), n) })
		if err == nil && wrong == nil && (h.Key != frame.Key || h.Total != frame.Total) {
			t.Error("another block is believed")
		}
		for _, known := range []knowledge{unknown, yes, no} {
			l := newLink(script{r: bytes.NewReader(b)})
			l.offers = known
			_, _ = l.put(frame) // does not crash
		}
		n := min(len(b), 200)
		c := cursorOf(b[:n])
		_, _ = c.tails(kvcache.TailSpec{}, b[n:]) // does not crash
	})
}
