//go:build unix

package arena

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/kvcache"
)

// newReader opens a reader until the test ends.
func newReader(t testing.TB, dir string) *Reader {
	t.Helper()
	r, err := OpenReader(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// borrow has a reader borrow a block.
func borrow(t testing.TB, s *Store, r *Reader, ref kvcache.Ref) (*kvcache.Lent, error) {
	t.Helper()
	slot, ticket, err := r.Ask()
	if err != nil {
		t.Fatal(err)
	}
	at, size, err := s.Lend(context.Background(), r.Name(), slot, ticket, ref)
	if err != nil {
		r.Abandon(slot)
		return nil, err
	}
	return r.Take(Loan{Data: s.Data(), ID: s.ID(), Slot: slot, At: at, Size: size}, ref, func(error) {
		if err := s.Refused(context.Background(), ref); err != nil {
			t.Error(err)
		}
	})
}

// churn writes ten times what fits.
func churn(t testing.TB, s *Store, space kvcache.Space) {
	t.Helper()
	before := s.Stats()
	for id := int32(1000); s.Stats().PutBytes < before.PutBytes+10*uint64(before.Limit); id++ {
		put(t, s, sealed(t, space, space.Root, id+int32(before.Puts), 20_000))
	}
}

// unchanged checks the bytes of a lent block.
func unchanged(t testing.TB, l *kvcache.Lent, f *kvcache.Frame) {
	t.Helper()
	if err := l.Verify(); err != nil || !bytes.Equal(l.Bytes(), f.Bytes()) {
		t.Fatalf("a block has changed while it was read: %v", err)
	}
}

// TestReader: a block that is being read outlives its eviction, and not its reading.
func TestReader(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir, Lease: time.Nanosecond})
	r := newReader(t, dir)
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 100_000)
	if _, err := borrow(t, s, r, f.Ref); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("a block that is not there: %v", err)
	}
	put(t, s, f)
	l, err := borrow(t, s, r, f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	if &l.Bytes()[0] != &r.view.b[int64(s.index.entries[s.index.byKey[f.Key]].at)*grain] {
		t.Error("the block was copied")
	}
	churn(t, s, space)
	unchanged(t, l, f)
	if err := s.Drop(context.Background(), space.Fingerprint); err != nil {
		t.Fatal(err)
	}
	churn(t, s, space)
	unchanged(t, l, f)
	if len(s.limbo) != 1 {
		t.Errorf("%d extents wait for their readers, want 1", len(s.limbo))
	}
	l.Release()
	churn(t, s, space)
	if len(s.limbo) != 0 || s.Stats().Failed != 0 {
		t.Errorf("%d extents wait for nobody", len(s.limbo))
	}
	wrong := f.Ref
	wrong.Space = kvcache.NewSpace("m", []byte("other"))
	put(t, s, f)
	if _, err := borrow(t, s, r, wrong); err == nil {
		t.Error("a block was lent to another tenant")
	}
	if len(r.free) != Slots {
		t.Errorf("%d slots are free, want all", len(r.free))
	}
}

// askAgain has a reader give a request up, and ask with the same slot once more.
func askAgain(t testing.TB, r *Reader) (slot int, late, ticket Ticket) {
	t.Helper()
	slot, late, err := r.Ask()
	if err != nil {
		t.Fatal(err)
	}
	r.Abandon(slot)
	again, ticket, err := r.Ask()
	if err != nil || again != slot {
		t.Fatalf("slot %d, want %d: %v", again, slot, err)
	}
	return slot, late, ticket
}

// TestLendTooLate: a request that its reader gave up, handled when another one has the slot,
// gets nothing and takes nothing from that one.
func TestLendTooLate(t *testing.T) {
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir, Limit: 1 << 20, Lease: time.Nanosecond})
	r := newReader(t, dir)
	space := kvcache.NewSpace("m", nil)
	f, other := sealed(t, space, space.Root, 1, 100_000), sealed(t, space, space.Root, 2, 1000)
	put(t, s, f, other)
	slot, late, ticket := askAgain(t, r)
	at, size, err := s.Lend(ctx, r.Name(), slot, ticket, f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	l, err := r.Take(Loan{Data: s.Data(), ID: s.ID(), Slot: slot, At: at, Size: size}, f.Ref, func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Lend(ctx, r.Name(), slot, late, other.Ref); !errors.Is(err, context.Canceled) {
		t.Errorf("lent to nobody: %v", err)
	}
	if ok, err := s.Remove(ctx, f.Ref); !ok || err != nil { // as eviction does
		t.Fatal(ok, err)
	}
	churn(t, s, space)
	unchanged(t, l, f)
	l.Release()
	if _, err := borrow(t, s, r, f.Ref); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("a block that is not there: %v", err)
	}
	if churn(t, s, space); len(s.limbo) != 0 || len(s.peers[r.Name()].held) != 0 {
		t.Errorf("%d extents wait for nobody", len(s.limbo))
	}
}

