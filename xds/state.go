package xds

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/xds/registry"
)

// state is what the control plane knows, and what it made of it. Reports come in
// from many goroutines; each pool has one that draws the conclusions.
type state struct {
	mu      sync.Mutex
	pools   map[string]*pool   // by name
	workers map[string]*worker // by id; each is also in its pool
}

// pool is one WorkerPool with its members.
type pool struct {
	name string
	// health is the policy of verdicts. Guarded by state.mu: a reload replaces it.
	health health.Config
	// urgent wakes the pool's loop: a verdict may have changed. Capacity 1.
	urgent chan struct{}
	// order keeps decisions and their publication in one order. It is taken
	// before state.mu.
	order sync.Mutex

	// Guarded by state.mu.
	workers map[string]*worker // the members, by id
	removed []string           // ids whose fleet resource must go
	stale   bool               // members changed since EDS was last made
}

// worker is one member of a pool. Guarded by state.mu.
type worker struct {
	id     string
	pool   *pool
	origin origin
	member registry.Member
	in     health.Input
	load   *fleetpb.Load
	raw    health.Verdict // of the worker alone, for hysteresis
	shown  health.Verdict // in view of its pool: what Envoy sees
	dirty  bool           // the fleet resource is behind
	// unfit says why Envoy would refuse the endpoint, "" when it would not.
	unfit string
}

// origin is what is special about servers that are not our own workers.
type origin struct {
	static   bool   // probed, not registered
	hostname string // for host headers and certificates, see envoy.Endpoint
	tls      bool   // an https server

	foreign bool // it writes to Redis and reports no load itself
}

// newState knows nobody.
func newState() *state {
	return &state{pools: map[string]*pool{}, workers: map[string]*worker{}}
}

// setPools takes the pools and their health policy from a set.
func (s *state) setPools(set *policy.Set) {
	s.mu.Lock()
	defer s.mu.Unlock()
	keep := map[string]bool{}
	for i := range set.Pools {
		// A pool that stays keeps its members, its loop and its channel.
		w := &set.Pools[i]
		keep[w.Name] = true
		p := s.pools[w.Name]
		if p == nil {
			p = &pool{name: w.Name, urgent: make(chan struct{}, 1), workers: map[string]*worker{}}
			s.pools[w.Name] = p
		}
		p.health, p.stale = healthConfig(w.Health), true
		p.wake()
	}
	for name, p := range s.pools {
		if !keep[name] {
			for id := range p.workers {
				delete(s.workers, id)
			}
			delete(s.pools, name)
		}
	}
}

// healthConfig translates a pool's policy, whose defaults policy.Parse filled in.
func healthConfig(h policy.Health) health.Config {
	return health.Config{
		Blackout:     h.BlackoutPeriod.D(),
		Expiration:   h.WeightExpirationPeriod.D(),
		Silence:      h.SilenceTimeout.D(),
		ErrorPenalty: *h.ErrorUtilizationPenalty,
		Hysteresis:   *h.Hysteresis,
		MinShare:     *h.MinShare,

		ThrottlePenalty: *h.ThrottleUtilizationPenalty,
	}
}

// wake tells the pool's loop that there is something to decide; it never blocks.
func (p *pool) wake() {
	select {
	case p.urgent <- struct{}{}:
	default:
	}
}

// all returns the pools in order of their names.
func (s *state) all() []*pool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.pools), func(a, b *pool) int { return cmp.Compare(a.name, b.name) })
}

// touch has the next decision publish the pool's endpoints in any case.
func (s *state) touch(p *pool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.stale = true
}

// hasPool reports whether the policy has a pool of that name.
func (s *state) hasPool(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pools[name] != nil
}

