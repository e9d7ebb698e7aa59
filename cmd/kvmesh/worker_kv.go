package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/checkpoint"
	"github.com/kvmesh/kvmesh/worker/llamacpp"
)

// kvOptions are the flags of `kvmesh worker` that keep the KV of streams, so that
// another worker can go on with them.
type kvOptions struct {
	dir        string
	node       string // directory of a KV node, instead of dir
	limit      int64
	block      int
	codec      string
	catchUp    string
	secretFile string
}

// add adds the flags.
func (o *kvOptions) add(f *pflag.FlagSet) {
	f.StringVar(&o.dir, "kv-dir", "", "directory in which the workers of a host keep the KV of their streams, best below /dev/shm (default: none is kept)")
	f.StringVar(&o.node, "kv-node", "", "directory of the host's KV node, which keeps the KV instead of --kv-dir")
	f.Int64Var(&o.limit, "kv-limit", 4<<30, "most bytes in --kv-dir, of all its workers together")
	f.IntVar(&o.block, "kv-block", 64, "tokens of a block of KV; equal for all workers of --kv-dir")
	f.StringVar(&o.codec, "kv-codec", "raw", "how full blocks are stored: raw, or int8 or int4, which are smaller and not quite what was computed: a stream that goes on from them is marked as quantized and never exact (llama.cpp only)")
	f.StringVar(&o.catchUp, "catch-up", "exact", "how a continued stream decodes what was not checkpointed: exact (one token at a time, as the lost worker did) or fast (as one batch)")
	f.StringVar(&o.secretFile, "relay-secret-file", "", "file with the secret by which the relay proves itself (default KVMESH_RELAY_SECRET; without one no stream is continued here)")
}

// apply fills in the worker's configuration. What it opens is closed by close, after
// the worker has ended.
func (o *kvOptions) apply(cfg *worker.Config, interval int, getenv func(string) string) (done func(), err error) {
	switch o.catchUp {
	case "exact":
		cfg.CatchUp = worker.CatchUpExact
	case "fast":
		cfg.CatchUp = worker.CatchUpFast
	default:
		return nil, usagef("--catch-up %q: want exact or fast", o.catchUp)
	}
	if cfg.RelaySecret, err = relaySecret(o.secretFile, getenv); err != nil {
		return nil, err
	}
	codec, err := kvcache.ParseCodec(o.codec)
	if err != nil {
		return nil, usagef("--kv-codec %q: want raw, int8 or int4", o.codec)
	}
	if codec != kvcache.CodecRaw && cfg.EngineName != policy.EngineLlamaCpp {
		return nil, usagef("--kv-codec %s: only engine %s has KV that can be quantized", o.codec, policy.EngineLlamaCpp)
	}
	store, err := o.open(cfg)
	if store == nil || err != nil {
		return func() {}, err
	}
	if cfg.Registry == nil {
		cfg.Registry = prometheus.NewRegistry()
	}
	keep := checkpoint.Config{Store: store, Block: o.block, Interval: interval, Codec: codec, Registry: cfg.Registry, Log: cfg.Log}
	if cfg.EngineName == policy.EngineLlamaCpp {
		keep.Parts, keep.Shape = llamacpp.StateParts, llamacpp.StateShape
		fillLater(store)
	}
	keeper, err := checkpoint.New(keep)
	if err != nil {
		store.Close()
		return nil, err
	}
	cfg.KV = keeper
	return func() {
		keeper.Close()
		store.Close()
	}, nil
}

// open opens the store that the flags name, if they name one.
func (o *kvOptions) open(cfg *worker.Config) (checkpoint.Store, error) {
	switch {
	case o.dir != "" && o.node != "":
		return nil, usagef("--kv-dir and --kv-node: give one of them")
	case o.node != "":
		c, err := kvnode.Open(o.node)
		if err != nil {
			return nil, withHint(err, "give --kv-node the directory of this user's KV node; the node may start later")
		}
		return c, nil
	case o.dir != "":
		s, err := openDir(dirstore.Config{Dir: o.dir, Limit: o.limit, Log: cfg.Log}, openTime)
		if errors.Is(err, dirstore.ErrOpenToOthers) {
			return nil, withHint(err, "chmod 700 "+o.dir)
		}
		if err != nil {
			return nil, withHint(err, "give --kv-dir a directory of this user, best below /dev/shm")
		}
		return s, nil
	}
	return nil, nil
}

// fillLater has the memory of a KV node entered into this process's page tables while the
// engine starts, so that no restore waits for that. The simulated engine has too little KV to
// gain from it.
func fillLater(store checkpoint.Store) {
	if c, ok := store.(*kvnode.Client); ok {
		// It ends with the client at the latest. A node that is away is mapped once it is there.
		go func() { _ = c.Fill(context.Background()) }()
	}
}

// openTime is how long a file system may take for the few files that are needed to open a
// store in it.
const openTime = 10 * time.Second

// openDir opens a store in a directory, unless its file system hangs.
func openDir(cfg dirstore.Config, within time.Duration) (*dirstore.Store, error) {
	type opened struct {
		store *dirstore.Store
		err   error
	}
	done := make(chan opened, 1)
	go func() {
		s, err := dirstore.Open(cfg)
		done <- opened{s, err}
	}()
	select {
	case o := <-done:
		return o.store, o.err
	case <-time.After(within):
		return nil, fmt.Errorf("open KV store: the file system of %s has not answered for %v", cfg.Dir, within)
	}
}

// checkpointEvery is the number of tokens between two checkpoints: what the user chose,
// else every token where they go to memory of this host, which costs less than a
// hundredth of the time, else what the flag says.
func checkpointEvery(flag *pflag.Flag, interval int, dir string) int {
	if flag.Changed || !inMemory(dir) {
		return interval
	}
	return 1
}

// relaySecret reads the secret that relay and workers share from a file, or without
// one from KVMESH_RELAY_SECRET.
func relaySecret(file string, getenv func(string) string) (string, error) {
	if file == "" {
		return getenv("KVMESH_RELAY_SECRET"), nil
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("read the relay's secret: %w", err)
	}
	secret := strings.TrimSpace(string(raw))
	if secret == "" {
		return "", usagef("--relay-secret-file %s is empty", file)
	}
	return secret, nil
}
