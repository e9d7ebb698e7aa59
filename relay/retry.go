package relay

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// retryBudget bounds the further attempts of all requests together, so that a
// sick pool is not buried under repetitions. Safe for concurrent use.
type retryBudget struct {
	share float64
	least int64

	mu      sync.Mutex
	running int64           // requests
	further int64           // attempts beyond the first, until their first byte
	queue   []chan struct{} // of those that wait for one, closed when they may
}

// request counts one more running request, or one less.
func (b *retryBudget) request(n int64) {
	b.mu.Lock()
	b.running += n
	b.mu.Unlock()
}

// take allows one more further attempt; each must be given back.
func (b *retryBudget) take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.queue) > 0 || b.further >= b.most() {
		return false
	}
	b.further++
	return true
}

func (b *retryBudget) most() int64 { return max(b.least, int64(b.share*float64(b.running))) }

// wait is take for who can wait, in turn. It returns false when ctx ended first.
func (b *retryBudget) wait(ctx context.Context) bool {
	if b.take() {
		return true
	}
	b.mu.Lock()
	turn := make(chan struct{})
	b.queue = append(b.queue, turn)
	b.serve() // what was given back since
	b.mu.Unlock()
	select {
	case <-turn:
		return true
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.Index(b.queue, turn); i >= 0 {
		b.queue = slices.Delete(b.queue, i, i+1)
		return false
	}
	return true // it came at the same moment
}

// serve lets in those whose turn it is. The lock is held.
func (b *retryBudget) serve() {
	for len(b.queue) > 0 && b.further < b.most() {
		close(b.queue[0])
		b.queue = slices.Delete(b.queue, 0, 1)
		b.further++
	}
}

// give returns what take or wait allowed, at the attempt's first byte or its end: from
// then on it is a request like any other.
func (b *retryBudget) give() {
	b.mu.Lock()
	b.further--
	b.serve()
	b.mu.Unlock()
}

// once makes f harmless after its first call.
func once(f func()) func() { return sync.OnceFunc(f) }

// mostBackOff is the longest pause, in units of the first.
const mostBackOff = 25

// backOff is the pause before the n-th further attempt (from 1): the first pause doubled
// each time, of which up to a half is left off at random.
func backOff(first time.Duration, n int) time.Duration {
	d := min(first<<min(n-1, 10), mostBackOff*first)
	return d - rand.N(d/2+1)
}

// sleep waits. It returns false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
