package main

import (
	"context"
	"net"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvevents"
)

// eventOptions are the flags of `kvmesh kvnode` that say to whom it tells what it has.
type eventOptions struct {
	listen, replay, topic string
	tokenIDs, arrays      bool
}

func (o *eventOptions) add(f *pflag.FlagSet) {
	f.StringVar(&o.listen, "events", "", "where to tell of the blocks that come and go, as vLLM does over ZeroMQ: tcp://LOOPBACK-IP:PORT or ipc://PATH, such as tcp://127.0.0.1:5557 (default nowhere)")
	f.StringVar(&o.replay, "events-replay", "", "where to tell again what was told before, such as tcp://127.0.0.1:5558 (default nowhere)")
	f.StringVar(&o.topic, "events-topic", "", "topic of --events, such as kv@HOST@MODEL")
	f.BoolVar(&o.tokenIDs, "events-token-ids", false, "tell the token ids, too; they are the prompts, and whoever connects reads them")
	f.BoolVar(&o.arrays, "events-arrays", false, "write events as arrays, as versions of vLLM before 0.20 do")
}

// mostTold is how many blocks that are there at the start are told of.
const mostTold = 32 << 10

// serve has the node tell of what its memory holds.
func (o *eventOptions) serve(ctx context.Context, e *env, store *arena.Store, registry prometheus.Registerer, group *errgroup.Group) error {
	if o.listen == "" {
		if o.replay != "" || o.topic != "" || o.tokenIDs || o.arrays {
			return usagef("--events-replay, --events-topic, --events-token-ids and --events-arrays need --events")
		}
		return nil
	}
	l, err := listenEvents(ctx, "--events", o.listen)
	if err != nil {
		return err
	}
	var replay net.Listener
	if o.replay != "" {
		if replay, err = listenEvents(ctx, "--events-replay", o.replay); err != nil {
			l.Close()
			return err
		}
	}
	p := kvevents.NewPublisher(kvevents.PublisherConfig{Topic: o.topic, Encoding: kvevents.Encoding{Arrays: o.arrays}, Log: e.log})
	registry.MustRegister(p)
	store.Watch(blockEvents{p}, mostTold, o.tokenIDs)
	e.log.Info("KV events are told", "at", o.listen, "replay", o.replay, "topic", o.topic, "token_ids", o.tokenIDs)
	group.Go(func() error { return p.Serve(ctx, l, replay) })
	return nil
}

// listenEvents listens on an address of ZeroMQ on this host.
func listenEvents(ctx context.Context, flag, address string) (net.Listener, error) {
	network, at, err := kvevents.SplitAddress(address)
	if err != nil {
		return nil, usagef("%s %q: want tcp://LOOPBACK-IP:PORT or ipc://PATH", flag, address)
	}
	if network == "unix" {
		return listenLocal(ctx, flag, "unix:"+at)
	}
	host, _, _ := strings.Cut(at, ":")
	if ip := net.ParseIP(strings.Trim(host, "[]")); !strings.HasPrefix(at, "[::1]:") && (ip == nil || !ip.IsLoopback()) {
		return nil, usagef("%s %q: want a loopback address: ZeroMQ asks nobody who they are here", flag, address)
	}
	return listenTCP(ctx, at)
}

// blockEvents tells of blocks in vLLM's words.
type blockEvents struct{ to *kvevents.Publisher }

// Stored implements arena.Watcher.
func (b blockEvents) Stored(f kvcache.Found, ids []int32) {
	e := kvevents.Event{Kind: kvevents.BlockStored, Hashes: []kvevents.Hash{hashOf(f.Key)}, IDs: ids, BlockSize: f.Tokens, Medium: kvevents.MediumCPU}
	if f.Parent != f.Root {
		e.Parent = hashOf(f.Parent)
	}
	b.to.Publish(e)
}

// Removed implements arena.Watcher.
func (b blockEvents) Removed(key kvcache.Key) {
	b.to.Publish(kvevents.Event{Kind: kvevents.BlockRemoved, Hashes: []kvevents.Hash{hashOf(key)}, Medium: kvevents.MediumCPU})
}

// hashOf is a key as events have it.
func hashOf(key kvcache.Key) kvevents.Hash {
	h, _ := kvevents.HashOf(key[:]) // 32 bytes are a hash
	return h
}
