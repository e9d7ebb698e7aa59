//go:build unix

package nvmetier

import (
	"context"
	"errors"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// Walk implements kvcache.Walker. It reads the header of each block, from the disk and past
// what is remembered of it. Files that were removed by somebody else are forgotten, and are no
// fault: a store may lose blocks.
func (s *Store) Walk(ctx context.Context, each func(kvcache.Seen) error) error {
	s.mu.Lock()
	var all []placed
	for i := range s.index.entries {
		if e := &s.index.entries[i]; e.live {
			all = append(all, s.index.placed(e))
		}
	}
	s.mu.Unlock()
	for _, p := range all {
		seen := kvcache.Seen{Name: spaceDir(p.space) + "/" + p.name()}
		_, op, err := s.ops.Begin(ctx, remote.OpLookUp)
		if err != nil {
			return err
		}
		h, err := s.header(p)
		if err != nil {
			err = s.refused(p, err)
		}
		switch _, refused := errors.AsType[*kvcache.Refusal](err); {
		case err == nil:
			seen.Header = &h
		case refused, errors.Is(err, kvcache.ErrNotFound):
			seen.Err = err
		default:
			return op.End(err)
		}
		_ = op.End(nil) // the disk has answered
		if errors.Is(seen.Err, kvcache.ErrNotFound) {
			continue
		}
		if err := each(seen); err != nil {
			return err
		}
	}
	return nil
}

// Check implements kvcache.Walker.
func (s *Store) Check(ctx context.Context, ref kvcache.Ref) error {
	return kvcache.CheckBy(ctx, s.Get, ref)
}
