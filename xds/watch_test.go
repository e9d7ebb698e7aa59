package xds_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
)

func noWorkers(t *testing.T) func([]*fleetpb.Worker) {
	return func(list []*fleetpb.Worker) { t.Errorf("got %v", list) }
}

// gateway follows the fleet.
type gateway struct {
	mu    sync.Mutex
	list  []*fleetpb.Worker
	calls int
}

func (g *gateway) apply(list []*fleetpb.Worker) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.list, g.calls = list, g.calls+1
}

func (g *gateway) worker(id string) *fleetpb.Worker {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, w := range g.list {
		if w.GetId() == id {
			return w
		}
	}
	return nil
}

func (p *plane) watch() *gateway {
	g := &gateway{}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- fleet.Watch(ctx, fleet.WatchConfig{Target: "unix:" + p.config.ListenXDS, Node: "gateway"}, g.apply)
	}()
	p.t.Cleanup(func() {
		cancel()
		<-done
	})
	return g
}

// A gateway learns load, health and drain, and keeps what it knows while the
// control plane is away.
func TestGatewayFollowsTheFleet(t *testing.T) {
	p := newPlane(t, onePool)
	g := p.watch()
	w0, w1 := startWorker(t, "w0"), startWorker(t, "w1")
	p.register(w0)
	p.register(w1)
	until := func(what, id string, ok func(*fleetpb.Worker) bool) {
		t.Helper()
		envoytest.Eventually(t, 10*time.Second, what, func() bool { return ok(g.worker(id)) })
	}
	until("the load of w0", "w0", func(w *fleetpb.Worker) bool {
		return w.GetLoad().GetRunning() == 3 && w.GetLoad().GetKvUsage() == 0.25 && w.GetWeight() == 200 &&
			w.GetIncarnation() == w0.reg.Incarnation && w.GetModel() == "sim"
	})
	if err := p.client.Drain(t.Context(), "w1", true); err != nil {
		t.Fatal(err)
	}
	until("the drain of w1", "w1", func(w *fleetpb.Worker) bool { return w.GetStatus() == 3 && w.GetReason() == "draining" })
	if err := p.client.DrainKeeping(t.Context(), "w1"); err != nil {
		t.Fatal(err)
	}
	until("that w1 keeps its streams", "w1", func(w *fleetpb.Worker) bool { return w.GetKeepStreams() })

	p.crash()
	if g.worker("w0") == nil || g.worker("w1") == nil {
		t.Error("workers were forgotten with the control plane")
	}
	p.start()
	w0.load(1)
	until("the load after the restart", "w0", func(w *fleetpb.Worker) bool { return w.GetWeight() == 100 })
	if w := g.worker("w1"); w.GetStatus() != 3 || !w.GetKeepStreams() {
		t.Errorf("w1 is %v after the restart, want its drain kept", w)
	}

	p.call("DELETE", "/v1/workers/w1", nil)
	until("w1 gone", "w1", func(w *fleetpb.Worker) bool { return w == nil })
}
