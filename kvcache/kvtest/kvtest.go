// Package kvtest checks that a kvcache.Store keeps its promises. Every store runs
// the same suite from its own tests:
//
//	func TestMain(m *testing.M) {
//		if spec := os.Getenv(kvtest.ChildEnv); spec != "" {
//			kvtest.Child(spec, open)
//		}
//		os.Exit(m.Run())
//	}
//
//	func TestStore(t *testing.T) { kvtest.Run(t, kvtest.Harness{Open: open, …}) }
//
// The suite starts the test binary again as a writer that it kills, which is what
// TestMain is for.
package kvtest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Harness says how to open and to damage the store under test.
type Harness struct {
	// Open opens the store whose content is at dir, with a limit in bytes. Every
	// call with one dir is the same store; if Shared, they are open at once.
	Open Opener
	// Shared says that several processes may have one store open, and that its
	// content outlives them.
	Shared bool
	// Lags says that Stats.Used learns late of what other processes write.
	Lags bool
	// Lasting says that the content outlives its process, but that only one process at a
	// time may have the store open. A Shared store is more than that.
	Lasting bool
	// Kills is how often a process that writes to a store is killed; 0 is 20, or 5 with
	// -short.
	Kills int
	// Tamper changes the stored bytes of a block behind the store's back; the
	// result of change may have another length. ErrSame says that this store does not
	// keep what the change is about. Nil leaves those tests out.
	Tamper func(dir string, ref kvcache.Ref, change func([]byte) []byte) error
	// AppendAllocates is how often an append to a tail may allocate: crypto/tls does, for
	// each step in which it reads a record. 0 is never.
	AppendAllocates float64
	// Ranged says that the store reads some layers of a block without the others.
	Ranged bool
	// Limit is the smallest limit that the store can work with; 0 is 1 MiB.
	Limit int64
}

// Opener opens a store, in this process or in a child.
type Opener func(dir string, limit int64) (kvcache.Store, error)

// ErrSame is what Harness.Tamper returns where the store reads the same afterwards.
var ErrSame = errors.New("the change makes no difference")

// plenty is a limit that no test reaches that is not about limits.
const plenty = 1 << 30

// Run runs the suite. Tests of tails need a store that has kvcache.Tails, those
// of counters one that has kvcache.Counted.
func Run(t *testing.T, h Harness) {
	if h.Limit == 0 {
		h.Limit = 1 << 20
	}
	for name, test := range map[string]func(*testing.T, Harness){
		"Blocks": testBlocks, "WriteOnce": testWriteOnce, "Longest": testLongest, "LongestModel": testLongestModel,
		"Spaces": testSpaces, "Lent": testLent, "Drop": testDrop, "Closed": testClosed, "Erase": testErase, "Walk": testWalk,
		"Layers": testLayers, "Batch": testBatch, "Tamper": testTamper, "Limit": testLimit, "Concurrent": testConcurrent,
		"Tail": testTail, "TailAttempts": testTailAttempts, "TailDrop": testTailDrop, "TailSpaces": testTailSpaces,
		"TailPins": testTailPins, "TailAllocates": testTailAllocates,
		"Reopen": testReopen, "CrashBlocks": testCrashBlocks, "CrashTails": testCrashTails, "SameBlock": testSameBlock,
		"Zombie": testZombie, "Lasting": testLasting, "OwnerKilled": testOwnerKilled, "OwnerKilledFull": testOwnerKilledFull,
	} {
		t.Run(name, func(t *testing.T) { test(t, h) })
	}
}

