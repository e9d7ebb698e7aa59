//go:build unix

// Package privdir opens directories that are one user's alone, and at most one process's
// at a time: those in which a store keeps what nobody else may read. Unix only.
package privdir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// Open opens a directory, made if it is not there, that nobody else can reach: anybody
// may make one in /dev/shm or /tmp.
func Open(dir string) (*os.Root, error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	st, err := root.Stat(".")
	if err == nil {
		if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) != os.Getuid() {
			err = fmt.Errorf("%s belongs to user %d", dir, sys.Uid)
		} else if st.Mode().Perm()&0o077 != 0 {
			err = fmt.Errorf("%s has mode %04o: others must not reach it, want 0700", dir, st.Mode().Perm())
		}
	}
	if err != nil {
		root.Close()
		return nil, err
	}
	return root, nil
}

// ErrInUse says that another process has the lock of a directory, or another part of this
// one.
var ErrInUse = errors.New("another process has it open")

// Lock takes the lock that is a file in root, made if it is not there, until the file is
// closed or the process ends, however it ends. The error wraps ErrInUse if somebody has
// it.
func Lock(root *os.Root, name string) (*os.File, error) {
	f, err := root.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		f.Close()
		return nil, fmt.Errorf("%w: %s", ErrInUse, root.Name())
	}
	return f, nil
}
