package testmesh

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

// Host stands for another machine: a network namespace, joined to this one by a line
// of its own.
type Host struct {
	// NS is its name, and Dev the line's end on this side.
	NS, Dev string
	// Near and Addr are the addresses of this side and of the host.
	Near, Addr string

	named atomic.Int32 // ports
}

// ErrNoHosts says that a test may not make network namespaces here.
var ErrNoHosts = errors.New("no network namespaces: that takes root and iproute2 on Linux")

// NewHost makes a host, which goes with the test. Each of a process has another number, up
// to 63.
func NewHost(t testing.TB, no int) (*Host, error) {
	t.Helper()
	pid := os.Getpid()
	// 198.18.0.0/15 is set aside for tests of networks: RFC 2544, appendix C.2.2.
	net := fmt.Sprintf("198.18.%d.", pid%256)
	h := &Host{
		NS: fmt.Sprintf("kvmesh-%d-%d", pid, no), Dev: fmt.Sprintf("kvm%dx%d", pid, no),
		Near: net + strconv.Itoa(4*no+1), Addr: net + strconv.Itoa(4*no+2),
	}
	if _, err := exec.LookPath("ip"); err != nil || os.Getuid() != 0 {
		return nil, ErrNoHosts
	}
	if err := IP("netns", "add", h.NS); err != nil {
		return nil, errors.Join(ErrNoHosts, err)
	}
	t.Cleanup(func() {
		_ = IP("link", "del", h.Dev) // at once; else it goes with the namespace, some time
		if err := IP("netns", "del", h.NS); err != nil {
			t.Error(err)
		}
	})
	for _, args := range [][]string{
		{"link", "add", h.Dev, "type", "veth", "peer", "name", "eth0", "netns", h.NS},
		{"addr", "add", h.Near + "/30", "dev", h.Dev},
		{"link", "set", h.Dev, "up"},
		{"-n", h.NS, "addr", "add", h.Addr + "/30", "dev", "eth0"},
		{"-n", h.NS, "link", "set", "eth0", "up"},
		{"-n", h.NS, "link", "set", "lo", "up"},
	} {
		if err := IP(args...); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// Free is an address of the host that nobody uses: nothing runs there but what a test starts,
// so it is one that was not named yet.
func (h *Host) Free() string { return fmt.Sprintf("%s:%d", h.Addr, 20000+h.named.Add(1)) }

// Command is a command that runs on the host, as the process that it starts.
func (h *Host) Command(name string, args ...string) *exec.Cmd {
	return exec.Command("ip", append([]string{"netns", "exec", h.NS, name}, args...)...)
}

// Die kills all that runs on the host, and takes its line down.
func (h *Host) Die() error {
	out, err := exec.Command("ip", "netns", "pids", h.NS).Output()
	if err != nil {
		return fmt.Errorf("who runs on host %s: %w", h.NS, err)
	}
	for text := range strings.FieldsSeq(string(out)) {
		pid, err := strconv.Atoi(text)
		if err == nil {
			err = syscall.Kill(pid, syscall.SIGKILL)
		}
		if err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("kill process %s of host %s: %w", text, h.NS, err)
		}
	}
	return IP("link", "set", h.Dev, "down")
}

// IP runs iproute2's ip.
func IP(args ...string) error { return Run("ip", args...) }

// Run runs a command, whose output the error has.
func Run(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
