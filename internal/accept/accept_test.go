//go:build unix

package accept

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// listener answers each Accept with the next error, and then with a connection.
type listener struct {
	net.Listener
	errs []error
	conn net.Conn
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	if len(l.errs) == 0 {
		return l.conn, nil
	}
	err := l.errs[0]
	l.errs = l.errs[1:]
	return nil, err
}

// lacking is what the system says, as package net has it.
func lacking(no syscall.Errno) error {
	return &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", no)}
}

// TestNext: what passes is waited for, longer each time, and the connection comes then.
func TestNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, other := net.Pipe()
		defer c.Close()
		defer other.Close()
		l := &listener{conn: c}
		for range 12 {
			l.errs = append(l.errs, lacking(syscall.EMFILE), lacking(syscall.ECONNABORTED))
		}
		begin := time.Now()
		got, err := Next(t.Context(), l, slog.New(slog.DiscardHandler))
		if err != nil || got != c {
			t.Errorf("%v, %v", got, err)
		}
		// 5 ms to 640 ms, and a second for each of the others.
		if took, want := time.Since(begin), 1275*time.Millisecond+16*time.Second; took != want {
			t.Errorf("took %v, want %v", took, want)
		}
	})
}

// TestEnds: a closed listener ends it at once, and so does the end of the context.
func TestEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := slog.New(slog.DiscardHandler)
		for _, end := range []error{net.ErrClosed, fmt.Errorf("x: %w", syscall.EINVAL)} {
			if _, err := Next(t.Context(), &listener{errs: []error{end}}, log); !errors.Is(err, end) {
				t.Errorf("%v, want %v", err, end)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := Next(ctx, &listener{errs: []error{lacking(syscall.EMFILE)}}, log); !errors.Is(err, context.Canceled) {
			t.Errorf("%v when the context has ended", err)
		}
	})
}
