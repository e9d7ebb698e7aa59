package main

import (
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/supervise"
)

// Only folders of dead runs are leftovers: of the right name, with an owner's file that
// nobody holds, and not one that was made a moment ago, unless up.json names it.
func TestLeftovers(t *testing.T) {
	temp, dir := t.TempDir(), t.TempDir()
	e := &env{log: slog.New(slog.NewTextHandler(io.Discard, nil)), getenv: func(name string) string {
		return map[string]string{"TMPDIR": temp}[name]
	}}
	folder := func(name string, owner bool, age time.Duration) string {
		path := filepath.Join(temp, name)
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		if owner {
			file := filepath.Join(path, ownerFile)
			if err := os.WriteFile(file, []byte("1\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			at := time.Now().Add(-age)
			if err := os.Chtimes(file, at, at); err != nil {
				t.Fatal(err)
			}
		}
		return path
	}
	want := []string{folder("kvmesh-1", true, 0), folder("kvmesh-2", true, time.Hour), folder("kvmesh-kv-3", true, time.Hour)}
	folder("kvmesh-4", false, 0)
	folder("kvmesh-5", true, 0)
	folder("kvmesh-e2e-6", true, time.Hour)
	held := folder("kvmesh-7", true, time.Hour)
	lock, err := supervise.Take(filepath.Join(held, ownerFile))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(held, ownerFile), old, old); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(want[1], filepath.Join(temp, "kvmesh-8")); err != nil {
		t.Fatal(err)
	}
	upJSON(t, dir, runningMesh{RunDir: want[0], KVDir: held})

	var got []string
	for _, d := range leftovers(e, filepath.Join(dir, stateFolder)) {
		if strings.HasPrefix(d, temp) { // in /dev/shm there may be others'
			got = append(got, d)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("%v\nwant %v", got, want)
	}
}

// `up` removes them before it starts, in the place that its policy names, too.
func TestUpSweeps(t *testing.T) {
	temp, kv := t.TempDir(), t.TempDir()
	m := &localMesh{stateDir: t.TempDir(), set: &policy.Set{}, e: &env{log: slog.New(slog.DiscardHandler), getenv: func(name string) string {
		return map[string]string{"TMPDIR": temp}[name]
	}}}
	m.set.Mesh.KV.Dir = kv
	left := filepath.Join(kv, "kvmesh-kv-1")
	if err := os.MkdirAll(filepath.Join(left, "models"), 0o700); err != nil {
		t.Fatal(err)
	}
	owner := filepath.Join(left, ownerFile)
	if err := os.WriteFile(owner, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(owner, old, old); err != nil {
		t.Fatal(err)
	}
	m.sweep()
	if !absent(left) {
		t.Error("left behind still")
	}
	// A run's own folders are marked.
	if err := m.own(kv); err != nil {
		t.Fatal(err)
	}
	if _, held := supervise.Holder(filepath.Join(kv, ownerFile)); !held {
		t.Error("an own folder is nobody's")
	}
	m.close()
	if _, held := supervise.Holder(filepath.Join(kv, ownerFile)); held {
		t.Error("held after the end")
	}
}
