package stack

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// eraseWait is how long an erasure waits for blocks that are being written to the far tiers.
const eraseWait = 10 * time.Second

// EraseTenant implements kvcache.Eraser, in all tiers: the near store first, so that what
// waits to be written is not written any more, then the far ones, one after another, then
// what a look-up may have brought near meanwhile. The error is of those that could not.
func (s *Stack) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
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
	for _, t := range s.tiers {
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
