package picker

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// Config configures a Picker.
type Config struct {
	// Policy routes model names to pools. Required, read-only.
	Policy *policy.Set
	// Zone is where this gateway runs; "" prefers no zone.
	Zone string
	// MaxCandidates is the length of the list, at least 2; 0 means 5.
	MaxCandidates int
	// RoomBelow is the utilization up to which workers of the own zone come
	// first; 0 means 0.8.
	RoomBelow float64
	// BreakAfter is the number of failures in a row that opens a worker's
	// breaker; 0 means 3.
	BreakAfter int
	// BreakFor is how long a breaker opens for the first time; it doubles with
	// each further time up to 30 times that. 0 means 1 s.
	BreakFor time.Duration
	// Held tells how many tokens of a prompt workers hold from its beginning on, by their ids;
	// nil where nobody knows. It is called for each choice, by many at once, and never waits.
	Held func(Prompt) map[string]int
}

// Validate fills in defaults and reports the first field that cannot be used.
func (c *Config) Validate() error {
	if c.MaxCandidates == 0 {
		c.MaxCandidates = 5
	}
	if c.RoomBelow == 0 {
		c.RoomBelow = 0.8
	}
	if c.BreakAfter == 0 {
		c.BreakAfter = 3
	}
	if c.BreakFor == 0 {
		c.BreakFor = time.Second
	}
	switch {
	case c.Policy == nil:
		return errors.New("picker: Policy: missing")
	case c.MaxCandidates < 2:
		return errors.New("picker: MaxCandidates: want at least 2")
	case c.RoomBelow < 0 || c.BreakAfter < 0 || c.BreakFor < 0:
		return errors.New("picker: negative limit")
	}
	return nil
}

// Picker chooses workers. It is safe for concurrent use; Pick takes no lock.
type Picker struct {
	cfg  Config
	snap atomic.Pointer[snapshot] // nil until the first Update
	seq  atomic.Uint64            // numbers choices, to spread ties

	moves sync.Mutex // held from a choice for a moved stream until it counts

	mu     sync.RWMutex         // guards counts; held by Update throughout
	counts map[string]*counters // by worker id
}

// New returns a Picker that does not know a fleet yet.
func New(cfg Config) (*Picker, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Picker{cfg: cfg, counts: map[string]*counters{}}, nil
}

// Known reports whether a fleet was ever received, be it an empty one.
func (p *Picker) Known() bool { return p.snap.Load() != nil }

// Policy returns the policy the picker routes by.
func (p *Picker) Policy() *policy.Set { return p.cfg.Policy }

// Update replaces the fleet by ws, the full list. It keeps nothing of ws. A
// worker's breaker closes when its incarnation changed, and the requests of this
// gateway count as reported when its load changed.
func (p *Picker) Update(ws []*fleetpb.Worker) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.snap.Load()
	next := newSnapshot(len(ws))
	for _, pb := range ws {
		c := p.counts[pb.GetId()]
		if c == nil {
			c = &counters{}
			p.counts[pb.GetId()] = c
		}
		w := newWorker(pb, c)
		switch was := old.worker(w.ID); {
		case was == nil || was.incarnation != w.incarnation:
			c.restart()
		case was.load != w.load || was.reported != w.reported:
			c.report()
		}
		next.add(w)
	}
	next.finish()
	for id, c := range p.counts {
		if next.byID[id] == nil && c.inflight.Load() == 0 {
			delete(p.counts, id)
		}
	}
	p.snap.Store(next)
}

// Choose is Pick, and notes that the first candidate is about to get the request. Streams that
// move come in bursts, for the last free sequences of a pool: each sees the choices before its own.
func (p *Picker) Choose(now time.Time, r Request) Decision {
	if r.RelayMark != "" {
		p.moves.Lock()
		defer p.moves.Unlock()
	}
	d := p.Pick(now, r)
	if len(d.Candidates) > 0 {
		p.count(d.Candidates[0].ID).reserve(now, p.seq.Add(1))
	}
	return d
}

// Acquire counts one more request of this gateway at a worker until the returned
// function is called, which may happen more than once.
func (p *Picker) Acquire(id string) (release func()) {
	c := p.count(id)
	c.acquire()
	return sync.OnceFunc(func() { c.inflight.Add(-1) })
}

// Failed tells that a worker failed a request of this gateway. certain opens its
// breaker at once (nobody listens there); else BreakAfter failures in a row do.
func (p *Picker) Failed(now time.Time, id string, certain bool) {
	p.count(id).fail(now, p.cfg.BreakAfter, certain, p.cfg.BreakFor)
}

// Succeeded tells that a worker served a request of this gateway; it closes the
// breaker.
func (p *Picker) Succeeded(id string) { p.count(id).succeed() }

// WorkerAt returns the id of the worker at an address, false when the fleet has
// none there.
func (p *Picker) WorkerAt(address string) (id string, ok bool) {
	if s := p.snap.Load(); s != nil {
		if w := s.byAddress[address]; w != nil {
			return w.ID, true
		}
	}
	return "", false
}

// Served returns the model names of a pool's workers that take requests, sorted;
// false when a worker's names are not known, or there is no worker.
func (p *Picker) Served(pool string) ([]string, bool) {
	s := p.snap.Load()
	if s == nil || len(s.takers[pool]) == 0 {
		return nil, false
	}
	var out []string
	for _, w := range s.takers[pool] {
		if len(w.models) == 0 {
			return nil, false
		}
		out = append(out, w.models...)
	}
	slices.Sort(out)
	return slices.Compact(out), true
}

// count returns the counters of a worker, making them for one that left.
func (p *Picker) count(id string) *counters {
	p.mu.RLock()
	c := p.counts[id]
	p.mu.RUnlock()
	if c != nil {
		return c
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if c = p.counts[id]; c == nil {
		c = &counters{}
		p.counts[id] = c
	}
	return c
}
