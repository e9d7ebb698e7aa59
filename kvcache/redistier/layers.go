package redistier

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// GetLayers implements kvcache.Ranged: the header is in the manifest, and of the parts in which the frame
// is kept only those ranges are asked for that the layers are in.
func (s *Store) GetLayers(ctx context.Context, ref kvcache.Ref, l kvcache.Layers) (*kvcache.Lent, error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpGet)
	if err != nil {
		return nil, err
	}
	lent, err := s.getLayers(ctx, ref, l)
	return lent, op.End(err)
}

func (s *Store) getLayers(ctx context.Context, ref kvcache.Ref, l kvcache.Layers) (*kvcache.Lent, error) {
	found, err := s.look(ctx, []kvcache.Key{ref.Key})
	if err != nil {
		return nil, err
	}
	b := found[0]
	if b.text == nil {
		return nil, s.miss(ref)
	}
	if b.err != nil {
		return nil, s.refuse(ref, b, b.err)
	}
	var bytes atomic.Uint64
	f, err := remote.ReadLayers(ctx, remote.LayerRead{
		Ref: ref, Form: s.cfg.Form, Layers: l, Header: &b.header,
		Read: func(ctx context.Context, to []byte, from int64) (int64, error) {
			bytes.Add(uint64(len(to)))
			return b.header.Total, s.readRange(ctx, &b.manifest, to, from)
		},
	})
	_, refused := errors.AsType[*kvcache.Refusal](err)
	if refused || errors.Is(err, redis.Nil) {
		return s.get(ctx, ref) // which finds out whose fault it is, and removes it
	}
	if err != nil {
		return nil, err
	}
	s.renew(ref.Fingerprint, b)
	s.ops.Count.Hits.Add(1)
	s.ops.Count.HitBytes.Add(bytes.Load())
	return kvcache.NewLent(f, func() {}, func(err error) {
		if s.ops.Refused(err) {
			s.purge(b)
		}
	}), nil
}

// readRange reads the bytes of a frame from a place on. Redis.Nil says that a part is not there, or is
// shorter than it was.
func (s *Store) readRange(ctx context.Context, m *manifest, to []byte, from int64) error {
	for len(to) > 0 {
		i := from / m.part
		at := from - i*m.part
		n := min(int64(len(to)), m.size(int(i))-at)
		text, err := s.client.GetRange(ctx, s.keys.part(m.header.Key, m.nonce, int(i)), at, at+n-1).Result()
		if err != nil {
			return err
		}
		if int64(len(text)) != n {
			return redis.Nil
		}
		copy(to, text)
		to, from = to[n:], from+n
	}
	return nil
}

var _ kvcache.Ranged = (*Store)(nil)
