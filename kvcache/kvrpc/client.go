//go:build unix

package kvrpc

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvrpc/kvrpcpb"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// Client is a kvcache.Store with Tails: what a peer serves. The peer may come, go and come
// back meanwhile; calls fail while it is away. It is safe for concurrent use.
type Client struct {
	cfg     Config
	ops     *remote.Ops
	conn    *grpc.ClientConn
	control kvrpcpb.PeerClient
	blocks  *pool
	appends *pool // of their own, so that no token waits for a block
	memory  *memory

	mu   sync.Mutex
	last kvcache.Stats // of the peer
}

var (
	_ kvcache.Store   = (*Client)(nil)
	_ kvcache.Tails   = (*Client)(nil)
	_ kvcache.Counted = (*Client)(nil)
	_ kvcache.Labeled = (*Client)(nil)
	_ kvcache.Eraser  = (*Client)(nil)
)

// Dial makes a client of a peer, and does not wait for it.
func Dial(cfg Config) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	host, _, err := net.SplitHostPort(cfg.Addr)
	if err != nil {
		return nil, err
	}
	d := &dialer{cfg, host}
	c := &Client{
		cfg: cfg, blocks: newPool(cfg.Connections, d.data), appends: newPool(cfg.Connections, d.data), memory: newMemory(cfg.Memory),
	}
	if c.conn, err = d.control(); err != nil {
		return nil, fmt.Errorf("dial KV peer %s: %w", cfg.Addr, err)
	}
	c.control = kvrpcpb.NewPeerClient(c.conn)
	c.ops = remote.NewOps(remote.OpsConfig{
		Tier: cfg.Name, Timeout: cfg.Timeout, PutTimeout: cfg.PutTimeout, Away: cfg.Away, Registry: cfg.Registry,
	}, func() int64 { return 0 })
	return c, nil
}

// Close implements kvcache.Store. What is lent stays readable.
func (c *Client) Close() error {
	first, err := c.ops.Close()
	if !first {
		return err
	}
	c.blocks.close()
	c.appends.close()
	if cerr := c.conn.Close(); err == nil {
		err = cerr
	}
	return err
}

// do does one operation of the data channel on a connection of a pool. A connection that
// was left behind by a peer that has gone is not the next peer's fault: then it is done on
// another one.
func do(ctx context.Context, p *pool, what func(*link) error) error {
	end, _ := ctx.Deadline() // every call has one
	for {
		l, used, err := p.take(ctx, end)
		if err != nil {
			return ended(ctx, err)
		}
		well := false
		if err = l.c.SetDeadline(end); err == nil {
			// The end of ctx also ends what waits already.
			stop := context.AfterFunc(ctx, func() { _ = l.c.SetDeadline(time.Unix(1, 0)) })
			err = what(l)
			// Where the end has come, the deadline is being changed.
			well = stop() && (err == nil || told(err))
		}
		p.give(l, well)
		if err == nil || !used || !left(err) {
			return ended(ctx, err)
		}
	}
}

// ask sends the request that was begun on a connection and reads the head and body of its
// answer.
func (l *link) ask(what op, data []byte) (head, error) {
	if err := l.send(uint8(what), data); err != nil {
		return head{}, err
	}
	return l.answer()
}

// answer reads the head and body of an answer, behind which the data is still to be read.
func (l *link) answer() (head, error) {
	h, err := l.receive(mostIndex)
	if err != nil {
		return h, err
	}
	if s := status(h.what); s != statusDone {
		if h.data != 0 {
			return h, errNonsense
		}
		return h, toldError{errorOf(s, l.body)}
	}
	return h, nil
}
