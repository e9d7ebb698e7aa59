//go:build unix

package kvrpc

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/kvmesh/kvmesh/kvcache"
)

// memory gives out bytes, at most so many at once, that are used again: new memory costs
// more than what is read into it. It is safe for concurrent use.
type memory struct {
	most int64
	room *semaphore.Weighted
	free sync.Pool
}

func newMemory(most int64) *memory { return &memory{most: most, room: semaphore.NewWeighted(most)} }

// get waits until ctx ends for n bytes. The error is kvcache.ErrFull where there never are
// so many. give takes them back.
func (m *memory) get(ctx context.Context, n int64) ([]byte, error) {
	if n < 0 || n > m.most {
		return nil, fmt.Errorf("%d bytes of at most %d on their way: %w", n, m.most, kvcache.ErrFull)
	}
	if err := m.room.Acquire(ctx, n); err != nil {
		return nil, fmt.Errorf("wait for memory: %w", err)
	}
	if b, ok := m.free.Get().(*[]byte); ok && int64(cap(*b)) >= n && int64(cap(*b)) <= 2*n {
		return (*b)[:n], nil
	}
	return make([]byte, n), nil
}

// give takes back what get gave out.
func (m *memory) give(b []byte) {
	n := int64(len(b))
	b = b[:cap(b)]
	m.free.Put(&b)
	m.room.Release(n)
}
