//go:build unix

package dirstore

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
)

// TestMain makes the test binary a child where a test started it as one.
func TestMain(m *testing.M) {
	if spec := os.Getenv(kvtest.ChildEnv); spec != "" {
		kvtest.Child(spec, openForSuite)
	}
	if dir := os.Getenv(fullEnv); dir != "" {
		os.Exit(writeToFullDisk(dir))
	}
	os.Exit(m.Run())
}

// openForSuite opens a store as kvtest asks for it.
func openForSuite(dir string, limit int64) (kvcache.Store, error) {
	return Open(Config{Dir: filepath.Join(dir, "store"), Limit: limit})
}

// tamper rewrites the file of a block.
func tamper(dir string, ref kvcache.Ref, change func([]byte) []byte) error {
	name := filepath.Join(dir, "store", blockName(ref))
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	// Another file: the old one may be mapped.
	if err := os.Remove(name); err != nil {
		return err
	}
	return os.WriteFile(name, change(b), 0o600)
}

func TestStore(t *testing.T) {
	kvtest.Run(t, kvtest.Harness{Open: openForSuite, Shared: true, Tamper: tamper})
}

// newStore opens a store of a test; cfg without a folder gets a new one.
func newStore(t testing.TB, cfg Config) *Store {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join(t.TempDir(), "store")
	}
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// sealed makes a block of one token behind a parent.
func sealed(t testing.TB, space kvcache.Space, parent kvcache.Key, id int32, size int) *kvcache.Frame {
	t.Helper()
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, IDs: []int32{id}},
		[]kvcache.Part{{Size: int64(size)}}, make([]byte, size))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// put stores blocks.
func put(t testing.TB, s *Store, frames ...*kvcache.Frame) {
	t.Helper()
	for _, f := range frames {
		if err := s.Put(context.Background(), f); err != nil {
			t.Fatal(err)
		}
	}
}

func TestConfig(t *testing.T) {
	for name, cfg := range map[string]Config{
		"no directory": {}, "limit": {Dir: "x", Limit: -1}, "ttl": {Dir: "x", TailTTL: -1}, "sweep": {Dir: "x", SweepEvery: -1},
	} {
		if s, err := Open(cfg); err == nil {
			s.Close()
			t.Errorf("%s: opened", name)
		}
	}
}

