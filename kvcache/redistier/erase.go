package redistier

import (
	"context"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// EraseTenant implements kvcache.Eraser. It reads the manifests of all blocks that are
// counted. Each batch has the time of a write, and all of it no end but that of ctx.
func (s *Store) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	for cursor := uint64(0); ; {
		n, next, err := s.eraseSome(ctx, e, cursor)
		blocks += n
		if err != nil || next == 0 {
			return blocks, err
		}
		cursor = next
	}
}

// eraseSome looks at the blocks behind a cursor and returns the next one, 0 behind the last.
func (s *Store) eraseSome(ctx context.Context, e kvcache.Erasure, cursor uint64) (n int, next uint64, err error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpDrop)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = op.End(err) }()
	found, next, err := s.scan(ctx, cursor)
	if err != nil {
		return 0, 0, err
	}
	e.Looked(len(found))
	if len(found) == 0 {
		return 0, next, nil
	}
	var theirs []block
	for _, b := range found {
		if b.text != nil && b.err == nil && e.Has(b.header.Space) {
			theirs = append(theirs, b)
		}
	}
	return len(theirs), next, s.remove(ctx, theirs)
}
