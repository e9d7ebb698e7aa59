package main

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvrpc"
	"github.com/kvmesh/kvmesh/kvcache/members"
	"github.com/kvmesh/kvmesh/kvcache/peers"
	"github.com/kvmesh/kvmesh/kvcache/placement"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// The tiers of the other hosts' memory and of this host's disk, in messages and metrics.
const (
	peerTier = "peers"
	diskTier = "nvme"
)

// peerPart is what of a node concerns other hosts; nil = it knows none.
type peerPart struct {
	o    peerOptions
	e    *env
	near *arena.Store // what others read and write here: memory only, and no tier below
	// store is the memory of the others, a tier of the stack, which closes it.
	store  *peers.Store
	served kvrpc.ServerConfig
	server *kvrpc.Server // set by start
	listen net.Listener
	// below is the stack that has the store as a tier; set by start.
	below *stack.Stack
}

// open opens what the flags name: the store of the others' memory, and the server for them.
func (o *peerOptions) open(ctx context.Context, e *env, near *arena.Store, registry prometheus.Registerer) (*peerPart, error) {
	if o.listen == "" {
		return nil, nil
	}
	client, server := kvrpc.Config{Log: e.log}, kvrpc.ServerConfig{Log: e.log}
	if o.identity != (kvrpc.Identity{}) {
		var err error
		if client.TLS, err = o.identity.Client(); err == nil {
			server.TLS, err = o.identity.Server()
		}
		if err != nil {
			return nil, withHint(err, "give --peer-tls-cert, --peer-tls-key and --peer-tls-ca, PEM files")
		}
	}
	p := &peerPart{o: *o, e: e, near: near}
	l, err := listenTCP(ctx, o.listen)
	if err != nil {
		return nil, err
	}
	if err := server.Validate(l.Addr()); err != nil {
		l.Close()
		return nil, withHint(err, "give --peer-tls-cert, --peer-tls-key and --peer-tls-ca, or a loopback address")
	}
	p.store, err = peers.New(peers.Config{
		Self: o.self, Near: near, Copies: o.replicas, Interval: o.interval, Bandwidth: o.bytes, Book: o.book, Own: p, Registry: registry, Log: e.log,
		Lost:  func() { p.offer() },
		Waits: func(key kvcache.Key) bool { return p.below != nil && p.below.Waits(peerTier, key) },
		Open: func(m placement.Member) (peers.Peer, error) {
			c := client
			c.Addr, c.Name = m.Addr, "peer "+m.ID
			return kvrpc.Dial(c)
		},
	})
	if err != nil {
		l.Close()
		return nil, err
	}
	p.listen, p.served = l, server
	return p, nil
}

// Drop drops a model on this host: in its memory and on its disk. What is there for all
// hosts, the node does that was asked first.
func (p *peerPart) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	return p.below.Part(diskTier).Drop(ctx, f)
}

// EraseTenant implements kvcache.Eraser, as Drop.
func (p *peerPart) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	return p.below.Part(diskTier).EraseTenant(ctx, e)
}

// unreplicated is how many tokens are on no other host.
func (p *peerPart) unreplicated() int64 {
	return max(p.below.BehindIn(peerTier).Tokens+p.store.Behind(), 0)
}

// offered is how many blocks are offered again when a host has gone that may have had copies:
// as many as peers knows of.
const offered = 1 << 16

// offer offers those of the newest blocks to the other hosts again that are on too few.
func (p *peerPart) offer() {
	if p.below != nil {
		p.below.OfferIn(peerTier, p.store.Missing(p.near.Newest(offered)))
	}
}

// start serves the other hosts, and learns who they are, until ctx ends.
func (p *peerPart) start(ctx context.Context, group *errgroup.Group, below *stack.Stack, registry prometheus.Registerer) error {
	p.below, p.served.Forget = below, p
	p.server = kvrpc.NewServer(p.near, p.served)
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "kvmesh_kv_unreplicated_tokens",
		Help: "Tokens whose KV is on no other host yet: lost if this host is lost now. Those of blocks that were given up are in kvmesh_kv_stack_dropped_total.",
	}, func() float64 { return float64(p.unreplicated()) }))
	group.Go(func() error {
		stop := context.AfterFunc(ctx, func() { logClose(p.e, "server of peers", p.server.Close()) })
		defer stop()
		if err := p.server.Serve(p.listen); err != nil && ctx.Err() == nil {
			return fmt.Errorf("serve KV peers: %w", err)
		}
		return nil
	})
	p.offer() // what is left of the process before, of which this one knows nothing
	if p.o.registry == "" {
		p.store.SetMembers(p.o.list)
		return nil
	}
	link, err := redislink.Open(redislink.Config{URL: p.o.registry})
	if err != nil {
		return err
	}
	busy := turnover{limit: p.near.Stats().Limit}
	group.Go(func() error {
		defer link.Close()
		members.Run(ctx, members.Config{
			Client: link, Incarnation: uint64(time.Now().UnixNano()), Changed: p.store.SetMembers, Log: p.e.log,
			Self: func() placement.Member {
				m := p.o.self
				m.Room, m.Busy = busy.limit, busy.share(time.Now(), p.near.Stats().EvictedBytes)
				return m
			},
		})
		return nil
	})
	return nil
}

// close ends the server; the store is closed with the other tiers.
func (p *peerPart) close() {
	switch {
	case p == nil:
	case p.server == nil:
		p.listen.Close()
	default:
		logClose(p.e, "server of peers", p.server.Close())
	}
}

// turnover is how fast a memory turns over.
type turnover struct {
	limit int64 // bytes
	// evicted is how many bytes had been given up at the last look.
	evicted uint64
	at      time.Time // of that
	// last is what share returned last.
	last float64
}

// turnoverTime is the time in which all of a memory has to go for it to be as busy as can be.
const turnoverTime = time.Minute

// share is the part of the memory that is given up in a turnoverTime, at most 1, in eighths, so
// that copies do not move for nothing.
func (t *turnover) share(now time.Time, evicted uint64) float64 {
	took := now.Sub(t.at)
	if t.at.IsZero() || t.limit <= 0 {
		t.at, t.evicted = now, evicted
		return 0
	}
	if took < turnoverTime/2 {
		return t.last
	}
	share := float64(evicted-t.evicted) / float64(t.limit) * float64(turnoverTime) / float64(took)
	t.at, t.evicted, t.last = now, evicted, float64(int(8*min(share, 1)))/8
	return t.last
}
