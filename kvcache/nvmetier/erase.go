//go:build unix

package nvmetier

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// EraseTenant implements kvcache.Eraser. What an ending loss of power may undo of a drop it
// may undo of this.
func (s *Store) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpDrop)
	if err != nil {
		return 0, err
	}
	blocks, err = s.erase(ctx, e)
	return blocks, op.End(err)
}

func (s *Store) erase(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	s.mu.Lock()
	var spaces []kvcache.Space
	for _, space := range s.index.spaces {
		if e.Has(space) {
			spaces = append(spaces, space)
		}
	}
	e.Looked(len(s.index.byKey))
	s.mu.Unlock()
	for _, space := range spaces {
		if err := ctx.Err(); err != nil {
			return blocks, err
		}
		gone := s.scratch(goneDir)
		s.publish.Lock()
		err := s.disk.Rename(spaceDir(space), gone)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			s.mu.Lock()
			blocks += s.index.erase(space)
			s.mu.Unlock()
		}
		s.publish.Unlock()
		if err == nil {
			err = removeAll(s.disk, gone)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return blocks, fmt.Errorf("erase a tenant: %w", err)
		}
	}
	return blocks, nil
}

// erase takes out all blocks of a space, and says how many.
func (x *index) erase(space kvcache.Space) (n int) {
	for id := range x.entries {
		if e := &x.entries[id]; e.live && x.spaces[e.space] == space {
			x.take(evict.ID(id), false)
			n++
		}
	}
	return n
}
