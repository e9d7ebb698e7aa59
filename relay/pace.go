package relay

import (
	"sync"
	"sync/atomic"
	"time"
)

// pace is what is known of how fast a worker is, from its own answers. Safe for
// concurrent use.
type pace struct {
	mu sync.Mutex
	// Between two tokens of an answer, moving averages as TCP has them for round trips:
	// the mean, and how far from it. 0 while nothing is known.
	gap, gapDev time.Duration
	// Until the first token: the same.
	first, firstDev time.Duration

	heard atomic.Int64 // when it last gave a token of any answer, Unix ns
}

// quiet is for how long it has not given a token of any answer.
func (p *pace) quiet(now time.Time) time.Duration { return now.Sub(time.Unix(0, p.heard.Load())) }

// usual is after what time nearly all of its answers have their first token, 0 while nothing
// is known.
func (p *pace) usual() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.first + 4*p.firstDev
}

// token notes the time between two tokens.
func (p *pace) token(d time.Duration) {
	p.mu.Lock()
	p.gap, p.gapDev = average(p.gap, p.gapDev, d)
	p.mu.Unlock()
}

// begun notes the time from a request to its first token.
func (p *pace) begun(d time.Duration) {
	p.mu.Lock()
	p.first, p.firstDev = average(p.first, p.firstDev, d)
	p.mu.Unlock()
}

func average(mean, dev, d time.Duration) (time.Duration, time.Duration) {
	if mean == 0 {
		return max(d, 1), d / 2
	}
	off := d - mean
	return max(mean+off/8, 1), dev + (max(off, -off)-dev)/4
}

// stall is after what silence between two tokens the worker is taken for hung. With most 0, where
// silence is no reason to leave a worker, it is after which an answer no more counts as flowing.
func (p *pace) stall(least, most time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if most == 0 {
		most = never
	}
	if p.gap == 0 {
		return most
	}
	return min(max(4*p.gap+8*p.gapDev, least), most)
}

// brisk is the longest silence between two tokens that is nothing special.
func (p *pace) brisk() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return 4*p.gap + 8*p.gapDev
}

// Before the first token the time depends on the prompt, the queue and the cache, so
// much more is allowed than for the time between two tokens.
const firstFactor = 10

// silence is the same before the first token, 0 while nothing is known.
func (p *pace) silence(least time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.first == 0 {
		return 0
	}
	return max(firstFactor*(p.first+4*p.firstDev), firstFactor*least)
}

// byWorker keeps one T per worker id. Safe for concurrent use.
type byWorker[T any] struct {
	make func(id string) *T
	mu   sync.Mutex
	m    map[string]*T
}

// of returns the worker's.
func (b *byWorker[T]) of(id string) *T {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.m[id]
	if t == nil {
		if b.m == nil {
			b.m = map[string]*T{}
		}
		t = b.make(id)
		b.m[id] = t
	}
	return t
}

// each calls f for what every worker has. f must not come back to b.
func (b *byWorker[T]) each(f func(*T)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.m {
		f(t)
	}
}

// retain forgets the workers for which known is false.
func (b *byWorker[T]) retain(known func(id string) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id := range b.m {
		if !known(id) {
			delete(b.m, id)
		}
	}
}

// enter waits for the attempt's turn at its worker, which lasts until its first token or
// its end. One that takes over for a dead worker must not be buried under its prefills;
// the wait is no stall. It returns false when the attempt ended first.
func (a *attempt) enter() bool {
	turn := a.j.r.pacers.of(a.w.id)
	if !turn.enter(a.ctx, a.j.route.Priority) {
		return false
	}
	was := a.free
	a.free = once(func() { turn.leave(); was() })
	return true
}

// turns is how many answers at once may begin to go on at a worker: as many as it runs.
func (r *Relay) turns(id string) int64 {
	info, _ := r.cfg.Picker.Info(id)
	if info.MaxRunning == 0 {
		return r.cfg.MovesAtOnce
	}
	return max(int64(info.MaxRunning), 4)
}
