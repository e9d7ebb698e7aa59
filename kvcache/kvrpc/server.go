//go:build unix

package kvrpc

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/kvmesh/kvmesh/internal/accept"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvmetrics"
	"github.com/kvmesh/kvmesh/kvcache/kvrpc/kvrpcpb"
)

// Server serves a store to KV nodes of other hosts. It is safe for concurrent use.
type Server struct {
	cfg    ServerConfig
	store  kvcache.Store
	tails  *tailTable
	memory *memory
	count  kvmetrics.Counters // of what did not come as far as the store

	grpc *grpc.Server
	mux  *mux
	ctx  context.Context // ends when the server is closed
	stop context.CancelFunc
	done sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]bool
	lis   net.Listener
	ended bool
}

// preface is how connections of the control channel begin.
const preface = "PRI "

// mostStreams is how many calls of one connection are answered at once.
const mostStreams = 128

// NewServer makes a server of a store, which may be a kvcache.Tails, Counted and Labeled,
// too. What is wrong with cfg Serve says. The store is the caller's to close, after the
// server.
func NewServer(store kvcache.Store, cfg ServerConfig) *Server {
	cfg = withStore(cfg.withDefaults(), store)
	if cfg.Forget == nil {
		cfg.Forget, _ = store.(kvcache.Forgetter)
	}
	s := &Server{cfg: cfg, store: store, memory: newMemory(cfg.Memory), conns: map[net.Conn]bool{}}
	tails, _ := store.(kvcache.Tails)
	s.tails = newTailTable(tails, cfg)
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.mux = &mux{ctx: s.ctx, conns: make(chan net.Conn)}
	s.grpc = grpc.NewServer(
		grpc.MaxRecvMsgSize(mostRequest), grpc.MaxSendMsgSize(mostResponse), grpc.MaxConcurrentStreams(mostStreams),
		grpc.ConnectionTimeout(cfg.Stall),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: leastAlive, PermitWithoutStream: true}),
	)
	kvrpcpb.RegisterPeerServer(s.grpc, &control{s: s})
	s.done.Go(func() { _ = s.grpc.Serve(s.mux) }) // ends with the mux
	return s
}

// Serve serves until Close, and closes l. The error is nil then, and says otherwise why it
// could not go on.
func (s *Server) Serve(l net.Listener) error {
	defer l.Close()
	if err := s.cfg.Validate(l.Addr()); err != nil {
		return err
	}
	s.mu.Lock()
	s.lis = l
	ended := s.ended
	s.mu.Unlock()
	for !ended {
		c, err := accept.Next(s.ctx, l, s.cfg.Log)
		if err != nil {
			if s.ctx.Err() != nil {
				break
			}
			return fmt.Errorf("accept: %w", err)
		}
		if !s.begin(c) {
			c.Close()
			continue
		}
		s.done.Go(func() {
			if err := s.meet(c); err != nil && !over(err) {
				s.cfg.Log.Info("KV peer: connection ended", "peer", c.RemoteAddr().String(), "err", err)
			}
		})
	}
	return nil
}

// over says whether an error is the usual end of a connection.
func over(err error) bool { return left(err) || errors.Is(err, net.ErrClosed) }

// begin notes a connection, if it is not one too many.
func (s *Server) begin(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false
	}
	if len(s.conns) >= s.cfg.Connections {
		s.cfg.Log.Warn("KV peer: too many connections", "most", s.cfg.Connections)
		return false
	}
	s.conns[c] = true
	return true
}

// forget closes a connection.
func (s *Server) forget(c net.Conn) {
	c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// meet finds out who connects and what for, and serves the data channel; the control
// channel it hands over.
func (s *Server) meet(raw net.Conn) error {
	c := raw
	mine := true
	defer func() {
		if mine {
			s.forget(raw)
		}
	}()
	if err := c.SetDeadline(time.Now().Add(s.cfg.Stall)); err != nil {
		return err
	}
	if s.cfg.TLS != nil {
		t := tls.Server(newWide(c), withProtos(s.cfg.TLS, "", protoControl, protoData))
		if err := t.HandshakeContext(s.ctx); err != nil {
			return fmt.Errorf("handshake: %w", err)
		}
		c = t
	}
	l := newLink(c)
	first, err := l.r.Peek(len(preface))
	if err != nil {
		return err
	}
	switch {
	case string(first) == preface:
		if err := c.SetDeadline(time.Time{}); err != nil {
			return err
		}
		mine = false
		return s.mux.hand(&controlConn{Conn: c, r: l.r, forget: sync.OnceFunc(func() { s.forget(raw) })})
	case string(first[:len(family)]) == family:
		p := &peer{s: s, l: l}
		return p.serve()
	}
	return fmt.Errorf("%w: % x", errNonsense, first)
}

// closeWait is how long Close waits for requests that are being answered.
const closeWait = 5 * time.Second

// Close ends Serve, closes all connections and waits for what is being answered, 5 s at
// most. It may be called twice.
func (s *Server) Close() error {
	s.stop()
	s.mu.Lock()
	s.ended = true
	lis := s.lis
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	if lis != nil {
		lis.Close()
	}
	ended := make(chan struct{})
	go func() {
		s.grpc.Stop()
		s.done.Wait()
		s.tails.close()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-time.After(closeWait):
		return fmt.Errorf("close the server of KV peers: requests are still being answered after %v", closeWait)
	}
}

// Stats are the counters of what did not come as far as the store: frames and states that
// were wrong when they arrived.
func (s *Server) Stats() kvcache.Stats { return s.count.Stats() }

// mux is the listener of the gRPC server: it has connections of which it is known that
// they are for it.
type mux struct {
	ctx   context.Context
	conns chan net.Conn
}

// hand hands a connection over.
func (m *mux) hand(c net.Conn) error {
	select {
	case m.conns <- c:
		return nil
	case <-m.ctx.Done():
		return c.Close()
	}
}

// Accept implements net.Listener.
func (m *mux) Accept() (net.Conn, error) {
	select {
	case c := <-m.conns:
		return c, nil
	case <-m.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. The context of the server ends it.
func (m *mux) Close() error { return nil }

// Addr implements net.Listener.
func (m *mux) Addr() net.Addr { return &net.TCPAddr{} }

// controlConn is a connection of the control channel, with what was read of it ahead.
type controlConn struct {
	net.Conn
	r      *bufio.Reader
	forget func()
}

// Read implements net.Conn.
func (c *controlConn) Read(b []byte) (int, error) {
	if c.r.Buffered() > 0 {
		return c.r.Read(b)
	}
	return c.Conn.Read(b)
}

// Close implements net.Conn.
func (c *controlConn) Close() error {
	c.forget()
	return nil
}
