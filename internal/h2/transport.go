package h2

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Transport is an http.RoundTripper to one server, whatever a request's URL says. Its
// requests share a connection, or several where one carries as many as it may. Its fields
// are set before the first. It is safe for concurrent use.
type Transport struct {
	// Dial makes a connection. Its context is not a request's: all that wait for a
	// connection get the same one.
	Dial        func(ctx context.Context) (net.Conn, error)
	DialTimeout time.Duration // until the server's first frame, too
	Window      int32         // bytes of one answer that wait to be read
	Share       int64         // bytes of all answers together, no less than Window
	PingAfter   time.Duration // a connection that is silent for so long is checked
	PingTimeout time.Duration // and ended after that
	MaxStreams  int           // of one connection at a time, where the server takes as many; positive
	MaxResets   int           // of one connection; after them it carries those that it has, and no more; positive

	mu    sync.Mutex
	conns []*clientConn // that take requests
	dials *dial         // the last one under way, nil for none
}

// dial is an attempt to connect, of all who wait for it.
type dial struct {
	done    chan struct{}
	waiters int // no more than a connection has room for
	c       *clientConn
	err     error
}

// ErrConnect says that there was no connection to make a request on.
var ErrConnect = errors.New("h2: no connection")

// Errors for which a request is made again, on another connection.
var (
	errUnprocessed = errors.New("h2: the server has not looked at the request")
	errFull        = errors.New("h2: the server takes no more requests")
)

// mostTries bounds how often a request is made that the server does not look at.
const mostTries = 4

// RoundTrip implements http.RoundTripper. The answer's body is a *Body. A request that the
// server has certainly not looked at is made again where its body can be.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	for try := 1; ; try++ {
		var resp *http.Response
		s, c, err := t.open(req)
		if err == nil {
			resp, err = c.roundTrip(s, req)
		}
		if err == nil || !errors.Is(err, errUnprocessed) || try == mostTries {
			if err != nil && req.Body != nil {
				_ = req.Body.Close() // nobody reads it
			}
			return resp, err
		}
		if req, err = again(req); err != nil {
			return nil, err
		}
	}
}

// again is a request as it was before its body was read.
func again(req *http.Request) (*http.Request, error) {
	if req.Body == nil || req.Body == http.NoBody {
		return req, nil
	}
	_ = req.Body.Close() // another one takes its place
	if req.GetBody == nil {
		return nil, errUnprocessed
	}
	body, err := req.GetBody()
	if err != nil {
		return nil, fmt.Errorf("read the request's body again: %w", err)
	}
	next := *req
	next.Body = body
	return &next, nil
}

// open begins a request on a connection that takes it.
func (t *Transport) open(req *http.Request) (*stream, *clientConn, error) {
	for try := 1; ; {
		t.mu.Lock()
		conns := slices.Clone(t.conns)
		t.mu.Unlock()
		for _, c := range conns {
			if s := c.open(req); s != nil {
				return s, c, nil
			}
		}
		if try > mostTries {
			return nil, nil, errFull
		}
		c, err := t.connect(req.Context())
		if err != nil {
			return nil, nil, err
		}
		if s := c.open(req); s != nil {
			return s, c, nil
		}
		if !c.carries() { // it is not that others were faster
			try++
		}
	}
}

// connect waits for a new connection, which it makes unless another does for as many as
// will find room on it.
func (t *Transport) connect(ctx context.Context) (*clientConn, error) {
	t.mu.Lock()
	d := t.dials
	if d == nil || d.waiters >= t.MaxStreams {
		d = &dial{done: make(chan struct{})}
		t.dials = d
		go t.attempt(context.WithoutCancel(ctx), d)
	}
	d.waiters++
	t.mu.Unlock()
	select {
	case <-d.done:
		return d.c, d.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// attempt makes the connection of a dial.
func (t *Transport) attempt(ctx context.Context, d *dial) {
	c, err := t.dial(ctx)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		d.c = c
		t.conns = append(t.conns, c)
		if c.isAway() {
			t.removeLocked(c)
		}
	} else {
		d.err = fmt.Errorf("%w: %w", ErrConnect, err)
	}
	if t.dials == d {
		t.dials = nil
	}
	close(d.done)
}

// dial makes a connection and waits for the server's SETTINGS: only then is known how many
// requests it takes.
func (t *Transport) dial(ctx context.Context) (*clientConn, error) {
	ctx, cancel := context.WithTimeout(ctx, t.DialTimeout)
	defer cancel()
	nc, err := t.Dial(ctx)
	if err != nil {
		return nil, err
	}
	c := newClientConn(t, nc)
	c.start()
	select {
	case <-c.hasSet:
		return c, nil
	case <-c.done:
		return nil, c.why()
	case <-ctx.Done():
		err := fmt.Errorf("h2: no SETTINGS of the server: %w", ctx.Err())
		c.fail(err)
		return nil, err
	}
}

// remove has no more requests use a connection.
func (t *Transport) remove(c *clientConn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.removeLocked(c)
}

func (t *Transport) removeLocked(c *clientConn) {
	t.conns = slices.DeleteFunc(t.conns, func(o *clientConn) bool { return o == c })
}

// CloseIdleConnections ends the connections that carry nothing.
func (t *Transport) CloseIdleConnections() {
	t.mu.Lock()
	conns := slices.Clone(t.conns)
	t.mu.Unlock()
	for _, c := range conns {
		c.closeIdle()
	}
}
