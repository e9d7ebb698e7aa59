package h2

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"golang.org/x/net/http2"
)

// through is a proxy that passes pieces on in the goroutine that reads them, as long as
// there is room, and else by one of its own.
type through struct {
	t      testing.TB
	tr     *Transport
	mu     sync.Mutex
	inline int // pieces that were passed on at once
}

func (p *through) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resp, err := p.tr.RoundTrip(newRequest(p.t, http.MethodGet, r.URL.Path, nil).WithContext(r.Context()))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer resp.Body.Close()
	out, body := w.(*Writer), resp.Body.(*Body)
	out.Flush()
	var mu sync.Mutex
	mu.Lock()
	buf := make([]byte, 1000)
	body.Inline(func(b *Batch) bool {
		if !mu.TryLock() {
			return false
		}
		defer mu.Unlock()
		for out.Room(len(buf)) {
			n, err := body.ReadNow(b, buf)
			if err != nil {
				return errors.Is(err, ErrNotYet)
			}
			p.mu.Lock()
			p.inline++
			p.mu.Unlock()
			if out.WriteNow(b, buf[:n]) != nil {
				return false
			}
		}
		return false
	})
	for {
		n, err := body.ReadNow(nil, buf)
		switch {
		case errors.Is(err, ErrNotYet):
			mu.Unlock()
			body.Wait()
			mu.Lock()
			continue
		case n > 0:
			_, _ = out.Write(buf[:n])
			out.Flush()
			continue
		}
		body.Inline(nil)
		mu.Unlock()
		if !errors.Is(err, io.EOF) {
			panic(http.ErrAbortHandler)
		}
		return
	}
}

// Pieces that are passed on at once, by the goroutine that reads them, come whole and in
// their order, over many streams, on sockets and on what is none.
func TestInline(t *testing.T) {
	var want strings.Builder
	for i := range 100 {
		want.WriteString(fmt.Sprintf("event %d\n", i))
	}
	p := &through{t: t, tr: newTransport(t, theirServer(t, http.HandlerFunc(exchanges)))}
	tr := theirs(t, serve(t, newServer(p)))
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			for range 5 {
				if _, body, err := roundTrip(t, tr, newRequest(t, http.MethodGet, "/stream", nil)); err != nil || body != want.String() {
					t.Errorf("%d bytes, %v", len(body), err)
				}
			}
		})
	}
	wg.Wait()
	if p.inline == 0 {
		t.Error("nothing was passed on at once")
	}
	resp, err := tr.RoundTrip(newRequest(t, http.MethodGet, "/cut", nil))
	if err == nil {
		var body []byte
		body, err = io.ReadAll(resp.Body)
		if string(body) != "half" {
			t.Errorf("got %q", body)
		}
		_ = resp.Body.Close() // it was read
	}
	if err == nil {
		t.Error("what was cut ends well")
	}
}

// A client that reads nothing stops its own answer and no other.
func TestInlineStalled(t *testing.T) {
	large := strings.Repeat("x", 1<<20)
	up := newTransport(t, theirServer(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/large" {
			_, _ = io.WriteString(w, large)
			return
		}
		exchanges(w, r)
	})))
	c := newClient(t, serve(t, newServer(&through{t: t, tr: up})))
	c.headers(1, true, ":method", "GET", ":scheme", "http", ":authority", "a", ":path", "/large")
	got := 0
	c.did(c.fr.WriteWindowUpdate(0, 4<<20)) // the stream's is the limit
	until(c, func(f *http2.DataFrame) bool { got += len(f.Data()); return got == firstWindow })
	c.headers(3, true, ":method", "GET", ":scheme", "http", ":authority", "a", ":path", "/stream")
	until(c, func(f *http2.DataFrame) bool { return f.StreamID == 3 && f.StreamEnded() })
	c.did(c.fr.WriteWindowUpdate(1, 1<<20))
	until(c, func(f *http2.DataFrame) bool { got += len(f.Data()); return f.StreamEnded() })
	if got != len(large) {
		t.Errorf("%d bytes of %d", got, len(large))
	}
}

// pipeConn is a connection whose frames go to nobody.
func pipeConn(t *testing.T) (*serverConn, net.Conn) {
	near, far := net.Pipe()
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	return newServerConn(newServer(http.HandlerFunc(idle)), near), far
}

// What WriteNow cannot send is kept, whatever happens to the caller's buffer, and goes out
// in its order when the window opens.
func TestWriteNowKeeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, far := pipeConn(t)
		c.mu.Lock()
		s := c.newStreamLocked(1)
		s.window = 3
		c.mu.Unlock()
		if !s.hasRoom(3) || s.hasRoom(4) {
			t.Error("the room is not the window")
		}
		var b Batch
		p := []byte("abcdef")
		for range 2 {
			if err := s.writeNow(&b, p); err != nil {
				t.Error(err)
			}
		}
		copy(p, "xxxxxx")
		if s.hasRoom(0) {
			t.Error("there is room behind what waits")
		}
		b.flush()
		got := make(chan string, 1)
		go func() {
			fr := http2.NewFramer(io.Discard, far)
			var all bytes.Buffer
			for all.Len() < 12 {
				f, err := fr.ReadFrame()
				if err != nil {
					t.Error(err)
					break
				}
				all.Write(f.(*http2.DataFrame).Data())
			}
			got <- all.String()
		}()
		synctest.Wait()
		c.mu.Lock()
		s.window += 100
		s.moveLocked()
		c.wakeLocked()
		c.mu.Unlock()
		if all := <-got; all != "abcdefabcdef" {
			t.Errorf("got %q", all)
		}
	})
}

// What many write at once goes out together, and what nobody takes is bounded.
func TestGathers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, far := pipeConn(t)
		c.sendWindow = 1 << 30
		for i := range uint32(100) {
			c.mu.Lock()
			s := c.newStreamLocked(2*i + 1)
			s.window = 1 << 30
			c.mu.Unlock()
			go func() { _ = s.write(make([]byte, 10_000), true) }()
		}
		synctest.Wait() // the first is being sent, which nobody takes
		c.mu.Lock()
		if n := len(c.out); n < mostPending || n > mostPending+firstFrame+9 {
			t.Errorf("%d bytes are held", n)
		}
		c.mu.Unlock()
		got, reads := 0, 0
		for buf := make([]byte, 1<<20); got < 100*10_009; reads++ {
			n, err := far.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			got += n
		}
		if reads > 40 {
			t.Errorf("%d writes for 100 frames", reads)
		}
	})
}
