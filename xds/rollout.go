package xds

import (
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// leases say which rollout may replace workers of a pool. They are in memory: a rollout
// renews its own within fleet.Heartbeat of a restart of the control plane. The zero value
// is ready; safe for concurrent use.
type leases struct {
	mu     sync.Mutex
	byPool map[string]lease
}

// lease is one rollout's right.
type lease struct {
	owner string
	until time.Time
}

// take gives or renews a pool's lease, or says who has it.
func (l *leases) take(pool, owner string, now time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if had, ok := l.byPool[pool]; ok && had.owner != owner && now.Before(had.until) {
		return fmt.Errorf("%s replaces workers of pool %s; its right ends in %v unless it is renewed", had.owner, pool, had.until.Sub(now).Round(time.Second))
	}
	if l.byPool == nil {
		l.byPool = map[string]lease{}
	}
	l.byPool[pool] = lease{owner, now.Add(fleet.TTL)}
	return nil
}

// free ends a pool's lease, if owner has it.
func (l *leases) free(pool, owner string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byPool[pool].owner == owner {
		delete(l.byPool, pool)
	}
}

// leaseOwner reads whose lease a request is about. It answers what cannot be and returns
// false.
func (cp *ControlPlane) leaseOwner(w http.ResponseWriter, r *http.Request) (pool, owner string, ok bool) {
	pool, owner = r.PathValue("pool"), r.URL.Query().Get(fleet.ParamOwner)
	switch {
	case owner == "" || len(owner) > fleet.MostOwner:
		openai.Invalid(fleet.ParamOwner, "Want 1 to %d bytes that say whose rollout it is.", fleet.MostOwner).Write(w)
	case !cp.state.hasPool(pool):
		openai.Errorf(http.StatusNotFound, "There is no WorkerPool %q.", pool).Write(w)
	default:
		return pool, owner, true
	}
	return "", "", false
}

// leasePool takes PUT /v1/pools/{pool}/rollout?owner=NAME: the answer says for how long
// the owner alone may replace workers of the pool. 409 says who may at present.
func (cp *ControlPlane) leasePool(w http.ResponseWriter, r *http.Request) {
	pool, owner, ok := cp.leaseOwner(w, r)
	if !ok {
		return
	}
	if err := cp.leases.take(pool, owner, time.Now()); err != nil {
		openai.Errorf(http.StatusConflict, "%v", err).Write(w)
		return
	}
	writeJSON(w, fleet.Lease{TTLSeconds: fleet.TTL.Seconds()})
}

// releasePool takes DELETE /v1/pools/{pool}/rollout?owner=NAME.
func (cp *ControlPlane) releasePool(w http.ResponseWriter, r *http.Request) {
	pool, owner, ok := cp.leaseOwner(w, r)
	if !ok {
		return
	}
	cp.leases.free(pool, owner)
	w.WriteHeader(http.StatusNoContent)
}
