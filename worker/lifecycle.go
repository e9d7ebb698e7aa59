package worker

import (
	"net/http"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// lifecycle is where the worker stands between its start and its end, and counts
// the requests that must finish before the end. Safe for concurrent use.
type lifecycle struct {
	changed chan struct{} // gets an element when the state has changed, capacity 1

	mu       sync.Mutex
	engine   Engine // nil while loading
	percent  float64
	draining bool
	inflight int
	idle     chan struct{} // closed when draining and inflight is 0
}

// newLifecycle starts in the state of loading at 0 percent.
func newLifecycle() *lifecycle {
	return &lifecycle{changed: make(chan struct{}, 1), idle: make(chan struct{})}
}

// notify announces a change of state without ever waiting for a reader.
func (l *lifecycle) notify() {
	select {
	case l.changed <- struct{}{}:
	default: // a change is already announced
	}
}

// progress notes how far loading is, in percent.
func (l *lifecycle) progress(percent float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.percent = min(max(percent, 0), 100)
}

// loaded makes the worker ready.
func (l *lifecycle) loaded(e Engine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.engine = e
	l.notify()
}

// drain refuses requests from now on and returns a channel that is closed when
// the last running one has ended.
func (l *lifecycle) drain() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.draining {
		l.draining = true
		if l.inflight == 0 {
			close(l.idle)
		}
		l.notify()
	}
	return l.idle
}

// begin admits a generation request; the caller owes one end for each nil error.
func (l *lifecycle) begin() (Engine, *openai.Error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.draining:
		return nil, openai.Unavailable(time.Second, "This worker is shutting down.")
	case l.engine == nil:
		return nil, openai.Unavailable(time.Second, "The model is still being loaded (%.0f %%).", l.percent)
	}
	l.inflight++
	return l.engine, nil
}

// end gives back what begin admitted; the last one of a drain closes idle.
func (l *lifecycle) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inflight--
	if l.draining && l.inflight == 0 {
		close(l.idle)
	}
}

// current returns the engine, nil while loading.
func (l *lifecycle) current() Engine {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.engine
}

// load returns the engine's load, zero while loading.
func (l *lifecycle) load() Load {
	if e := l.current(); e != nil {
		return e.Load()
	}
	return Load{}
}

// broken returns why the engine can no longer generate, nil if it can or is
// still being loaded.
func (l *lifecycle) broken() error {
	if c, ok := l.current().(Checker); ok {
		return c.Check()
	}
	return nil
}

// state is the word for the registration. A broken engine takes no new requests,
// which is what draining says.
func (l *lifecycle) state() string {
	failed := l.broken() != nil
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.draining || failed:
		return fleet.StateDraining
	case l.engine == nil:
		return fleet.StateLoading
	}
	return fleet.StateReady
}

// healthStatus is the body of /health and /ready.
type healthStatus struct {
	Status  string   `json:"status"`
	Worker  string   `json:"worker"`
	Percent *float64 `json:"percent,omitempty"` // of loading
	Reason  string   `json:"reason,omitempty"`
}

// health answers whether the process should live.
func (l *lifecycle) health() (int, healthStatus) {
	if err := l.broken(); err != nil {
		return http.StatusServiceUnavailable, healthStatus{Status: "failed", Reason: err.Error()}
	}
	return http.StatusOK, healthStatus{Status: "ok"}
}

// ready answers whether it should get requests.
func (l *lifecycle) ready() (int, healthStatus) {
	if err := l.broken(); err != nil {
		return http.StatusServiceUnavailable, healthStatus{Status: "not_ready", Reason: err.Error()}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.draining:
		return http.StatusServiceUnavailable, healthStatus{Status: "shutting_down"}
	case l.engine == nil:
		return http.StatusServiceUnavailable, healthStatus{Status: "loading", Percent: new(l.percent)}
	}
	return http.StatusOK, healthStatus{Status: "ready"}
}
