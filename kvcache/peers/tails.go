package peers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/placement"
)

// OpenTail implements kvcache.Tails, on the first member that placement names for the stream
// and that takes it. The writer fails when that member does.
func (s *Store) OpenTail(ctx context.Context, spec kvcache.TailSpec) (kvcache.TailWriter, error) {
	w, _, err := s.openTail(ctx, spec)
	return w, err
}

// openTail is OpenTail that says where the tail is.
func (s *Store) openTail(ctx context.Context, spec kvcache.TailSpec) (kvcache.TailWriter, *member, error) {
	if s.isClosed() {
		return nil, nil, kvcache.ErrClosed
	}
	if spec.Stream == "" || spec.Choice < 0 || spec.Choice > math.MaxInt32 || spec.Attempt < 0 || spec.First < 0 {
		return nil, nil, fmt.Errorf("open tail: bad choice %d, attempt %d or position %d, or no stream", spec.Choice, spec.Attempt, spec.First)
	}
	list, passed := s.writers(spec.Space, placement.StreamKey(spec.Space, spec.Stream))
	var failed error
	for _, m := range list {
		begin := time.Now()
		w, err := m.peer.OpenTail(ctx, spec)
		if s.called(ctx, m, begin, err) == nil {
			return w, m, nil
		}
		failed = errors.Join(failed, fmt.Errorf("open tail on KV peer %s: %w", m.ID, err))
		if errors.Is(err, kvcache.ErrStale) || ctx.Err() != nil {
			return nil, nil, failed
		}
	}
	if failed == nil || passed && !errors.Is(failed, kvcache.ErrFull) {
		failed = errors.Join(errNobody(), failed)
	}
	return nil, nil, failed
}

// ReadTail implements kvcache.Tails: those of all members that may have one. It does not wait
// for those that are much slower than the first that has some.
func (s *Store) ReadTail(ctx context.Context, space kvcache.Space, stream string, choice int) ([]kvcache.Tail, error) {
	if s.isClosed() {
		return nil, kvcache.ErrClosed
	}
	list := s.readers(space, nil, placement.StreamKey(space, stream))
	if len(list) == 0 {
		return nil, errNobody()
	}
	type read struct {
		tails []kvcache.Tail
		err   error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan read, len(list))
	for _, m := range list {
		go func() {
			begin := time.Now()
			tails, err := m.peer.ReadTail(ctx, space, stream, choice)
			answers <- read{tails, s.called(ctx, m, begin, err)}
		}()
	}
	var all []kvcache.Tail
	var failed error
	heard := false
	w := waiting{begin: time.Now()}
	for range list {
		select {
		case a := <-answers:
			failed, heard = cmp.Or(failed, a.err), heard || a.err == nil
			if all = append(all, a.tails...); len(all) > 0 {
				w.start()
			}
		case <-w.over:
			return kvcache.SortTails(all), nil
		case <-ctx.Done():
			failed = cmp.Or(failed, ctx.Err())
			if len(all) == 0 {
				return nil, failed
			}
			return kvcache.SortTails(all), nil
		}
	}
	if heard {
		failed = nil
	}
	return kvcache.SortTails(all), failed
}

// DropTail implements kvcache.Tails, on all members.
func (s *Store) DropTail(ctx context.Context, space kvcache.Space, stream string) error {
	if s.isClosed() {
		return kvcache.ErrClosed
	}
	defer s.tails.drop(func(spec kvcache.TailSpec) bool { return spec.Space == space && spec.Stream == stream })()
	return joined(s.all(func(m *member) error { return m.peer.DropTail(ctx, space, stream) }))
}
