package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
)

// WatchConfig says where and as whom to follow the fleet.
type WatchConfig struct {
	// Target of the control plane as gRPC writes it: unix:///path or host:port.
	Target string
	// Node names this gateway to the control plane.
	Node string
	// Log takes connection losses; nil discards.
	Log *slog.Logger
	// Dial options beside those of the Watch itself, for tests.
	Dial []grpc.DialOption
	// Backoff is the longest pause between two attempts, default 500ms.
	Backoff time.Duration
}

// Watch follows the fleet over delta ADS until ctx ends, and returns ctx's error,
// or the one that makes the target unusable. apply is called with the full list,
// sorted by id, after every change and never at the same time twice; the list and
// its workers are shared and must not be changed. While the control plane is away
// the last list stands; one that comes back resends only what changed.
func Watch(ctx context.Context, c WatchConfig, apply func([]*fleetpb.Worker)) error {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.Backoff = cmp.Or(c.Backoff, 500*time.Millisecond)
	opts := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
	}, c.Dial...)
	conn, err := grpc.NewClient(c.Target, opts...)
	if err != nil {
		return fmt.Errorf("watch fleet at %s: %w", c.Target, err)
	}
	defer conn.Close()
	w := &watcher{config: c, conn: conn, apply: apply, versions: map[string]string{}, workers: map[string]*fleetpb.Worker{}}
	return w.run(ctx)
}

// watcher is the state of one Watch. Only its own goroutine touches it.
type watcher struct {
	config WatchConfig
	conn   *grpc.ClientConn
	apply  func([]*fleetpb.Worker)
	// What the control plane sent, by resource name. A reconnect tells it the
	// versions, so it resends only what changed meanwhile.
	versions map[string]string
	workers  map[string]*fleetpb.Worker
	applied  bool // apply was called at least once
}

// patience is for how long a control plane that was never there may still be
// starting, which is no news.
const patience = 5 * time.Second

// run opens stream after stream. The first tries follow each other closely; a
// control plane that restarts is back within a second.
func (w *watcher) run(ctx context.Context) error {
	pause, began := 10*time.Millisecond, time.Now()
	told := false // of this loss
	for {
		answered, err := w.follow(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		// A stream that brought something ends the series of failures.
		if answered {
			pause, told = 10*time.Millisecond, false
		}
		if !told && (w.applied || time.Since(began) > patience) {
			told = true
			w.config.Log.Warn("fleet watch lost, keeping the last state", "target", w.config.Target, "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		pause = min(2*pause, w.config.Backoff)
		w.conn.ResetConnectBackoff()
	}
}

// follow keeps one stream until it breaks.
func (w *watcher) follow(ctx context.Context) (answered bool, err error) {
	ctx, cancel := context.WithCancel(ctx) // gives the stream up on every return
	defer cancel()
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(w.conn).DeltaAggregatedResources(ctx)
	if err != nil {
		return false, err
	}
	if err := stream.Send(&discoveryv3.DeltaDiscoveryRequest{
		Node:                    &corev3.Node{Id: w.config.Node, Cluster: "kvmesh"},
		TypeUrl:                 TypeURL,
		ResourceNamesSubscribe:  []string{"*"},
		InitialResourceVersions: maps.Clone(w.versions),
	}); err != nil {
		return false, err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return answered, err
		}
		answered = true
		ack := &discoveryv3.DeltaDiscoveryRequest{TypeUrl: TypeURL, ResponseNonce: m.GetNonce()}
		changed, err := w.take(m)
		// An update that cannot be read is refused; what was known stays.
		if err != nil {
			w.config.Log.Error("fleet update refused", "err", err)
			ack.ErrorDetail = status.New(codes.InvalidArgument, err.Error()).Proto()
		}
		if changed || !w.applied {
			w.applied = true
			w.apply(w.list())
		}
		if err := stream.Send(ack); err != nil {
			return answered, err
		}
	}
}

// take applies a response: all of it, or nothing when a part is unreadable.
func (w *watcher) take(m *discoveryv3.DeltaDiscoveryResponse) (changed bool, err error) {
	if m.GetTypeUrl() != TypeURL {
		return false, fmt.Errorf("response of type %q", m.GetTypeUrl())
	}
	fresh := make([]*fleetpb.Worker, len(m.GetResources()))
	var errs []error
	for i, r := range m.GetResources() {
		fresh[i] = &fleetpb.Worker{}
		if err := r.GetResource().UnmarshalTo(fresh[i]); err != nil {
			errs = append(errs, fmt.Errorf("worker %s: %w", r.GetName(), err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return false, err
	}
	for i, r := range m.GetResources() {
		w.versions[r.GetName()] = r.GetVersion()
		// Only real news is passed on: after a reconnect much is sent again.
		changed = changed || !proto.Equal(w.workers[r.GetName()], fresh[i])
		w.workers[r.GetName()] = fresh[i]
	}
	for _, name := range m.GetRemovedResources() {
		_, had := w.workers[name]
		changed = changed || had
		delete(w.workers, name)
		delete(w.versions, name)
	}
	return changed, nil
}

// list is all workers as apply gets them: a fresh slice of shared workers.
func (w *watcher) list() []*fleetpb.Worker {
	return slices.SortedFunc(maps.Values(w.workers), func(a, b *fleetpb.Worker) int {
		return cmp.Compare(a.GetId(), b.GetId())
	})
}
