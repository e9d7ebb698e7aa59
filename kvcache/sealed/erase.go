package sealed

import (
	"context"
	"errors"
	"slices"

	"github.com/kvmesh/kvmesh/kvcache"
)

// EraseTenant implements kvcache.Eraser, where the store that keeps the frames does: what is
// under keys that are there is erased. What was under others can be read by nobody.
//
// A tenant that is named in the file may have been under the default keys before, with a
// root of its own there, too; so those are looked through for everybody.
func (s *Store) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	under, ok := s.under.(kvcache.Eraser)
	if !ok {
		return 0, errors.New("the store cannot erase a tenant's blocks")
	}
	plain := e.Roots
	e.Roots = func(f kvcache.Fingerprint) (roots []kvcache.Key) {
		for _, root := range plain(f) {
			for _, k := range slices.Concat(s.keys.of(kvcache.Space{Fingerprint: f, Root: root}), s.keys.others) {
				roots = append(roots, k.name(root))
			}
		}
		return roots
	}
	return under.EraseTenant(ctx, e)
}

// Walk implements kvcache.Walker, where the store that keeps the frames does. The headers are
// as that has them: what they show of keys and tokens is encrypted.
func (s *Store) Walk(ctx context.Context, each func(kvcache.Seen) error) error {
	if w, ok := s.under.(kvcache.Walker); ok {
		return w.Walk(ctx, each)
	}
	return errors.New("the store cannot show its blocks")
}

// Check implements kvcache.Walker, by the sums of what is encrypted: no key is needed.
func (s *Store) Check(ctx context.Context, ref kvcache.Ref) error {
	if w, ok := s.under.(kvcache.Walker); ok {
		return w.Check(ctx, ref)
	}
	return errors.New("the store cannot check its blocks")
}
