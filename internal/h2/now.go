package h2

import (
	"errors"
	"net"
	"syscall"
)

// now writes to a socket as much as it takes at once. Not safe for concurrent use.
type now struct {
	raw syscall.RawConn
	try func(fd uintptr) bool // made once, for a token is too little to make one

	p   []byte
	n   int
	err error
}

func (w *now) init(nc net.Conn) {
	if sc, ok := nc.(syscall.Conn); ok {
		w.raw, _ = sc.SyscallConn() // nil where it is closed already
	}
	w.try = func(fd uintptr) bool {
		for {
			w.n, w.err = syscall.Write(int(fd), w.p)
			if !errors.Is(w.err, syscall.EINTR) {
				return true // never wait
			}
		}
	}
}

// can reports whether the connection is a socket.
func (w *now) can() bool { return w.raw != nil }

// write returns how much the socket took; none is no error.
func (w *now) write(p []byte) (int, error) {
	w.p = p
	if err := w.raw.Write(w.try); err != nil {
		return 0, err
	}
	w.p = nil
	switch {
	case errors.Is(w.err, syscall.EAGAIN):
		return 0, nil
	case w.err != nil:
		return 0, w.err
	}
	return w.n, nil
}
