package rollout

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// fakeLeases are pools with their owners.
type fakeLeases map[string]string

func (l fakeLeases) LeasePool(_ context.Context, pool, owner string) error {
	if had := l[pool]; had != "" && had != owner {
		return fmt.Errorf("%w: %s", fleet.ErrLeased, had)
	}
	l[pool] = owner
	return nil
}

func (l fakeLeases) ReleasePool(_ context.Context, pool, owner string) error {
	if l[pool] == owner {
		delete(l, pool)
	}
	return nil
}

func TestHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fakeLeases{"b": "another"}
		if _, _, err := Hold(t.Context(), l, []string{"a", "b"}, "me"); !errors.Is(err, fleet.ErrLeased) {
			t.Errorf("held by another: %v", err)
		}
		if l["a"] != "" {
			t.Error("a pool is kept though the other could not be had")
		}
		delete(l, "b")
		ctx, release, err := Hold(t.Context(), l, []string{"a", "b"}, "me")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if ctx.Err() != nil {
			t.Errorf("ended while it held: %v", context.Cause(ctx))
		}
		l["b"] = "another" // it was silent for too long
		time.Sleep(2 * fleet.Heartbeat)
		if !errors.Is(context.Cause(ctx), fleet.ErrLeased) {
			t.Errorf("lost: %v", context.Cause(ctx))
		}
		release()
		if l["a"] != "" || l["b"] != "another" {
			t.Errorf("after release: %v", l)
		}
	})
}
