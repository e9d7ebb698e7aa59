//go:build unix

package arena

import (
	"context"
	"errors"
	"math"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Walk implements kvcache.Walker. Values of Redis clients are not among the blocks.
func (s *Store) Walk(ctx context.Context, each func(kvcache.Seen) error) error {
	for _, b := range s.Newest(math.MaxInt) {
		seen := kvcache.Seen{Name: b.Key.String()}
		l, err := s.Peek(ctx, b.Ref)
		switch _, refused := errors.AsType[*kvcache.Refusal](err); {
		case errors.Is(err, kvcache.ErrNotFound):
			continue
		case refused:
			seen.Err = err
		case err != nil:
			return err
		default:
			h := l.Header
			seen.Header = &h
			l.Release()
		}
		if err := each(seen); err != nil {
			return err
		}
	}
	return nil
}

// Check implements kvcache.Walker.
func (s *Store) Check(ctx context.Context, ref kvcache.Ref) error {
	return kvcache.CheckBy(ctx, s.Peek, ref)
}
