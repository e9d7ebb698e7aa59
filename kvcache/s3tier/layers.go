package s3tier

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// GetLayers implements kvcache.Ranged: the header and the layers are asked for as ranges of the object.
func (s *Store) GetLayers(ctx context.Context, ref kvcache.Ref, l kvcache.Layers) (*kvcache.Lent, error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpGet)
	if err != nil {
		return nil, err
	}
	lent, err := s.getLayers(ctx, ref, l)
	return lent, op.End(err)
}

func (s *Store) getLayers(ctx context.Context, ref kvcache.Ref, l kvcache.Layers) (*kvcache.Lent, error) {
	path, err := s.path(ctx, ref)
	if err != nil {
		return nil, err
	}
	if path == "" {
		return nil, s.miss(ref)
	}
	tag, bytes := "", atomic.Uint64{}
	f, err := remote.ReadLayers(ctx, remote.LayerRead{
		Ref: ref, Form: s.cfg.Form, Layers: l,
		Read: func(ctx context.Context, b []byte, from int64) (int64, error) {
			// Of the same object, not of one that has taken its place: all but the first ask for its tag.
			body, info, total, err := s.open(ctx, path, from, int64(len(b)), tag)
			if err != nil {
				return 0, err
			}
			if from == 0 {
				tag = info.ETag
				b = b[:min(int64(len(b)), total)]
			}
			bytes.Add(uint64(len(b)))
			return total, fill(b, body)
		},
	})
	_, refused := errors.AsType[*kvcache.Refusal](err)
	switch code := status(err); {
	case code == http.StatusNotFound || code == http.StatusPreconditionFailed:
		s.memory.forget(ref.Key) // removed, perhaps while it was read
		return nil, s.miss(ref)
	case refused || code == http.StatusRequestedRangeNotSatisfiable:
		return s.get(ctx, ref) // which finds out whose fault it is, and removes it
	case err != nil:
		return nil, err
	}
	s.memory.use(ref.Key)
	s.ops.Count.Hits.Add(1)
	s.ops.Count.HitBytes.Add(bytes.Load())
	return kvcache.NewLent(f, func() {}, func(err error) {
		if s.ops.Refused(err) {
			s.purge(ref.Key, path)
		}
	}), nil
}

var _ kvcache.Ranged = (*Store)(nil)
