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

	// left is how many calls run that their caller has left at its deadline.
	left atomic.Int64

	look, read pace
}

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

// ask makes a call on a goroutine of its own, which the caller leaves when ctx ends: then
// ok is false. The call itself ends as the store thinks right.
func ask[T any](ctx context.Context, t *tier, call func() T) (answer T, ok bool) {
	ready := make(chan T)
	go func() {
		a := call()
		select {
		case ready <- a:
		case <-ctx.Done():
			t.left.Add(-1)
		}
	}()
	select {
	case answer = <-ready:
		return answer, true
	case <-ctx.Done():
		t.left.Add(1)
		return answer, false
	}
}
