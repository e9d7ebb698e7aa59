//go:build unix

package nvmetier

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// GetLayers implements kvcache.Ranged: of the file the pages are read that the layers are in.
func (s *Store) GetLayers(ctx context.Context, ref kvcache.Ref, l kvcache.Layers) (*kvcache.Lent, error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpGet)
	if err != nil {
		return nil, err
	}
	lent, err := s.getLayers(ctx, ref, l)
	return lent, op.End(err)
}

func (s *Store) getLayers(ctx context.Context, ref kvcache.Ref, l kvcache.Layers) (*kvcache.Lent, error) {
	p, err := s.look(ref)
	if err != nil {
		return nil, err
	}
	f, bytes, err := s.layersOf(ctx, p, l)
	if _, refused := errors.AsType[*kvcache.Refusal](err); refused || notFile(err) {
		return s.get(ref) // which finds out what is wrong, and removes it
	}
	if err != nil {
		return nil, s.refused(p, err)
	}
	s.mu.Lock()
	s.index.use(ref.Key, time.Now())
	s.mu.Unlock()
	s.ops.Count.Hits.Add(1)
	s.ops.Count.HitBytes.Add(bytes)
	return kvcache.NewLent(f, func() {}, func(err error) { _ = s.refused(p, err) }), nil
}

// layersOf reads layers of a block's file, and says how many bytes those were. The file stays open
// meanwhile, so that all is of one.
func (s *Store) layersOf(ctx context.Context, p placed, l kvcache.Layers) (*kvcache.Frame, uint64, error) {
	const flags = os.O_RDONLY | unix.O_NONBLOCK
	name, how := spaceDir(p.space)+"/"+p.name(), flags|direct
	if s.buffered.Load() {
		how = flags
	}
	f, err := s.disk.Open(name, how)
	if errors.Is(err, unix.EINVAL) {
		f, err = s.disk.Open(name, flags)
	}
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	var bytes atomic.Uint64
	frame, err := remote.ReadLayers(ctx, remote.LayerRead{
		Ref: p.ref(), Form: s.cfg.Form, Layers: l,
		Read: func(ctx context.Context, b []byte, from int64) (int64, error) {
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			b = b[:min(int64(len(b)), p.size-from)]
			bytes.Add(uint64(len(b)))
			return p.size, s.readRange(f, b, from)
		},
	})
	return frame, bytes.Load(), err
}

// readRange reads the bytes of a file from a place on, by whole pages.
func (s *Store) readRange(f file, b []byte, from int64) error {
	skip := from % page
	buf := s.buffers.get(skip + int64(len(b)))
	defer s.buffers.put(buf)
	n, err := f.ReadAt(buf, from-skip)
	if err == nil && int64(n) < skip+int64(len(b)) {
		err = kvcache.Refuse(kvcache.ReasonTorn, "the file ends at byte %d", from-skip+int64(n))
	}
	if err != nil {
		return err
	}
	copy(b, buf[skip:])
	return nil
}

var _ kvcache.Ranged = (*Store)(nil)