// TestReaderOutlivesOwner: an owner that comes back finds what is being read, in the
// index or not, and leaves it alone.
func TestReaderOutlivesOwner(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cfg := Config{Dir: dir, Limit: 1 << 20, Lease: time.Nanosecond}
	s := newStore(t, cfg)
	r := newReader(t, dir)
	space := kvcache.NewSpace("m", nil)
	kept, gone := sealed(t, space, space.Root, 1, 50_000), sealed(t, space, space.Root, 2, 50_000)
	put(t, s, kept, gone)
	var lent []*kvcache.Lent
	for _, f := range []*kvcache.Frame{kept, gone, kept} {
		l, err := borrow(t, s, r, f.Ref)
		if err != nil {
			t.Fatal(err)
		}
		lent = append(lent, l)
	}
	s.mu.Lock()
	s.removeLocked(s.index.byKey[gone.Key])
	err := s.log.flush()
	s.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s.Close()
		s = newStore(t, cfg)
		churn(t, s, space)
		unchanged(t, lent[0], kept)
		unchanged(t, lent[1], gone)
		unchanged(t, lent[2], kept)
	}
	if _, err := borrow(t, s, r, gone.Ref); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("a block that had left: %v", err)
	}
	for _, l := range lent {
		l.Release()
	}
	churn(t, s, space)
	if err := s.Sweep(context.Background(), time.Now()); err != nil {
		t.Fatal(err)
	}
	if len(s.limbo) != 0 {
		t.Errorf("%d extents wait for nobody", len(s.limbo))
	}
	// A reader that asks for nothing more goes with its file.
	r.Close()
	s.Close()
	newStore(t, cfg)
	if names, err := os.ReadDir(filepath.Join(dir, readersDir)); err != nil || len(names) != 0 {
		t.Errorf("%v, %v are left of readers", names, err)
	}
}

// TestReaderClosed: a reader that is closed maps the arena no more, to fill it or for a block
// that it had asked for, and leaves nothing behind.
func TestReaderClosed(t *testing.T) {
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir})
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 50_000)
	put(t, s, f)
	r := newReader(t, dir)
	slot, ticket, err := r.Ask()
	if err != nil {
		t.Fatal(err)
	}
	at, size, err := s.Lend(ctx, r.Name(), slot, ticket, f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	l := Loan{Data: s.Data(), ID: s.ID(), Slot: slot, At: at, Size: size}
	if _, err := r.Take(l, f.Ref, func(err error) { t.Error(err) }); !errors.Is(err, kvcache.ErrClosed) {
		t.Errorf("a block: %v", err)
	}
	if err := r.Fill(ctx, l); !errors.Is(err, kvcache.ErrClosed) || r.view != nil || r.words != nil {
		t.Errorf("filled: %v", err)
	}
	if err := s.Sweep(ctx, time.Now()); err != nil || len(s.peers) != 0 || s.index.entries[s.index.byKey[f.Key]].refs != 0 {
		t.Errorf("the owner still knows it: %v", err)
	}
}

// TestReaderDies: what a dead process was reading comes back.
func TestReaderDies(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir})
	r, err := OpenReader(dir)
	if err != nil {
		t.Fatal(err)
	}
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 50_000)
	put(t, s, f)
	if _, err := borrow(t, s, r, f.Ref); err != nil {
		t.Fatal(err)
	}
	if err := s.Drop(context.Background(), space.Fingerprint); err != nil {
		t.Fatal(err)
	}
	for _, dead := range []bool{false, true} {
		if dead {
			// As the kernel does.
			if err := errors.Join(unix.Munmap(r.words), r.file.Close()); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Sweep(context.Background(), time.Now()); err != nil {
			t.Fatal(err)
		}
		if left := len(s.limbo) + len(s.peers); (left == 0) != dead {
			t.Errorf("dead %v: %d are left", dead, left)
		}
	}
	if used := s.Stats().Used; used != grain {
		t.Errorf("%d bytes in use, want the header alone", used)
	}
}

