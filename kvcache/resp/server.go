//go:build unix

package resp

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/internal/accept"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
)

// Config says what a server serves.
type Config struct {
	// Store has the values. The caller closes it after Serve has ended.
	Store *arena.Store
	// Password is what AUTH must give; "" lets everybody in.
	Password string
	// Lease is how long a value stays that EXISTS has told of; 0 is 1 minute.
	Lease time.Duration
	// Log gets what goes wrong, never keys or values; nil is silent.
	Log *slog.Logger
}

// Bounds.
const (
	mostConns  = 1024
	mostLeases = 4096
	// heldShare is the part of the memory that leases may hold, one of so many.
	heldShare = 4
	// stall is how long a client may take to send or take one command or answer.
	stall = time.Minute
	// promised is how long a key is remembered that EXISTS has told of, in leases.
	promised = 10
)

// Server serves a store to Redis clients. It is safe for concurrent use.
type Server struct {
	cfg   Config
	space kvcache.Space

	mu     sync.Mutex
	conns  map[net.Conn]bool
	leases map[kvcache.Key]*lease
	held   int64 // bytes of values that leases hold
	done   sync.WaitGroup
}

// lease is a value that EXISTS has told of.
type lease struct {
	lent  *kvcache.Lent // nil when nothing is held, and the promise still remembered
	size  int64         // of what is held
	until time.Time
}

// New makes a server.
func New(cfg Config) (*Server, error) {
	if cfg.Store == nil || cfg.Lease < 0 {
		return nil, errors.New("resp: no store, or a negative lease")
	}
	cfg.Lease = cmp.Or(cfg.Lease, time.Minute)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Server{cfg: cfg, space: arena.Values(), conns: map[net.Conn]bool{}, leases: map[kvcache.Key]*lease{}}, nil
}

// Serve serves until ctx ends, closes l and all connections, and waits for them. The error
// is nil when ctx has ended.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	s.done.Go(func() { s.sweepUntil(ctx) })
	for {
		c, err := accept.Next(ctx, l, s.cfg.Log)
		if err != nil {
			l.Close()
			s.end()
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("accept: %w", err)
		}
		s.mu.Lock()
		full := len(s.conns) >= mostConns
		if !full {
			s.conns[c] = true
		}
		s.mu.Unlock()
		if full {
			c.Close()
			s.cfg.Log.Warn("RESP: too many connections", "most", mostConns)
			continue
		}
		s.done.Go(func() {
			p := &peer{s: s, c: c, in: reader{r: bufio.NewReaderSize(c, 64<<10)}, w: bufio.NewWriter(c), known: s.cfg.Password == ""}
			err := p.serve(ctx)
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				s.cfg.Log.Info("RESP: connection ended", "err", err)
			}
			c.Close()
			s.mu.Lock()
			delete(s.conns, c)
			s.mu.Unlock()
		})
	}
}

// end closes all connections, waits for them, and gives up all leases.
func (s *Server) end() {
	s.mu.Lock()
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.done.Wait()
	s.sweep(time.Now().Add(promised * s.cfg.Lease))
}

// sweepUntil ends leases when their time has come, until ctx ends.
func (s *Server) sweepUntil(ctx context.Context) {
	tick := time.NewTicker(s.cfg.Lease / 4)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.sweep(now)
		}
	}
}

// sweep ends leases that are over, and forgets promises of long ago.
func (s *Server) sweep(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, l := range s.leases {
		if now.Before(l.until) {
			continue
		}
		s.releaseLocked(l)
		if now.Sub(l.until) >= (promised-1)*s.cfg.Lease {
			delete(s.leases, key)
		}
	}
}

// holdLocked begins a lease of a value, unless leases hold a quarter of the memory already:
// what they hold cannot be evicted. Then the value is promised and may go.
func (s *Server) holdLocked(l *kvcache.Lent, until time.Time) *lease {
	size := l.Total
	if s.held+size > s.cfg.Store.Stats().Limit/heldShare {
		l.Release()
		return &lease{until: until}
	}
	s.held += size
	return &lease{l, size, until}
}

// releaseLocked ends a lease, if it was not.
func (s *Server) releaseLocked(l *lease) {
	if l.lent != nil {
		l.lent.Release()
		l.lent = nil
		s.held -= l.size
	}
}

// ref names the block of a key.
func (s *Server) ref(key string) (kvcache.Ref, []int32) {
	sum := sha256.Sum256([]byte(key))
	ids := make([]int32, len(sum)/4)
	for i := range ids {
		ids[i] = int32(binary.LittleEndian.Uint32(sum[4*i:]) & (1<<31 - 1))
	}
	return s.space.Child(s.space.Root, ids), ids
}

// peer is one connection.
type peer struct {
	s      *Server
	c      net.Conn
	in     reader
	w      *bufio.Writer
	known  bool // it has given the password
	common bool // it is no client that would wait for what is not there
}

// serve answers commands until the connection ends, and says why it did.
func (p *peer) serve(ctx context.Context) error {
	for {
		// Answers wait for each other as long as there are commands to read.
		if p.in.r.Buffered() == 0 {
			if err := p.flush(); err != nil {
				return err
			}
			if err := p.c.SetReadDeadline(time.Time{}); err != nil {
				return err
			}
		}
		if _, err := p.in.r.Peek(1); err != nil {
			return err
		}
		if err := p.c.SetReadDeadline(time.Now().Add(stall)); err != nil {
			return err
		}
		name, err := p.in.next()
		if err == nil {
			err = p.command(ctx, strings.ToUpper(name))
		}
		if err != nil {
			if errors.Is(err, errProtocol) {
				p.fail("ERR " + err.Error())
			}
			_ = p.flush() // it ends anyway
			return err
		}
	}
}

func (p *peer) flush() error {
	if err := p.c.SetWriteDeadline(time.Now().Add(stall)); err != nil {
		return err
	}
	return p.w.Flush()
}

// The answers. What cannot be written shows at the next flush.

func (p *peer) text(s string) { p.w.WriteString("+" + s + "\r\n") }
func (p *peer) fail(s string) { p.w.WriteString("-" + s + "\r\n") }
func (p *peer) number(n int)  { p.w.WriteString(":" + strconv.Itoa(n) + "\r\n") }
func (p *peer) bulk(s string) { p.w.WriteString("$" + strconv.Itoa(len(s)) + "\r\n" + s + "\r\n") }

// login compares a password in a time that does not depend on it.
func (s *Server) login(password string) bool {
	have, want := sha256.Sum256([]byte(password)), sha256.Sum256([]byte(s.cfg.Password))
	return subtle.ConstantTimeCompare(have[:], want[:]) == 1
}
