package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/kvmesh/kvmesh/extproc"
	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/relay"
)

// gatewayOptions are the flags of `kvmesh gateway`.
type gatewayOptions struct {
	files         []string
	runDir, xds   string
	metrics, zone string
	node          string
	secretFile    string
	redisCA       string
	drain         time.Duration
	handover      time.Duration
}

func gatewayCommand(e *env) *cobra.Command {
	o := gatewayOptions{}
	c := &cobra.Command{
		Use:   "gateway -f FILE --run-dir DIR",
		Short: "Run the gateway: Envoy's external processor and the relay",
		Long: `Run the gateway beside one Envoy. It answers ext_proc and carries generation
requests on Unix sockets in --run-dir, and follows the fleet over the control plane's
xDS. Without it Envoy serves alone.

Where the Mesh document has shareStreams, streams that clients may come back to are kept
in registry.redis too, for the other gateways with the same relay secret. REDIS_URL takes
the place of its URL.`,
		Example: "  kvmesh gateway -f mesh.yaml --run-dir /run/kvmesh --metrics 127.0.0.1:9090",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkGatewayFlags(c.Flags()); err != nil {
				return err
			}
			return runGateway(c.Context(), e, o)
		},
	}
	f := c.Flags()
	policyFlag(c, &o.files)
	f.StringVar(&o.runDir, "run-dir", "", "folder of the mesh's Unix sockets, as Envoy and the control plane have it")
	f.StringVar(&o.xds, "xds", "", "the control plane's xDS: a socket path or ip:port (default xds.sock in --run-dir)")
	f.StringVar(&o.metrics, "metrics", "127.0.0.1:9090", "ip:port of /health and /metrics")
	f.StringVar(&o.zone, "zone", "", "zone of this gateway (default the Mesh document's)")
	f.StringVar(&o.node, "node", "gateway", "name of this gateway towards the control plane")
	f.DurationVar(&o.drain, "drain", 30*time.Second, "time that running answers have on SIGTERM; then they end with an error")
	f.DurationVar(&o.handover, "handover", 15*time.Minute, "time that running answers have on SIGUSR2, when another gateway has taken over this one's sockets")
	f.StringVar(&o.secretFile, "relay-secret-file", "", "file with the secret that proves to workers that a request is the relay's (default KVMESH_RELAY_SECRET; without one answers are not continued)")
	f.StringVar(&o.redisCA, "redis-ca", "", "PEM file of the authorities of a rediss:// registry (default the system's)")
	_ = c.MarkFlagRequired("run-dir")
	return c
}

func runGateway(ctx context.Context, e *env, o gatewayOptions) error {
	set, err := readPolicies(o.files)
	if err != nil {
		return err
	}
	if o.runDir, err = filepath.Abs(o.runDir); err != nil {
		return fmt.Errorf("run folder: %w", err)
	}
	secret, err := relaySecret(o.secretFile, e.getenv)
	if err != nil {
		return err
	}
	s := socketsIn(o.runDir)
	if o.xds == "" {
		o.xds = "unix://" + s.xds
	} else if filepath.IsAbs(o.xds) {
		o.xds = "unix://" + o.xds
	}
	if o.zone == "" {
		o.zone = set.Mesh.Zone
	}
	log := e.log.With("part", "gateway")
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	egress := func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "unix", s.egress) }
	choice, decide := picker.Config{Policy: set, Zone: o.zone}, extproc.Config{Policy: set, Registerer: reg, Log: log}
	known, err := newPrefixes(set, reg, log, egress)
	if err != nil {
		return err
	}
	if known != nil {
		choice.Held, decide.Known = known.held, known.prompts.Known
	}
	pick, err := picker.New(choice)
	if err != nil {
		return err
	}
	held := semaphore.NewWeighted(int64(set.Mesh.HeldBodies))
	decide.Picker, decide.Held = pick, held
	ext, err := extproc.New(decide)
	if err != nil {
		return err
	}
	traces, flush, err := tracing(ctx, e, log, "kvmesh-gateway")
	if err != nil {
		return err
	}
	defer flush()
	streams, err := sharedStreams(set, e.getenv, o.redisCA, secret)
	if err != nil {
		return err
	}
	if streams != nil {
		defer func() { _ = streams.Close() }() // nothing uses it any more
	}
	rel, err := relay.New(relay.Config{
		Streams: streams, Socket: s.relay, Policy: set, Picker: pick, Held: held, Registerer: reg, Log: log, Drain: o.handover, Secret: secret, Tracing: traces,
		DialEgress: egress,
	})
	if err != nil {
		return err
	}
	g := gateway{options: o, sockets: s, log: log, pick: pick, ext: ext, rel: rel, known: known}
	g.admin.Handle("/v1/streams", rel.StreamsHandler())
	g.admin.Handle("/v1/streams/", rel.StreamsHandler())
	g.admin.Handle("/", extproc.AdminHandler(pick, reg))
	return g.run(ctx)
}

