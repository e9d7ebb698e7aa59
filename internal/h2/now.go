package h2

import (
	"errors"
	"io"
	"net"
	"syscall"
)

// now reads and writes a socket with system calls that never wait, so that none has to be
// announced to Go's scheduler (sys_linux.go says what that saves). A read that finds nothing
// waits between two of them, as net.Conn's does. One may read and one write at a time.
type now struct {
	nc      net.Conn
	raw     syscall.RawConn // nil where that is no socket
	in, out transfer
	busy    int // reads since one found nothing
}

// mostBusy is after how many reads in a row that did not have to wait they are announced:
// who does not rest for long must be seen by the scheduler, which makes room for others.
const mostBusy = 10

// transfer is what one direction has under way.
type transfer struct {
	try func(fd uintptr) bool // made once, for a token is too little to make one
	p   []byte
	n   int
	err error
}

func (w *now) init(nc net.Conn) {
	w.nc = nc
	if sc, ok := nc.(syscall.Conn); ok {
		w.raw, _ = sc.SyscallConn() // nil where it is closed already
	}
	w.in.try = func(fd uintptr) bool {
		sys := sysRead
		if w.busy++; w.busy > mostBusy {
			sys = func(fd uintptr, p []byte) (int, error) { return syscall.Read(int(fd), p) }
		}
		w.in.call(fd, sys)
		if errors.Is(w.in.err, syscall.EAGAIN) {
			w.busy = 0
			return false // wait until there is something
		}
		return true
	}
	w.out.try = func(fd uintptr) bool {
		w.out.call(fd, sysWrite)
		return true // never wait
	}
}

func (t *transfer) call(fd uintptr, sys func(fd uintptr, p []byte) (int, error)) {
	for {
		if t.n, t.err = sys(fd, t.p); !errors.Is(t.err, syscall.EINTR) {
			return
		}
	}
}

// end lets go of the buffer. err is why there was no call, or no more.
func (t *transfer) end(err error) (int, error) {
	t.p = nil
	if err == nil {
		err = t.err
	}
	if err != nil {
		return 0, err
	}
	return t.n, nil
}

// can reports whether write is possible: the connection is a socket.
func (w *now) can() bool { return w.raw != nil }

// read is the connection's Read, for a p that is not empty.
func (w *now) read(p []byte) (int, error) {
	if !w.can() {
		return w.nc.Read(p)
	}
	w.in.p = p
	n, err := w.in.end(w.raw.Read(w.in.try))
	if n == 0 && err == nil {
		return 0, io.EOF
	}
	return n, err
}

// write returns how much the socket took; none is no error.
func (w *now) write(p []byte) (int, error) {
	w.out.p = p
	n, err := w.out.end(w.raw.Write(w.out.try))
	if errors.Is(err, syscall.EAGAIN) {
		return 0, nil
	}
	return n, err
}
