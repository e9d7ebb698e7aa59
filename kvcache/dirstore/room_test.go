//go:build unix

package dirstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// name makes a key of a number; parents are made by it too.
func name(i int) kvcache.Key { return kvcache.Key{byte(i), byte(i >> 8), 1} }

// TestKeepOrder checks the order of removal over random trees: a block goes after
// all that are behind it, and else those go first whose last use, or that of
// anything behind them, is longest ago.
func TestKeepOrder(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 5))
		inv := &inventory{blocks: map[kvcache.Key]*stock{}}
		n := 1 + r.IntN(40)
		for i := range n {
			parent := name(1000) // the root
			if i > 0 && r.IntN(4) > 0 {
				parent = name(r.IntN(i))
			}
			inv.blocks[name(i)] = &stock{
				ref:  kvcache.Ref{Parent: parent, Key: name(i)},
				used: start.Add(time.Duration(r.IntN(20)) * time.Second),
			}
		}
		pins := map[kvcache.Key]bool{}
		for range r.IntN(3) {
			inv.pinned = append(inv.pinned, name(r.IntN(n+5)))
		}
		for _, key := range inv.pinned {
			for b := inv.blocks[key]; b != nil; b = inv.blocks[b.ref.Parent] {
				pins[b.ref.Key] = true
			}
		}
		// The last use of a block or of anything behind it, the slow way.
		used := map[kvcache.Key]time.Time{}
		for _, b := range inv.blocks {
			for up := b; up != nil; up = inv.blocks[up.ref.Parent] {
				if b.used.After(used[up.ref.Key]) {
					used[up.ref.Key] = b.used
				}
			}
		}
		order := inv.keepOrder()
		if len(order) != n-len(pins) {
			t.Fatalf("seed %d: %d blocks may go, want %d", seed, len(order), n-len(pins))
		}
		at := map[kvcache.Key]int{}
		for i, b := range order {
			if pins[b.ref.Key] {
				t.Fatalf("seed %d: a pinned block may go", seed)
			}
			at[b.ref.Key] = i
			if before, ok := at[b.ref.Parent]; !ok && inv.blocks[b.ref.Parent] != nil && !pins[b.ref.Parent] || before > i {
				t.Fatalf("seed %d: a head goes before its tail", seed)
			}
			if i > 0 && used[b.ref.Key].After(used[order[i-1].ref.Key]) {
				t.Fatalf("seed %d: what was used later goes first", seed)
			}
		}
	}
}

// TestLeastUsed: reading and finding a block is using it.
func TestLeastUsed(t *testing.T) {
	s := newStore(t, Config{Limit: 1 << 20})
	space := kvcache.NewSpace("m", nil)
	var frames []*kvcache.Frame
	old := time.Now().Add(-time.Hour)
	for i := range 8 {
		f := sealed(t, space, space.Root, int32(i), 100_000)
		put(t, s, f)
		frames = append(frames, f)
		// One after the other, an hour ago.
		when := old.Add(time.Duration(i) * time.Minute)
		if err := s.root.Chtimes(blockName(f.Ref), when, when); err != nil {
			t.Fatal(err)
		}
	}
	l, err := s.Get(context.Background(), frames[0].Ref)
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	if m, err := s.Longest(context.Background(), kvcache.Query{Space: space, IDs: []int32{1}}); err != nil || len(m.Blocks) != 1 {
		t.Fatal(m, err)
	}
	for i := range 3 {
		put(t, s, sealed(t, space, space.Root, int32(100+i), 100_000))
	}
	for i, f := range frames[:4] {
		_, err := s.root.Lstat(blockName(f.Ref))
		if want := i < 2; (err == nil) != want {
			t.Errorf("block %d there: %v, want %v", i, err == nil, want)
		}
	}
}

// TestCountIsRight: after random work the shared count is what is there.
func TestCountIsRight(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	a, b := newStore(t, Config{Dir: dir, Limit: 4 << 20}), newStore(t, Config{Dir: dir, Limit: 4 << 20})
	r := rand.New(rand.NewPCG(1, 6))
	space := kvcache.NewSpace("m", nil)
	ctx := context.Background()
	for i := range 400 {
		s := []*Store{a, b}[r.IntN(2)]
		stream := fmt.Sprint(r.IntN(4))
		switch r.IntN(4) {
		case 0, 1:
			put(t, s, sealed(t, space, space.Root, int32(r.IntN(100)), 1+r.IntN(30_000)))
		case 2:
			w, err := s.OpenTail(ctx, kvcache.TailSpec{Space: space, Stream: stream, Attempt: i})
			if err != nil {
				t.Fatal(err)
			}
			for j := range r.IntN(5) {
				if err := w.Append(kvcache.Range{First: j, IDs: []int32{1}, Data: make([]byte, 1+r.IntN(9000))}); err != nil {
					t.Fatal(err)
				}
			}
			if r.IntN(2) == 0 {
				if err := w.Rotate(space.Root, 0); err != nil {
					t.Fatal(err)
				}
			}
			w.Close()
		case 3:
			if err := s.DropTail(ctx, space, stream); err != nil {
				t.Fatal(err)
			}
		}
	}
	counted := a.Stats().Used
	if err := a.recount(); err != nil {
		t.Fatal(err)
	}
	// Small files that few know of are left to the recount: words, and the locks.
	if there := a.Stats().Used; there < counted || there > counted+20*4096 {
		t.Errorf("%d bytes counted, %d there", counted, there)
	}
	// A recount does not take away what is reserved and not written yet.
	before := a.Stats().Used
	if err := a.reserve(ctx, 8192); err != nil {
		t.Fatal(err)
	}
	if err := a.recount(); err != nil || a.Stats().Used != before+8192 {
		t.Errorf("%d bytes with a reservation of 8192, %d without, %v", a.Stats().Used, before, err)
	}
	a.settle(8192, false)
	// Whatever went wrong before, a sweep mends it.
	for _, wrong := range []int64{-1 << 40, 1 << 40} {
		there := a.Stats().Used
		a.control.addUsed(wrong)
		if err := b.Sweep(ctx, time.Now()); err != nil {
			t.Fatal(err)
		}
		if got := b.Stats().Used; got != there {
			t.Errorf("%d bytes after a sweep, %d there", got, there)
		}
	}
}

