package main

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/internal/supervise"
)

// What each part of a mesh may take to stop. All of them together are about 5 s,
// the patience of whoever pressed Ctrl-C; usually it is a tenth of a second.
const (
	gatewayDrain = 2 * time.Second // of running answers, then they end with an error event
	graceGateway = gatewayDrain + 500*time.Millisecond
	graceEnvoy   = 500 * time.Millisecond
	graceOther   = time.Second
	// lastEvents is what Envoy has to pass on what the gateway said last.
	lastEvents = 100 * time.Millisecond
)

// layer is a set of parts that start and stop together.
type layer struct {
	name string
	runs []func(context.Context)
	stop func() // ends them and waits for that
}

// layers lists the parts in the order in which they stop. The gateway is first, so
// that it tells the clients of running answers; then Envoy, behind which nobody
// waits any more; then the workers, which sign off at the control plane.
func (m *localMesh) layers() []*layer {
	workers := &layer{name: fmt.Sprintf("%d workers", len(m.workers))}
	for _, w := range m.workers {
		workers.runs = append(workers.runs, m.child(m.workerSpec(w)))
	}
	node := &layer{name: "KV node"} // behind the workers, whose last ranges it takes
	if m.kv.dir != "" && m.set.Mesh.KV.Node {
		node.runs = append(node.runs, m.child(m.kvNodeSpec()))
		if m.servesEngines() {
			workers.runs = append(workers.runs, m.child(m.lmcacheSpec()))
		}
	}
	return []*layer{
		{name: "gateway", runs: []func(context.Context){m.child(m.gatewaySpec())}},
		{name: "envoy", runs: []func(context.Context){m.child(m.envoySpec()), m.serveSnapshot, m.rotateAccessLog}},
		workers,
		node,
		{name: "control plane", runs: []func(context.Context){m.child(m.controlPlaneSpec())}},
	}
}

// start runs all children until ctx ends, then stops them layer by layer. The
// channel is closed when all are gone.
func (m *localMesh) start(ctx context.Context) <-chan struct{} {
	background := context.WithoutCancel(ctx)
	layers := m.layers()
	for i := len(layers) - 1; i >= 0; i-- {
		lctx, cancel := context.WithCancel(background)
		var wg sync.WaitGroup
		for _, run := range layers[i].runs {
			wg.Go(func() { run(lctx) })
		}
		layers[i].stop = func() { cancel(); wg.Wait() }
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		<-ctx.Done()
		m.stop(background, layers)
	}()
	return done
}

// stop ends the layers in order and says so.
func (m *localMesh) stop(ctx context.Context, layers []*layer) {
	fmt.Fprintf(m.e.stderr, "stopping: running answers have %v (Ctrl-C again ends everything at once)\n", gatewayDrain)
	m.refuseClients(ctx)
	for _, l := range layers {
		if len(l.runs) == 0 {
			continue
		}
		fmt.Fprintf(m.e.stderr, "stopping %s\n", l.name)
		l.stop()
		if l.name == "gateway" {
			time.Sleep(lastEvents)
		}
	}
	fmt.Fprintln(m.e.stderr, "stopped")
}

// refuseClients has Envoy take no new connections: a request that came now would
// only be cut.
func (m *localMesh) refuseClients(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	if !m.ownEnvoy(ctx) {
		return
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.ready().Admin+"/drain_listeners", nil)
	if err != nil {
		return // the address was checked when it was picked
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		m.e.log.Debug("Envoy still takes connections", "err", err)
		return
	}
	_ = resp.Body.Close() // nothing of it is read
}

// child runs a part until its context ends.
func (m *localMesh) child(s supervise.Spec) func(context.Context) {
	return func(ctx context.Context) { m.group.Run(ctx, s) }
}
