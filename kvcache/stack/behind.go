package stack

import (
	"context"
	"errors"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

const (
	// awayLook is the time between two tries at a tier that is away.
	awayLook = time.Second
	// tries is how often a write is tried that fails otherwise, and lateTries one that has
	// no answer in the tier's own time: that is how a server begins to be away.
	tries     = 3
	lateTries = 30
	// offerLook is the time between two looks whether a queue has room for old blocks.
	offerLook = 100 * time.Millisecond
)

// Wrote notes that the near store has a block that did not come by Put: it is to be written
// to the far tiers too. It never waits.
func (s *Stack) Wrote(b kvcache.Found) {
	for _, t := range s.tiers {
		t.count(b, 1)
		select {
		case t.queue <- b:
		default:
			t.count(b, -1)
			t.givenUp.Add(1)
			s.metrics.dropped.WithLabelValues(t.Name, "full").Inc()
		}
	}
}

// Offer notes blocks that the near store has had for longer, of which nobody knows whether
// the far tiers have them. They wait, in their order, until a tier's queue is less than half
// full, so that new ones have room. What waits already is not offered again; what is being written
// is written once more. It never waits.
func (s *Stack) Offer(blocks []kvcache.Found) {
	s.offerTo(func(*tier) bool { return true }, blocks)
}

// OfferIn is Offer for one tier.
func (s *Stack) OfferIn(name string, blocks []kvcache.Found) {
	s.offerTo(func(t *tier) bool { return t.Name == name }, blocks)
}

// offerTo is Offer for some tiers.
func (s *Stack) offerTo(which func(*tier) bool, blocks []kvcache.Found) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	for _, t := range s.tiers {
		if which(t) {
			fresh := t.countFresh(blocks)
			s.done.Go(func() { s.offer(t, fresh) })
		}
	}
}

// offer hands blocks to the queue of a tier, until the stack is closed.
func (s *Stack) offer(t *tier, blocks []kvcache.Found) {
	for len(blocks) > 0 {
		if len(t.queue) < (cap(t.queue)+1)/2 {
			select {
			case t.queue <- blocks[0]:
				blocks = blocks[1:]
				continue
			default:
			}
		}
		select {
		case <-s.ctx.Done():
			return
		case <-time.After(offerLook):
		}
	}
}

// Label implements kvcache.Labeled. The far tiers that remember labels are told in the
// background, once.
func (s *Stack) Label(ctx context.Context, f kvcache.Fingerprint, l kvcache.Label) error {
	if n, ok := s.near.(kvcache.Labeled); ok {
		if err := n.Label(ctx, f, l); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if was, told := s.labels[f]; s.closed || told && was == s.forgottenLocked(f) {
		return nil
	}
	s.labels[f] = s.forgottenLocked(f)
	for _, t := range s.tiers {
		if far, ok := t.Store.(kvcache.Labeled); ok {
			s.done.Go(func() {
				if err := far.Label(s.ctx, f, l); err != nil {
					s.cfg.Log.Debug("label KV in a far tier", "tier", t.Name, "err", err)
				}
			})
		}
	}
	return nil
}

// countFresh notes blocks that wait from now on, and returns them: those that do not yet. The others
// are to be written once more, if they are being written.
func (t *tier) countFresh(blocks []kvcache.Found) (fresh []kvcache.Found) {
	t.waits.Lock()
	defer t.waits.Unlock()
	for _, b := range blocks {
		if t.waits.times[b.Key] == 0 {
			fresh = append(fresh, b)
			t.countLocked(b, 1)
		} else {
			t.waits.again[b.Key] = true
		}
	}
	return fresh
}

// count notes a block that waits, or does so no longer.
func (t *tier) count(b kvcache.Found, n int64) {
	t.waits.Lock()
	defer t.waits.Unlock()
	t.countLocked(b, n)
}

func (t *tier) countLocked(b kvcache.Found, n int64) {
	if t.waits.times[b.Key] += int(n); t.waits.times[b.Key] <= 0 {
		delete(t.waits.times, b.Key)
		delete(t.waits.again, b.Key)
	}
	t.behind.blocks.Add(n)
	t.behind.bytes.Add(n * b.Size)
	t.behind.tokens.Add(n * int64(b.Tokens))
}

// write writes what waits for a tier, until the stack is closed.
func (s *Stack) write(t *tier) {
	for {
		select {
		case <-s.ctx.Done():
			return
		case b := <-t.queue:
			t.beginWrite(b)
			for s.endWrite(t, b, s.writeOne(t, b)) {
			}
		}
	}
}

// beginWrite notes that a block that waits is being written: offers until now have what they want.
func (t *tier) beginWrite(b kvcache.Found) {
	t.waits.Lock()
	defer t.waits.Unlock()
	delete(t.waits.again, b.Key)
}

// endWrite notes that a block was written, or why it could not be, and that it waits no longer;
// again = it was offered meanwhile, and is to be written once more.
func (s *Stack) endWrite(t *tier, b kvcache.Found, why string) (again bool) {
	t.waits.Lock()
	defer t.waits.Unlock()
	if t.waits.again[b.Key] {
		delete(t.waits.again, b.Key)
		return true
	}
	if why != "" && why != "gone" {
		t.givenUp.Add(1)
	}
	if why != "" {
		s.metrics.dropped.WithLabelValues(t.Name, why).Inc()
	}
	t.countLocked(b, -1)
	return false
}

// writeOne writes one block, and says why it could not.
func (s *Stack) writeOne(t *tier, b kvcache.Found) (why string) {
	before := s.dropped(t, b.Fingerprint)
	for failed := 0; ; {
		err := s.copyOut(t, b.Ref)
		_, refused := errors.AsType[*kvcache.Refusal](err)
		switch {
		case err == nil:
			if s.dropped(t, b.Fingerprint) != before {
				// It may have come after the drop.
				_ = t.Store.Drop(s.ctx, b.Fingerprint) // the tier counts what fails
			}
			return ""
		case refused || errors.Is(err, kvcache.ErrNotFound):
			return "gone"
		case errors.Is(err, kvcache.ErrNoKey):
			return "no_key"
		case errors.Is(err, kvcache.ErrFull):
			s.cfg.Log.Debug("KV tier is full", "tier", t.Name, "err", err)
			return "no_room"
		case errors.Is(err, kvcache.ErrClosed):
			return "failed"
		case !errors.Is(err, remote.ErrAway):
			s.cfg.Log.Debug("write a block of KV to a far tier", "tier", t.Name, "err", err)
			most := tries
			if errors.Is(err, context.DeadlineExceeded) {
				most = lateTries
			}
			if failed++; failed >= most {
				return "failed"
			}
		}
		select {
		case <-s.ctx.Done():
			return "failed"
		case <-time.After(awayLook):
		}
	}
}

// copyOut puts a block of the near store into a tier. What is wrong in memory goes nowhere.
func (s *Stack) copyOut(t *tier, ref kvcache.Ref) error {
	l, err := s.peek(s.ctx, ref)
	if err != nil {
		return err
	}
	defer l.Release()
	if err := l.Verify(); err != nil {
		return err
	}
	return t.Store.Put(s.ctx, l.Frame)
}

// peek lends a block of the near store, without counting it as a use where it can.
func (s *Stack) peek(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	if p, ok := s.near.(Peeker); ok {
		return p.Peek(ctx, ref)
	}
	return s.near.Get(ctx, ref)
}