// put adds a worker or brings its registration up to date. A new incarnation
// starts with a clean record. fresh says that the worker must be watched anew.
func (s *state) put(m registry.Member, o origin) (fresh bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pools[m.Pool]
	w := s.workers[m.ID]
	if w != nil && (w.pool != p || w.member.Incarnation != m.Incarnation || !o.static && w.member.Address != m.Address) {
		s.removeLocked(m.ID)
		w = nil
	}
	if p == nil { // the policy changed since the caller looked
		return false
	}
	if w == nil {
		fresh = true
		w = &worker{id: m.ID, pool: p, origin: o, load: &fleetpb.Load{}}
		w.in.Heartbeat = o.foreign
		s.workers[m.ID], p.workers[m.ID] = w, w
		p.removed = slices.DeleteFunc(p.removed, func(id string) bool { return id == m.ID })
	}
	if o.static && w.member.Address != "" { // what probes found out stays
		m.Address, m.Model, m.Aliases = w.member.Address, w.member.Model, w.member.Aliases
	}
	w.member, w.dirty, p.stale = m, true, true
	w.fit()
	w.in.Draining = m.Drained || m.State == fleet.StateDraining
	w.in.Loading = m.State == fleet.StateLoading
	w.in.Sick = ""
	if m.State == fleet.StateFailed {
		w.in.Sick = cmp.Or(m.Reason, "says that it failed")
	}
	w.in.Since = m.ReadySince // survives our own restart, unlike the first report
	if m.Heard.After(w.in.Heard) {
		w.in.Heard = m.Heard
	}
	p.wake()
	return fresh
}

// observe takes in what a probe found of a static server.
func (s *state) observe(id string, o registry.Observation) {
	s.update(id, 1, o.At, func(w *worker) {
		if o.Address != w.member.Address {
			w.member.Address, w.pool.stale = o.Address, true
			w.fit()
			w.pool.wake()
		}
		if len(o.Models) > 0 {
			w.member.Model, w.member.Aliases = o.Models[0], o.Models[1:]
		}
		w.in.Failed = o.Failed
		if o.Failed != "" || o.Silent {
			return
		}
		w.in.Heard, w.in.Heartbeat = o.At, o.Load == nil
		if o.Load != nil {
			w.in.Report = health.Report{At: o.At, Utilization: o.Load.Utilization()}
			w.load = &fleetpb.Load{
				Running: o.Load.Running, Waiting: o.Load.Waiting, KvUsage: o.Load.KVUsage, Utilization: o.Load.Utilization(),
			}
		}
	})
}

// retain removes every worker that keep does not name.
func (s *state) retain(keep map[string]bool) (gone []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.workers {
		if !keep[id] {
			s.removeLocked(id)
			gone = append(gone, id)
		}
	}
	return gone
}

// removeLocked forgets a worker; its pool publishes that it is gone.
func (s *state) removeLocked(id string) {
	w := s.workers[id]
	delete(s.workers, id)
	delete(w.pool.workers, id)
	w.pool.removed = append(w.pool.removed, id)
	w.pool.stale = true
	w.pool.wake()
}

// update changes what is known of a worker, if it is still this incarnation, and
// wakes its pool when that alone changes the worker's verdict.
func (s *state) update(id string, incarnation uint64, now time.Time, change func(*worker)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.workers[id]
	if w == nil || w.member.Incarnation != incarnation {
		return // a report that was on its way when the worker was replaced
	}
	change(w)
	w.dirty = true
	// Against the verdict that was published last, so small steps in one direction
	// add up to a change.
	v := health.Assess(now, w.config(), w.input(), w.raw)
	if v.Status != w.raw.Status || v.Weight != w.raw.Weight || v.Reason != w.raw.Reason {
		w.pool.wake()
	}
}

// fit notes whether Envoy would take the endpoint. One that it would not is left out,
// whatever else is known of the worker: the others of its pool would go with it.
func (w *worker) fit() {
	w.unfit = ""
	if e := w.endpoint(); e.Address != "" {
		e.Status, e.Weight = health.Unhealthy, health.MinWeight // those change, and are ours
		if err := e.Validate(); err != nil {
			w.unfit = "not in Envoy: " + err.Error()
		}
	}
}

// input is what the worker is judged by.
func (w *worker) input() health.Input {
	in := w.in
	in.Failed = cmp.Or(w.unfit, in.Failed)
	return in
}

// config is the pool's, but that a worker judged by its registrations alone is
// given their pace.
func (w *worker) config() health.Config {
	c := w.pool.health
	if w.in.Heartbeat && !w.origin.static {
		c.Silence = max(c.Silence, fleet.TTL)
	}
	return c
}

// alive reports whether a worker is heard of by other ways than registrations.
func (s *state) alive(id string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.workers[id]
	return w != nil && !w.in.Report.At.IsZero() && now.Sub(w.in.Report.At) < w.pool.health.Silence
}

