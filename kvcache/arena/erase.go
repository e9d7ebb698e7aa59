//go:build unix

package arena

import (
	"context"
	"errors"

	"github.com/kvmesh/kvmesh/kvcache"
)

// EraseTenant implements kvcache.Eraser. Writers of the tenant's tails get kvcache.ErrStale.
// Values of Redis clients are nobody's: they have no tenant.
//
// Each block that is removed is in the journal, so what was erased when the owner dies in
// the middle stays erased, and the rest is there again. What readers have mapped they go on
// reading until they are done; its room is given out only then.
func (s *Store) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	if err := s.enter(ctx); err != nil {
		return 0, err
	}
	defer s.walkLocked()()
	gone := map[uint32]bool{}
	for space, no := range s.index.spaceOf {
		if space != Values() && e.Has(space) {
			gone[no] = true
			s.dropTailsLocked(no)
		}
	}
	for i := range s.index.entries {
		if en := &s.index.entries[i]; en.live && gone[en.space] {
			blocks++
		}
	}
	e.Looked(len(s.index.entries))
	err = s.count.Failure(s.log.flush())
	s.mu.Unlock()
	return blocks, errors.Join(err, s.reclaim(ctx, gone))
}