// TestTwoEvict: stores that make room at the same time keep to the limit.
func TestTwoEvict(t *testing.T) {
	const limit = 1 << 20
	dir := filepath.Join(t.TempDir(), "store")
	var wg sync.WaitGroup
	for n := range 2 {
		s := newStore(t, Config{Dir: dir, Limit: limit})
		wg.Go(func() {
			space := kvcache.NewSpace("m", nil)
			for i := range 200 {
				f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{int32(n), int32(i)}},
					[]kvcache.Part{{Size: 20_000}}, make([]byte, 20_000))
				if err == nil {
					err = s.Put(context.Background(), f)
				}
				if err != nil && !errors.Is(err, kvcache.ErrFull) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	s := newStore(t, Config{Dir: dir, Limit: limit})
	if err := s.recount(); err != nil {
		t.Fatal(err)
	}
	// A recount by one misses what the other is just writing.
	if used := s.Stats().Used; used > limit+2*24_576 || used < limit/2 {
		t.Errorf("%d bytes there, limit %d", used, limit)
	}
}

// TestAppendMakesRoom: tails do not evict, they have it done.
func TestAppendMakesRoom(t *testing.T) {
	s := newStore(t, Config{Limit: 1 << 20})
	space := kvcache.NewSpace("m", nil)
	for i := range 9 {
		put(t, s, sealed(t, space, space.Root, int32(i), 100_000))
	}
	w, err := s.OpenTail(context.Background(), kvcache.TailSpec{Space: space, Stream: "s"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	r := kvcache.Range{IDs: []int32{1}, Data: make([]byte, 10_000)}
	for deadline := time.Now().Add(20 * time.Second); r.First < 50; {
		switch err := w.Append(r); {
		case err == nil:
			r.First++
		case !errors.Is(err, kvcache.ErrFull):
			t.Fatal(err)
		case time.Now().After(deadline):
			t.Fatalf("no room after %d appends: %+v", r.First, s.Stats())
		}
	}
	if s.Stats().Evictions == 0 {
		t.Error("no block was evicted")
	}
}

// fullEnv makes the test binary a child whose files cannot grow beyond fullSize
// bytes, which fails in the midst of a write as a full disk does. Its value is
// the directory.
const (
	fullEnv  = "DIRSTORE_FULL"
	fullSize = 64 << 10
)

// TestFullDisk: a write that fails is an error, leaves nothing half-written, and
// what follows works.
func TestFullDisk(t *testing.T) {
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(cmd.Environ(), fullEnv+"="+filepath.Join(t.TempDir(), "store"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
}

// writeToFullDisk is the child.
func writeToFullDisk(dir string) (code int) {
	signal.Ignore(syscall.SIGXFSZ)
	lim := syscall.Rlimit{Cur: fullSize, Max: fullSize}
	must := func(what string, ok bool, args ...any) {
		if !ok {
			fmt.Println(what, args)
			code = 1
		}
	}
	must("limit files", syscall.Setrlimit(syscall.RLIMIT_FSIZE, &lim) == nil)
	s, err := Open(Config{Dir: dir})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer s.Close()
	ctx, space := context.Background(), kvcache.NewSpace("m", nil)
	seal := func(id int32, size int) *kvcache.Frame {
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{id}},
			[]kvcache.Part{{Size: int64(size)}}, make([]byte, size))
		must("seal", err == nil, err)
		return f
	}
	used := s.Stats().Used
	large := seal(1, fullSize+1)
	err = s.Put(ctx, large)
	must("a put that does not fit", errors.Is(err, syscall.EFBIG), err)
	_, err = s.Get(ctx, large.Ref)
	must("its block", errors.Is(err, kvcache.ErrNotFound), err)
	must("the room is free again", s.Stats().Used == used, s.Stats())
	names, err := s.names(writersDir)
	must("no temporary file", err == nil && len(names) == 1, names, err)
	must("a smaller block", s.Put(ctx, seal(2, 100)) == nil)

	w, err := s.OpenTail(ctx, kvcache.TailSpec{Space: space, Stream: "s"})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	at := 0
	for ; at < 10; at++ {
		if err = w.Append(kvcache.Range{First: at, IDs: []int32{1}, Data: []byte(strings.Repeat("x", 9000))}); err != nil {
			break
		}
	}
	must("an append that does not fit", errors.Is(err, syscall.EFBIG) && at == 7, at, err)
	must("the smaller one after it", w.Append(kvcache.Range{First: at, IDs: []int32{2, 3}, Data: []byte("y")}) == nil)
	tails, err := s.ReadTail(ctx, space, "s", 0)
	must("read", err == nil && len(tails) == 1 && len(tails[0].IDs()) == 9, tails, err)
	must("rotate", w.Rotate(space.Root, 0) == nil)
	must("counted", s.Stats().Failed == 2, s.Stats())
	return code
}
