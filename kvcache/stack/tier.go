package stack

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvmesh/kvmesh/kvcache"
)

// tier is a far store with what is known of it.
type tier struct {
	Tier
	queue chan kvcache.Found // to be written
	slots chan struct{}      // taken by each read of a block
	room  *semaphore.Weighted
	// behind is what waits in the queue or is being written.
	behind struct{ blocks, bytes, tokens atomic.Int64 }
	// waits has how often each of these blocks waits, so that none is offered that does, and which
	// of them were offered all the same: what is being written then may be where nobody has it.
	waits struct {
		sync.Mutex
		times map[kvcache.Key]int
		again map[kvcache.Key]bool
	}
	// givenUp counts blocks that were not written although they were there.
	givenUp atomic.Int64

	// left is how many calls run that their caller has left at its deadline.
	left atomic.Int64
	// looks is how many look-ups run, whoever waits for them.
	looks atomic.Int64

	// settling says that it is being asked to drop what it owes.
	settling atomic.Bool

	look, read pace
}

// mostLooks is how many look-ups of one tier run at once. Each may hold a thread where the
// tier is a file system.
const mostLooks = 128

// admits says whether the tier may be asked.
func (t *tier) admits() bool { return t.left.Load() <= 0 }

// pace is how long one kind of call takes, learned from those that were made. It is safe
// for concurrent use.
type pace struct {
	mu    sync.Mutex
	took  time.Duration // 0 = not known
	bytes int64         // of the block, on average
	asked time.Time     // when it was last let through without regard to the time
}

// again is how long a pace is believed that says that a call is not worth it.
const again = 10 * time.Second

// note takes in one call.
func (p *pace) note(took time.Duration, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.took == 0 {
		p.took, p.bytes = max(took, 1), bytes
		return
	}
	p.took, p.bytes = max((3*p.took+took)/4, 1), (3*p.bytes+bytes)/4
}

// worth says whether so many calls, so many at once, for so many bytes each on average,
// are expected to take no longer than limit. What is not known is worth a try, and so is,
// now and then, what is not expected to.
func (p *pace) worth(calls, abreast int, bytes int64, limit time.Duration, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	took := p.took
	if p.bytes > 0 && bytes > p.bytes {
		took = time.Duration(float64(took) * float64(bytes) / float64(p.bytes))
	}
	if time.Duration((calls+abreast-1)/abreast)*took <= limit {
		return true
	}
	if now.Sub(p.asked) < again {
		return false
	}
	p.asked = now
	return true
}

// look is a look-up in a tier, on a goroutine of its own. It ends as the store thinks
// right, whoever waits for it.
type look struct {
	t     *tier
	q     kvcache.Query
	ready chan kvcache.Match // gets the answer
	state atomic.Int32
}

// The states of a look-up, of which the first is only left once.
const (
	lookRuns = iota
	lookDone
	lookLeft
)

// look begins one; nil = there are too many. What fails has found nothing.
func (s *Stack) look(t *tier, q kvcache.Query) *look {
	if t.looks.Add(1) > mostLooks {
		t.looks.Add(-1)
		return nil
	}
	l := &look{t: t, q: q, ready: make(chan kvcache.Match, 1)}
	go func() {
		defer t.looks.Add(-1)
		begin := time.Now()
		m, err := t.Store.Longest(s.ctx, q)
		if err != nil {
			s.cfg.Log.Debug("look up KV in a far tier", "tier", t.Name, "err", err)
			m = kvcache.Match{}
		} else {
			t.look.note(time.Since(begin), 0)
		}
		l.ready <- m
		if !l.state.CompareAndSwap(lookRuns, lookDone) {
			t.left.Add(-1)
		}
	}()
	return l
}

// wait waits for the answer until ctx ends; then ok is false.
func (l *look) wait(ctx context.Context) (m kvcache.Match, ok bool) {
	select {
	case m := <-l.ready:
		return m, true
	case <-ctx.Done():
		return kvcache.Match{}, false
	}
}

// leave says that nobody waits any more, because the time was over: it counts against the
// tier as long as the look-up runs.
func (l *look) leave() {
	if l.state.CompareAndSwap(lookRuns, lookLeft) {
		l.t.left.Add(1)
	}
}
