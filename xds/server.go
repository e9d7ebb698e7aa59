package xds

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/names"
)

// allNodes is the one node key of the snapshot cache: every Envoy of a mesh gets
// the same configuration.
const allNodes = "mesh"

// sameForAll puts every node under one key.
type sameForAll struct{}

// ID implements cache.NodeHash.
func (sameForAll) ID(*corev3.Node) string { return allNodes }

// server hands resources out over delta ADS. Endpoints and the fleet change all
// the time, so they are in caches that compare one resource; the rest is a
// snapshot. Resource versions are hashes of the content: a client that comes over
// from another replica, or from before a restart, is sent only what differs.
type server struct {
	log     *slog.Logger
	metrics *metrics

	endpoints *cache.LinearCache
	fleet     *cache.LinearCache
	rest      cache.SnapshotCache // ordered: clusters before listeners before routes

	mu       sync.Mutex
	services map[string][]string      // pool → names of its EDS resource, the current one first
	stored   map[string]proto.Message // type URL + "\n" + name → resource, for the snapshot
	changed  chan struct{}            // capacity 1: stored changed
}

// newServer makes a server with nothing to serve yet.
func newServer(log *slog.Logger, m *metrics) *server {
	quiet := cacheLog{log}
	return &server{
		log: log, metrics: m,
		endpoints: cache.NewLinearCache(resource.EndpointType, cache.WithLogger(quiet)),
		fleet:     cache.NewLinearCache(fleet.TypeURL, cache.WithLogger(quiet)),
		rest:      cache.NewSnapshotCache(true, sameForAll{}, quiet),
		services:  map[string][]string{},
		stored:    map[string]proto.Message{},
		changed:   make(chan struct{}, 1),
	}
}

// mux routes a request to the cache of its type. Types we have nothing of go to
// the snapshot too, which leaves them unanswered instead of ending the stream.
func (s *server) mux() *cache.MuxCache {
	key := func(typeURL string) string {
		switch typeURL {
		case resource.EndpointType, fleet.TypeURL:
			return typeURL
		}
		return allNodes
	}
	return &cache.MuxCache{
		Classify:      func(r *cache.Request) string { return key(r.GetTypeUrl()) },
		ClassifyDelta: func(r *cache.DeltaRequest) string { return key(r.GetTypeUrl()) },
		Caches: map[string]cache.Cache{
			resource.EndpointType: s.endpoints, fleet.TypeURL: s.fleet, allNodes: s.rest,
		},
	}
}

// expect says under which names the clusters of a coming configuration will ask
// for their endpoints. The names before them stay in use: an Envoy that refuses
// the new configuration goes on with the old one.
func (s *server) expect(clusters []*clusterv3.Cluster) {
	s.mu.Lock()
	defer s.mu.Unlock()
	services, used := map[string][]string{}, map[string]bool{}
	for _, c := range clusters {
		name := c.GetEdsClusterConfig().GetServiceName()
		pool, isPool := strings.CutPrefix(c.GetName(), names.PoolPrefix)
		if !isPool {
			continue
		}
		services[pool] = []string{name}
		// After a change: new and old. Without one: whatever there was.
		if old := s.services[pool]; len(old) > 0 && old[0] != name {
			services[pool] = append(services[pool], old[0])
		} else {
			services[pool] = append(services[pool], old[min(1, len(old)):]...)
		}
		for _, n := range services[pool] {
			used[n] = true
		}
	}
	s.services = services
	for key := range s.stored {
		typeURL, name, _ := strings.Cut(key, "\n")
		if typeURL == resource.EndpointType && !used[name] {
			delete(s.stored, key)
			if err := s.endpoints.DeleteResource(name); err != nil {
				s.log.Error("endpoints not removed", "service", name, "err", err)
			}
		}
	}
}

