//go:build unix

package arena

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/privdir"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
)

// kills is how often the crash tests kill the owner of an arena.
var kills = flag.Int("arena-kills", 0, "kill the owner of an arena that often (default 20)")

// large makes tests and benchmarks take the sizes of a real host: 5 GiB, a million keys.
var large = flag.Bool("arena-large", false, "restart with 5 GiB and use a million keys; needs 6 GiB of /dev/shm")

// TestMain makes the test binary a child where a test started it as one.
func TestMain(m *testing.M) {
	if spec := os.Getenv(kvtest.ChildEnv); spec != "" {
		kvtest.Child(spec, openForSuite)
	}
	if dir := os.Getenv(fillEnv); dir != "" {
		os.Exit(fill(dir))
	}
	os.Exit(m.Run())
}

// openForSuite opens a store as kvtest asks for it.
func openForSuite(dir string, limit int64) (kvcache.Store, error) {
	return Open(Config{Dir: filepath.Join(dir, "store"), Limit: limit})
}

func TestStore(t *testing.T) {
	kvtest.Run(t, kvtest.Harness{Open: openForSuite, Lasting: true, Kills: *kills, Tamper: tamper})
}

// tamper rewrites the bytes of a block in the arena, which it finds by the journal. The
// length of a block is in the journal, too: what is cut off reads as zeros.
func tamper(dir string, ref kvcache.Ref, change func([]byte) []byte) error {
	dir = filepath.Join(dir, "store")
	at, size, err := find(dir, ref.Key)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, dataName), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	old, changed := make([]byte, size), make([]byte, size)
	if _, err := f.ReadAt(old, at); err != nil {
		return err
	}
	copy(changed, change(bytes.Clone(old)))
	if bytes.Equal(old, changed) {
		return kvtest.ErrSame
	}
	_, err = f.WriteAt(changed, at)
	return err
}

// find replays a journal and returns where a block lies.
func find(dir string, key kvcache.Key) (at, size int64, err error) {
	b, err := os.ReadFile(filepath.Join(dir, journalName))
	if err != nil {
		return 0, 0, err
	}
	p := replayOf(b)
	for at, i := range p.alive {
		if p.puts[i].key == key && p.known(p.puts[i].space) {
			return at, p.puts[i].size, nil
		}
	}
	return 0, 0, errors.New("no such block")
}

// replayOf replays the bytes of a journal.
func replayOf(b []byte) *replay {
	p := newReplay()
	id := arenaID(b[16:32])
	for b = b[journalHeader:]; ; {
		r, n, err := parseRecord(b, id)
		if err != nil {
			return p
		}
		p.apply(r)
		b = b[n:]
	}
}

// newStore opens a store of a test; cfg without a folder gets a new one.
func newStore(t testing.TB, cfg Config) *Store {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join(t.TempDir(), "store")
	}
	if cfg.Limit == 0 {
		cfg.Limit = 1 << 20
	}
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// sealed makes a block of one token behind a parent, with a payload of one byte again
// and again.
func sealed(t testing.TB, space kvcache.Space, parent kvcache.Key, id int32, size int) *kvcache.Frame {
	t.Helper()
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, IDs: []int32{id}},
		[]kvcache.Part{{Size: int64(size)}}, bytes.Repeat([]byte{byte(id)}, size))
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

// has says whether a block is there, and fails the test if it is wrong.
func has(t testing.TB, s *Store, f *kvcache.Frame) bool {
	t.Helper()
	l, err := s.Get(context.Background(), f.Ref)
	if errors.Is(err, kvcache.ErrNotFound) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	if err := l.Verify(); err != nil || !bytes.Equal(l.Bytes(), f.Bytes()) {
		t.Fatalf("a block is not what was put: %v", err)
	}
	return true
}

func TestConfig(t *testing.T) {
	for name, cfg := range map[string]Config{
		"no directory": {}, "small": {Dir: "x", Limit: 100}, "huge": {Dir: "x", Limit: 1 << 62}, "ttl": {Dir: "x", TailTTL: -1},
		"quota": {Dir: "x", Quota: -1},
	} {
		if s, err := Open(cfg); err == nil {
			s.Close()
			t.Errorf("%s: opened", name)
		}
	}
}

