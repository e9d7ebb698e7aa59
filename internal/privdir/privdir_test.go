//go:build unix

package privdir_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvmesh/kvmesh/internal/privdir"
)

// TestOpen: what is made is this user's alone, and what others can reach is refused.
func TestOpen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	for range 2 {
		root, err := privdir.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		root.Close()
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	if err := os.Chmod(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	if root, err := privdir.Open(dir); err == nil {
		root.Close()
		t.Error("a directory that a group can read was opened")
	}
}

// TestLock: one at a time.
func TestLock(t *testing.T) {
	root, err := privdir.Open(filepath.Join(t.TempDir(), "d"))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for range 2 {
		f, err := privdir.Lock(root, "lock")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := privdir.Lock(root, "lock"); !errors.Is(err, privdir.ErrInUse) {
			t.Errorf("a second one: %v", err)
		}
		f.Close()
	}
}
