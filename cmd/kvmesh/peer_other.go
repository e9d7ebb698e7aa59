//go:build !linux

package main

import (
	"context"
	"errors"
)

// socketOwner would return the process that listens on a Unix socket.
func socketOwner(context.Context, string) (pid int, err error) {
	return 0, errors.New("who listens on a socket is known on Linux only")
}
