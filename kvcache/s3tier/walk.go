package s3tier

import (
	"context"
	"errors"
	"net/http"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// Walk implements kvcache.Walker. It reads the header of each block that this process has
// not read before: blocks never change, and whether one has been changed all the same is what
// Check finds out. An object that is no block, or not the one that its name says, is removed
// as by any reader.
func (s *Store) Walk(ctx context.Context, each func(kvcache.Seen) error) error {
	found, err := s.listAll(ctx)
	if err != nil {
		return err
	}
	for _, o := range found {
		seen := kvcache.Seen{Name: o.path, Header: s.memory.header(o.Key)}
		if seen.Header == nil {
			h, err := s.headerOf(ctx, o)
			switch _, refused := errors.AsType[*kvcache.Refusal](err); {
			case errors.Is(err, kvcache.ErrNotFound):
				continue
			case refused:
				seen.Err = err
				s.ops.Refused(err)
				s.purge(o.Key, o.path)
			case err != nil:
				return err
			default:
				seen.Header = &h
			}
		}
		if err := each(seen); err != nil {
			return err
		}
	}
	return nil
}

// headerOf reads the header of an object, which must be what its name says.
func (s *Store) headerOf(ctx context.Context, o object) (kvcache.Header, error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpLookUp)
	if err != nil {
		return kvcache.Header{}, err
	}
	h, err := s.header(ctx, o.path)
	if err == nil && (h.Key != o.Key || h.Parent != o.parent) {
		err = kvcache.Refuse(kvcache.ReasonKey, "another block than the name says")
	}
	switch _, refused := errors.AsType[*kvcache.Refusal](err); {
	case status(err) == http.StatusNotFound:
		_ = op.End(nil) // the server has answered
		return h, kvcache.ErrNotFound
	case refused:
		_ = op.End(nil) // likewise
		return h, err
	}
	return h, op.End(err)
}

// Check implements kvcache.Walker. It is a use of the block, which makes an old one new.
func (s *Store) Check(ctx context.Context, ref kvcache.Ref) error {
	return kvcache.CheckBy(ctx, s.Get, ref)
}