// newDir makes a folder for a store, in shared memory where there is some.
func newDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvtest-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// open opens a store until the test ends.
func (h Harness) open(t testing.TB, dir string, limit int64) kvcache.Store {
	t.Helper()
	s, err := h.Open(dir, limit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// fresh opens an empty store.
func (h Harness) fresh(t testing.TB) kvcache.Store {
	t.Helper()
	return h.open(t, newDir(t), plenty)
}

// tails returns a store's tails or skips the test.
func tails(t testing.TB, s kvcache.Store) kvcache.Tails {
	t.Helper()
	ts, ok := s.(kvcache.Tails)
	if !ok {
		t.Skip("the store has no tails")
	}
	return ts
}

// stats returns a store's counters, all 0 if it has none, and whether it has.
func stats(s kvcache.Store) (kvcache.Stats, bool) {
	c, ok := s.(kvcache.Counted)
	if !ok {
		return kvcache.Stats{}, false
	}
	return c.Stats(), true
}

// refusals returns how many refusals a store has counted.
func refusals(s kvcache.Store) uint64 {
	st, _ := stats(s)
	n := uint64(0)
	for _, c := range st.Refused {
		n += c
	}
	return n
}

// content is the payload that every block of a key has in these tests, so that
// whoever reads it can tell. The writer's number makes two writers differ.
func content(key kvcache.Key, writer byte, size int) []byte {
	key[0] ^= writer
	b := make([]byte, size)
	// One random page, again and again with its number in front: much faster than
	// random bytes, and no page can be taken for another.
	page := b[:min(size, 4096)]
	_, _ = rand.NewChaCha8(key).Read(page) // never fails
	for at := len(page); at < size; at += len(page) {
		if n := copy(b[at:], page); n >= 8 {
			binary.LittleEndian.PutUint64(b[at:], uint64(at))
		}
	}
	return b
}

// block makes a sealed frame of two parts.
func block(space kvcache.Space, parent kvcache.Key, first int, ids []int32, size int) *kvcache.Frame {
	return blockBy(space, parent, first, ids, func(key kvcache.Key) []byte { return content(key, 0, size) })
}

// blockBy makes one with a payload of the caller's choice.
func blockBy(space kvcache.Space, parent kvcache.Key, first int, ids []int32, payload func(kvcache.Key) []byte) *kvcache.Frame {
	b := payload(space.Key(parent, ids))
	half := int64(len(b) / 2)
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: first, IDs: ids},
		[]kvcache.Part{{Plane: kvcache.PlaneKeys, Size: half}, {Plane: kvcache.PlaneValues, Size: int64(len(b)) - half}}, b)
	if err != nil {
		panic(err) // of this package's own making
	}
	return f
}

// tokens makes n ids that follow from a seed.
func tokens(seed uint64, n int) []int32 {
	r := rand.New(rand.NewPCG(seed, 0))
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = r.Int32N(1 << 18)
	}
	return ids
}

// chain makes blocks of the given size that follow each other from the root.
func chain(space kvcache.Space, ids []int32, run, size int) (frames []*kvcache.Frame) {
	parent := space.Root
	for first := 0; first+run <= len(ids); first += run {
		f := block(space, parent, first, ids[first:first+run], size)
		frames, parent = append(frames, f), f.Key
	}
	return frames
}

// put stores frames in order.
func put(t testing.TB, s kvcache.Store, frames ...*kvcache.Frame) {
	t.Helper()
	for _, f := range frames {
		if err := s.Put(context.Background(), f); err != nil {
			t.Fatalf("put at %d: %v", f.First, err)
		}
	}
}

// has says whether a store has a block, and fails the test if it is not whole
// and right.
func has(t testing.TB, s kvcache.Store, ref kvcache.Ref) bool {
	t.Helper()
	l, err := s.Get(context.Background(), ref)
	if errors.Is(err, kvcache.ErrNotFound) {
		return false
	}
	if err != nil {
		t.Fatalf("get: %v", err)
	}
	defer l.Release()
	b, err := l.Payload()
	if err != nil {
		t.Fatalf("payload: %v", err)
	}
	if !bytes.Equal(b, content(ref.Key, 0, len(b))) || len(b) == 0 {
		t.Fatalf("the payload of block %v is not its own", ref.Key)
	}
	if l.Ref != ref {
		t.Fatalf("asked for %v, got %v", ref, l.Ref)
	}
	return true
}

// longest asks for a chain from the root.
func longest(t testing.TB, s kvcache.Store, space kvcache.Space, ids []int32) kvcache.Match {
	t.Helper()
	m, err := s.Longest(context.Background(), kvcache.Query{Space: space, IDs: ids})
	if err != nil {
		t.Fatalf("longest: %v", err)
	}
	return m
}

// wantRefusal checks that an error is a refusal for one of the reasons.
func wantRefusal(t testing.TB, err error, reasons ...kvcache.Reason) {
	t.Helper()
	r, ok := errors.AsType[*kvcache.Refusal](err)
	if !ok {
		t.Errorf("%v is no refusal", err)
		return
	}
	if !slices.Contains(reasons, r.Reason) {
		t.Errorf("refused for %v, want %v", r.Reason, reasons)
	}
}
