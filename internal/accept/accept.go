//go:build unix

// Package accept takes connections in for servers that outlive a lack of resources: where no
// file descriptor is left, new clients wait, and those that are served notice nothing.
package accept

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"syscall"
	"time"
)

// The wait between two tries while the system lacks something: it doubles from the one to
// the other.
const (
	firstWait = 5 * time.Millisecond
	lastWait  = time.Second
)

// Next returns the next connection of l. What passes, such as too many open files, is logged
// and waited for until ctx ends; other errors, such as that of a closed listener, are
// returned. It is safe for concurrent use.
func Next(ctx context.Context, l net.Listener, log *slog.Logger) (net.Conn, error) {
	for wait := firstWait; ; wait = min(2*wait, lastWait) {
		c, err := l.Accept()
		if err == nil || !passes(err) {
			return c, err
		}
		log.Warn("accept a connection: tried again", "err", err, "after", wait)
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// passes says whether an error of Accept is about one connection, or a lack of something.
func passes(err error) bool {
	for _, e := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED, syscall.EPERM} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
