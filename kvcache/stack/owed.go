package stack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvmesh/kvmesh/kvcache"
)

// mostOwed bounds how many drops are remembered that tiers have not done.
const mostOwed = 4096

// Owed is a drop of a model that a far tier has not done yet. What the tier still has of the
// model is not found through the stack.
type Owed struct {
	Tier        string              `json:"tier"`
	Fingerprint kvcache.Fingerprint `json:"fingerprint"`
}

// Owe notes drops that tiers have not done, such as those of the process before. Those of
// tiers that are not there are kept, and are for a later process that has them.
func (s *Stack) Owe(list ...Owed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range list {
		if _, known := s.owed[o]; !known {
			s.oweLocked(o)
		}
	}
}

// dropping are the calls of a tier for a drop that it owes: how many run, and how many have begun.
type dropping struct{ running, begun int }

// oweLocked notes a drop, and returns its calls; nil = there are too many drops.
func (s *Stack) oweLocked(o Owed) *dropping {
	if d := s.owed[o]; d != nil {
		return d
	}
	if len(s.owed) < mostOwed {
		d := &dropping{}
		s.owed[o] = d
		return d
	}
	s.cfg.Log.Error("too many drops wait for tiers: invalidate it again when the tier is back", "tier", o.Tier, "model", o.Fingerprint)
	return nil
}

// Owing lists the drops that tiers have not done, by tier and fingerprint.
func (s *Stack) Owing() (list []Owed) {
	s.mu.Lock()
	for o := range s.owed {
		list = append(list, o)
	}
	s.mu.Unlock()
	slices.SortFunc(list, func(a, b Owed) int {
		return cmp.Or(cmp.Compare(a.Tier, b.Tier), slices.Compare(a.Fingerprint[:], b.Fingerprint[:]))
	})
	return list
}

// owes says whether a tier still has to drop a model, so that nobody is to have it from there.
func (s *Stack) owes(t *tier, f kvcache.Fingerprint) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.owesLocked(t, f)
}

func (s *Stack) owesLocked(t *tier, f kvcache.Fingerprint) bool {
	_, owed := s.owed[Owed{t.Name, f}]
	return owed
}

// unlessDropped returns what was read from a tier, unless the model was dropped meanwhile: before,
// that had been done so often. It gives back what it does not return.
func (s *Stack) unlessDropped(t *tier, f kvcache.Fingerprint, dropped int, l *kvcache.Lent) *kvcache.Lent {
	if l == nil || s.dropped(nil, f) == dropped && !s.owes(t, f) {
		return l
	}
	l.Release()
	s.metrics.cut(t, cutDropped)
	return nil
}

// dropIn drops a model in one tier, which owes that until it has. Other hosts' memory is
// asked and not noted: who keeps that remembers it itself.
func (s *Stack) dropIn(ctx context.Context, t *tier, f kvcache.Fingerprint) error {
	ended := func(error) {}
	if !t.Apart {
		ended = s.beginDrop(Owed{t.Name, f})
	}
	err := t.Store.Drop(ctx, f)
	ended(err)
	if err != nil {
		return fmt.Errorf("drop in tier %s: %w", t.Name, err)
	}
	return nil
}

// beginDrop notes that a call for a drop begins, and returns what notes how it has ended. The drop
// is owed until one has gone well behind which no other has begun: what came to the tier in between
// may have come too late for the one before.
func (s *Stack) beginDrop(o Owed) (ended func(error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, nth := s.oweLocked(o), 0
	if d != nil {
		d.running++
		d.begun++
		nth = d.begun
	}
	return func(err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		switch {
		case d == nil && err != nil:
			s.oweLocked(o)
		case d == nil:
		case err == nil && d.begun == nth && s.owed[o] == d:
			delete(s.owed, o)
		default:
			d.running--
		}
	}
}

// DropOwed has the tiers do what they owe. The near store is left alone: what it has was
// computed since. It returns at the end of ctx, too; a call that hangs then is left, and
// nothing more is asked of its tier until it has ended.
func (s *Stack) DropOwed(ctx context.Context) error {
	if s.isClosed() {
		return kvcache.ErrClosed
	}
	var mu sync.Mutex // of errs
	var errs []error
	var all sync.WaitGroup
	for _, t := range s.tiers {
		list := s.takeOwed(t)
		if len(list) == 0 || !t.settling.CompareAndSwap(false, true) {
			continue
		}
		all.Add(1)
		s.done.Go(func() {
			defer all.Done()
			defer t.settling.Store(false)
			for _, f := range list {
				if err := s.dropIn(ctx, t, f); err != nil {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
					return // the others of this tier would fail as well
				}
			}
		})
	}
	ended := make(chan struct{})
	go func() {
		all.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
	mu.Lock()
	defer mu.Unlock()
	return errors.Join(errs...)
}

// takeOwed lists what a tier owes that no call runs for. What is on its way to it now is
// dropped when it is there.
func (s *Stack) takeOwed(t *tier) (list []kvcache.Fingerprint) {
	for _, o := range s.Owing() {
		s.mu.Lock()
		if d := s.owed[o]; d != nil && d.running == 0 && o.Tier == t.Name {
			s.drops[drop{t, o.Fingerprint}]++
			list = append(list, o.Fingerprint)
		}
		s.mu.Unlock()
	}
	return list
}
