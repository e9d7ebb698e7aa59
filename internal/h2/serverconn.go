package h2

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/net/http2"
)

// drainPing is how long a client may take to show that it knows of a graceful end.
const drainPing = time.Second

// serverConn is a server's connection.
type serverConn struct {
	*conn
	s        *Server
	running  int // handlers, of streams that were reset too
	handlers sync.WaitGroup
	draining bool // no new streams, as soon as the client knows
	drained  bool // no new streams
}

func newServerConn(s *Server, nc net.Conn) *serverConn {
	c := &serverConn{conn: newConn(nc, s.Window, s.Share), s: s}
	c.role = c
	return c
}

// run serves, after hello, until the connection is over and no handler runs any more.
func (c *serverConn) run() {
	c.serve()
	c.handlers.Wait()
	c.s.remove(c)
}

// settledLocked implements role.
func (c *serverConn) settledLocked() {
	_ = c.nc.SetReadDeadline(time.Time{}) // one that cannot be set is closed already
}

// goAwayLocked implements role: what a client's GOAWAY is about are streams of ours, and
// there are none.
func (c *serverConn) goAwayLocked(*http2.GoAwayFrame) {}

// headers implements role: a request begins, or one ends with trailers.
func (c *serverConn) headers(f *http2.MetaHeadersFrame) error {
	id := f.StreamID
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.streams[id]; s != nil {
		return c.trailersLocked(s, f)
	}
	switch {
	case id%2 == 0:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	case id <= c.last: // reset, which the client did not know yet
		return nil
	}
	c.last = id
	switch {
	case c.drained || c.err != nil: // the client has been told that nobody looks at it
		return nil
	case c.running >= int(c.s.MaxStreams):
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeRefusedStream}
	}
	req, err := requestOf(f)
	if err != nil {
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol, Cause: err}
	}
	c.beginLocked(req, f)
	return nil
}

func (c *conn) trailersLocked(s *stream, f *http2.MetaHeadersFrame) error {
	switch {
	case s.ended:
		return http2.ConnectionError(http2.ErrCodeStreamClosed)
	case !f.StreamEnded(), len(f.PseudoFields()) > 0:
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeProtocol}
	}
	h, _, err := headerOf(f.RegularFields())
	if err != nil {
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeProtocol, Cause: err}
	}
	s.trailer = h
	return s.endInLocked()
}

// beginLocked runs the handler.
func (c *serverConn) beginLocked(req *http.Request, f *http2.MetaHeadersFrame) {
	s := c.newStreamLocked(f.StreamID)
	s.length, s.ended = req.ContentLength, f.StreamEnded()
	ctx, cancel := context.WithCancel(context.Background())
	s.gone = cancel
	req = req.WithContext(ctx)
	req.RemoteAddr = c.nc.RemoteAddr().String()
	req.Body = http.NoBody
	if !s.ended {
		req.Body = requestBody{s}
	}
	handler := c.s.Handler
	if f.Truncated {
		handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "the request's header is too large", http.StatusRequestHeaderFieldsTooLarge)
		})
	}
	c.running++
	c.handlers.Go(func() {
		defer cancel()
		w := &Writer{s: s, req: req, header: http.Header{}, length: -1}
		c.handle(handler, w)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.running--
	})
}

// handle runs a handler and ends its answer. One that panics has none.
func (c *serverConn) handle(h http.Handler, w *Writer) {
	whole := false
	defer func() {
		if p := recover(); p != nil && p != http.ErrAbortHandler {
			c.s.Log.Error("a handler panicked", "panic", p, "stack", string(debug.Stack()))
		}
		w.end(whole)
	}()
	if w.req.Header.Get("Expect") == "100-continue" {
		w.WriteHeader(http.StatusContinue)
	}
	h.ServeHTTP(w, w.req)
	whole = true
}

// drain has the client send no new requests, and ends the connection when the last one
// has been answered. What the client has sent before it knew is served.
func (c *serverConn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining || c.err != nil {
		return
	}
	c.draining = true
	_ = c.fr.WriteGoAway(mostWindow, http2.ErrCodeNo, nil)
	_ = c.fr.WritePing(false, [8]byte{'d', 'r', 'a', 'i', 'n'})
	c.wakeLocked()
	time.AfterFunc(drainPing, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.pongLocked()
	})
}

// pongLocked implements role: the client knows of the end by now.
func (c *serverConn) pongLocked() {
	if !c.draining || c.drained {
		return
	}
	c.drained = true
	_ = c.fr.WriteGoAway(c.last, http2.ErrCodeNo, nil)
	c.wakeLocked()
	c.emptyLocked()
}

// emptyLocked implements role.
func (c *serverConn) emptyLocked() {
	if c.drained && len(c.streams) == 0 {
		c.failLocked(ErrClosed)
	}
}

// requestBody is the body of a request.
type requestBody struct{ s *stream }

// Read implements io.Reader.
func (b requestBody) Read(p []byte) (int, error) {
	n, err := b.s.read(p)
	var reset http2.StreamError
	if errors.As(err, &reset) {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// Close implements io.Closer. What is not read is dropped when the handler returns.
func (b requestBody) Close() error { return nil }
