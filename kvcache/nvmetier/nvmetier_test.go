//go:build unix

package nvmetier

import (
	"bytes"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/internal/privdir"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
	"github.com/kvmesh/kvmesh/kvcache/sealed/sealedtest"
)

var kills = flag.Int("nvme-kills", 0, "how often a process that writes to a store is killed; 0 is 20")

// TestMain makes the test binary a child where a test started it as one.
func TestMain(m *testing.M) {
	if spec := os.Getenv(kvtest.ChildEnv); spec != "" {
		kvtest.Child(spec, openForSuite)
	}
	flag.Parse()
	os.Exit(m.Run())
}

// openForSuite opens a store as kvtest asks for it.
func openForSuite(dir string, limit int64) (kvcache.Store, error) {
	if os.Getenv(sealedtest.Env) == "" {
		return Open(Config{Dir: dir, Limit: limit})
	}
	return sealedtest.Wrap(Open(Config{Dir: dir, Limit: limit, Form: kvcache.Encrypted}))
}

// fileOf finds the file of a block.
func fileOf(dir string, ref kvcache.Ref) (string, error) {
	all, err := filepath.Glob(filepath.Join(dir, spaceDir(ref.Space), "*"))
	if err != nil {
		return "", err
	}
	for _, name := range all {
		if b, ok := parseName(filepath.Base(name)); ok && b.key == ref.Key {
			return name, nil
		}
	}
	return "", os.ErrNotExist
}

// tamper changes a block behind a store's back.
func tamper(dir string, ref kvcache.Ref, change func([]byte) []byte) error {
	if os.Getenv(sealedtest.Env) != "" {
		ref = sealedtest.Ref(ref)
	}
	name, err := fileOf(dir, ref)
	if err != nil {
		return err
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	return os.WriteFile(name, change(b), 0o600)
}

func TestStore(t *testing.T) {
	kvtest.Run(t, kvtest.Harness{Open: openForSuite, Lasting: true, Tamper: tamper, Kills: *kills, Ranged: true})
}

// TestSealed: the same with encryption before it.
func TestSealed(t *testing.T) {
	t.Setenv(sealedtest.Env, "1")
	kvtest.Run(t, kvtest.Harness{Open: openForSuite, Lasting: true, Tamper: tamper, Kills: *kills})
}

// newStore opens a store until the test ends.
func newStore(t testing.TB, cfg Config) *Store {
	t.Helper()
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// sealed makes a block with random content.
func sealed(t testing.TB, space kvcache.Space, parent kvcache.Key, first int, ids []int32, size int) *kvcache.Frame {
	t.Helper()
	payload := make([]byte, size)
	_, _ = rand.NewChaCha8(space.Key(parent, ids)).Read(payload) // never fails
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: first, IDs: ids}, []kvcache.Part{{Size: int64(size)}}, payload)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestConfig(t *testing.T) {
	for name, cfg := range map[string]Config{
		"no directory": {}, "limit": {Dir: t.TempDir(), Limit: -1}, "quota": {Dir: t.TempDir(), Quota: -1}, "away": {Dir: t.TempDir(), Away: -1},
	} {
		if s, err := Open(cfg); err == nil {
			s.Close()
			t.Errorf("%s: opened", name)
		}
	}
	dir := filepath.Join(t.TempDir(), "kv")
	newStore(t, Config{Dir: dir})
	if _, err := Open(Config{Dir: dir}); !errors.Is(err, privdir.ErrInUse) {
		t.Errorf("a second owner: %v", err)
	}
}

// TestSizes reads blocks of all lengths about a page's, on the file system of temporary
// files and in memory, with O_DIRECT where there is one and without.
func TestSizes(t *testing.T) {
	for name, dir := range map[string]string{"disk": t.TempDir(), "memory": filepath.Join("/dev/shm", filepath.Base(t.TempDir())+"-nvmetier")} {
		t.Cleanup(func() { os.RemoveAll(dir) })
		for _, buffered := range []bool{false, true} {
			s, err := Open(Config{Dir: filepath.Join(dir, "kv")})
			if err != nil {
				t.Skipf("%s: %v", name, err)
			}
			s.buffered.Store(buffered)
			space := kvcache.NewSpace("m", nil)
			for i, size := range []int{1, page - 256, page - 255, page, 3*page - 256, 3*page - 257, 100_000, 5 << 20} {
				f := sealed(t, space, space.Root, 0, []int32{int32(i)}, size)
				if err := s.Put(t.Context(), f); err != nil {
					t.Fatal(err)
				}
				l, err := s.Get(t.Context(), f.Ref)
				if err != nil || l.Verify() != nil || !bytes.Equal(l.Bytes(), f.Bytes()) {
					t.Fatalf("%s, %d bytes: %v", name, size, err)
				}
				l.Release()
			}
			t.Logf("%s: through the page cache: %v", name, s.buffered.Load())
			s.Close()
		}
	}
}

// TestNoFile puts other things in the place of blocks: none is opened for good, each is
// refused and counted.
func TestNoFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	s := newStore(t, Config{Dir: dir})
	space := kvcache.NewSpace("m", nil)
	for i, put := range []func(string) error{
		func(name string) error { return os.Mkdir(name, 0o700) },
		func(name string) error { return os.Symlink("/dev/zero", name) },
		func(name string) error { return unix.Mkfifo(name, 0o600) },
	} {
		f := sealed(t, space, space.Root, 0, []int32{int32(i)}, 10)
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		name, err := fileOf(dir, f.Ref)
		if err == nil {
			err = os.Remove(name)
		}
		if err == nil {
			err = put(name)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.Get(t.Context(), f.Ref)
		if r, ok := errors.AsType[*kvcache.Refusal](err); !ok || r.Reason != kvcache.ReasonKind {
			t.Errorf("%d: %v", i, err)
		}
		if _, err = s.Get(t.Context(), f.Ref); !errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("%d, again: %v", i, err)
		}
	}
	// A file that is gone is a miss, for look-ups too.
	f := sealed(t, space, space.Root, 0, []int32{9}, 10)
	if err := s.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	name, err := fileOf(dir, f.Ref)
	if err == nil {
		err = os.Remove(name)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), f.Ref); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("a file that is gone: %v", err)
	}
	if err := s.Put(t.Context(), f); err != nil {
		t.Error(err)
	}
	if st := s.Stats(); st.Puts != 5 || st.Failed != 0 {
		t.Errorf("counted %+v", st)
	}
}

