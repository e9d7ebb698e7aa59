//go:build unix

package dirstore

import (
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapFile maps the first size bytes of a file, shared. Size is at least 1, and
// the file must be as long: a read behind its end would kill the process.
func mapFile(f *os.File, size int64, write bool) ([]byte, error) {
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	}
	// An address space of 32 bits cannot map every file.
	if size < 1 || int64(int(size)) != size {
		return nil, fmt.Errorf("map %d bytes of %s", size, f.Name())
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(size), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	return b, nil
}

// unmap gives a mapping back. It cannot fail for what mapFile returned.
func unmap(b []byte) { _ = unix.Munmap(b) }

// word64 returns the 8-byte word at a multiple of 8 in a mapping, which other
// processes may change at any time.
func word64(b []byte, at int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&b[at : at+8][0]))
}

// word32 is the same for 4 bytes.
func word32(b []byte, at int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&b[at : at+4][0]))
}

// lock takes the exclusive lock of a file if nobody has it. The kernel frees it
// when the process ends, however it ends; unlike a process id it means the same
// in every container that shares the directory.
func lock(f *os.File) bool { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil }
