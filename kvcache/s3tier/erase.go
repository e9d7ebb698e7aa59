package s3tier

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// EraseTenant implements kvcache.Eraser. Names do not say whose a block is, so the header of
// each is read that this process has not read before; one that is not whole is removed, too.
// Each request has the time of one, and all of it no end but that of ctx.
func (s *Store) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	found, err := s.listAll(ctx)
	if err != nil {
		return 0, err
	}
	var mu sync.Mutex
	var theirs []object
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(apart)
	for _, o := range found {
		g.Go(func() error {
			is, err := s.belongs(gctx, o, e)
			e.Looked(1)
			if is {
				mu.Lock()
				theirs = append(theirs, o)
				mu.Unlock()
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return 0, err
	}
	ctx, op, err := s.ops.Begin(ctx, remote.OpDrop)
	if err != nil {
		return 0, err
	}
	return len(theirs), op.End(s.removeAll(ctx, theirs))
}

// listAll lists all blocks of the prefix.
func (s *Store) listAll(ctx context.Context) ([]object, error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpDrop)
	if err != nil {
		return nil, err
	}
	found, err := s.list(ctx, s.cfg.Prefix+"/", 0)
	if err != nil {
		err = fmt.Errorf("list blocks: %w", err)
	}
	return found, op.End(err)
}

// belongs says whether an object is to be erased.
func (s *Store) belongs(ctx context.Context, o object, e kvcache.Erasure) (bool, error) {
	if h := s.memory.header(o.Key); h != nil {
		return e.Has(h.Space), nil
	}
	ctx, op, err := s.ops.Begin(ctx, remote.OpLookUp)
	if err != nil {
		return false, err
	}
	h, err := s.header(ctx, o.path)
	switch {
	case status(err) == http.StatusNotFound:
		return false, op.End(nil)
	case s.ops.Refused(err):
		return true, op.End(nil)
	}
	return err == nil && e.Has(h.Space), op.End(err)
}