// TestNewest: what came last, in its order.
func TestNewest(t *testing.T) {
	s := newStore(t, Config{})
	space := kvcache.NewSpace("m", nil)
	var want []kvcache.Ref
	for i := range int32(6) {
		f := sealed(t, space, space.Root, i, 100)
		want = append(want, f.Ref)
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	values := Values()
	for i := range int32(3) { // what Redis clients keep is not offered to anybody
		put(t, s, sealed(t, values, values.Root, i, 100))
	}
	for _, most := range []int{0, 2, 6, 10} {
		got := s.Newest(most)
		if n := min(most, len(want)); len(got) != n {
			t.Errorf("%d of %d blocks, want %d", len(got), most, n)
		}
		for i, b := range got {
			if b.Ref != want[len(want)-len(got)+i] || b.Tokens == 0 || b.Size == 0 {
				t.Errorf("%d of %d is %+v", i, most, b)
			}
		}
	}
	if err := s.Drop(t.Context(), space.Fingerprint); err != nil || len(s.Newest(10)) != 0 {
		t.Errorf("%d blocks of a dropped model: %v", len(s.Newest(10)), err)
	}
}

// TestOneOwner: a second process, or a second store of one, is refused while the first
// lives.
func TestOneOwner(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir})
	if other, err := Open(Config{Dir: dir, Limit: 1 << 20}); !errors.Is(err, privdir.ErrInUse) {
		if err == nil {
			other.Close()
		}
		t.Errorf("a second owner: %v", err)
	}
	s.Close()
	newStore(t, Config{Dir: dir})
}

// TestForeign: what is no arena is not overwritten, and a directory that others can
// reach is not used.
func TestForeign(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(dir, "precious")
	text := bytes.Repeat([]byte("precious "), 1<<17)[:1<<20]
	if err := os.WriteFile(precious, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := Open(Config{Dir: filepath.Join(dir, "a"), Data: precious, Limit: 1 << 20}); err == nil {
		s.Close()
		t.Error("something else was taken for an arena")
	}
	if b, err := os.ReadFile(precious); err != nil || !bytes.Equal(b, text) {
		t.Errorf("it was changed: %v", err)
	}
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o755); err != nil {
		t.Fatal(err)
	}
	if s, err := Open(Config{Dir: open, Limit: 1 << 20}); err == nil {
		s.Close()
		t.Error("a directory of everybody was used")
	}
}

// TestElsewhere: the arena may lie on another file system than the journal, and be made
// by whoever mounts it.
func TestElsewhere(t *testing.T) {
	dir, data := filepath.Join(t.TempDir(), "store"), filepath.Join(t.TempDir(), "mounted")
	if err := os.WriteFile(data, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 1000)
	for round := range 2 {
		s := newStore(t, Config{Dir: dir, Data: data})
		if has(t, s, f) != (round > 0) {
			t.Errorf("round %d: the block is there: %v", round, round == 0)
		}
		put(t, s, f)
		s.Close()
	}
	if _, err := os.Stat(filepath.Join(dir, dataName)); err == nil {
		t.Error("there is an arena in the directory, too")
	}
}

// TestPrefault takes all memory at once, and says so where there is none.
func TestPrefault(t *testing.T) {
	s := newStore(t, Config{Prefault: true, Limit: 8 << 20})
	st, err := s.region.file.Stat()
	if err != nil || st.Size() != 8<<20 || s.region.taken != 8<<20 {
		t.Errorf("%d bytes of %d taken, %v", s.region.taken, st.Size(), err)
	}
}

// TestAnotherSize: the limit is the size, and another one begins anew.
func TestAnotherSize(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 1000)
	for _, limit := range []int64{1 << 20, 2 << 20, 1 << 19} {
		s := newStore(t, Config{Dir: dir, Limit: limit})
		if has(t, s, f) {
			t.Errorf("limit %d: the block of another arena is there", limit)
		}
		put(t, s, f)
		if st := s.Stats(); st.Limit != limit || st.Used > limit {
			t.Errorf("%d of %d bytes in use", st.Used, st.Limit)
		}
		s.Close()
	}
}

// TestDeadVersion: blocks of an older version of a model that nobody uses go first.
func TestDeadVersion(t *testing.T) {
	s := newStore(t, Config{DeadAfter: time.Nanosecond, Lease: time.Nanosecond})
	older, newer := kvcache.NewSpace("v1", nil), kvcache.NewSpace("v2", nil)
	ctx := context.Background()
	label := func(sp kvcache.Space, name string) {
		t.Helper()
		if err := s.Label(ctx, sp.Fingerprint, kvcache.Label{Model: name}); err != nil {
			t.Fatal(err)
		}
	}
	label(older, "model")
	first := sealed(t, newer, newer.Root, 1, 100_000)
	old := sealed(t, older, older.Root, 1, 100_000)
	put(t, s, first, old)
	for range 3 {
		if !has(t, s, old) {
			t.Fatal("the block is missing")
		}
	}
	label(newer, "model")
	for id := int32(2); s.Stats().Evictions == 0; id++ {
		put(t, s, sealed(t, newer, newer.Root, id, 100_000))
	}
	if has(t, s, old) || !has(t, s, first) {
		t.Error("a new version's block went before one of the old version")
	}
}

