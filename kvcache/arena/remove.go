//go:build unix

package arena

import (
	"context"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Remove takes one block out, and says whether it was there. Whoever reads it goes on.
// Blocks that follow it stay, and are found again when it is.
func (s *Store) Remove(ctx context.Context, ref kvcache.Ref) (bool, error) {
	if err := s.enter(ctx); err != nil {
		return false, err
	}
	defer s.mu.Unlock()
	if !s.hasLocked(ref) {
		return false, nil
	}
	s.removeLocked(s.index.byKey[ref.Key])
	return true, s.count.Failure(s.log.flush())
}
