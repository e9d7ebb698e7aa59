package h2

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/net/http2"

	"github.com/kvmesh/kvmesh/internal/accept"
)

// Server serves HTTP/2 without TLS, and HTTP/1.1 by net/http where a client speaks that.
// Its fields are set before Serve. It is safe for concurrent use.
type Server struct {
	Handler    http.Handler
	MaxStreams uint32        // of one connection, and handlers that run for it
	Window     int32         // bytes of a request's body that wait for its handler
	Share      int64         // bytes of all bodies of one connection together, no less than Window
	Hello      time.Duration // that a client may take for its first frame, or HTTP/1.1's header
	Log        *slog.Logger

	mu      sync.Mutex
	closing bool // no more connections are accepted
	closed  bool // none is served
	lis     net.Listener
	stop    func() // accepting from it
	conns   map[*serverConn]struct{}
	fresh   map[net.Conn]struct{} // that have not said what they speak
	old     *http.Server
	oldConn chan net.Conn
	empty   chan struct{} // closed and replaced when a connection ends
}

// Serve takes connections of lis until Shutdown or Close, and returns
// http.ErrServerClosed then. It closes lis.
func (s *Server) Serve(lis net.Listener) error {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		_ = lis.Close() // nobody needs it
		return http.ErrServerClosed
	}
	s.lis, s.conns, s.fresh, s.empty = lis, map[*serverConn]struct{}{}, map[net.Conn]struct{}{}, make(chan struct{})
	accepting, stop := context.WithCancel(context.Background())
	defer stop()
	s.stop, s.oldConn = stop, make(chan net.Conn)
	s.old = &http.Server{Handler: s.Handler, ReadHeaderTimeout: s.Hello, ErrorLog: slog.NewLogLogger(s.Log.Handler(), slog.LevelWarn)}
	s.mu.Unlock()
	old := &handed{Listener: lis, conns: s.oldConn, done: make(chan struct{})}
	go func() { _ = s.old.Serve(old) }() // until it is shut down
	defer func() { _ = old.Close() }()
	for {
		nc, err := accept.Next(accepting, lis, s.Log)
		switch {
		case err == nil:
			go s.greet(nc, old.done)
		case s.isClosing():
			return http.ErrServerClosed
		default:
			_ = lis.Close() // it is of no use
			return err
		}
	}
}

func (s *Server) isClosing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

// greet finds out what a client speaks, and serves it.
func (s *Server) greet(nc net.Conn, stopped <-chan struct{}) {
	s.mu.Lock()
	s.fresh[nc] = struct{}{}
	_ = nc.SetReadDeadline(time.Now().Add(s.helloLocked())) // one that cannot be set is closed already
	s.mu.Unlock()
	begun, err := readPreface(nc)
	var c *serverConn
	if string(begun) == http2.ClientPreface {
		c = newServerConn(s, nc)
		c.hello(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: s.MaxStreams})
	}
	s.mu.Lock()
	delete(s.fresh, nc)
	closing, closed := s.closing, s.closed
	if c != nil && !closed {
		s.conns[c] = struct{}{}
	}
	s.changedLocked()
	s.mu.Unlock()
	switch {
	case err != nil || closed:
		_ = nc.Close() // it has sent nothing of use
	case c != nil:
		if closing { // it has just missed that
			c.drain()
		}
		c.run()
	default:
		_ = nc.SetReadDeadline(time.Time{}) // net/http has its own
		select {
		case s.oldConn <- &begunConn{Conn: nc, begun: begun}:
		case <-stopped:
			_ = nc.Close() // the server ends
		}
	}
}

// helloLocked is how long a new client may take to say something.
func (s *Server) helloLocked() time.Duration {
	if s.closing {
		return min(s.Hello, lastHello)
	}
	return s.Hello
}

// lastHello is how long a server that ends waits for clients that have connected before.
const lastHello = time.Second

// readPreface reads the beginning of HTTP/2, or as much as shows that it is none.
func readPreface(r io.Reader) ([]byte, error) {
	p := make([]byte, len(http2.ClientPreface))
	for n := 0; ; {
		more, err := r.Read(p[n:])
		n += more
		if n == len(p) || string(p[:n]) != http2.ClientPreface[:n] {
			return p[:n], nil
		}
		if err != nil {
			return nil, fmt.Errorf("read the preface: %w", err)
		}
	}
}

// Shutdown takes no more connections and requests, and waits until those that run have
// been answered, or ctx is over. It may be called again.
func (s *Server) Shutdown(ctx context.Context) error {
	s.close(false, func(c *serverConn) { c.drain() })
	s.mu.Lock()
	old := s.old
	s.mu.Unlock()
	if old == nil {
		return nil
	}
	oldDone := make(chan error, 1)
	go func() { oldDone <- old.Shutdown(ctx) }()
	for {
		s.mu.Lock()
		left, empty := len(s.conns)+len(s.fresh), s.empty
		s.mu.Unlock()
		if left == 0 {
			return <-oldDone
		}
		select {
		case <-empty:
		case <-ctx.Done():
			<-oldDone
			return ctx.Err()
		}
	}
}

// Close ends all connections at once.
func (s *Server) Close() error {
	s.close(true, func(c *serverConn) { c.fail(ErrClosed) })
	s.mu.Lock()
	old := s.old
	s.mu.Unlock()
	if old == nil {
		return nil
	}
	return old.Close()
}

// close takes no more connections and tells those that are there.
func (s *Server) close(atOnce bool, tell func(*serverConn)) {
	s.mu.Lock()
	s.closing, s.closed = true, s.closed || atOnce
	if s.lis != nil {
		s.stop()
		_ = s.lis.Close() // it may be closed already
	}
	var conns []*serverConn
	for c := range s.conns {
		conns = append(conns, c)
	}
	for nc := range s.fresh {
		if atOnce {
			_ = nc.Close() // it has not said anything
		} else {
			_ = nc.SetReadDeadline(time.Now().Add(s.helloLocked())) // one that cannot be set is closed already
		}
	}
	s.mu.Unlock()
	for _, c := range conns {
		tell(c)
	}
}

// remove forgets a connection whose handlers are done.
func (s *Server) remove(c *serverConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	s.changedLocked()
}

// changedLocked wakes who waits for connections to end.
func (s *Server) changedLocked() {
	close(s.empty)
	s.empty = make(chan struct{})
}

// handed is a listener of connections that come from elsewhere.
type handed struct {
	net.Listener // for Addr
	conns        chan net.Conn
	once         sync.Once
	done         chan struct{}
}

// Accept implements net.Listener.
func (h *handed) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (h *handed) Close() error {
	h.once.Do(func() { close(h.done) })
	return nil
}

// begunConn is a connection of which a part was read already.
type begunConn struct {
	net.Conn
	begun []byte
}

// Read implements net.Conn.
func (c *begunConn) Read(p []byte) (int, error) {
	if len(c.begun) > 0 {
		n := copy(p, c.begun)
		c.begun = c.begun[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}
