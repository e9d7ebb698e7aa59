package relay

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// retryBudget bounds the further attempts of all requests together, until their first
// byte, so that a sick pool is not buried under repetitions. Safe for concurrent use.
type retryBudget struct {
	gate
	running atomic.Int64 // requests
}

// init lets in a share of the running requests, and at least so many.
func (b *retryBudget) init(share float64, least int64) {
	b.most = func() int64 { return max(least, int64(share*float64(b.running.Load()))) }
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