// configure replaces listeners, routes and clusters.
func (s *server) configure(r envoy.Resources) error {
	// Endpoints are not part of it: they change a thousand times as often.
	byType := map[resource.Type][]types.Resource{
		resource.ListenerType: resources(r.Listeners),
		resource.RouteType:    resources(r.Routes),
		resource.ClusterType:  resources(r.Clusters),
	}
	version, err := contentVersion(byType)
	if err != nil {
		return fmt.Errorf("version of the configuration: %w", err)
	}
	snapshot, err := cache.NewSnapshot(version, byType)
	if err != nil {
		return fmt.Errorf("snapshot of the configuration: %w", err)
	}
	if err := s.rest.SetSnapshot(context.Background(), allNodes, snapshot); err != nil {
		return fmt.Errorf("publish the configuration: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// What is no longer configured must not come back out of the snapshot.
	for typeURL, rs := range byType {
		s.dropLocked(func(key string) bool { return strings.HasPrefix(key, typeURL+"\n") })
		for _, res := range rs {
			s.stored[typeURL+"\n"+cache.GetResourceName(res)] = res
		}
	}
	s.touch()
	return nil
}

// resources widens a slice to the cache's own type.
func resources[M types.Resource](ms []M) []types.Resource {
	out := make([]types.Resource, len(ms))
	for i, m := range ms {
		out[i] = m
	}
	return out
}

// contentVersion is a hash over everything, in a fixed order.
func contentVersion(byType map[resource.Type][]types.Resource) (string, error) {
	h := fnv.New64a()
	// Not a range over the map: its order changes from run to run.
	for _, typeURL := range []string{resource.ListenerType, resource.RouteType, resource.ClusterType} {
		for _, r := range byType[typeURL] {
			raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
			if err != nil {
				return "", err
			}
			_, _ = h.Write(raw) // a hash never fails
		}
	}
	return fmt.Sprintf("%016x", h.Sum64()), nil
}

// setEndpoints publishes the endpoints of a pool.
func (s *server) setEndpoints(pool string, eps []envoy.Endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	update := map[string]types.Resource{}
	for _, service := range s.services[pool] {
		// One bad endpoint would have Envoy refuse all of them.
		cla := envoy.Endpoints(service, eps)
		if err := cla.ValidateAll(); err != nil {
			s.log.Error("endpoints not published", "pool", pool, "err", err)
			return
		}
		update[service] = cla
		s.stored[resource.EndpointType+"\n"+service] = cla
	}
	if err := s.endpoints.UpdateResources(update, nil); err != nil {
		s.log.Error("endpoints not published", "pool", pool, "err", err)
		return
	}
	s.metrics.pushes.WithLabelValues("endpoints").Inc()
	s.touch()
}

// setFleet publishes what became of workers, and which are gone.
func (s *server) setFleet(update []*fleetpb.Worker, removed []string) {
	byName := make(map[string]types.Resource, len(update))
	for _, w := range update {
		byName[w.GetId()] = w
	}
	if err := s.fleet.UpdateResources(byName, removed); err != nil {
		s.log.Error("fleet not published", "err", err)
		return
	}
	s.metrics.pushes.WithLabelValues("fleet").Inc()
}

// dropLocked removes stored resources by key.
func (s *server) dropLocked(drop func(key string) bool) {
	for key := range s.stored {
		if drop(key) {
			delete(s.stored, key)
		}
	}
}

// touch asks for the snapshot to be written.
func (s *server) touch() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// serve answers Envoys and gateways until ctx ends.
func (s *server) serve(ctx context.Context, addr string) error {
	ln, err := listen(addr)
	if err != nil {
		return fmt.Errorf("listen for xDS at %s: %w", addr, err)
	}
	s.log.Info("control plane serves", "xds", addr)
	return serveADS(ctx, ln, s.mux(), s.callbacks())
}

// serveADS serves a cache on a listener until ctx ends.
func serveADS(ctx context.Context, ln net.Listener, c cache.Cache, cb serverv3.Callbacks) error {
	g := grpc.NewServer(
		grpc.MaxConcurrentStreams(10000),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		// Envoy pings every second, gateways every 10 s; gRPC's own floor is 5 minutes.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 200 * time.Millisecond, PermitWithoutStream: true}),
	)
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(g, serverv3.NewServer(ctx, c, cb))
	grpc_health_v1.RegisterHealthServer(g, health.NewServer())
	stop := context.AfterFunc(ctx, g.Stop)
	defer stop()
	// Serve closes the listener, and returns nil or an error after Stop.
	if err := g.Serve(ln); err != nil && ctx.Err() == nil {
		return fmt.Errorf("serve xDS: %w", err)
	}
	return ctx.Err()
}

// callbacks count streams and note what clients refuse.
func (s *server) callbacks() serverv3.Callbacks {
	return serverv3.CallbackFuncs{
		DeltaStreamOpenFunc: func(context.Context, int64, string) error {
			s.metrics.streams.Inc()
			return nil
		},
		DeltaStreamClosedFunc: func(int64, *corev3.Node) { s.metrics.streams.Dec() },
		StreamDeltaRequestFunc: func(_ int64, r *discoveryv3.DeltaDiscoveryRequest) error {
			// Envoy goes on with what it had. The message says which resource and why.
			if e := r.GetErrorDetail(); e != nil {
				s.metrics.nacks.WithLabelValues(shortType(r.GetTypeUrl())).Inc()
				s.log.Error("configuration refused", "by", r.GetNode().GetId(), "type", shortType(r.GetTypeUrl()), "err", e.GetMessage())
			}
			return nil
		},
	}
}

// shortType is the last part of a type URL, for people and metric labels.
func shortType(typeURL string) string {
	return typeURL[strings.LastIndexByte(typeURL, '.')+1:]
}

// listen opens an ip:port or a Unix socket with mode 0600. The socket appears
// under its name only when it is ready, in place of one that a dead process left.
func listen(addr string) (net.Listener, error) {
	if !strings.HasPrefix(addr, "/") {
		return net.Listen("tcp", addr)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(addr), ".x") // mode 0700: nobody connects too early
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(tmp) }() // empty by then
	path := filepath.Join(tmp, "s")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	ln.SetUnlinkOnClose(false) // its name is another by then
	if err := errors.Join(os.Chmod(path, 0o600), os.Rename(path, addr)); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	return ln, nil
}

// cacheLog passes the cache's errors on and drops its chatter.
type cacheLog struct{ log *slog.Logger }

// Debugf implements log.Logger: dropped, it is several lines per push.
func (cacheLog) Debugf(string, ...any) {}

// Infof implements log.Logger: dropped, it is a line per push.
func (cacheLog) Infof(string, ...any) {}

// Warnf implements log.Logger.
func (l cacheLog) Warnf(format string, args ...any) {
	l.log.Warn("xds cache", "msg", fmt.Sprintf(format, args...))
}

// Errorf implements log.Logger.
func (l cacheLog) Errorf(format string, args ...any) {
	l.log.Error("xds cache", "msg", fmt.Sprintf(format, args...))
}
