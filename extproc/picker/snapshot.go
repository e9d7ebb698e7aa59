package picker

import (
	"cmp"
	"math"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
)

// load is what a worker reported.
type load struct {
	running, waiting, maxRunning uint32
	utilization                  float64
}

// worker is one worker of a snapshot. All but c is immutable.
type worker struct {
	ID, Address, Zone, Pool string

	incarnation uint64
	status      health.Status
	weight      float64 // at least 1
	reported    bool    // a load was ever reported
	load        load
	capacity    float64 // load.maxRunning, or the pool's mean where unknown
	kvUsage     float64 // 0..1
	hash        uint64  // of ID

	engine, fingerprint, relayMark string
	keepStreams                    bool

	// models are the names it serves; empty when that is not known.
	models []string

	c *counters
}

// serves reports whether a request for a model may go to the worker: it has that
// model, or nobody knows which ones it has.
func (w *worker) serves(model string) bool {
	return model == "" || len(w.models) == 0 || slices.Contains(w.models, model)
}

func newWorker(pb *fleetpb.Worker, c *counters) *worker {
	l := pb.GetLoad()
	var models []string
	if pb.GetModel() != "" {
		models = append([]string{pb.GetModel()}, pb.GetAliases()...)
	}
	return &worker{
		models: models,
		ID:     pb.GetId(), Address: pb.GetAddress(), Zone: pb.GetZone(), Pool: pb.GetPool(),
		incarnation: pb.GetIncarnation(), status: health.Status(pb.GetStatus()),
		weight: max(float64(pb.GetWeight()), 1), reported: l != nil,
		load: load{l.GetRunning(), l.GetWaiting(), l.GetMaxRunning(), number(l.GetUtilization())},
		hash: xxhash.Sum64String(pb.GetId()), c: c, kvUsage: min(number(l.GetKvUsage()), 1),
		engine: pb.GetEngine(), fingerprint: pb.GetFingerprint(), relayMark: pb.GetRelayMark(), keepStreams: pb.GetKeepStreams(),
	}
}

// number makes a reported share usable: not a number, negative and endless ones
// count as nothing.
func number(v float64) float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	return max(v, 0)
}

// snapshot is the fleet at one moment; immutable once finished.
type snapshot struct {
	all       []*worker // by id
	byID      map[string]*worker
	byAddress map[string]*worker   // of two at one address the younger
	takers    map[string][]*worker // by pool, those that take new requests
}

func newSnapshot(n int) *snapshot {
	return &snapshot{
		all:       make([]*worker, 0, n),
		byID:      make(map[string]*worker, n),
		byAddress: make(map[string]*worker, n),
		takers:    map[string][]*worker{},
	}
}

// worker returns the worker of that id, nil without one; s may be nil.
func (s *snapshot) worker(id string) *worker {
	if s == nil {
		return nil
	}
	return s.byID[id]
}

func (s *snapshot) add(w *worker) {
	if s.byID[w.ID] != nil {
		return
	}
	s.all = append(s.all, w)
	s.byID[w.ID] = w
	if was := s.byAddress[w.Address]; was == nil || was.incarnation < w.incarnation {
		s.byAddress[w.Address] = w
	}
}

// finish fills in what depends on all workers.
func (s *snapshot) finish() {
	slices.SortFunc(s.all, func(a, b *worker) int { return cmp.Compare(a.ID, b.ID) })
	for _, w := range s.all {
		// A worker that lost its address to a younger one cannot be meant any more.
		if w.status.Takes() && w.Address != "" && s.byAddress[w.Address] == w {
			s.takers[w.Pool] = append(s.takers[w.Pool], w)
		}
	}
	for _, ws := range s.takers {
		sum, n := 0.0, 0.0
		for _, w := range ws {
			if w.load.maxRunning > 0 {
				sum, n = sum+float64(w.load.maxRunning), n+1
			}
		}
		mean := sum / max(n, 1)
		for _, w := range ws {
			w.capacity = max(cmp.Or(float64(w.load.maxRunning), mean), 1)
		}
	}
}
