package chaos

import (
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

// wired makes a host that is joined to this machine by a wire, with the addresses of both
// and what can happen to it: it is down, and everything sent is lost in silence; it is slow;
// or it loses some.
func wired(t *testing.T) (*testmesh.Host, [2]string, []*trouble, error) {
	t.Helper()
	h, err := testmesh.NewHost(t, 0)
	if err != nil {
		return nil, [2]string{}, nil, err
	}
	w, err := testmesh.NewWire(t, nil, h)
	if err != nil {
		return nil, [2]string{}, nil, err
	}
	return h, w.Addrs, []*trouble{
		{
			name: "down", begin: func() { w.Up(false) }, end: func() { w.Up(true) },
			hits: func() int64 { return w.Frames().Cut }, unit: "frames lost, all that came",
		},
		{
			name: "slow", begin: func() { w.Slow(100*time.Millisecond, 0) }, end: func() { w.Slow(0, 0) },
			hits: func() int64 { return w.Frames().Late }, unit: "frames 100 ms late, all that came",
		},
		{
			name: "lossy", begin: func() { w.Slow(0, 20) }, end: func() { w.Slow(0, 0) },
			hits: func() int64 { return w.Frames().Lost }, unit: "frames lost, one of 20",
		},
	}, nil
}
