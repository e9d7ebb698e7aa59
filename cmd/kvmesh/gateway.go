package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/kvmesh/kvmesh/extproc"
	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/relay"
)

// gatewayOptions are the flags of `kvmesh gateway`.
type gatewayOptions struct {
	files         []string
	runDir, xds   string
	metrics, zone string
	node          string
	secretFile    string
	drain         time.Duration
}

func gatewayCommand(e *env) *cobra.Command {
	o := gatewayOptions{}
	c := &cobra.Command{
		Use:   "gateway -f FILE --run-dir DIR",
		Short: "Run the gateway: Envoy's external processor and the relay",
		Long: `Run the gateway beside one Envoy. It answers ext_proc and carries generation
requests on Unix sockets in --run-dir, and follows the fleet over the control plane's
xDS. Without it Envoy serves alone.`,
		Example: "  kvmesh gateway -f mesh.yaml --run-dir /run/kvmesh --metrics 127.0.0.1:9090",
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return runGateway(c.Context(), e, o) },
	}
	f := c.Flags()
	policyFlag(c, &o.files)
	f.StringVar(&o.runDir, "run-dir", "", "folder of the mesh's Unix sockets, as Envoy and the control plane have it")
	f.StringVar(&o.xds, "xds", "", "the control plane's xDS: a socket path or ip:port (default xds.sock in --run-dir)")
	f.StringVar(&o.metrics, "metrics", "127.0.0.1:9090", "ip:port of /health and /metrics")
	f.StringVar(&o.zone, "zone", "", "zone of this gateway (default the Mesh document's)")
	f.StringVar(&o.node, "node", "gateway", "name of this gateway towards the control plane")
	f.DurationVar(&o.drain, "drain", 30*time.Second, "time that running answers have on SIGTERM; then they end with an error")
	f.StringVar(&o.secretFile, "relay-secret-file", "", "file with the secret that proves to workers that a request is the relay's (default KVMESH_RELAY_SECRET; without one answers are not continued)")
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
	pick, err := picker.New(picker.Config{Policy: set, Zone: o.zone})
	if err != nil {
		return err
	}
	held := semaphore.NewWeighted(int64(set.Mesh.HeldBodies))
	ext, err := extproc.New(extproc.Config{Policy: set, Picker: pick, Held: held, Registerer: reg, Log: log})
	if err != nil {
		return err
	}
	rel, err := relay.New(relay.Config{
		Policy: set, Picker: pick, Held: held, Registerer: reg, Log: log, Drain: o.drain, Secret: secret,
		DialEgress: func(ctx context.Context) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", s.egress)
		},
	})
	if err != nil {
		return err
	}
	extLis, err := listenUnix(s.extProc)
	if err != nil {
		return err
	}
	relLis, err := listenUnix(s.relay)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return ext.Run(ctx, extLis) })
	group.Go(func() error { return rel.Run(ctx, relLis) })
	group.Go(func() error {
		return fleet.Watch(ctx, fleet.WatchConfig{Target: o.xds, Node: o.node, Log: log}, pick.Update)
	})
	admin := http.NewServeMux()
	admin.Handle("GET /v1/streams", rel.StreamsHandler())
	admin.Handle("/", extproc.AdminHandler(pick, reg))
	group.Go(func() error { return serveHTTP(ctx, o.metrics, signed(admin)) })
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// listenUnix listens on a socket that only this user may use, in place of one
// that a process before left behind.
func listenUnix(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
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
