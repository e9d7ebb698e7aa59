package rollout

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// Leaser lets one rollout at a time replace workers of a pool. A lease that is not
// renewed for fleet.TTL is free again.
type Leaser interface {
	// LeasePool takes or renews the lease of a pool. The error of one that another owner
	// has matches fleet.ErrLeased.
	LeasePool(ctx context.Context, pool, owner string) error
	// ReleasePool gives it back.
	ReleasePool(ctx context.Context, pool, owner string) error
}

// Hold takes the leases of pools and renews them until release is called. The context it
// returns ends when a lease is lost.
func Hold(ctx context.Context, l Leaser, pools []string, owner string) (held context.Context, release func(), err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	back := func(n int) {
		rest, done := context.WithTimeout(context.WithoutCancel(ctx), giveBackTime)
		defer done()
		for _, pool := range pools[:n] {
			_ = l.ReleasePool(rest, pool, owner) // else it ends by itself
		}
	}
	for i, pool := range pools {
		if err := l.LeasePool(ctx, pool, owner); err != nil {
			back(i)
			cancel(nil)
			return nil, nil, err
		}
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		cancel(renew(ctx, l, pools, owner))
	}()
	return ctx, func() {
		cancel(nil)
		<-over
		back(len(pools))
	}, nil
}

// renew keeps the leases until ctx ends, or returns why one was lost. A control plane
// that does not answer takes none away; the rollout's own calls say that it is gone.
func renew(ctx context.Context, l Leaser, pools []string, owner string) error {
	for {
		if err := sleep(ctx, fleet.Heartbeat); err != nil {
			return err
		}
		for _, pool := range pools {
			if err := l.LeasePool(ctx, pool, owner); errors.Is(err, fleet.ErrLeased) {
				return fmt.Errorf("the rollout lost pool %s: %w", pool, err)
			}
		}
	}
}