// TestStrangeNames: what is not the store's own stays where it is.
func TestStrangeNames(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	s := newStore(t, Config{Dir: dir})
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 0, []int32{1, 2}, 10)
	if err := s.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	s.Close()
	var all []string
	for _, name := range []string{blockDir + "/x", modelDir(space.Fingerprint) + "/x", spaceDir(space) + "/x", spaceDir(space) + "/" + strings.Repeat("9", 40)} {
		all = append(all, filepath.Join(dir, name))
		if err := os.WriteFile(all[len(all)-1], nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// What a process that died was writing goes.
	if err := os.WriteFile(filepath.Join(dir, tmpDir, "7"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	s = newStore(t, Config{Dir: dir})
	for _, name := range all {
		if _, err := os.Stat(name); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(filepath.Join(dir, tmpDir)); err != nil || len(left) != 0 {
		t.Errorf("%d temporary files are left: %v", len(left), err)
	}
	if m, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: []int32{1, 2}}); err != nil || len(m.Blocks) != 1 {
		t.Errorf("%+v, %v", m, err)
	}
}

// TestLabels: of two versions of a model the older one goes first, when nobody has used it
// for a while; who is older is remembered.
func TestLabels(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	s := newStore(t, Config{Dir: dir})
	a, b := kvcache.NewSpace("a", nil), kvcache.NewSpace("b", nil)
	for _, space := range []kvcache.Space{a, b, a} {
		if err := s.Label(t.Context(), space.Fingerprint, kvcache.Label{Model: "m"}); err != nil {
			t.Fatal(err)
		}
		if err := s.Put(t.Context(), sealed(t, space, space.Root, 0, []int32{1}, 10)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Label(t.Context(), kvcache.Fingerprint{}, kvcache.Label{Text: strings.Repeat("x", mostLabel)}); err == nil {
		t.Error("a label that nobody will read")
	}
	s.Close()
	s = newStore(t, Config{Dir: dir})
	if x, y := s.index.models[a.Fingerprint], s.index.models[b.Fingerprint]; x == nil || y == nil || x.Order != 1 || y.Order != 2 {
		t.Fatalf("%+v, %+v", x, y)
	}
	if err := s.Drop(t.Context(), a.Fingerprint); err != nil || s.labelled(a.Fingerprint) {
		t.Errorf("a dropped model has a label: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, modelDir(b.Fingerprint), labelName), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.Close()
	s = newStore(t, Config{Dir: dir})
	if s.labelled(b.Fingerprint) || !s.known(b.Child(b.Root, []int32{1})) {
		t.Error("half a label counts, or its model does not")
	}
}

// TestManyChildren: a root with more children than one listing has.
func TestManyChildren(t *testing.T) {
	s := newStore(t, Config{Dir: filepath.Join(t.TempDir(), "kv")})
	s.disk = newMemDisk(1) // in memory, for speed
	for _, dir := range []string{tmpDir, goneDir, blockDir} {
		if err := s.disk.Mkdir(dir); err != nil {
			t.Fatal(err)
		}
	}
	space := kvcache.NewSpace("m", nil)
	for i := range int32(2500) {
		if err := s.Put(t.Context(), sealed(t, space, space.Root, 0, []int32{i, 1, 2, 3}, 10)); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range []int32{0, 1, 999, 1000, 1001, 2499} {
		for want, ids := range map[int][]int32{4: {i, 1, 2, 3}, 3: {i, 1, 2, 9}, 1: {i}, 0: {i + 3000}} {
			m, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: ids})
			if err != nil || m.Tokens()+m.Common != want {
				t.Errorf("%v: %d and %d tokens, want %d: %v", ids, m.Tokens(), m.Common, want, err)
			}
		}
	}
}

// TestBounded writes ten times the limit from several goroutines: the files never take more.
func TestBounded(t *testing.T) {
	const limit = 64 * page
	dir := filepath.Join(t.TempDir(), "kv")
	s := newStore(t, Config{Dir: dir, Limit: limit})
	var wg sync.WaitGroup
	for w := range int32(4) {
		wg.Go(func() {
			space := kvcache.NewSpace("m", []byte{byte(w)})
			for i := range int32(80) {
				if err := s.Put(t.Context(), sealed(t, space, space.Root, 0, []int32{i}, 2*page-256)); err != nil {
					t.Error(err)
				}
				if st := s.Stats(); st.Used > limit+4*3*page {
					t.Errorf("%d bytes in use, limit %d", st.Used, limit)
				}
			}
		})
	}
	wg.Wait()
	onDisk := int64(0)
	_ = filepath.Walk(dir, func(_ string, st os.FileInfo, err error) error {
		if err == nil && st.Mode().IsRegular() {
			onDisk += pages(st.Size())
		}
		return nil
	})
	if st := s.Stats(); onDisk != st.Used || st.Used > limit || st.Evictions < 200 {
		t.Errorf("%d bytes on the disk, counted %+v", onDisk, st)
	}
}
