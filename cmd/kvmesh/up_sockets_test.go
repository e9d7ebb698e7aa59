package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/supervise"
)

// A named folder is taken only when nothing of anybody else is in it: all of it is removed
// at the end.
func TestClaimFolder(t *testing.T) {
	root := t.TempDir()
	make := func(name string, files ...string) string {
		dir := filepath.Join(root, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	for name, dir := range map[string]string{
		"new": filepath.Join(root, "new"), "empty": make("empty"), "of a killed run": make("dead", ownerFile, "xds.sock"),
	} {
		lock, err := claimFolder(dir)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if _, err := claimFolder(dir); err == nil {
			t.Errorf("%s was given to two", name)
		}
		defer lock.Close()
		st, err := os.Stat(dir)
		if err != nil || st.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", name, st, err)
		}
		if list, err := os.ReadDir(dir); err != nil || len(list) != 1 { // whose it is
			t.Errorf("%s: %v is in it, %v", name, list, err)
		}
	}
	held := make("held")
	l, err := supervise.Take(filepath.Join(held, ownerFile))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	link := filepath.Join(root, "link")
	if err := os.Symlink(make("target"), link); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(make("full", "mine"), "mine")
	for dir, want := range map[string]string{
		held: "is in use by process ", link: "is no folder of this user", file: "is no folder of this user",
		filepath.Dir(file): "is not empty: mine is in it", filepath.Join(root, "no", "such"): "no such file",
	} {
		if _, err := claimFolder(dir); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", dir, err, want)
		}
	}
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
}
