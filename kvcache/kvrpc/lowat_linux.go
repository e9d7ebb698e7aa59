package kvrpc

import (
	"crypto/tls"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// lowat is SO_RCVLOWAT of a connection: how many bytes there must be before the kernel
// wakes who reads. While much is still to come, being woken for each packet is what costs
// most, more than a copy of the bytes does.
type lowat struct {
	raw  syscall.RawConn // nil = there is nothing to set
	now  int             // what is set
	over int             // how much may have been read from the kernel and not been handed on
	set  func(fd uintptr)
	err  error // of set
}

// mostLowat is the most that is waited for.
const mostLowat = 1 << 20

func newLowat(c net.Conn) *lowat {
	w := &lowat{now: 1}
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
		w.over = wideBuffer + 2*maxRecord
		if below, ok := c.(*wide); ok {
			c = below.Conn
		}
	}
	if s, ok := c.(syscall.Conn); ok {
		w.raw, _ = s.SyscallConn() // nil where it is closed already
	}
	w.set = func(fd uintptr) {
		w.err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT, w.now)
	}
	w.widen()
	return w
}

// widen has the kernel make the receive buffer large enough for two units, as it does when
// it is told to wait for so much: while one is verified, the next one comes.
func (w *lowat) widen() {
	for _, n := range []int{2 * mostLowat, 1} {
		// Where the kernel does not let it, the channel is slower.
		if w.now = n; w.raw != nil {
			_ = w.raw.Control(w.set)
		}
	}
}

// maxRecord is more than the longest record of TLS 1.3 with its header (RFC 8446 §5.2).
const maxRecord = 17 << 10

// expect sets it for a message of which left bytes are still to be handed on: never more
// than must come, or the wait would be for the peer's end.
func (w *lowat) expect(left int) error {
	n := max(1, min(mostLowat, left-w.over))
	if w.raw == nil || n == w.now {
		return nil
	}
	w.now = n
	if err := w.raw.Control(w.set); err != nil {
		return err
	}
	return w.err
}
