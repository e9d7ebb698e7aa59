package chaos

import (
	"testing"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

// troublesOf are what can happen to a host's line: it is down, and everything sent is
// lost in silence; or it is slow and loses packets, where the kernel has netem.
func troublesOf(t *testing.T, h *testmesh.Host) [2]trouble {
	down := trouble{
		"line down",
		func() error { return testmesh.IP("link", "set", h.Dev, "down") },
		func() error { return testmesh.IP("link", "set", h.Dev, "up") },
	}
	slow := trouble{
		"line slow and lossy",
		func() error {
			return testmesh.Run("tc", "qdisc", "add", "dev", h.Dev, "root", "netem", "delay", "100ms", "20ms", "loss", "1%")
		},
		func() error { return testmesh.Run("tc", "qdisc", "del", "dev", h.Dev, "root") },
	}
	if err := slow.begin(); err != nil {
		t.Logf("the line is never slow and lossy, it is down instead: %v", err)
		return [2]trouble{down, down}
	}
	if err := slow.end(); err != nil {
		t.Fatal(err)
	}
	return [2]trouble{down, slow}
}
