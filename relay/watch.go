package relay

import (
	"sync"
	"time"
)

// watch ends a request when the worker leaves it waiting for too long. Only the
// time between wait and busy counts: while the client is written to, the worker
// is not to blame. Its timer is set again when it fires, not at each token. Safe
// for concurrent use.
type watch struct {
	cancel func(cause error)

	mu    sync.Mutex
	timer *time.Timer // nil until the first limit
	limit time.Duration
	cause error
	since time.Time // of the wait, zero while busy
}

// set replaces the limit and begins to wait; 0 switches it off.
func (w *watch) set(limit time.Duration, cause error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limit, w.cause, w.since = limit, cause, time.Now()
	switch {
	case limit <= 0 && w.timer != nil:
		w.timer.Stop()
	case limit <= 0:
	case w.timer == nil:
		w.timer = time.AfterFunc(limit, w.fire)
	default:
		w.timer.Reset(limit)
	}
}

// wait begins to wait for the worker.
func (w *watch) wait(now time.Time) {
	w.mu.Lock()
	w.since = now
	w.mu.Unlock()
}

// busy ends the wait.
func (w *watch) busy() { w.wait(time.Time{}) }

func (w *watch) fire() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.limit <= 0 {
		return
	}
	if w.since.IsZero() {
		w.timer.Reset(w.limit)
		return
	}
	if left := w.limit - time.Since(w.since); left > 0 {
		w.timer.Reset(left)
		return
	}
	w.cancel(w.cause)
}

// stop ends the watch for good.
func (w *watch) stop() { w.set(0, nil) }
