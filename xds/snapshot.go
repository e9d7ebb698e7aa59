package xds

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/kvmesh/kvmesh/xds/registry"
)

// The snapshot is written at once after a change, so that a control plane that
// dies leaves its last word, and then not again for snapshotPause, or for as long
// as keeps the cost of writing under 1/snapshotCost of a core.
const (
	snapshotPause = 50 * time.Millisecond
	snapshotCost  = 4
	snapshotRetry = 500 * time.Millisecond // after one that could not be written
)

// keepSnapshot writes all of Envoy's resources to a file whenever they changed,
// so that an Envoy can start while no control plane runs.
func (s *server) keepSnapshot(ctx context.Context, path string) error {
	told := trouble{log: s.log, what: "snapshot not written"}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.changed:
		}
		start := time.Now()
		pause := snapshotPause
		err := s.writeSnapshot(path)
		if told.note(start, err); err != nil {
			s.touch()
			pause = snapshotRetry
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(max(pause, snapshotCost*time.Since(start))):
		}
	}
}

// writeSnapshot stores the resources as one response of the protocol that serves
// them, sorted by type and name.
func (s *server) writeSnapshot(path string) error {
	// Messages are never changed once stored, so they can be packed without the lock.
	s.mu.Lock()
	all := maps.Clone(s.stored)
	s.mu.Unlock()
	out := &discoveryv3.DeltaDiscoveryResponse{}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		packed := &anypb.Any{}
		if err := anypb.MarshalFrom(packed, all[key], proto.MarshalOptions{Deterministic: true}); err != nil {
			return fmt.Errorf("pack %s: %w", key, err)
		}
		_, name, _ := strings.Cut(key, "\n")
		out.Resources = append(out.Resources, &discoveryv3.Resource{Name: name, Resource: packed})
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(out)
	if err != nil {
		return fmt.Errorf("write snapshot: %w", err)
	}
	if err := registry.WriteFile(path, raw); err != nil {
		return fmt.Errorf("write snapshot: %w", err)
	}
	return nil
}

// SnapshotConfig says which snapshot is served.
type SnapshotConfig struct {
	// Path of the file that a control plane writes, see SnapshotPath.
	Path string
	// Listener takes Envoy's connections; it is closed in the end.
	Listener net.Listener
	// Primary is where the control plane listens: a Unix socket's path or ip:port.
	Primary string
	// Log takes what operators should see; nil discards.
	Log *slog.Logger
}

// ServeSnapshot serves the last configuration a control plane wrote to Envoys that
// find no control plane, until ctx ends. It reads the file at each connection; as
// long as there is none it answers nothing, rather than an empty configuration.
//
// Envoy stays with whoever answered it for as long as the connection lasts. So
// connections are closed as soon as the control plane listens again, and Envoy
// goes back to it.
func ServeSnapshot(ctx context.Context, c SnapshotConfig) error {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	srv := newServer(c.Log, newMetrics())
	s := &snapshotServer{config: c, server: srv}
	ln := &standIn{Listener: c.Listener, primary: c.Primary, conns: map[net.Conn]bool{}}
	go ln.yield(ctx)
	return serveADS(ctx, ln, srv.mux(), serverv3.CallbackFuncs{
		DeltaStreamOpenFunc: func(context.Context, int64, string) error { return s.load() },
	})
}

// snapshotServer serves one file.
type snapshotServer struct {
	config SnapshotConfig
	server *server

	mu sync.Mutex // one load at a time
}

// load reads the file anew: it may have been written since the last Envoy came.
func (s *snapshotServer) load() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	raw, err := os.ReadFile(s.config.Path)
	if err == nil {
		err = s.fill(raw)
	}
	if err != nil {
		s.config.Log.Warn("no snapshot to serve", "err", err)
		return status.Errorf(codes.Unavailable, "no snapshot: %v", err)
	}
	s.config.Log.Warn("no control plane answers: an Envoy takes its configuration from the snapshot", "path", s.config.Path)
	return nil
}

// fill puts a stored response into the caches.
func (s *snapshotServer) fill(raw []byte) error {
	// Everything is read before anything is served: no half of a snapshot.
	var stored discoveryv3.DeltaDiscoveryResponse
	if err := proto.Unmarshal(raw, &stored); err != nil {
		return fmt.Errorf("read snapshot: %w", err)
	}
	byType := map[resource.Type][]types.Resource{}
	endpoints := map[string]types.Resource{}
	for _, r := range stored.GetResources() {
		m, err := r.GetResource().UnmarshalNew()
		if err != nil {
			return fmt.Errorf("read snapshot: %s: %w", r.GetName(), err)
		}
		if t := r.GetResource().GetTypeUrl(); t == resource.EndpointType {
			endpoints[r.GetName()] = m
		} else {
			byType[t] = append(byType[t], m)
		}
	}
	// An empty file reads as an empty message without error.
	if len(byType[resource.ListenerType]) == 0 || len(byType[resource.ClusterType]) == 0 {
		return errors.New("read snapshot: it has no listeners or no clusters")
	}
	snapshot, err := cache.NewSnapshot("stored", byType)
	if err != nil {
		return fmt.Errorf("read snapshot: %w", err)
	}
	// Endpoints first, so that no cluster waits for them.
	s.server.endpoints.SetResources(endpoints)
	return s.server.rest.SetSnapshot(context.Background(), allNodes, snapshot)
}