// TestAbandon: an owner that is late finds that nobody waits.
func TestAbandon(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir})
	r := newReader(t, dir)
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 50_000)
	put(t, s, f)
	slot, ticket, err := r.Ask()
	if err != nil {
		t.Fatal(err)
	}
	r.Abandon(slot)
	if _, _, err := s.Lend(context.Background(), r.Name(), slot, ticket, f.Ref); err == nil {
		t.Error("lent to nobody")
	}
	if n := s.index.entries[s.index.byKey[f.Key]].refs; n != 0 {
		t.Errorf("%d readers of a block that nobody reads", n)
	}
	for _, bad := range []struct {
		reader string
		slot   int
		ticket Ticket
	}{{r.Name(), -1, 1}, {r.Name(), Slots, 1}, {r.Name(), 0, 2}, {"../lock", 0, 1}, {"0123456789abcdef", 0, 1}} {
		if _, _, err := s.Lend(context.Background(), bad.reader, bad.slot, bad.ticket, f.Ref); err == nil {
			t.Errorf("lent to %+v", bad)
		}
	}
	// A reader that reads all it can is told so, and not made to wait.
	for range Slots {
		if _, _, err := r.Ask(); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := r.Ask(); !errors.Is(err, ErrNoSlot) {
		t.Errorf("more than all slots: %v", err)
	}
}

// TestReaderRefuses: a reader that finds a block to be wrong has it removed.
func TestReaderRefuses(t *testing.T) {
	for name, at := range map[string]int64{"header": 180, "payload": 3000} {
		dir := filepath.Join(t.TempDir(), "store")
		s := newStore(t, Config{Dir: dir})
		r := newReader(t, dir)
		space := kvcache.NewSpace("m", nil)
		f := sealed(t, space, space.Root, 1, 50_000)
		put(t, s, f)
		s.bytes(s.index.entries[0].extent())[at] ^= 4
		l, err := borrow(t, s, r, f.Ref)
		if err == nil {
			err = l.Verify()
			l.Release()
		}
		if _, ok := errors.AsType[*kvcache.Refusal](err); !ok {
			t.Errorf("%s: %v", name, err)
		}
		if has(t, s, f) {
			t.Errorf("%s: it is still there", name)
		}
		if n := s.Stats().Refused[kvcache.ReasonChecksum]; n == 0 {
			t.Errorf("%s: not counted", name)
		}
		if len(r.free) != Slots {
			t.Errorf("%s: %d slots are free", name, len(r.free))
		}
	}
}

// TestAnotherArena: an owner that begins anew is noticed, and what is being read of the
// old arena stays readable.
func TestAnotherArena(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir, Limit: 1 << 20})
	r := newReader(t, dir)
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 50_000)
	put(t, s, f)
	old, err := borrow(t, s, r, f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	s = newStore(t, Config{Dir: dir, Limit: 2 << 20})
	put(t, s, f)
	churn(t, s, space)
	put(t, s, f)
	fresh, err := borrow(t, s, r, f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	unchanged(t, old, f)
	unchanged(t, fresh, f)
	fresh.Release()
	r.Close()
	unchanged(t, old, f)
	old.Release()
	if r.words != nil {
		t.Error("a closed reader that reads nothing holds its words")
	}
}

// TestReaderBesideStart: an owner that starts while a reader makes its file may take that for
// a dead process's; the reader makes another.
func TestReaderBesideStart(t *testing.T) {
	dir := newStore(t, Config{}).cfg.Dir
	stop, took := make(chan struct{}), make(chan struct{})
	defer close(stop)
	go takeReader(dir, stop, took)
	for range 5000 {
		r, err := OpenReader(dir)
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
		select {
		case <-took:
			return
		default:
		}
	}
	t.Skip("the two never met")
}

// takeReader removes one file that a reader is making, as findPeers would, and says so.
func takeReader(dir string, stop, took chan struct{}) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		names, _ := filepath.Glob(filepath.Join(dir, readersDir, "*"+newSuffix))
		for _, name := range names {
			f, err := os.OpenFile(name, os.O_RDWR, 0)
			if err != nil {
				continue
			}
			taken := flock(f) && os.Remove(name) == nil
			f.Close()
			if taken {
				close(took)
				return
			}
		}
	}
}
