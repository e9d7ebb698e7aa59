//go:build linux && !race

package h2

import (
	"syscall"
	"unsafe"
)

// sysRead and sysWrite are read(2) and write(2) on a socket that does not block. A call that
// might block has to be announced to Go's scheduler, which then wakes a thread of its own,
// sysmon, to look after the processor that the call may keep. While a process sleeps
// between two tokens, sysmon does, too: so each token woke two threads, and the second for
// nothing but a fifth of what the token cost. These calls are over in microseconds, and
// need nobody to look after them.
func sysRead(fd uintptr, p []byte) (int, error) { return sys(syscall.SYS_READ, fd, p) }

func sysWrite(fd uintptr, p []byte) (int, error) { return sys(syscall.SYS_WRITE, fd, p) }

func sys(call, fd uintptr, p []byte) (int, error) {
	n, _, errno := syscall.RawSyscall(call, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
