package rollout

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// fakeLeases are pools with their owners.
type fakeLeases struct {
	mu sync.Mutex
	of map[string]string
}

func (l *fakeLeases) LeasePool(_ context.Context, pool, owner string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if had := l.of[pool]; had != "" && had != owner {
		return fmt.Errorf("%w: %s", fleet.ErrLeased, had)
	}
	l.of[pool] = owner
	return nil
}

func (l *fakeLeases) ReleasePool(_ context.Context, pool, owner string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of[pool] == owner {
		delete(l.of, pool)
	}
	return nil
}

// set gives a pool to an owner, or to nobody.
func (l *fakeLeases) set(pool, owner string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of[pool] = owner
}

func (l *fakeLeases) get(pool string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.of[pool]
}

func TestHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &fakeLeases{of: map[string]string{"b": "another"}}
		if _, _, err := Hold(t.Context(), l, []string{"a", "b"}, "me"); !errors.Is(err, fleet.ErrLeased) {
			t.Errorf("held by another: %v", err)
		}
		if l.get("a") != "" {
			t.Error("a pool is kept though the other could not be had")
		}
		l.set("b", "")
		ctx, release, err := Hold(t.Context(), l, []string{"a", "b"}, "me")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if ctx.Err() != nil {
			t.Errorf("ended while it held: %v", context.Cause(ctx))
		}
		l.set("b", "another") // it was silent for too long
		time.Sleep(2 * fleet.Heartbeat)
		if !errors.Is(context.Cause(ctx), fleet.ErrLeased) {
			t.Errorf("lost: %v", context.Cause(ctx))
		}
		release()
		if l.get("a") != "" || l.get("b") != "another" {
			t.Errorf("after release: %v", l.of)
		}
	})
}
