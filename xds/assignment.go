package xds

import (
	"context"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/xds/registry"
)

// Pace of a pool's decisions.
const (
	// Between two urgent decisions of one pool lie at least minGap and so much per
	// worker: what a push costs everybody grows with the pool.
	minGap    = 10 * time.Millisecond
	perWorker = 40 * time.Microsecond
	// loadEvery is how often gateways hear of load that changed no verdict, and
	// how often silence is looked for.
	loadEvery = 100 * time.Millisecond
)

// watcher is what runs on behalf of one worker.
type watcher struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// sync brings state and watchers in line with the registry and the policy.
func (cp *ControlPlane) sync() {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	keep := map[string]bool{}
	for _, m := range cp.registry.Members() {
		// The pool may have gone with a reload; the worker stays registered, in
		// case it comes back.
		if !cp.state.hasPool(m.Pool) {
			continue
		}
		keep[m.ID] = true
		if cp.state.put(m, origin{foreign: foreign(m)}) && !foreign(m) {
			c := &collector{state: cp.state, metrics: cp.metrics, id: m.ID, address: m.Address, incarnation: m.Incarnation}
			cp.watchLocked(m.ID, c.run)
		}
	}
	// Then those the policy lists.
	servers, err := registry.Servers(cp.policy)
	if err != nil { // New and Reload checked it
		cp.log.Error("static servers", "err", err)
	}
	for _, s := range servers {
		keep[s.ID] = true
		cp.syncServerLocked(s)
	}
	// Whoever was not named is gone, and nobody needs to watch it.
	for _, id := range cp.state.retain(keep) {
		if w := cp.watchers[id]; w != nil {
			w.cancel()
			delete(cp.watchers, id)
		}
	}
}

// syncServerLocked makes sure that a static server is known and probed.
func (cp *ControlPlane) syncServerLocked(s registry.Server) {
	// It has no incarnations: what is behind the address is always the same to us.
	m := registry.Member{Registration: fleet.Registration{
		ID: s.ID, Pool: s.Pool, Zone: s.Zone, Engine: policy.EngineOpenAI, Incarnation: 1,
	}}
	drain := cp.registry.Drained(s.ID)
	m.Drained, m.KeepStreams = drain.On, drain.KeepStreams
	if p := cp.policy.Pool(s.Pool); p != nil {
		m.Model = p.Model
	}
	cp.state.put(m, origin{static: true, hostname: s.Hostname(), tls: s.TLS})
	if cp.watchers[s.ID] != nil {
		return // one prober serves for the server's whole life
	}
	prober, err := registry.NewProber(s, cp.config.Envoy.TrustedCA)
	if err != nil {
		cp.log.Error("server cannot be probed", "server", s.ID, "err", err)
		cp.state.update(s.ID, 1, time.Now(), func(w *worker) { w.in.Failed = err.Error() })
		return
	}
	cp.watchLocked(s.ID, func(ctx context.Context) {
		prober.Run(ctx, func(found registry.Observation) { cp.state.observe(s.ID, found) })
	})
}

// watchLocked runs f for a worker until it is gone, in place of what ran before.
func (cp *ControlPlane) watchLocked(id string, f func(context.Context)) {
	if old := cp.watchers[id]; old != nil {
		old.cancel()
	}
	if cp.run == nil { // not running yet: Run syncs again
		return
	}
	ctx, cancel := context.WithCancel(cp.run)
	w := &watcher{cancel: cancel, done: make(chan struct{})}
	cp.watchers[id] = w
	cp.loops.Go(func() {
		defer close(w.done)
		defer cancel()
		f(ctx)
	})
}

// startPools runs one loop per pool and ends those of pools that are gone.
func (cp *ControlPlane) startPools() {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	now := map[string]bool{} // pools of the present policy
	for _, p := range cp.state.all() {
		now[p.name] = true
		if cp.pools[p.name] == nil {
			ctx, cancel := context.WithCancel(cp.run)
			cp.pools[p.name] = cancel
			cp.loops.Go(func() { cp.runPool(ctx, p) })
		}
	}
	for name, cancel := range cp.pools {
		if !now[name] {
			cancel()
			delete(cp.pools, name)
		}
	}
}

// runPool publishes the pool's decisions: the first of a burst at once, the rest
// together after a gap.
func (cp *ControlPlane) runPool(ctx context.Context, p *pool) {
	tick := time.NewTicker(loadEvery)
	defer tick.Stop()
	gap := time.NewTimer(0)
	defer gap.Stop()
	urgent := p.urgent
	for {
		select {
		case <-ctx.Done():
			return
		case <-urgent:
			n := cp.publish(p, false)
			urgent = nil // a nil channel is never ready: the gap has to pass
			gap.Reset(minGap + time.Duration(n)*perWorker)
		case <-gap.C:
			urgent = p.urgent // what came in the meantime is waiting there
		case <-tick.C:
			n := cp.publish(p, true)
			// A large pool has more to say and is told less often.
			tick.Reset(max(loadEvery, 2*time.Duration(n)*perWorker))
		}
	}
}

// publish decides for a pool and hands the outcome to the server. It returns the
// number of members.
func (cp *ControlPlane) publish(p *pool, loads bool) int {
	p.order.Lock()
	defer p.order.Unlock()
	d := cp.state.decide(p, time.Now(), loads)
	for _, w := range d.unfit {
		cp.log.Error("worker left out: Envoy would refuse its whole pool", "pool", p.name, "worker", w)
	}
	// Envoy first: it is what requests depend on.
	if d.changed {
		cp.server.setEndpoints(p.name, d.endpoints)
	}
	if len(d.fleet)+len(d.removed) > 0 {
		cp.server.setFleet(d.fleet, d.removed)
	}
	return d.members
}

// publishAll publishes every pool now, whether or not anything changed.
func (cp *ControlPlane) publishAll() {
	for _, p := range cp.state.all() {
		cp.state.touch(p)
		cp.publish(p, true)
	}
}
