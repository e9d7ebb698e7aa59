// Package modelstore keeps models on a machine's own disk, so that a worker starts
// without the network. A manifest says what a version of a model consists of; a pull
// brings it here from a file path, an HTTP server or S3.
//
//	DIR/NAME/VERSION/            one version, whole and checked
//	DIR/NAME/VERSION/manifest.json
//	DIR/.partial/NAME@VERSION/   a pull that can be gone on with; *.part are incomplete
//	DIR/.locks/NAME@VERSION      held by the process that pulls
//
// A version's folder appears by a rename when everything in it was checked, and is
// never changed afterwards: a worker may run from one version while the next is
// pulled.
package modelstore

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrMissing says that a version is not in the store, or not whole.
var ErrMissing = errors.New("not in the store")

// Names of the store's own folders; no model's name begins with a dot.
const (
	partialDir = ".partial"
	locksDir   = ".locks"
)

// Store is a folder of models. Its methods are safe for concurrent use, also by
// several processes.
type Store struct{ dir string }

// Open returns the store in a folder, which appears with the first pull.
func Open(dir string) *Store { return &Store{dir} }

// Model is one version in the store.
type Model struct {
	Manifest Manifest
	Dir      string // where its files are
}

// Main is the path of the file that the engine opens.
func (m Model) Main() string { return filepath.Join(m.Dir, filepath.FromSlash(m.Manifest.Main)) }

// folder is where a version is.
func (s *Store) folder(r Ref) string { return filepath.Join(s.dir, r.Name, r.Version) }

// staging is where it is before it is whole.
func (s *Store) staging(r Ref) string { return filepath.Join(s.dir, partialDir, r.String()) }

// Find returns a version that is whole. It compares sizes; Verify compares hashes.
func (s *Store) Find(r Ref) (Model, error) {
	if err := r.validate(); err != nil {
		return Model{}, err
	}
	m := Model{Dir: s.folder(r)}
	raw, err := os.ReadFile(filepath.Join(m.Dir, manifestName))
	if errors.Is(err, fs.ErrNotExist) {
		return Model{}, fmt.Errorf("%s: %w %s", r, ErrMissing, s.dir)
	}
	if err != nil {
		return Model{}, err
	}
	if m.Manifest, err = ParseManifest(raw); err != nil {
		return Model{}, fmt.Errorf("%s: %w", r, err)
	}
	if m.Manifest.Ref() != r {
		return Model{}, fmt.Errorf("%s: its manifest is of %s", r, m.Manifest.Ref())
	}
	for _, f := range m.Manifest.Files {
		st, err := os.Stat(filepath.Join(m.Dir, filepath.FromSlash(f.Path)))
		if err != nil || !st.Mode().IsRegular() || st.Size() != f.Size {
			return Model{}, fmt.Errorf("%s: %w whole: %s is missing or has another size", r, ErrMissing, f.Path)
		}
	}
	return m, nil
}

// Verify hashes every file of a version again. The error joins a HashError or
// another one per file that is wrong.
func (s *Store) Verify(ctx context.Context, r Ref) (Model, error) {
	m, err := s.Find(r)
	if err != nil {
		return m, err
	}
	var errs []error
	for _, f := range m.Manifest.Files {
		got, err := hashFile(ctx, filepath.Join(m.Dir, filepath.FromSlash(f.Path)))
		switch {
		case ctx.Err() != nil:
			return m, ctx.Err()
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", f.Path, err))
		case got != f.SHA256:
			errs = append(errs, &HashError{f.Path, f.SHA256, got})
		}
	}
	return m, errors.Join(errs...)
}

// hashFile returns the SHA-256 of a file.
func hashFile(ctx context.Context, name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return hashOf(ctx, f)
}

// hashOf is the SHA-256 of what is left to read.
func hashOf(ctx context.Context, from io.Reader) (string, error) {
	sum := sha256.New()
	if _, err := io.Copy(sum, contextReader{ctx, from}); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// States of an Entry.
const (
	StateReady   = "ready"   // whole
	StatePartial = "partial" // a pull began
	StateBroken  = "broken"  // something is missing
)

// Entry is one version as List shows it.
type Entry struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	State   string `json:"state"`
	Files   int    `json:"files"`
	Bytes   int64  `json:"bytes"` // on disk
	Dir     string `json:"dir"`
	Reason  string `json:"reason,omitempty"` // why it is broken
}

// List returns everything in the store, sorted by name and version.
func (s *Store) List() ([]Entry, error) {
	out := []Entry{}
	names, err := folders(s.dir)
	if err != nil {
		return nil, fmt.Errorf("list models: %w", err)
	}
	for _, name := range names {
		versions, err := folders(filepath.Join(s.dir, name))
		if err != nil {
			return nil, fmt.Errorf("list models: %w", err)
		}
		for _, version := range versions {
			e := entry(Ref{name, version}, s.folder(Ref{name, version}), StateReady)
			if _, err := s.Find(Ref{name, version}); err != nil {
				e.State, e.Reason = StateBroken, err.Error()
			}
			out = append(out, e)
		}
	}
	partial, err := folders(filepath.Join(s.dir, partialDir))
	if err != nil {
		return nil, fmt.Errorf("list models: %w", err)
	}
	for _, name := range partial {
		if r, err := ParseRef(name); err == nil {
			out = append(out, entry(r, s.staging(r), StatePartial))
		}
	}
	slices.SortFunc(out, func(a, b Entry) int {
		return strings.Compare(a.Name+"\x00"+a.Version, b.Name+"\x00"+b.Version)
	})
	return out, nil
}

// folders lists the folders in a folder, without hidden ones; a missing one is empty.
func folders(dir string) (names []string, err error) {
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, d := range list {
		if d.IsDir() && !strings.HasPrefix(d.Name(), ".") {
			names = append(names, d.Name())
		}
	}
	return names, err
}

// entry counts what is in a folder.
func entry(r Ref, dir, state string) Entry {
	e := Entry{Name: r.Name, Version: r.Version, State: state, Dir: dir}
	// Files come and go while a pull runs; what cannot be read is not counted.
	_ = filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Base(name) == manifestName {
			return nil
		}
		if st, err := d.Info(); err == nil {
			e.Files++
			e.Bytes += st.Size()
		}
		return nil
	})
	return e
}

// lock waits until no other process pulls the version. The lock's file goes with the
// last that holds it.
func (s *Store) lock(ctx context.Context, r Ref) (unlock func(), err error) {
	name := filepath.Join(s.dir, locksDir, r.String())
	for {
		f, err := tryLock(name)
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", r, err)
		}
		if f != nil {
			return func() {
				_ = os.Remove(name) // while it is held, so that it is nobody else's
				_ = f.Close()       // and with the file goes the lock
			}, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for another pull of %s: %w", r, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// tryLock makes a file and locks it; nil = another process has it, or has just removed it.
func tryLock(name string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		return nil, f.Close()
	} else if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	have, err1 := f.Stat()
	want, err2 := os.Stat(name)
	if err1 != nil || err2 != nil || !os.SameFile(have, want) {
		return nil, f.Close() // a lock on what was removed keeps nobody out
	}
	return f, nil
}

// syncPath brings a file or the names in a folder to disk.
func syncPath(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