// TestQuota: a tenant that has more than its quota gives way, however often its blocks
// are used.
func TestQuota(t *testing.T) {
	s := newStore(t, Config{Quota: 500_000, Lease: time.Nanosecond})
	greedy, modest := kvcache.NewSpace("m", []byte("greedy")), kvcache.NewSpace("m", []byte("modest"))
	theirs := sealed(t, modest, modest.Root, 1, 50_000)
	put(t, s, theirs)
	var all []*kvcache.Frame
	for id := range int32(40) {
		f := sealed(t, greedy, greedy.Root, id, 50_000)
		put(t, s, f)
		has(t, s, f)
		all = append(all, f)
	}
	if !has(t, s, theirs) {
		t.Error("a tenant below its quota lost a block")
	}
	left := 0
	for _, f := range all {
		if has(t, s, f) {
			left++
		}
	}
	// There is room, so the quota is no limit.
	if left < 15 {
		t.Errorf("%d blocks of the other are left: there was room for more", left)
	}
}

// TestLinger: the blocks of a stream that has ended stay for a while, unless there is
// no other way.
func TestLinger(t *testing.T) {
	s := newStore(t, Config{Lease: time.Nanosecond, Linger: time.Minute})
	ctx := context.Background()
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 100_000)
	put(t, s, f)
	w, err := s.OpenTail(ctx, kvcache.TailSpec{Space: space, Stream: "s", Parent: f.Key, First: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := s.DropTail(ctx, space, "s"); err != nil {
		t.Fatal(err)
	}
	next := int32(2)
	fill := func() {
		t.Helper()
		for range 20 {
			put(t, s, sealed(t, space, space.Root, next, 100_000))
			next++
		}
	}
	there := func() bool { // without using it
		_, ok := s.index.byKey[f.Key]
		return ok
	}
	fill()
	if !there() {
		t.Error("the block went with its stream")
	}
	if err := s.Sweep(ctx, time.Now().Add(2*time.Minute)); err != nil {
		t.Fatal(err)
	}
	fill()
	if there() {
		t.Error("the block stays for ever")
	}
	// When nothing else is left to go, it goes before its time.
	f = sealed(t, space, space.Root, 1, 700_000)
	put(t, s, f)
	if w, err = s.OpenTail(ctx, kvcache.TailSpec{Space: space, Stream: "s", Parent: f.Key, First: 1}); err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	large := sealed(t, space, space.Root, 2, 800_000)
	if err := s.Put(ctx, large); !errors.Is(err, kvcache.ErrFull) || !there() {
		t.Errorf("put beside a live stream: %v", err)
	}
	if err := s.DropTail(ctx, space, "s"); err != nil {
		t.Fatal(err)
	}
	if err := s.Put(ctx, large); err != nil || there() {
		t.Errorf("put beside a stream that has ended: %v", err)
	}
}

// TestExpired: a stream that nobody appends to is dropped after its time.
func TestExpired(t *testing.T) {
	s := newStore(t, Config{TailTTL: time.Minute})
	ctx := context.Background()
	space := kvcache.NewSpace("m", nil)
	w, err := s.OpenTail(ctx, kvcache.TailSpec{Space: space, Stream: "s"})
	if err != nil {
		t.Fatal(err)
	}
	r := kvcache.Range{IDs: []int32{1}, Data: []byte{1}}
	if err := w.Append(r); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		after time.Duration
		tails int
	}{{50 * time.Second, 1}, {2 * time.Minute, 0}} {
		if err := s.Sweep(ctx, time.Now().Add(c.after)); err != nil {
			t.Fatal(err)
		}
		if tails, err := s.ReadTail(ctx, space, "s", 0); err != nil || len(tails) != c.tails {
			t.Errorf("after %v: %d tails, %v", c.after, len(tails), err)
		}
	}
	r.First = 1
	if err := w.Append(r); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("append to an expired tail: %v", err)
	}
	if st := s.Stats(); st.Expired != 1 || st.Used != grain {
		t.Errorf("%d expired, %d bytes in use", st.Expired, st.Used)
	}
}
