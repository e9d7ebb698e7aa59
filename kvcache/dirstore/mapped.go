//go:build unix

package dirstore

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// words are the words of a small file that other processes have mapped too. The file may
// be cut from outside at any time, after which a read behind its end is a fault of the
// memory: with panics those become errors, and without them the end of the process. So
// they are reached through with alone.
type words struct{ b []byte }

// errFault says that mapped memory could not be reached: its file has become shorter, or
// its disk or file system failed.
var errFault = errors.New("the mapped file has become shorter or cannot be read")

// mapWords maps the first size bytes of a file, shared. Size is at least 1.
func mapWords(f *os.File, size int) (words, error) {
	b, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return words{}, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	return words{b}, nil
}

// close gives the mapping back. It may be called twice.
func (w *words) close() {
	if w.b != nil {
		_ = unix.Munmap(w.b) // cannot fail for what Mmap returned
		w.b = nil
	}
}

// with lets f reach the words. It returns errFault when they could not be.
func (w words) with(f func(b []byte)) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			// A fault elsewhere is a fault of the program.
			if begin := uintptr(unsafe.Pointer(unsafe.SliceData(w.b))); p.Addr() < begin || p.Addr() >= begin+uintptr(len(w.b)) {
				panic(p)
			}
			err = errFault
		default:
			panic(p)
		}
	}()
	f(w.b)
	return nil
}

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
