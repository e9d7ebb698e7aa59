package dirstore

import (
	"context"
	"errors"

	"github.com/kvmesh/kvmesh/kvcache"
)

// EraseTenant implements kvcache.Eraser. It reads the header of every block and tail; one
// that is refused goes, too. Who has a tail open goes on writing to a file that nobody finds.
func (s *Store) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	models, err := s.Models(ctx)
	if err != nil {
		return 0, err
	}
	for _, m := range models {
		for en := range s.Entries(ctx, m.Fingerprint, false) {
			e.Looked(1)
			if !s.belongs(en, m.Fingerprint, e) {
				continue
			}
			if err := s.Remove(ctx, en); err != nil {
				return blocks, err
			}
			if !en.Tail {
				blocks++
			}
		}
	}
	return blocks, ctx.Err()
}

// belongs says whether a block or tail is to be erased.
func (s *Store) belongs(en Entry, f kvcache.Fingerprint, e kvcache.Erasure) bool {
	space := kvcache.Space{Fingerprint: f, Root: en.Header.Root}
	err := en.Err
	if en.Tail && err == nil {
		var h parsedTail
		h, err = s.readTailHeader(en.Path)
		space = h.Space
	}
	if _, refused := errors.AsType[*kvcache.Refusal](err); refused {
		return true
	}
	return err == nil && e.Has(space)
}
