package main

import (
	"fmt"
	"os"
	"path/filepath"

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
	made, err := os.MkdirTemp(dir, prefix)
	if err != nil {
		return "", withHint(fmt.Errorf("folder for temporary files: %w", err), "set TMPDIR to a short folder that exists and is writable")
	}
	return filepath.Clean(made), nil
}
