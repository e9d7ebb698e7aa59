package stack

import (
	"context"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// flight is a block on its way into the near store. Whoever wants the same block waits
// for the same flight.
type flight struct {
	t    *tier // from which it comes
	done chan struct{}
	err  error // once done: why it did not come
}

// wait waits for a flight until ctx ends, and says whether it has ended by then. One that
// is left counts against its own tier, whoever else would have had the block.
func (f *flight) wait(ctx context.Context) bool {
	select {
	case <-f.done:
		return true
	default:
	}
	select {
	case <-f.done:
		return true
	case <-ctx.Done():
		f.t.left.Add(1)
		go func() {
			<-f.done
			f.t.left.Add(-1)
		}()
		return false
	}
}

// feed brings blocks one after another, as many at once as the tier has slots.
type feed struct {
	t       *tier
	s       *Stack
	blocks  int          // how many there are
	flights chan *flight // in the order of the blocks; closed behind the last
}

// feed begins to bring blocks, in their order, and begins no more when ctx has ended.
func (s *Stack) feed(ctx context.Context, t *tier, blocks []kvcache.Found) *feed {
	f := &feed{t: t, s: s, blocks: len(blocks), flights: make(chan *flight, len(blocks))}
	go func() {
		defer close(f.flights)
		for _, b := range blocks {
			fl := s.bring(ctx, t, b)
			if fl == nil {
				s.metrics.cut(t, cutDeadline)
				return
			}
			f.flights <- fl
		}
	}()
	return f
}

// wait waits for the blocks until ctx ends or one did not come, behind which the others are
// of no use, and says how many came and whether those are all.
func (f *feed) wait(ctx context.Context) (came int, all bool) {
	for fl := range f.flights {
		if !fl.wait(ctx) {
			f.s.metrics.cut(fl.t, cutDeadline)
			return came, false
		}
		if fl.err != nil {
			return came, false
		}
		came++
	}
	return came, came == f.blocks
}

// bring begins the flight of a block, or joins the one that is on its way, unless that comes
// from another tier that is not to be asked. It waits for a slot of the tier and for room;
// nil = ctx has ended meanwhile.
func (s *Stack) bring(ctx context.Context, t *tier, b kvcache.Found) *flight {
	if f := s.flying(t, b.Key); f != nil {
		s.metrics.shared.WithLabelValues(t.Name).Inc()
		return f
	}
	select {
	case t.slots <- struct{}{}:
	case <-ctx.Done():
		return nil
	}
	size := min(b.Size, s.cfg.FetchBytes)
	if t.room.Acquire(ctx, size) != nil {
		<-t.slots
		return nil
	}
	free := func() {
		t.room.Release(size)
		<-t.slots
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.flyingLocked(t, b.Key); f != nil || s.closed {
		free()
		return f
	}
	f := &flight{t: t, done: make(chan struct{})}
	if s.owesLocked(t, b.Fingerprint) { // it was dropped since somebody found it there
		free()
		s.metrics.cut(t, cutDropped)
		f.err = kvcache.ErrNotFound
		close(f.done)
		return f
	}
	s.flights[b.Key] = f
	dropped := s.drops[drop{f: b.Fingerprint}]
	s.done.Go(func() {
		f.err = s.copyIn(t, b, dropped)
		free()
		s.mu.Lock()
		if s.flights[b.Key] == f {
			delete(s.flights, b.Key)
		}
		s.mu.Unlock()
		close(f.done)
	})
	return f
}

// flying returns the flight of a block that is on its way and that who would read it from a
// tier may wait for.
func (s *Stack) flying(t *tier, key kvcache.Key) *flight {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.flyingLocked(t, key)
}

func (s *Stack) flyingLocked(t *tier, key kvcache.Key) *flight {
	if f := s.flights[key]; f != nil && (f.t == t || f.t.admits()) {
		return f
	}
	return nil
}

// copyIn reads a block from a tier, verifies it, and puts it into the near store, unless
// its model was dropped meanwhile.
func (s *Stack) copyIn(t *tier, b kvcache.Found, dropped int) error {
	if l, err := s.peek(s.ctx, b.Ref); err == nil {
		l.Release()
		return nil // another flight has ended since somebody found that it was missing
	}
	begin := time.Now()
	l, err := t.Store.Get(s.ctx, b.Ref)
	if err != nil {
		return err
	}
	defer l.Release()
	if err := l.Verify(); err != nil {
		return err
	}
	t.read.note(time.Since(begin), l.Total)
	if s.dropped(nil, b.Fingerprint) != dropped {
		return kvcache.ErrNotFound
	}
	if err := s.near.Put(s.ctx, l.Frame); err != nil {
		return err
	}
	if s.dropped(nil, b.Fingerprint) != dropped {
		// It has come after the drop.
		return s.near.Drop(s.ctx, b.Fingerprint)
	}
	s.metrics.brought(t, len(l.IDs), l.Total)
	return nil
}
