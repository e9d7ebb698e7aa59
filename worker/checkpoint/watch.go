package checkpoint

import (
	"fmt"
	"sync"
	"time"
)

// watch knows whether the store answers. A call of a store may hang whatever its context
// says, in a file system whose server is away or on a disk that fails. Such a call cannot
// be ended, only left alone; so look-ups run on goroutines of their own, whoever waits for
// one leaves it at its deadline, and a store that hangs is not asked again, but for a probe
// now and then, until a call returns. Safe for concurrent use.
type watch struct {
	patience time.Duration // after which a call hangs

	mu     sync.Mutex
	next   int
	calls  map[int]*call // that run
	good   time.Time     // when the last call began that returned in time
	probed time.Time     // when a hanging store was last asked

	failed map[jobKind]failed // by the kind of write, where the last one failed
}

// failed says that writes have been failing.
type failed struct {
	since time.Time // the first of those in a row
	n     int       // how many they are
	why   error     // what the last one said
}

// call is one call of the store, or several in a row.
type call struct {
	began time.Time
	left  bool // nobody waits for it
	write bool // the keeper's writer is in it
}

const (
	// mostLeft bounds the calls that nobody waits for. Each may hold a thread.
	mostLeft = 8
	// sayFailed is how many writes fail in a row before it is logged.
	sayFailed = 3
	// probeEvery is the time between two look-ups that a hanging store is asked for.
	probeEvery = 5 * time.Second
)

func newWatch(patience time.Duration) *watch {
	return &watch{patience: patience, calls: map[int]*call{}, failed: map[jobKind]failed{}}
}

// begin notes a call of the store; end must be called when it returns.
func (w *watch) begin(now time.Time, write bool) (c *call, end func(now time.Time)) {
	c = &call{began: now, write: write}
	w.mu.Lock()
	defer w.mu.Unlock()
	id := w.next
	w.next++
	w.calls[id] = c
	return c, func(now time.Time) {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.calls, id)
		if now.Sub(c.began) < w.patience && c.began.After(w.good) {
			w.good = c.began
		}
	}
}

// leave notes that nobody waits for a call any more.
func (w *watch) leave(c *call) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c.left = true
}

// admits reports whether the store may be asked. What it answers is noted as a probe.
func (w *watch) admits(now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	left, since := w.lookLocked(now)
	switch {
	case left >= mostLeft:
		return false
	case since == 0:
		return true
	case now.Sub(w.probed) < probeEvery:
		return false
	}
	w.probed = now
	return true
}

// lookLocked counts the calls that nobody waits for, and says for how long the store has
// been hanging: since the oldest of the calls that hang and after which none returned.
func (w *watch) lookLocked(now time.Time) (left int, since time.Duration) {
	for _, c := range w.calls {
		if c.left {
			left++
		}
		if age := now.Sub(c.began); age >= w.patience && (c.write || !c.began.Before(w.good)) {
			since = max(since, age)
		}
	}
	return left, since
}

// writes reports whether the writer gets on, so that a copy for it is of use.
func (w *watch) writes(now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.calls {
		if c.write && now.Sub(c.began) >= w.patience {
			return false
		}
	}
	return true
}

// wrote notes what came of a write, and reports what is worth a line in a log: that the
// store takes none, and that it takes them again, after so long.
func (w *watch) wrote(now time.Time, kind jobKind, err error) (none bool, again time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f, was := w.failed[kind]
	if err == nil {
		delete(w.failed, kind)
		if f.n >= sayFailed {
			again = now.Sub(f.since)
		}
		return false, again
	}
	if !was {
		f.since = now
	}
	f.n, f.why = f.n+1, err
	w.failed[kind] = f
	return f.n == sayFailed, 0
}

// degraded says why the store is not, or not fully, in use; "" for no reason.
func (w *watch) degraded(now time.Time) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	left, since := w.lookLocked(now)
	switch {
	case since > 0:
		return fmt.Sprintf("the KV store has not answered for %v; the worker goes on without it", since.Truncate(time.Second))
	case left >= mostLeft:
		return fmt.Sprintf("the KV store is slow: %d look-ups that nobody waits for still run", left)
	}
	for _, kind := range []jobKind{blockJob, tailJob} {
		if f, ok := w.failed[kind]; ok {
			return fmt.Sprintf("the KV store takes no %v, for %v: %v", kind, now.Sub(f.since).Truncate(time.Second), f.why)
		}
	}
	return ""
}
