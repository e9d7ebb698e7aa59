package relay

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// retryBudget bounds the further attempts of all requests together, so that a
// sick pool is not buried under repetitions. Safe for concurrent use.
type retryBudget struct {
	share   float64
	least   int64
	running atomic.Int64 // requests
	further atomic.Int64 // attempts beyond the first, until their first byte
}

// take allows one more further attempt; each must be given back.
func (b *retryBudget) take() bool {
	if b.further.Add(1) <= max(b.least, int64(b.share*float64(b.running.Load()))) {
		return true
	}
	b.further.Add(-1)
	return false
}

// give returns what take allowed, at the attempt's first byte or its end: from
// then on it is a request like any other.
func (b *retryBudget) give() { b.further.Add(-1) }

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