// holds reports whether a worker has its address for itself: it was heard of a moment
// ago, by its reports or its registration, and nobody else was found there. What
// others wrote about it into Redis proves nothing.
func (s *state) holds(id string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.workers[id]
	return w != nil && !w.origin.foreign && w.in.Failed == "" && now.Sub(w.lastSign()) < w.pool.health.Silence
}

// settled reports whether every worker that could report did, or certainly cannot.
func (s *state) settled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		// A worker that drains, loads or failed takes no traffic whatever it reports.
		heard := !w.in.Report.At.IsZero() || w.in.Heartbeat && !w.in.Heard.IsZero() || w.input().Failed != ""
		if !heard && !w.in.Draining && !w.in.Loading && w.in.Sick == "" {
			return false
		}
	}
	return true
}

// decision is what a pool's loop must publish.
type decision struct {
	members   int              // of the pool, for the pace
	endpoints []envoy.Endpoint // nil when nothing changed
	changed   bool             // endpoints are to be published
	fleet     []*fleetpb.Worker
	removed   []string // ids of workers whose fleet resource goes
	unfit     []string // workers that are left out from now on, each with the reason
}

// decide judges all workers of a pool together. Load that changed without a
// change of verdict is part of the decision only when loads is set.
func (s *state) decide(p *pool, now time.Time, loads bool) decision {
	s.mu.Lock()
	defer s.mu.Unlock()
	ws := slices.Collect(maps.Values(p.workers))
	slices.SortFunc(ws, func(a, b *worker) int { // as health.Pool wants it
		return cmp.Or(b.lastSign().Compare(a.lastSign()), cmp.Compare(a.id, b.id))
	})
	// First each alone, then all in view of each other.
	verdicts := make([]health.Verdict, len(ws))
	for i, w := range ws {
		w.raw = health.Assess(now, w.config(), w.input(), w.raw)
		verdicts[i] = w.raw
	}
	health.Pool(p.health, verdicts)
	d := decision{changed: p.stale, members: len(ws)}
	for _, id := range p.removed {
		if s.workers[id] == nil { // not moved to another pool
			d.removed = append(d.removed, id)
		}
	}
	p.stale, p.removed = false, nil
	for i, w := range ws {
		// Envoy hears of status and weight, gateways also of reasons and load.
		moved := w.shown.Status != verdicts[i].Status || w.shown.Weight != verdicts[i].Weight
		d.changed = d.changed || moved
		told := w.shown.Reason != verdicts[i].Reason
		w.shown = verdicts[i]
		if told && w.unfit != "" {
			d.unfit = append(d.unfit, w.id+": "+w.unfit)
		}
		if moved || told || w.dirty && loads {
			w.dirty = false
			d.fleet = append(d.fleet, w.resource())
		}
	}
	if d.changed {
		d.endpoints = make([]envoy.Endpoint, 0, len(ws))
		for _, w := range ws {
			if e := w.endpoint(); e.Address != "" && w.unfit == "" {
				d.endpoints = append(d.endpoints, e)
			}
		}
	}
	return d
}

// lastSign is when the worker was last heard in any way. The one heard last is the
// first to be kept by the pool's minimum share.
func (w *worker) lastSign() time.Time {
	if w.in.Report.At.After(w.in.Heard) {
		return w.in.Report.At
	}
	return w.in.Heard
}

// endpoint is the worker as Envoy should see it.
func (w *worker) endpoint() envoy.Endpoint {
	return envoy.Endpoint{
		Worker: w.id, Address: w.member.Address, Zone: w.member.Zone,
		Status: w.shown.Status, Weight: w.shown.Weight,
		Hostname: w.origin.hostname, TLS: w.origin.tls,
	}
}

// resource is the worker as gateways see it. Its load is shared, not copied: reports
// replace it, they never change it.
func (w *worker) resource() *fleetpb.Worker {
	m := w.member
	return &fleetpb.Worker{
		Id: w.id, Address: m.Address, Pool: m.Pool, Zone: m.Zone, Model: m.Model, Aliases: m.Aliases,
		Engine: m.Engine, Incarnation: m.Incarnation, Status: int32(w.shown.Status), Weight: w.shown.Weight,
		Reason: w.shown.Reason, Pid: m.PID, Load: w.load, Fingerprint: m.Fingerprint, RelayMark: m.RelayMark,
		KeepStreams: m.KeepStreams,
	}
}
