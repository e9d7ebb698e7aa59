package xds

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/xds/registry"
)

// Config says what a control plane serves and where.
type Config struct {
	// Envoy holds the policy and the addresses that go into Envoy's configuration.
	Envoy envoy.Config
	// Mesh is what GET /v1/mesh tells of the other parts; its PID is filled in.
	Mesh fleet.MeshView
	// ListenXDS is where Envoys and gateways connect: the path of a Unix socket,
	// made with mode 0600, or an ip:port.
	ListenXDS string
	// ListenAPI takes the HTTP API's connections; the control plane closes it. It
	// should be a loopback address: the API has no credentials.
	ListenAPI net.Listener
	// StateDir holds registry.json and the snapshot. It must exist.
	StateDir string
	// RedisCA is a PEM file of the authorities of a rediss:// registry, "" for the
	// system's.
	RedisCA string
	// Settle is how long the workers known from before have to report until the
	// first Envoy is answered, default 1 s.
	Settle time.Duration
	// Log takes what operators should see; nil discards.
	Log *slog.Logger
}

// Names of files in StateDir.
const snapshotFile = "snapshot.pb"

// SnapshotPath returns the path of the snapshot that a control plane with this
// StateDir writes.
func SnapshotPath(stateDir string) string { return stateDir + "/" + snapshotFile }

// validate reports everything that is wrong beside envoy.Config, which has its own.
func (c Config) validate() error {
	var errs []error
	if c.ListenXDS == "" {
		errs = append(errs, errors.New("ListenXDS: missing"))
	}
	if c.ListenAPI == nil {
		errs = append(errs, errors.New("ListenAPI: missing"))
	}
	if fi, err := os.Stat(c.StateDir); err != nil || !fi.IsDir() {
		errs = append(errs, fmt.Errorf("StateDir %q: not a directory", c.StateDir))
	}
	return errors.Join(errs...)
}

// ControlPlane is one replica of the control plane. Its methods are safe for
// concurrent use.
type ControlPlane struct {
	config   Config
	log      *slog.Logger
	registry *registry.Embedded
	state    *state
	server   *server
	metrics  *metrics
	redis    *redisMembers // nil without a Redis
	leases   leases

	mu       sync.Mutex
	policy   *policy.Set
	watchers map[string]*watcher           // by worker id
	pools    map[string]context.CancelFunc // running loops by pool
	run      context.Context               // of the loops, nil before Run

	// loops counts watchers and pools' loops; Run ends after them.
	loops sync.WaitGroup
}

// New loads the state of StateDir and checks the configuration, without
// listening.
func New(c Config) (*ControlPlane, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.Settle = cmp.Or(c.Settle, time.Second)
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("control plane: %w", err)
	}
	// What Envoy would refuse must not come to serving.
	resources, err := envoy.Build(c.Envoy)
	if err != nil {
		return nil, fmt.Errorf("control plane: %w", err)
	}
	servers, err := registry.Servers(c.Envoy.Policy)
	if err != nil {
		return nil, fmt.Errorf("control plane: %w", err)
	}
	state := newState()
	rc := registry.Config{
		Dir: c.StateDir, Log: c.Log,
		Alive: func(id string) bool { return state.holds(id, time.Now()) },
	}
	for _, s := range servers {
		rc.Static = append(rc.Static, s.ID)
	}
	reg, err := registry.Open(rc, time.Now())
	if err != nil {
		return nil, fmt.Errorf("control plane: %w", err)
	}
	cp := &ControlPlane{
		config: c, log: c.Log, registry: reg, state: state, metrics: newMetrics(),
		watchers: map[string]*watcher{}, pools: map[string]context.CancelFunc{},
	}
	cp.metrics.workers(cp.state)
	cp.server = newServer(cp.log, cp.metrics)
	cp.policy = c.Envoy.Policy
	if cp.redis, err = newRedisMembers(cp); err != nil {
		return nil, fmt.Errorf("control plane: %w", err)
	}
	cp.state.setPools(cp.policy)
	cp.server.expect(resources.Clusters)
	return cp, cp.server.configure(resources)
}

// Run serves until ctx ends or a listener fails.
func (cp *ControlPlane) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	cp.mu.Lock()
	cp.run = ctx
	cp.mu.Unlock()
	// Workers may register while the known ones are given their time.
	group.Go(func() error { return cp.serveAPI(ctx) })
	cp.loops.Go(func() { cp.redis.run(ctx) })
	cp.sync()
	cp.settle(ctx)
	cp.publishAll()
	cp.startPools()
	group.Go(func() error { return cp.housekeep(ctx) })
	group.Go(func() error { return cp.server.serve(ctx, cp.config.ListenXDS) })
	group.Go(func() error { return cp.server.keepSnapshot(ctx, SnapshotPath(cp.config.StateDir)) })
	err := group.Wait()
	cp.loops.Wait() // collectors and pools end with the same context
	if ferr := cp.registry.Flush(time.Now()); ferr != nil {
		cp.log.Error("registry not stored", "err", ferr)
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, http.ErrServerClosed) {
		return nil // as asked
	}
	return err
}

// settle waits until every worker has been heard or Settle is over.
func (cp *ControlPlane) settle(ctx context.Context) {
	deadline := time.NewTimer(cp.config.Settle)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !cp.state.settled() {
		select {
		case <-ctx.Done():
			return
		case <-deadline.C:
			return
		case <-tick.C:
		}
	}
}

// housekeep removes workers that are gone for good and stores what waits to be.
func (cp *ControlPlane) housekeep(ctx context.Context) error {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	told := trouble{log: cp.log, what: "registry not stored"}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		now := time.Now()
		// A worker whose registrations do not get through, but whose reports do, lives.
		gone := cp.registry.Expire(now, fleet.TTL, func(id string) bool { return cp.state.alive(id, now) || cp.redis.vouches(id, now) })
		if len(gone) > 0 {
			cp.log.Warn("workers fell silent and are removed", "workers", gone)
			cp.sync()
		}
		told.note(now, cp.registry.Flush(now))
	}
}

// Reload replaces the policy while serving. On error the old one stays.
func (cp *ControlPlane) Reload(set *policy.Set) error {
	c := cp.config.Envoy
	c.Policy = set
	resources, err := envoy.Build(c)
	if err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	servers, err := registry.Servers(set)
	if err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	var static []string
	for _, s := range servers {
		static = append(static, s.ID)
	}
	// From here on nothing can fail that the old policy could not.
	cp.registry.SetStatic(static)
	cp.mu.Lock()
	cp.policy = set
	cp.mu.Unlock()
	cp.state.setPools(set)
	cp.sync()
	// The new clusters' endpoints must be there before the clusters are.
	cp.server.expect(resources.Clusters)
	cp.publishAll()
	if err := cp.server.configure(resources); err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	cp.startPools()
	return nil
}
