package stack

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// GetLayers implements kvcache.Ranged. What is near is lent from there, whole, since it is read in
// place. Of what is not, a tier that can reads the layers alone, and they are not brought near: a
// store keeps whole blocks. Tiers are asked in their order, one after another, as far as the time
// goes. Where none of those has it, and there is one that lends whole blocks only, the block is
// brought near as by Get.
func (s *Stack) GetLayers(ctx context.Context, ref kvcache.Ref, l kvcache.Layers) (*kvcache.Lent, error) {
	if s.isClosed() {
		return nil, kvcache.ErrClosed
	}
	lent, err := s.near.Get(ctx, ref)
	if !errors.Is(err, kvcache.ErrNotFound) {
		return lent, err
	}
	bounded, cancel := s.bound(ctx)
	defer cancel()
	whole, dropped := false, s.dropped(nil, ref.Fingerprint)
	for _, t := range s.tiers {
		r, ok := t.Store.(kvcache.Ranged)
		switch {
		case !ok:
			whole = true
			continue
		case s.owes(t, ref.Fingerprint):
			s.metrics.cut(t, cutDropped)
			continue
		case !t.admits():
			s.metrics.cut(t, cutAway)
			continue
		}
		lent, tried := s.layers(bounded, t, func() (*kvcache.Lent, error) { return r.GetLayers(s.ctx, ref, l) })
		if lent = s.unlessDropped(t, ref.Fingerprint, dropped, lent); lent != nil {
			return lent, nil
		}
		err = errors.Join(err, tried)
		if bounded.Err() != nil {
			s.metrics.cut(t, cutDeadline)
			return nil, fmt.Errorf("layers of block %s: %w", ref.Key, errors.Join(kvcache.ErrNotFound, bounded.Err()))
		}
	}
	if whole {
		return s.Get(ctx, ref)
	}
	return nil, err
}

// layers reads from a tier on a goroutine of its own, since not every tier heeds the end of ctx; one
// that does not counts against the tier until it has ended.
func (s *Stack) layers(ctx context.Context, t *tier, read func() (*kvcache.Lent, error)) (*kvcache.Lent, error) {
	select {
	case t.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	type answer struct {
		lent *kvcache.Lent
		err  error
	}
	ready := make(chan answer, 1)
	begin := time.Now()
	go func() {
		lent, err := read()
		<-t.slots
		ready <- answer{lent, err}
	}()
	select {
	case a := <-ready:
		s.cfg.Log.Debug("layers of a block from a far tier", "tier", t.Name, "took", time.Since(begin), "err", a.err)
		return a.lent, a.err
	case <-ctx.Done():
	}
	t.left.Add(1)
	go func() {
		a := <-ready
		t.left.Add(-1)
		if a.lent != nil {
			a.lent.Release()
		}
	}()
	return nil, ctx.Err()
}

var _ kvcache.Ranged = (*Stack)(nil)
