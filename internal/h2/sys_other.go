//go:build !linux || race

package h2

import "syscall"

// sysRead and sysWrite are read(2) and write(2), as the syscall package has them: it tells
// the race detector that what was written was so before it is read.

func sysRead(fd uintptr, p []byte) (int, error) { return syscall.Read(int(fd), p) }

func sysWrite(fd uintptr, p []byte) (int, error) { return syscall.Write(int(fd), p) }
