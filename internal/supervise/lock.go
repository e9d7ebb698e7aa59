package supervise

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// HeldError says that another process holds a lock.
type HeldError struct {
	Path string
	PID  int // of the holder, 0 when the file does not say
}

// Error implements error.
func (e *HeldError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("%s is held by another process", e.Path)
	}
	return fmt.Sprintf("%s is held by process %d", e.Path, e.PID)
}

// Lock is the exclusive lock of a file, held until Close or the end of this
// process, however it ends. Children do not inherit it.
type Lock struct {
	file *os.File
	path string
}

// Holds reports whether the file that is locked still has its name: a lock of a removed
// file keeps nobody out.
func (l *Lock) Holds() bool { return same(l.file, l.path) }

// lockPatience is how long Take waits for a lock to come free: whoever only looks
// whether it is held, holds it for a moment.
const lockPatience = 500 * time.Millisecond

// Take locks path, making the file and its folder, and writes this process's id
// into it. The error of a lock that another process holds is a *HeldError.
func Take(path string) (*Lock, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	deadline := time.Now().Add(lockPatience)
	for {
		l, err := try(path)
		if err == nil {
			if err := l.sign(); err != nil {
				return nil, err // it is closed
			}
			return l, nil
		}
		if _, held := errors.AsType[*HeldError](err); !held || time.Now().After(deadline) {
			return nil, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Holder returns the process that holds the lock of path, and whether one does.
// A missing file is held by nobody.
func Holder(path string) (pid int, held bool) {
	if _, err := os.Stat(path); err != nil {
		return 0, false
	}
	l, err := try(path)
	if err == nil {
		_ = l.Close() // it was only asked for
		return 0, false
	}
	h, ok := errors.AsType[*HeldError](err)
	if !ok {
		return 0, false
	}
	return h.PID, true
}

// try takes the lock if it is free now.
func try(path string) (*Lock, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		defer f.Close()
		return nil, &HeldError{Path: path, PID: signature(f)}
	}
	if err != nil {
		_ = f.Close() // the lock's error is the one to tell
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	// A file that was removed between open and lock keeps nobody out.
	if !same(f, path) {
		_ = f.Close() // a lock of nothing
		return nil, &HeldError{Path: path}
	}
	return &Lock{file: f, path: path}, nil
}

// same reports whether path still names the open file.
func same(f *os.File, path string) bool {
	open, err := f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(path)
	return err == nil && os.SameFile(open, named)
}

// signature reads the id that a holder wrote, 0 when there is none yet.
func signature(f *os.File) int {
	buf := make([]byte, 32)
	n, _ := f.ReadAt(buf, 0) // shorter than the buffer: io.EOF
	pid, err := strconv.Atoi(strings.TrimSpace(string(buf[:n])))
	if err != nil || pid < 0 {
		return 0
	}
	return pid
}

func (l *Lock) sign() error {
	err := l.file.Truncate(0)
	if err == nil {
		_, err = l.file.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	}
	if err != nil {
		_ = l.file.Close() // an unsigned lock is of no use
		return fmt.Errorf("sign lock: %w", err)
	}
	return nil
}

// Close gives the lock back. The file stays: a lock of a removed file would keep
// nobody out. A nil *Lock does nothing.
func (l *Lock) Close() error {
	if l == nil {
		return nil
	}
	return l.file.Close()
}
