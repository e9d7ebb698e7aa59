package relay

import (
	"cmp"
	"context"
	"slices"
	"sync"
)

// gate lets in so many at once; the others wait in turn, those of a higher priority
// first. most may change; who waits notices when somebody leaves. Safe for concurrent
// use.
type gate struct {
	most func() int64

	mu    sync.Mutex
	in    int64
	queue []*waiter // in their order
}

// waiter is somebody before a gate.
type waiter struct {
	priority int32
	in       chan struct{} // closed when it may enter
}

// try enters if nobody waits; whoever entered must leave.
func (g *gate) try() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.queue) > 0 || g.in >= g.most() {
		return false
	}
	g.in++
	return true
}

// enter waits for its turn. It returns false when ctx ended first.
func (g *gate) enter(ctx context.Context, priority int32) bool {
	w := &waiter{priority, make(chan struct{})}
	g.mu.Lock()
	at, _ := slices.BinarySearchFunc(g.queue, w, func(q, w *waiter) int {
		return cmp.Or(cmp.Compare(w.priority, q.priority), -1) // behind its equals
	})
	g.queue = slices.Insert(g.queue, at, w)
	g.serve()
	g.mu.Unlock()
	select {
	case <-w.in:
		return true
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := slices.Index(g.queue, w); i >= 0 {
		g.queue = slices.Delete(g.queue, i, i+1)
		return false
	}
	return true // it came at the same moment
}

// serve lets in those whose turn it is. The lock is held.
func (g *gate) serve() {
	for len(g.queue) > 0 && g.in < g.most() {
		close(g.queue[0].in)
		g.queue = slices.Delete(g.queue, 0, 1)
		g.in++
	}
}

// leave gives back what try or enter allowed.
func (g *gate) leave() {
	g.mu.Lock()
	g.in--
	g.serve()
	g.mu.Unlock()
}
