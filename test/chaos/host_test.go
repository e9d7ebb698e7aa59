package chaos

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// host stands for another machine: a network namespace, joined to this one by a line
// of its own.
type host struct {
	ns, dev    string // its name, and the line's end on this side
	near, addr string // addresses of this side and of the host
}

// errNoHosts: the test may not make network namespaces here.
var errNoHosts = errors.New("no network namespaces: that takes root and iproute2 on Linux")

// newHost makes a host, which goes with the test.
func newHost(t *testing.T) (*host, error) {
	t.Helper()
	pid := os.Getpid()
	// 198.18.0.0/15 is set aside for tests of networks: RFC 2544, appendix C.2.2.
	net := fmt.Sprintf("198.18.%d.", pid%256)
	h := &host{ns: fmt.Sprintf("kvmesh-%d", pid), dev: fmt.Sprintf("kvm%d", pid), near: net + "1", addr: net + "2"}
	if _, err := exec.LookPath("ip"); err != nil || os.Getuid() != 0 {
		return nil, errNoHosts
	}
	if err := ip("netns", "add", h.ns); err != nil {
		return nil, errors.Join(errNoHosts, err)
	}
	t.Cleanup(func() {
		if err := ip("netns", "del", h.ns); err != nil { // and the line with it
			t.Error(err)
		}
	})
	for _, args := range [][]string{
		{"link", "add", h.dev, "type", "veth", "peer", "name", "eth0", "netns", h.ns},
		{"addr", "add", h.near + "/30", "dev", h.dev},
		{"link", "set", h.dev, "up"},
		{"-n", h.ns, "addr", "add", h.addr + "/30", "dev", "eth0"},
		{"-n", h.ns, "link", "set", "eth0", "up"},
		{"-n", h.ns, "link", "set", "lo", "up"},
	} {
		if err := ip(args...); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// command is a command that runs on the host.
func (h *host) command(name string, args ...string) *exec.Cmd {
	return exec.Command("ip", append([]string{"netns", "exec", h.ns, name}, args...)...)
}

// troubles are what can happen to the host's line: it is down, and everything sent is
// lost in silence; or it is slow and loses packets, where the kernel has netem.
func (h *host) troubles(t *testing.T) [2]trouble {
	down := trouble{
		"line down",
		func() error { return ip("link", "set", h.dev, "down") },
		func() error { return ip("link", "set", h.dev, "up") },
	}
	slow := trouble{
		"line slow and lossy",
		func() error {
			return run("tc", "qdisc", "add", "dev", h.dev, "root", "netem", "delay", "100ms", "20ms", "loss", "1%")
		},
		func() error { return run("tc", "qdisc", "del", "dev", h.dev, "root") },
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

func ip(args ...string) error { return run("ip", args...) }

func run(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
