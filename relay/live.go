package relay

import (
	"cmp"
	"encoding/json"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
)

// live holds the requests that run now, for an operator to look at.
type live struct {
	mu   sync.Mutex
	jobs map[*job]bool
}

func (l *live) add(j *job) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.jobs == nil {
		l.jobs = map[*job]bool{}
	}
	l.jobs[j] = true
}

func (l *live) remove(j *job) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.jobs, j)
}

// state is what others may read of a job while its goroutine runs it.
type state struct {
	worker  atomic.Pointer[string] // of the running attempt
	attempt atomic.Int64
	events  atomic.Int64 // passed on to the client
}

// Streams lists the requests that run now, the oldest first. Safe for concurrent
// use.
func (r *Relay) Streams(now time.Time) []fleet.StreamView {
	r.live.mu.Lock()
	out := make([]fleet.StreamView, 0, len(r.live.jobs))
	for j := range r.live.jobs {
		v := fleet.StreamView{
			ID: j.in.Header.Get(names.Stream), Model: j.named, Request: j.in.Header.Get(names.RequestID), Pool: j.pool, Stream: j.stream,
			Attempt: j.state.attempt.Load(), Events: j.state.events.Load(), Seconds: now.Sub(j.start).Seconds(),
		}
		if w := j.state.worker.Load(); w != nil {
			v.Worker = *w
		}
		out = append(out, v)
	}
	r.live.mu.Unlock()
	slices.SortFunc(out, func(a, b fleet.StreamView) int {
		return cmp.Or(-cmp.Compare(a.Seconds, b.Seconds), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// StreamsHandler serves Streams as JSON. Stream ids are secrets of their clients:
// keep it on loopback.
func (r *Relay) StreamsHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(fleet.StreamList{Streams: r.Streams(time.Now())}) // the caller may be gone
	})
}