// sharedStreams opens the store of shared streams, nil where the policy shares none.
func sharedStreams(set *policy.Set, getenv func(string) string, ca, secret string) (*redis.Client, error) {
	if !set.Mesh.ShareStreams {
		return nil, nil
	}
	if secret == "" {
		return nil, usagef("shareStreams needs a relay secret, the same at all gateways: --relay-secret-file or KVMESH_RELAY_SECRET")
	}
	redisFromEnv(set, getenv)
	client, err := redislink.Open(redislink.Config{URL: set.Mesh.Registry.Redis, TrustedCA: ca})
	if err != nil {
		return nil, usagef("registry.redis or REDIS_URL: %w", err)
	}
	return client, nil
}

// redisFromEnv puts REDIS_URL in place of the policy's Redis, so that no password need
// stand in a file.
func redisFromEnv(set *policy.Set, getenv func(string) string) {
	if url := getenv("REDIS_URL"); url != "" && set.Mesh.Registry.Redis != "" {
		set.Mesh.Registry.Redis = url
	}
}

// gateway is the running command.
type gateway struct {
	options gatewayOptions
	sockets sockets
	log     *slog.Logger
	pick    *picker.Picker
	ext     *extproc.Server
	rel     *relay.Relay
	known   *prefixes // nil where nobody is followed
	admin   http.ServeMux
}

// fleetWait is how long a gateway that starts waits for the fleet before it serves
// without one: it would send requests past the relay, and that is better than none.
const fleetWait = 2 * time.Second

// run serves until ctx ends, or until SIGUSR2 says that another gateway has taken the
// sockets over; then it carries to their end the answers it has.
func (g *gateway) run(ctx context.Context) error {
	serving, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil)
	defer context.AfterFunc(ctx, func() {
		stop(nil)
		time.AfterFunc(g.options.drain, g.rel.Cut)
	})()
	g.heedReplacement(serving, stop)
	// The fleet is followed to the very end: an answer may still have to move.
	watching, done := context.WithCancel(context.WithoutCancel(ctx))
	defer done()
	follow := make(chan error, 1)
	go func() {
		follow <- fleet.Watch(watching, fleet.WatchConfig{Target: g.options.xds, Node: g.options.node, Log: g.log}, func(ws []*fleetpb.Worker) {
			g.pick.Update(ws)
			g.rel.Update()
		})
	}()
	if err := g.awaitFleet(serving, follow); err != nil {
		return errUnlessCanceled(err)
	}
	extLis, err := listenUnix(g.sockets.extProc)
	if err != nil {
		return err
	}
	relLis, err := listenUnix(g.sockets.relay)
	if err != nil {
		return err
	}
	group, serving := errgroup.WithContext(serving)
	group.Go(func() error { return g.ext.Run(serving, extLis) })
	group.Go(func() error { return g.rel.Run(serving, relLis) })
	if g.known != nil {
		group.Go(func() error { g.known.run(serving); return nil })
	}
	group.Go(func() error { return serveHTTP(serving, g.options.metrics, signed(&g.admin)) })
	group.Go(func() error {
		select {
		case err := <-follow:
			return err
		case <-serving.Done():
			return nil
		}
	})
	return errUnlessCanceled(group.Wait())
}

// errUnlessCanceled is err, but nil where that is the end that was asked for.
func errUnlessCanceled(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// heedReplacement stops serving at SIGUSR2.
func (g *gateway) heedReplacement(serving context.Context, stop context.CancelCauseFunc) {
	replaced := make(chan os.Signal, 1)
	signal.Notify(replaced, syscall.SIGUSR2)
	go func() {
		defer signal.Stop(replaced)
		select {
		case <-replaced:
			g.log.Info("another gateway has taken over; running answers go on to their end")
			if err := g.rel.Replaced(); err != nil {
				g.log.Error("streams without a client are not handed over", "err", err)
			}
			stop(extproc.ErrReplaced)
		case <-serving.Done():
		}
	}()
}

// awaitFleet returns when the fleet is known, or when it takes too long.
func (g *gateway) awaitFleet(ctx context.Context, follow <-chan error) error {
	late := time.After(fleetWait)
	for g.pick.Workers(time.Now()) == nil {
		select {
		case err := <-follow:
			return err
		case <-late:
			g.log.Warn("the control plane has not told the fleet yet; serving without it", "xds", g.options.xds)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

// listenUnix listens on a socket that only this user may use, in place of one that
// another process left behind, or is about to: at no moment is there no socket.
func listenUnix(path string) (net.Listener, error) {
	mine := fmt.Sprintf("%s.%d", path, os.Getpid())
	if err := os.Remove(mine); err != nil && !os.IsNotExist(err) {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: mine, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	l.SetUnlinkOnClose(false) // by then the path may be another process's
	err = os.Chmod(mine, 0o600)
	if err == nil {
		err = os.Rename(mine, path)
	}
	if err != nil {
		_ = l.Close() // the error to report is the one before
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return l, nil
}

// headerPID names the process that answers, so that `kvmesh up` does not take
// another mesh's gateway for its own.
const headerPID = "X-Kvmesh-Pid"

// signed adds headerPID to every answer of h.
func signed(h http.Handler) http.Handler {
	pid := strconv.Itoa(os.Getpid())
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(headerPID, pid)
		h.ServeHTTP(w, r)
	})
}

// serveHTTP serves h until ctx ends.
func serveHTTP(ctx context.Context, addr string, h http.Handler) error {
	l, err := listenTCP(ctx, addr)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() }) // nothing on it is worth waiting for
	defer stop()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", addr, err)
	}
	return nil
}
