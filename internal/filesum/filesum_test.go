package filesum

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// write writes a file, and the folders above it.
func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestSHA256(t *testing.T) {
	const want = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" // FIPS 180-4
	dir, cache := t.TempDir(), filepath.Join(t.TempDir(), "new", "cache")
	name := filepath.Join(dir, "f")
	write(t, name, "abc")
	for range 2 {
		if sum, err := SHA256(t.Context(), name, cache); err != nil || sum != want {
			t.Fatalf("%s, %v", sum, err)
		}
	}
	// It is remembered: what the cache says counts, until the file changes.
	entries, err := filepath.Glob(filepath.Join(cache, "*.sha256"))
	if err != nil || len(entries) != 1 {
		t.Fatalf("%v, %v", entries, err)
	}
	said := "00" + want[2:]
	write(t, entries[0], said+"\n")
	if sum, _ := SHA256(t.Context(), name, cache); sum != said {
		t.Errorf("hashed again: %s", sum)
	}
	if sum, _ := SHA256(t.Context(), name, ""); sum != want {
		t.Errorf("without a cache %s", sum)
	}
	write(t, entries[0], "torn")
	if sum, _ := SHA256(t.Context(), name, cache); sum != want {
		t.Errorf("a torn entry gives %s", sum)
	}
	write(t, name, "abd")
	later := time.Now().Add(time.Hour)
	if err := os.Chtimes(name, later, later); err != nil {
		t.Fatal(err)
	}
	if sum, _ := SHA256(t.Context(), name, cache); sum == want {
		t.Error("a change goes unseen")
	}
	if _, err := SHA256(t.Context(), dir, cache); err == nil {
		t.Error("a folder has a hash")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := SHA256(ctx, name, ""); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
}

func TestFolder(t *testing.T) {
	model := func() string {
		dir := t.TempDir()
		write(t, filepath.Join(dir, "config.json"), "{}")
		write(t, filepath.Join(dir, "part", "a.safetensors"), "weights")
		return dir
	}
	sum := func(dir string) string {
		t.Helper()
		s, err := Folder(t.Context(), dir, "")
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	base := model()
	want := sum(base)
	for name, same := range map[string]bool{
		"README.md": true, "LICENSE": true, ".cache/x.json": true,
		"more.safetensors": false, "part/a.safetensors": false, "config.json": false, "b/config.json": false,
	} {
		dir := model()
		write(t, filepath.Join(dir, filepath.FromSlash(name)), "changed")
		if (sum(dir) == want) != same {
			t.Errorf("%s is written: the same hash is %v, want %v", name, !same, same)
		}
	}
	// As in a cache of Hugging Face, where all files are links.
	linked := t.TempDir()
	for _, name := range []string{"config.json", "part"} {
		if err := os.Symlink(filepath.Join(base, name), filepath.Join(linked, name)); err != nil {
			t.Skip("no symbolic links here: ", err)
		}
	}
	if sum(linked) != want {
		t.Error("links to the same files have another hash")
	}
	if _, err := Folder(t.Context(), t.TempDir(), ""); !errors.Is(err, ErrEmpty) {
		t.Errorf("an empty folder: %v", err)
	}
	loop := model()
	if err := os.Symlink(loop, filepath.Join(loop, "again")); err != nil {
		t.Fatal(err)
	}
	if _, err := Folder(t.Context(), loop, ""); err == nil {
		t.Error("a folder that links to itself has a hash")
	}
}