// TestOthersCannotRead: prompts are in these files.
func TestOthersCannotRead(t *testing.T) {
	s := newStore(t, Config{})
	space := kvcache.NewSpace("m", nil)
	put(t, s, sealed(t, space, space.Root, 1, 10))
	w, err := s.OpenTail(context.Background(), kvcache.TailSpec{Space: space, Stream: "s"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	err = filepath.WalkDir(s.dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err == nil && st.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", name, st.Mode())
		}
		if strings.Contains(name, "gemma") {
			t.Errorf("%s tells the model", name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestEmptyDirectory closes one of ours in which there is nothing to others.
func TestEmptyDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "empty")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s, err := Open(Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	if err := os.Chmod(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Config{Dir: dir}); !errors.Is(err, ErrOpenToOthers) {
		t.Errorf("opened to others, with something in it: %v", err)
	}
}

// TestForeignDirectory refuses what somebody else may have prepared.
func TestForeignDirectory(t *testing.T) {
	open := filepath.Join(t.TempDir(), "open")
	if err := os.Mkdir(open, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(open, "something"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	everybodys := filepath.Join(t.TempDir(), "everybodys")
	if err := os.Mkdir(everybodys, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(everybodys, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	owned := filepath.Join(t.TempDir(), "owned")
	if err := os.Mkdir(owned, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dirs := []string{open, file, everybodys}
	if os.Chown(owned, 12345, -1) == nil { // as root only
		dirs = append(dirs, owned)
	}
	for _, dir := range dirs {
		if s, err := Open(Config{Dir: dir}); err == nil {
			s.Close()
			t.Errorf("opened %s", dir)
		}
	}
}

// TestNoEscape: a link inside the directory does not lead out of it.
func TestNoEscape(t *testing.T) {
	s := newStore(t, Config{})
	outside := t.TempDir()
	if err := os.Remove(filepath.Join(s.dir, modelsDir)); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(s.dir, modelsDir)); err != nil {
		t.Fatal(err)
	}
	space := kvcache.NewSpace("m", nil)
	if err := s.Put(context.Background(), sealed(t, space, space.Root, 1, 10)); err == nil {
		t.Error("put through a link")
	}
	if names, err := os.ReadDir(outside); err != nil || len(names) != 0 {
		t.Errorf("%v, %v were written outside", names, err)
	}
	if s.Stats().Failed == 0 {
		t.Error("the failure is not counted")
	}
}

// TestOtherVersion: words of another version are not guessed at.
func TestOtherVersion(t *testing.T) {
	for name, change := range map[string]func([]byte) []byte{
		"version": func(b []byte) []byte { b[6]++; return b },
		"length":  func(b []byte) []byte { return b[:100] },
	} {
		dir := filepath.Join(t.TempDir(), "store")
		s := newStore(t, Config{Dir: dir})
		s.Close()
		control := filepath.Join(dir, controlName)
		b, err := os.ReadFile(control)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(control, change(b), 0o600); err != nil {
			t.Fatal(err)
		}
		if s, err := Open(Config{Dir: dir}); err == nil {
			s.Close()
			t.Errorf("another %s: opened", name)
		}
	}
}

// TestSweepWriters: what a dead process left goes, what a living one writes stays.
func TestSweepWriters(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	a, b := newStore(t, Config{Dir: dir}), newStore(t, Config{Dir: dir})
	for _, name := range []string{
		"dead.lock", "dead.1", "dead.2/trash/file", "orphan.1", b.writer.id + ".77", a.writer.id + ".77",
	} {
		name = filepath.Join(dir, writersDir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte("half of a block"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Sweep(context.Background(), time.Now()); err != nil {
		t.Fatal(err)
	}
	names, err := a.names(writersDir)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{a.writer.id + ".lock": true, b.writer.id + ".lock": true, a.writer.id + ".77": true, b.writer.id + ".77": true}
	for _, name := range names {
		if !want[name] {
			t.Errorf("%s is still there", name)
		}
		delete(want, name)
	}
	for name := range want {
		t.Errorf("%s is gone", name)
	}
	if n := a.Stats().Swept; n != 3 {
		t.Errorf("%d files counted as swept, want 3", n)
	}
	// A store that closed leaves nothing but its content.
	b.Close()
	if err := a.Sweep(context.Background(), time.Now()); err != nil {
		t.Fatal(err)
	}
	if names, _ := a.names(writersDir); len(names) != 2 {
		t.Errorf("%v, want the own two", names)
	}
}

// TestSweepTails: a stream that nobody appends to is dropped after its time.
func TestSweepTails(t *testing.T) {
	s := newStore(t, Config{TailTTL: time.Minute})
	space := kvcache.NewSpace("m", nil)
	spec := kvcache.TailSpec{Space: space, Stream: "s"}
	w, err := s.OpenTail(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.Append(kvcache.Range{IDs: []int32{1}, Data: []byte{1}}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		after time.Duration
		tails int
	}{{50 * time.Second, 1}, {2 * time.Minute, 0}} {
		if err := s.Sweep(context.Background(), time.Now().Add(c.after)); err != nil {
			t.Fatal(err)
		}
		if tails, err := s.ReadTail(context.Background(), space, "s", 0); err != nil || len(tails) != c.tails {
			t.Errorf("after %v: %d tails, %v", c.after, len(tails), err)
		}
	}
	if err := w.Append(kvcache.Range{First: 1, IDs: []int32{1}, Data: []byte{1}}); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("append to an expired tail: %v", err)
	}
	if n := s.Stats().Expired; n != 1 {
		t.Errorf("%d expired, want 1", n)
	}
}

// TestDropperDied: one who marked a stream as dropped and died does not keep
// others from it.
func TestDropperDied(t *testing.T) {
	s := newStore(t, Config{})
	spec := kvcache.TailSpec{Space: kvcache.NewSpace("m", nil), Stream: "s", Attempt: 4}
	w, err := s.OpenTail(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	s.overtake(streamDir(spec.Fingerprint, spec.Stream))
	if err := w.Append(kvcache.Range{IDs: []int32{1}, Data: []byte{1}}); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("append: %v", err)
	}
	again, err := s.OpenTail(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := again.Append(kvcache.Range{IDs: []int32{1}, Data: []byte{1}}); err != nil {
		t.Error(err)
	}
}

// TestStaleListing: a process may die between a change and its word.
func TestStaleListing(t *testing.T) {
	s := newStore(t, Config{})
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 10)
	now := time.Now()
	count := func(now time.Time) int {
		t.Helper()
		children, err := s.children(space.Fingerprint, space.Root, now)
		if err != nil {
			t.Fatal(err)
		}
		return len(children)
	}
	if n := count(now); n != 0 {
		t.Fatalf("%d children", n)
	}
	put(t, s, f)
	s.control.with(func(b []byte) { word32(b, 4096+4*slot(space.Root)).Add(^uint32(0)) }) // as if it had not been raised
	if n := count(now); n != 0 {
		t.Fatalf("%d children: the test proves nothing", n)
	}
	if n := count(now.Add(maxListing)); n != 1 {
		t.Errorf("%d children after a while, want 1", n)
	}
	// A block that has gone is not named for long either.
	if err := os.Remove(filepath.Join(s.dir, blockName(f.Ref))); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(context.Background(), f.Ref); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("get: %v", err)
	}
	if n := count(now.Add(maxListing)); n != 0 {
		t.Errorf("%d children after a miss, want 0", n)
	}
}

// TestIndexIsBounded: a process that looks up for ever does not grow for ever.
func TestIndexIsBounded(t *testing.T) {
	var x index
	for i := range 3 * maxFolders {
		x.keep(folder{parent: kvcache.Key{byte(i), byte(i >> 8), byte(i >> 16)}}, &listing{})
	}
	if len(x.folders) > maxFolders {
		t.Errorf("%d folders, at most %d", len(x.folders), maxFolders)
	}
}
