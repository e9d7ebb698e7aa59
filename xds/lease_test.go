package xds

import (
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// One rollout at a time has a pool; a killed one loses it with time.
func TestLeases(t *testing.T) {
	var l leases
	now := time.Unix(1000, 0)
	if err := l.take("p", "a", now); err != nil {
		t.Fatal(err)
	}
	if err := l.take("p", "b", now.Add(time.Second)); err == nil || !strings.Contains(err.Error(), "a replaces workers of pool p") {
		t.Errorf("a second rollout: %v", err)
	}
	if err := l.take("q", "b", now); err != nil {
		t.Errorf("another pool: %v", err)
	}
	if err := l.take("p", "a", now.Add(10*time.Second)); err != nil {
		t.Errorf("renewal: %v", err)
	}
	if err := l.take("p", "b", now.Add(fleet.TTL+time.Second)); err == nil {
		t.Error("a renewed lease ended early")
	}
	if l.free("p", "b"); l.take("p", "b", now.Add(11*time.Second)) == nil {
		t.Error("a stranger freed the lease")
	}
	if err := l.take("p", "b", now.Add(10*time.Second+fleet.TTL)); err != nil {
		t.Errorf("after its end: %v", err)
	}
	if l.free("p", "b"); l.take("p", "c", now.Add(10*time.Second+fleet.TTL)) != nil {
		t.Error("a lease that was given back is held")
	}
}
