package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/kvmesh/kvmesh/internal/supervise"
)

// longestSocket is the longest path of a socket below the folder for temporary
// files: os.MkdirTemp appends up to ten digits to the run folder's name.
func longestSocket() string {
	s, longest := socketsIn("kvmesh-1234567890"), ""
	for _, path := range []string{s.xds, s.snapshot, s.extProc, s.relay, s.egress} {
		if len(path) > len(longest) {
			longest = path
		}
	}
	return longest
}

// tempDir is the folder for temporary files: TMPDIR where it does, else /tmp.
// complaint says why TMPDIR does not.
func (e *env) tempDir() (dir string, complaint, err error) {
	return supervise.TempDir(e.getenv("TMPDIR"), longestSocket())
}

// makeTemp makes a folder in tempDir that only this user can enter.
func (e *env) makeTemp(prefix string) (string, error) {
	dir, complaint, err := e.tempDir()
	if err != nil {
		return "", err
	}
	if complaint != nil {
		e.log.Info("temporary files go elsewhere", "dir", dir, "because", complaint)
	}
	const hint = "set TMPDIR to a short folder that exists and is writable"
	if free, err := freeBytes(dir); err == nil && free < leastTemp {
		return "", fullError(fmt.Errorf("%d KiB are free in %s, a run needs %d KiB: %w", free>>10, dir, leastTemp>>10, syscall.ENOSPC), dir, hint)
	}
	made, err := os.MkdirTemp(dir, prefix)
	if err != nil {
		return "", fullError(fmt.Errorf("folder for temporary files: %w", err), dir, hint)
	}
	return filepath.Clean(made), nil
}

// leastTemp is the room that the sockets, policies and state of a run need in any case.
const leastTemp = 4 << 20

// fullError puts first that a file system is full, where that is the cause of err, with
// what helps; else it is err with the hint.
func fullError(err error, dir, hint string) error {
	if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return withHint(err, hint)
	}
	return withHint(fmt.Errorf("the file system of %s is full: %w", dir, err), "free room there (`df -h "+dir+"` shows it), or "+hint)
}
