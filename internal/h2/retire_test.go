package h2

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// cancelled makes a request and gives it up when the server has it.
func cancelled(t *testing.T, tr *Transport, p *peer) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	req, done := newRequest(t, http.MethodGet, "/", nil).WithContext(ctx), make(chan error, 1)
	go func() {
		_, err := tr.RoundTrip(req)
		done <- err
	}()
	until(p, isGet)
	cancel()
	until(p, func(f *http2.RSTStreamFrame) bool { return f.ErrCode == http2.ErrCodeCancel })
	if err := <-done; err == nil {
		t.Error("a cancelled request has an answer")
	}
}

// A connection carries no more than MaxStreams, and others as soon as there is room.
func TestTransportMaxStreams(t *testing.T) {
	lis, dial := listen(t)
	tr := newTransport(t, dial)
	tr.MaxStreams = 2
	first := ask(t, tr, http.MethodGet, nil)
	p := acceptPeer(t, lis)
	until(p, isGet)
	second := ask(t, tr, http.MethodGet, nil)
	until(p, isGet)
	third := ask(t, tr, http.MethodGet, nil)
	q := acceptPeer(t, lis)
	until(q, isGet)
	p.headers(1, true, ":status", "200")
	if a := <-first; a.err != nil {
		t.Error(a.err)
	}
	fourth := ask(t, tr, http.MethodGet, nil)
	until(p, func(f *http2.MetaHeadersFrame) bool { return f.StreamID == 5 })
	p.headers(3, true, ":status", "200")
	p.headers(5, true, ":status", "200")
	q.headers(1, true, ":status", "200")
	for _, done := range []chan answered{second, third, fourth} {
		if a := <-done; a.err != nil {
			t.Error(a.err)
		}
	}
}

// Many requests at once make as many connections as they need, however many ask.
func TestTransportManyAtOnce(t *testing.T) {
	const requests, streams = 300, 10
	var in sync.WaitGroup
	in.Add(requests)
	out := make(chan struct{})
	tr := newTransport(t, serve(t, &Server{
		Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { in.Done(); <-out }), MaxStreams: 1000,
		Window: 64 << 10, Share: 1 << 20, Hello: hang, Log: slog.New(slog.DiscardHandler),
	}))
	tr.MaxStreams = streams
	var done []chan answered
	for range requests {
		done = append(done, ask(t, tr, http.MethodGet, nil))
	}
	all := make(chan struct{})
	go func() { in.Wait(); close(all) }()
	select {
	case <-all:
	case <-time.After(hang):
		t.Fatal("not all requests have reached the server")
	}
	tr.mu.Lock()
	carried := 0
	for _, c := range tr.conns {
		c.mu.Lock()
		if n := len(c.streams); n > streams {
			t.Errorf("%d streams on one connection", n)
		}
		carried += len(c.streams)
		c.mu.Unlock()
	}
	tr.mu.Unlock()
	if carried != requests {
		t.Errorf("%d streams of %d", carried, requests)
	}
	close(out)
	for _, d := range done {
		if a := <-d; a.err != nil {
			t.Error(a.err)
		}
	}
}

// A connection on which many requests were given up takes no more; what it carries goes on,
// and with the last of it the connection ends.
func TestTransportRetires(t *testing.T) {
	lis, dial := listen(t)
	tr := newTransport(t, dial)
	tr.MaxResets = 3
	live := ask(t, tr, http.MethodGet, nil)
	p := acceptPeer(t, lis)
	until(p, isGet)
	p.headers(1, false, ":status", "200")
	a := <-live
	if a.err != nil {
		t.Fatal(a.err)
	}
	for range tr.MaxResets {
		cancelled(t, tr, p)
	}
	var idle []*peer
	for range 2 { // with the second request ends a connection that carries nothing
		next := ask(t, tr, http.MethodGet, nil)
		q := acceptPeer(t, lis)
		until(q, isGet)
		q.headers(1, true, ":status", "204")
		if a := <-next; a.err != nil || a.resp.StatusCode != http.StatusNoContent {
			t.Errorf("%v, %v", a.resp, a.err)
		}
		for range tr.MaxResets {
			cancelled(t, tr, q)
		}
		idle = append(idle, q)
	}
	idle[0].gone()
	p.did(p.fr.WriteData(1, false, []byte("the ")))
	p.did(p.fr.WriteData(1, true, []byte("whole")))
	if text, err := io.ReadAll(a.resp.Body); err != nil || string(text) != "the whole" {
		t.Errorf("%q, %v", text, err)
	}
	p.gone()
	tr.CloseIdleConnections()
	idle[1].gone()
}
