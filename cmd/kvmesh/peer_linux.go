package main

import (
	"context"
	"errors"
	"net"

	"golang.org/x/sys/unix"
)

// socketOwner returns the process that listens on a Unix socket.
func socketOwner(ctx context.Context, path string) (pid int, err error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var optErr error
	err = raw.Control(func(fd uintptr) { cred, optErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(err, optErr); err != nil {
		return 0, err
	}
	return int(cred.Pid), nil
}
