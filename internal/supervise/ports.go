package supervise

import (
	"fmt"
	"math/rand/v2"
	"net"
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
		n := lowPort + rand.IntN(highPort-lowPort)
		candidate := net.JoinHostPort(host, strconv.Itoa(n))
		if bind(candidate) == nil {
			return candidate, nil
		}
	}
	return "", fmt.Errorf("no free port from %d to %d on %s", lowPort, highPort, host)
}

func bind(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	return l.Close()
}
