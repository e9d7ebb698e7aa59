package relay

import (
	"sync"
	"time"
)

// watchedFleet is what the relay last saw of the workers that carry answers.
type watchedFleet struct {
	mu     sync.Mutex
	sick   map[string]string // cause by worker
	warned map[string]time.Time
}

// Update has the relay look at the picker's fleet, which has changed: answers of workers
// that drain or are sick go on elsewhere. It does not wait for that.
func (r *Relay) Update() {
	r.fleet.mu.Lock()
	defer r.fleet.mu.Unlock()
	now := map[string]string{}
	for _, id := range r.live.workers() {
		cause := r.sick(id)
		if cause == "" {
			continue
		}
		now[id] = cause
		if r.fleet.sick[id] != cause {
			r.live.leave(id, cause)
		}
	}
	r.fleet.sick = now
	known := func(id string) bool { _, ok := r.cfg.Picker.Info(id); return ok }
	r.paces.retain(known)
	r.pacers.retain(known)
	r.tallies.retain(known)
}

// warnEvery is how often the same alert is logged.
const warnEvery = 10 * time.Second

// exodus reports whether most of a pool has turned sick together. Then answers that flow
// stay: the few that are left could not take them all, and what says that the others are
// sick may be wrong.
func (r *Relay) exodus(pool string) bool {
	takers, all := r.cfg.Picker.Members(pool)
	if 2*takers > all {
		return false
	}
	r.metrics.held.Inc()
	r.fleet.mu.Lock()
	defer r.fleet.mu.Unlock()
	if now := time.Now(); now.Sub(r.fleet.warned[pool]) > warnEvery {
		if r.fleet.warned == nil {
			r.fleet.warned = map[string]time.Time{}
		}
		r.fleet.warned[pool] = now
		r.cfg.Log.Error("most of a pool is sick at once: answers that flow stay where they are", "pool", pool, "takers", takers, "workers", all)
	}
	return true
}
