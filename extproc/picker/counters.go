package picker

import (
	"sync"
	"sync/atomic"
	"time"
)

// reservedFor is how long a choice counts at least, and twice that at most, before the request arrives at the
// relay; on the direct path nobody takes it back.
const reservedFor = time.Second

// counters are what this gateway alone knows of one worker. They outlive
// snapshots. Safe for concurrent use.
type counters struct {
	inflight atomic.Int64 // requests of this gateway being carried
	base     atomic.Int64 // inflight when the load in the snapshot was reported

	// Choices made and not yet acquired, of this period of time and of the one before: so
	// those that nobody acquires are forgotten, however many come after them.
	reserved, before atomic.Int64
	period           atomic.Int64 // its number
	chosen           atomic.Uint64

	openUntil atomic.Int64 // Unix ns; the breaker is open before it
	gone      atomic.Bool  // it opened because nobody listened there

	mu       sync.Mutex
	failures int // in a row
	openings int // since the last success
}

// reserve counts a choice until it is acquired, reported or old.
func (c *counters) reserve(now time.Time, seq uint64) {
	c.chosen.Store(seq)
	if p := periodOf(now); p != c.period.Load() {
		c.mu.Lock()
		if was := c.period.Load(); p != was {
			last := c.reserved.Swap(0)
			if p != was+1 {
				last = 0
			}
			c.before.Store(last)
			c.period.Store(p)
		}
		c.mu.Unlock()
	}
	c.reserved.Add(1)
}

// periodOf numbers the periods in which choices are counted together.
func periodOf(now time.Time) int64 { return now.UnixNano() / int64(reservedFor) }

func (c *counters) pending(now time.Time) int64 {
	switch periodOf(now) - c.period.Load() {
	case 0:
		return c.reserved.Load() + c.before.Load()
	case 1:
		return c.reserved.Load()
	}
	return 0
}

func (c *counters) acquire() {
	c.inflight.Add(1)
	for _, of := range []*atomic.Int64{&c.reserved, &c.before} {
		for n := of.Load(); n > 0; n = of.Load() {
			if of.CompareAndSwap(n, n-1) {
				return
			}
		}
	}
}

// report notes that a new load arrived, which contains what is in flight.
func (c *counters) report() {
	c.base.Store(c.inflight.Load())
	c.reserved.Store(0)
	c.before.Store(0)
}

// restart forgets what belonged to the worker's last incarnation.
func (c *counters) restart() {
	c.report()
	c.succeed()
}

// load estimates the requests at the worker now: those reported, plus this
// gateway's that came since, minus those that ended since; never fewer than its
// own.
func (c *counters) load(now time.Time, reported int64) int64 {
	in := c.inflight.Load()
	return max(in, reported+in-c.base.Load()) + c.pending(now)
}

func (c *counters) open(now time.Time) bool { return now.UnixNano() < c.openUntil.Load() }

// fail opens the breaker after that many failures in a row, or at once where nobody was there.
// When it closes by time alone one more failure opens it again, for twice as long.
func (c *counters) fail(now time.Time, after int, gone bool, first time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failures++
	if c.open(now) {
		c.gone.Store(gone || c.gone.Load())
		return
	}
	if c.failures < after && c.openings == 0 && !gone {
		return
	}
	c.gone.Store(gone)
	pause := min(first<<min(c.openings, 10), 30*first)
	c.openings++
	c.openUntil.Store(now.Add(pause).UnixNano())
}

func (c *counters) succeed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failures, c.openings = 0, 0
	c.openUntil.Store(0)
}
