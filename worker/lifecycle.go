package worker

import (
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// lifecycle is where the worker stands between its start and its end, and counts
// the requests that must finish before the end. Safe for concurrent use.
type lifecycle struct {
	changed chan struct{} // the first of watchers
	// hardware says what is wrong below the engine, "" for nothing; nil asks nobody.
	hardware func() string

	mu       sync.Mutex
	watchers []chan struct{} // each gets an element when the state has changed, capacity 1
	engine   Engine          // nil while loading
	percent  float64
	stopping bool  // for good
	drained  bool  // asked to take no requests, which can be taken back
	sick     error // why the last self-check failed, nil if it did not
	failures int   // self-checks in a row that failed and a new start may help against
	inflight int
	idle     chan struct{} // closed when stopping and inflight is 0
}

// hopeless is how many self-checks in a row must fail until the process should
// rather be started anew.
const hopeless = 3

// newLifecycle starts in the state of loading at 0 percent.
func newLifecycle() *lifecycle {
	l := &lifecycle{idle: make(chan struct{})}
	l.changed = l.watch()
	return l
}

// watch returns a channel that gets an element when the state has changed.
func (l *lifecycle) watch() chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := make(chan struct{}, 1)
	l.watchers = append(l.watchers, w)
	return w
}

// notifyLocked announces a change of state without ever waiting for a reader.
func (l *lifecycle) notifyLocked() {
	for _, w := range l.watchers {
		select {
		case w <- struct{}{}:
		default: // a change is already announced
		}
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
	l.notifyLocked()
}

// announce tells that something changed which the lifecycle does not hold itself.
func (l *lifecycle) announce() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.notifyLocked()
}

// healthy reports whether the last self-check went well.
func (l *lifecycle) healthy() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sick == nil
}

// checked notes how a self-check of e ended.
func (l *lifecycle) checked(e Engine, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.sick
	l.sick = err
	if _, remote := e.(Proxy); err == nil || remote {
		l.failures = 0
	} else {
		l.failures++
	}
	if (was == nil) != (err == nil) || l.failures == hopeless {
		l.notifyLocked()
	}
}

// setDrained refuses requests until it is taken back. ok is false when the worker
// is stopping, which cannot be.
func (l *lifecycle) setDrained(on bool) (ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopping && !on {
		return false
	}
	if l.drained != on {
		l.drained = on
		l.notifyLocked()
	}
	return true
}

// stop refuses requests from now on and returns a channel that is closed when
// the last running one has ended.
func (l *lifecycle) stop() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.stopping {
		l.stopping = true
		if l.inflight == 0 {
			close(l.idle)
		}
		l.notifyLocked()
	}
	return l.idle
}

// begin admits a generation request; the caller owes one end for each nil error.
func (l *lifecycle) begin() (Engine, *openai.Error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.stopping:
		return nil, openai.Unavailable(time.Second, "This worker is shutting down.")
	case l.drained:
		return nil, openai.Unavailable(time.Second, "This worker is draining.")
	case l.engine == nil && l.sick != nil:
		return nil, openai.Unavailable(time.Second, "The model does not generate.")
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
	if l.stopping && l.inflight == 0 {
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

// quiet reports whether nothing is asked of the engine.
func (l *lifecycle) quiet() bool {
	l.mu.Lock()
	inflight := l.inflight
	l.mu.Unlock()
	load := l.load()
	return inflight == 0 && load.Running == 0 && load.Waiting == 0
}

// broken returns why the engine can no longer generate, nil if it can or is
// still being loaded.
func (l *lifecycle) broken() error {
	if c, ok := l.current().(Checker); ok {
		return c.Check()
	}
	return nil
}

// fault says why no request should come here although nobody asked for that, ""
// for no reason.
func (l *lifecycle) fault() string {
	if err := l.broken(); err != nil {
		return err.Error()
	}
	if l.hardware != nil {
		if why := l.hardware(); why != "" {
			return why
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sick != nil {
		return l.sick.Error()
	}
	return ""
}

// state is the word for the registration, and the reason where it has one.
func (l *lifecycle) state() (state, reason string) {
	fault := l.fault()
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.stopping || l.drained:
		return fleet.StateDraining, fault
	case fault != "":
		return fleet.StateFailed, fault
	case l.engine == nil:
		return fleet.StateLoading, ""
	}
	return fleet.StateReady, ""
}
