package supervise

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strconv"
)

// Ports below the usual range of outgoing connections, so that a port stays
// free for its child while the child restarts.
const (
	lowPort  = 20000
	highPort = 32000
)

// FreePort returns addr with a free TCP port in place of port 0, or addr itself
// when the port is given and free. The error of a taken port names it.
func FreePort(addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", fmt.Errorf("address %q: want ip:port", addr)
	}
	if port != "0" {
		if err := bind(addr); err != nil {
			return "", fmt.Errorf("address %s cannot be used: %w", addr, err)
		}
		return addr, nil
	}
	for range 200 {
		candidate := net.JoinHostPort(host, strconv.Itoa(lowPort+rand.IntN(highPort-lowPort)))
		if bind(candidate) == nil {
			return candidate, nil
		}
	}
	return "", fmt.Errorf("no free port from %d to %d on %s", lowPort, highPort, host)
}

// Ports gives out free ports, none of them twice: some time passes until a child listens
// at its own. On Linux it takes none either that another process holds in a Ports. The
// zero value is ready; it holds its ports as long as it is reachable. Not safe for
// concurrent use.
type Ports struct {
	given map[string]bool // port numbers
	held  []io.Closer
}

// Free is FreePort.
func (p *Ports) Free(addr string) (string, error) {
	for {
		got, err := FreePort(addr)
		if err != nil || got == addr { // one that is given is the caller's to answer for
			return got, err
		}
		_, port, err := net.SplitHostPort(got)
		if err != nil {
			return "", err
		}
		if p.given[port] {
			continue
		}
		c, err := hold(port)
		if err != nil {
			continue // another process has it
		}
		if p.given == nil {
			p.given = map[string]bool{}
		}
		p.given[port] = true
		p.held = append(p.held, c)
		return got, nil
	}
}

// hold tells others on this host that a port is taken, by a name in Linux's abstract
// space, which goes with the process and leaves nothing behind.
func hold(port string) (io.Closer, error) {
	if runtime.GOOS != "linux" {
		return io.NopCloser(nil), nil
	}
	return net.ListenUnixgram("unixgram", &net.UnixAddr{Name: "@kvmesh-port-" + port, Net: "unixgram"})
}

func bind(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	return l.Close()
}
