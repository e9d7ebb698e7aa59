package stack

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// eraseWait is how long an erasure waits for blocks that are being written to the far tiers.
const eraseWait = 10 * time.Second

// drop is a drop of a model: in the near store, where t is nil, or in a far tier.
type drop struct {
	t *tier
	f kvcache.Fingerprint
}

// Drop implements kvcache.Store, in all tiers. The error is of those that could not: they
// still have the model's blocks.
func (s *Stack) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	return s.drop(ctx, s.tiers, f)
}

// EraseTenant implements kvcache.Eraser, in all tiers: the near store first, so that what
// waits to be written is not written any more, then the far ones, one after another, then
// what a look-up may have brought near meanwhile. The error is of those that could not.
func (s *Stack) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	return s.erase(ctx, s.tiers, e)
}

// Part forgets what is in the near store of a stack and in some of the far ones. It is safe
// for concurrent use.
type Part struct {
	s     *Stack
	tiers []*tier
}

// Part is the near store and those far tiers that have one of the names.
func (s *Stack) Part(names ...string) *Part {
	return &Part{s, slices.DeleteFunc(slices.Clone(s.tiers), func(t *tier) bool { return !slices.Contains(names, t.Name) })}
}

// Drop is that of the stack.
func (p *Part) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	return p.s.drop(ctx, p.tiers, f)
}

// EraseTenant implements kvcache.Eraser, as the stack does.
func (p *Part) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	return p.s.erase(ctx, p.tiers, e)
}

// drop drops a model in the near store and in some tiers.
func (s *Stack) drop(ctx context.Context, tiers []*tier, f kvcache.Fingerprint) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return kvcache.ErrClosed
	}
	s.drops[drop{f: f}]++ // what is on its way from now on comes too late
	for _, t := range tiers {
		s.drops[drop{t, f}]++
	}
	s.mu.Unlock()
	errs := make([]error, len(tiers)+1)
	errs[0] = s.near.Drop(ctx, f)
	var all sync.WaitGroup
	for i, t := range tiers {
		all.Go(func() {
			errs[i+1] = s.dropIn(ctx, t, f)
		})
	}
	all.Wait()
	if len(s.tiers) > 0 {
		// A look-up in between may have brought near what a tier still had.
		s.mu.Lock()
		s.drops[drop{f: f}]++
		s.mu.Unlock()
		errs = append(errs, s.near.Drop(ctx, f))
	}
	return errors.Join(errs...)
}

// Reclaim drops an old version of a model in the far tiers that are this host's or all hosts'
// together. The near store is left as it is: its owner knows what streams need. The error is
// of tiers that could not.
func (s *Stack) Reclaim(ctx context.Context, f kvcache.Fingerprint) error {
	own := slices.DeleteFunc(slices.Clone(s.tiers), func(t *tier) bool { return t.Apart })
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return kvcache.ErrClosed
	}
	for _, t := range own {
		s.drops[drop{t, f}]++ // what is on its way to it is dropped when it is there
	}
	s.mu.Unlock()
	errs := make([]error, len(own))
	var all sync.WaitGroup
	for i, t := range own {
		all.Go(func() {
			if err := t.Store.Drop(ctx, f); err != nil {
				errs[i] = fmt.Errorf("reclaim in tier %s: %w", t.Name, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// forgottenLocked is how often a model was dropped or reclaimed in any tier.
func (s *Stack) forgottenLocked(f kvcache.Fingerprint) int {
	n := s.drops[drop{f: f}]
	for _, t := range s.tiers {
		n += s.drops[drop{t, f}]
	}
	return n
}

// dropped is how often a model was dropped in the near store, where t is nil, or in a tier.
func (s *Stack) dropped(t *tier, f kvcache.Fingerprint) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.drops[drop{t, f}]
}

// erase erases a tenant in the near store and in some tiers.
func (s *Stack) erase(ctx context.Context, tiers []*tier, e kvcache.Erasure) (blocks int, err error) {
	if s.isClosed() {
		return 0, kvcache.ErrClosed
	}
	near := Tier{Name: "memory", Store: s.near}
	var errs []error
	erase := func(t Tier) {
		n, err := eraseIn(ctx, t, e)
		blocks += n
		if err != nil {
			errs = append(errs, fmt.Errorf("erase in tier %s: %w", t.Name, err))
		}
	}
	erase(near)
	for end := time.Now().Add(eraseWait); s.Behind() > 0 && time.Now().Before(end) && ctx.Err() == nil; {
		select {
		case <-ctx.Done():
		case <-time.After(flushLook):
		}
	}
	for _, t := range tiers {
		erase(t.Tier)
	}
	if len(s.tiers) > 0 {
		erase(near)
	}
	return blocks, errors.Join(errs...)
}

// eraseIn erases in one tier.
func eraseIn(ctx context.Context, t Tier, e kvcache.Erasure) (int, error) {
	s, ok := t.Store.(kvcache.Eraser)
	if !ok {
		return 0, errors.New("it cannot: erase the tenant where its blocks are")
	}
	return s.EraseTenant(ctx, e)
}
