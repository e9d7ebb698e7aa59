//go:build unix

package kvrpc

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Config says where a peer is and what calls to it may take. Zero fields take the defaults
// named beside them.
type Config struct {
	// Addr is the peer's host and port.
	Addr string
	// TLS is this node's side of mutual TLS; see Identity. nil = none, which is refused
	// unless Addr is a loopback address, or Plain.
	TLS *tls.Config
	// Plain lets bytes go over a network without TLS.
	Plain bool
	// Name is the peer's in messages, and the tier's in metrics; default "peer".
	Name string
	// Timeout bounds look-ups, reads and what concerns tails, 2 s; PutTimeout writes of
	// blocks and drops, 10 s. The caller's deadline counts where it is earlier.
	Timeout, PutTimeout time.Duration
	// DialTimeout bounds the making of a connection; default 1 s.
	DialTimeout time.Duration
	// Away is how long a peer is left alone that does not answer; default 5 s.
	Away time.Duration
	// Connections is how many blocks are on their way at once, each on a connection of its
	// own, and how many calls about tails; default 4.
	Connections int
	// Memory bounds the bytes of blocks that are read and not released; default 256 MiB. A
	// larger block is not read.
	Memory   int64
	Registry prometheus.Registerer // for the metrics kvmesh_kv_tier_*; default: none
	Log      *slog.Logger          // default: silent
	// Dial opens a connection; default: TCP.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
}

// withDefaults returns c with every zero field set.
func (c Config) withDefaults() Config {
	c.Name = cmp.Or(c.Name, "peer")
	c.Timeout = cmp.Or(c.Timeout, 2*time.Second)
	c.PutTimeout = cmp.Or(c.PutTimeout, 10*time.Second)
	c.DialTimeout = cmp.Or(c.DialTimeout, time.Second)
	c.Away = cmp.Or(c.Away, 5*time.Second)
	c.Connections = cmp.Or(c.Connections, 4)
	c.Memory = cmp.Or(c.Memory, 256<<20)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Dial == nil {
		c.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		}
	}
	return c
}

// Validate reports the first field that cannot work.
func (c Config) Validate() error {
	host, _, err := net.SplitHostPort(c.Addr)
	switch {
	case err != nil:
		return fmt.Errorf("kvrpc: address of a peer: %w", err)
	case c.TLS == nil && !c.Plain && !loopback(host):
		return fmt.Errorf("kvrpc: peer %s without TLS: blocks have what prompts were about", c.Addr)
	case min(c.Timeout, c.PutTimeout, c.DialTimeout, c.Away) < 0 || c.Connections < 0 || c.Memory < 0:
		return errors.New("kvrpc: negative limit or time")
	}
	return nil
}

// loopback says whether a host is surely this one.
func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Room is room in a store for one frame that a server fills. Nobody sees it before Commit.
// One of CommitProven and Cancel is the last call, Cancel may be both.
type Room interface {
	// Bytes is the room, as long as the frame is to be.
	Bytes() []byte
	// CommitProven publishes the frame, whose header is h; all of it was verified as it came.
	CommitProven(h kvcache.Header) (kvcache.Found, error)
	// Cancel gives the room back. It may be called after CommitProven, and then does nothing.
	Cancel()
}

// ServerConfig says how a store is served. Zero fields take the defaults named beside them.
type ServerConfig struct {
	// TLS is this node's side of mutual TLS; see Identity. It must demand certificates of
	// clients. nil = none, which is refused unless the listener is on loopback, or Plain.
	TLS *tls.Config
	// Plain lets bytes go over a network without TLS.
	Plain bool
	// Reserve takes room in the store, so that a frame is read into its place; nil, nil
	// says that the block is there already. Default: what the store has if it is an
	// arena, else frames are read into memory first.
	Reserve func(ctx context.Context, ref kvcache.Ref, size int64) (Room, error)
	// Resume returns a writer of the tail with a number that goes on at a position.
	// Default: what the store has if it is an arena, else tails end with the server.
	Resume func(ctx context.Context, no uint64, next int) (kvcache.TailWriter, error)
	// Forget is what drops and erasures of peers are of: the store, and what else of this
	// host has the same blocks. Default: the store, if it is a kvcache.Forgetter.
	Forget kvcache.Forgetter
	// MemoryID names the memory of the store, 64 bytes at most: with another name peers know
	// that what they put before is gone. Default: the arena's, if the store is one, else it is
	// not told.
	MemoryID string
	// Wrote, if any, is told of each block that a peer has put.
	Wrote func(kvcache.Found)
	// Connections is how many are served at once; default 256.
	Connections int
	// Memory bounds the bytes that are on their way through memory of the server's own:
	// the states of tails, and blocks where there is no Reserve; default 256 MiB.
	Memory int64
	// Tails is how many open tails are remembered; default 65536.
	Tails int
	// Stall is how long a peer may take for one step: a handshake, a request, a megabyte of
	// a block; default 30 s.
	Stall time.Duration
	Log   *slog.Logger // default: silent
}

// withDefaults returns c with every zero field set.
func (c ServerConfig) withDefaults() ServerConfig {
	c.Connections = cmp.Or(c.Connections, 256)
	c.Memory = cmp.Or(c.Memory, 256<<20)
	c.Tails = cmp.Or(c.Tails, 65536)
	c.Stall = cmp.Or(c.Stall, 30*time.Second)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports the first field that cannot work with a listener's address.
func (c ServerConfig) Validate(addr net.Addr) error {
	switch {
	case c.TLS != nil && c.TLS.ClientAuth != tls.RequireAndVerifyClientCert:
		return errors.New("kvrpc: TLS that does not demand and verify certificates of clients")
	case c.TLS == nil && !c.Plain && !local(addr):
		return fmt.Errorf("kvrpc: listening on %s without TLS: blocks have what prompts were about", addr)
	case c.Connections < 0 || c.Memory < 0 || c.Tails < 0 || c.Stall < 0:
		return errors.New("kvrpc: negative limit or time")
	}
	return nil
}

// local says whether only this host can connect to an address.
func local(addr net.Addr) bool {
	if addr.Network() == "unix" {
		return true
	}
	host, _, err := net.SplitHostPort(addr.String())
	return err == nil && loopback(host)
}
