//go:build unix

package lmcache

import (
	"context"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
)

// conn is one connection. An engine's ends with it, at the latest.
type conn struct {
	ended time.Time // zero: it lasts; guarded by the server's mutex
}

// gone says whether what a connection has begun is to be given up.
func (c *conn) gone(now time.Time, grace time.Duration) bool {
	return c != nil && !c.ended.IsZero() && now.Sub(c.ended) >= grace
}

type connKey struct{}

// connOf is the connection of a call.
func connOf(ctx context.Context) *conn {
	c, _ := ctx.Value(connKey{}).(*conn)
	return c
}

// connections tells the server when connections end.
type connections struct{ s *Server }

// TagConn implements stats.Handler.
func (h connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context {
	return context.WithValue(ctx, connKey{}, &conn{})
}

// HandleConn implements stats.Handler.
func (h connections) HandleConn(ctx context.Context, st stats.ConnStats) {
	c := connOf(ctx)
	if _, end := st.(*stats.ConnEnd); !end || c == nil {
		return
	}
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	c.ended = time.Now()
	for _, i := range h.s.instances {
		if i.conn == c {
			i.conn, i.seen = nil, c.ended
		}
	}
}

// TagRPC implements stats.Handler.
func (h connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (h connections) HandleRPC(context.Context, stats.RPCStats) {}

// clientID is what a client calls itself, so that equal names of requests of two engines
// are not one.
func clientID(ctx context.Context) string {
	if ids := metadata.ValueFromIncomingContext(ctx, "lmcache-client-id-bin"); len(ids) > 0 && len(ids[0]) <= 64 {
		return ids[0]
	}
	return ""
}

// sweep gives up what engines have begun that are gone, and look-ups that nobody used.
func (s *Server) sweep(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, w := range s.writes {
		if w.conn.gone(now, s.cfg.Grace) {
			s.dropWriteLocked(key)
			s.count.abandoned.Add(1)
		}
	}
	for key, r := range s.reads {
		if r.conn.gone(now, s.cfg.Grace) {
			s.dropReadLocked(key)
			s.count.abandoned.Add(1)
		}
	}
	for _, j := range s.jobs {
		if j.conn.gone(now, s.cfg.Grace) || now.Sub(j.begun) >= jobTime {
			s.endLocked(j)
		}
	}
}
