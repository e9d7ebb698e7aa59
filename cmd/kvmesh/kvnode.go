package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvmetrics"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
	"github.com/kvmesh/kvmesh/kvcache/resp"
)

// kvNodeOptions are the flags of `kvmesh kvnode`.
type kvNodeOptions struct {
	arena.Config
	tiers   tierOptions
	peers   peerOptions
	events  eventOptions
	metrics string
	resp    string
}

func kvNodeCommand(e *env) *cobra.Command {
	o := kvNodeOptions{}
	c := &cobra.Command{
		Use:   "kvnode",
		Short: "Run a KV node: one memory for the KV of all workers of this host",
		Long: `Run a KV node. It owns one piece of memory, of a fixed size that is taken at the
start, and keeps in it the KV that the workers of this host compute. They reach it by
a Unix socket in --dir and read what they look for in place. What is in the memory
outlives the node, by SIGKILL too; without the node the workers go on and compute.

With --nvme, --redis or --s3 what is put into the memory is written there too, in the
background, and what a worker looks for and is not in the memory is brought back from
there, where that is faster than to compute it. KV_REDIS_URL takes the place of --redis;
S3 takes AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and
AWS_ENDPOINT_URL.

With --peer-listen it exchanges copies with the KV nodes of other hosts: each block, and
the open ends of streams after every --replicate-interval tokens, so that a worker of
another host goes on where this host was lost. The nodes find each other by --peers, or
by --registry-redis, for which REDIS_URL is taken where it is set.`,
		Example: `  kvmesh kvnode --dir /dev/shm/kvnode --limit 8589934592
  kvmesh worker --kv-node /dev/shm/kvnode --id w1 …
  kvmesh kvnode --dir /var/lib/kvnode --data /mnt/pmem0/kv --limit 137438953472
  kvmesh kvnode --dir /dev/shm/kvnode --nvme /mnt/nvme0/kv --nvme-limit 1099511627776 --s3 s3://kv/prod
  kvmesh kvnode --dir /dev/shm/kvnode --peer-listen 10.0.0.1:9096 --id a --peers a=z1@10.0.0.1:9096,b=z2@10.0.0.2:9096 \\
    --peer-tls-cert node.pem --peer-tls-key node.key --peer-tls-ca ca.pem`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.peers.complete(e, c.Flags()); err != nil {
				return err
			}
			return runKVNode(c.Context(), e, o)
		},
	}
	f := c.Flags()
	f.StringVar(&o.Dir, "dir", "", "directory of the socket, the journal and, without --data, the memory; best below /dev/shm")
	f.StringVar(&o.Data, "data", "", "file or device that is the memory, such as a file on a DAX file system (default a file in --dir)")
	f.Int64Var(&o.Limit, "limit", 4<<30, "bytes of the memory; another size than before begins anew")
	f.Int64Var(&o.Quota, "tenant-quota", 0, "bytes from which on the blocks of one tenant and model go first when room is short; 0 = none")
	f.DurationVar(&o.TailTTL, "tail-ttl", 10*time.Minute, "time without an append after which the open end of a stream is dropped, and what it pins")
	f.StringVar(&o.resp, "resp", "", "where Redis clients keep values in the memory: unix:PATH or a loopback ip:port (default none); KVMESH_RESP_PASSWORD is their password")
	f.StringVar(&o.metrics, "metrics", "", "ip:port of /health and /metrics (default none)")
	o.tiers.add(f)
	o.peers.add(f)
	o.events.add(f)
	_ = c.MarkFlagRequired("dir")
	return c
}

func runKVNode(ctx context.Context, e *env, o kvNodeOptions) error {
	o.Prefault, o.Log = true, e.log
	if err := o.tiers.complete(e); err != nil {
		return err
	}
	begin := time.Now()
	store, err := arena.Open(o.Config)
	if err != nil {
		return withHint(err, "give --dir a directory of this user, best below /dev/shm, that no other node has, and --limit less than what is free there")
	}
	defer store.Close()
	registry := prometheus.NewRegistry()
	registry.MustRegister(kvmetrics.New("memory", store))
	o.peers.book = filepath.Join(o.Dir, "peers.json")
	others, err := o.peers.open(ctx, e, store, registry)
	if err != nil {
		return err
	}
	defer others.close()
	below, done, err := o.tiers.open(e, store, others, registry)
	defer done()
	if err != nil {
		return err
	}
	l, err := kvnode.Listen(o.Dir)
	if err != nil {
		return withHint(fmt.Errorf("socket of the KV node: %w", err), "the path of a Unix socket has about 100 characters at most: give a shorter --dir")
	}
	models, err := store.Models(ctx)
	if err != nil {
		return err
	}
	blocks := 0
	for _, m := range models {
		blocks += m.Blocks
	}
	e.log.Info("KV node is ready", "dir", o.Dir, "bytes", store.Stats().Limit, "blocks", blocks, "took", time.Since(begin).Round(time.Millisecond))
	group, ctx := errgroup.WithContext(ctx)
	if o.resp != "" {
		if err := o.serveRESP(ctx, e, store, group); err != nil {
			return err
		}
	}
	if err := o.events.serve(ctx, e, store, registry, group); err != nil {
		return err
	}
	epochs, err := o.openEpochs(e, registry)
	if err != nil {
		return err
	}
	served := kvnode.ServerConfig{Store: store, Below: below, Epochs: epochs, Log: e.log}
	if others != nil {
		if err := others.start(ctx, group, below, registry); err != nil {
			return err
		}
		served.Tails, served.Peers = others.store, others.view
	}
	group.Go(func() error { return kvnode.NewServer(served).Serve(ctx, l) })
	if o.metrics != "" {
		group.Go(func() error { return serveHTTP(ctx, o.metrics, kvNodeHandler(registry)) })
	}
	return group.Wait()
}

// openEpochs opens the records of which weights are a model's, also on the node's disk.
func (o kvNodeOptions) openEpochs(e *env, registry prometheus.Registerer) (*kvnode.Epochs, error) {
	cfg := kvnode.EpochConfig{File: filepath.Join(o.Dir, kvnode.EpochsName), Registry: registry, Log: e.log}
	if o.tiers.nvme.Dir != "" {
		cfg.Copy = filepath.Join(o.tiers.nvme.Dir, kvnode.EpochsName)
	}
	return kvnode.OpenEpochs(cfg)
}

// serveRESP has the node serve Redis clients, too.
func (o kvNodeOptions) serveRESP(ctx context.Context, e *env, store *arena.Store, group *errgroup.Group) error {
	password := e.getenv("KVMESH_RESP_PASSWORD")
	s, err := resp.New(resp.Config{Store: store, Password: password, Log: e.log})
	if err != nil {
		return err
	}
	l, err := listenLocal(ctx, "--resp", o.resp)
	if err != nil {
		return err
	}
	if warnOpen(l.Addr(), password) {
		e.log.Warn("every user of this host can read and change the values of --resp: it has no password", "addr", l.Addr().String(), "give", "KVMESH_RESP_PASSWORD, or --resp unix:PATH")
	}
	group.Go(func() error { return s.Serve(ctx, l) })
	return nil
}

// warnOpen says whether others than this user reach an address without a password.
func warnOpen(addr net.Addr, password string) bool {
	return password == "" && addr.Network() != "unix"
}

// kvNodeHandler serves /health and /metrics of a node.
func kvNodeHandler(registry *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	return mux
}
