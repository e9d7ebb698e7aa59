//go:build unix

package arena

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/kvcache"
)

// lent is room that a writer has.
type lent struct {
	slot    int
	ticket  Ticket
	b       []byte
	release func()
}

// newWriter opens a writer.
func newWriter(t testing.TB, dir string) *Reader {
	t.Helper()
	w, err := OpenWriter(dir)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// lendRoom has a writer take room for a frame; nil where there is the block.
func lendRoom(t testing.TB, s *Store, w *Reader, f *kvcache.Frame) *lent {
	t.Helper()
	slot, ticket, err := w.Ask()
	if err != nil {
		t.Fatal(err)
	}
	at, err := s.LendRoom(context.Background(), w.Name(), slot, ticket, f.Ref, f.Total)
	if err != nil {
		t.Fatal(err)
	}
	if at == 0 {
		w.Abandon(slot)
		return nil
	}
	l := &lent{slot: slot, ticket: ticket}
	if l.b, l.release, err = w.Room(Loan{Data: s.Data(), ID: s.ID(), Slot: slot, At: at, Size: f.Total}); err != nil {
		t.Fatal(err)
	}
	return l
}

// TestLendRoom: a process that has the arena mapped writes a block in place, and nobody sees
// it before it is published.
func TestLendRoom(t *testing.T) {
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir})
	w := newWriter(t, dir)
	defer w.Close()
	space := kvcache.NewSpace("m", nil)
	f, other := sealed(t, space, space.Root, 1, 50_000), sealed(t, space, space.Root, 2, 50_000)
	l := lendRoom(t, s, w, f)
	copy(l.b, f.Bytes())
	if has(t, s, f) {
		t.Error("it is seen before it is published")
	}
	churn(t, s, space)
	if string(l.b) != string(f.Bytes()) {
		t.Fatal("somebody else has written into it")
	}
	if _, err := s.Publish(ctx, w.Name(), l.slot, l.ticket, f.Ref, f.Total+grain*100); err == nil {
		t.Error("more is published than was lent")
	}
	if _, err := s.Publish(ctx, w.Name(), l.slot, l.ticket, f.Ref, f.Total); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Publish(ctx, w.Name(), l.slot, l.ticket, f.Ref, f.Total); err != nil {
		t.Errorf("asked again because the answer got lost: %v", err)
	}
	l.release()
	if !has(t, s, f) {
		t.Error("it is not there")
	}
	if lendRoom(t, s, w, f) != nil {
		t.Error("room for what is there")
	}
	// What is no frame, or another one, is not published, and its room is free again.
	for _, b := range [][]byte{make([]byte, f.Total), f.Bytes()} {
		l := lendRoom(t, s, w, other)
		copy(l.b, b)
		if _, err := s.Publish(ctx, w.Name(), l.slot, l.ticket, other.Ref, other.Total); err == nil {
			t.Error("something else is published")
		}
		l.release()
	}
	l = lendRoom(t, s, w, other)
	l.release()
	if _, err := s.Publish(ctx, w.Name(), l.slot, l.ticket, other.Ref, other.Total); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("published after it was given up: %v", err)
	}
	if err := s.Sweep(ctx, time.Now()); err != nil || len(s.limbo) != 0 || has(t, s, other) {
		t.Errorf("%d extents are held by nobody: %v", len(s.limbo), err)
	}
}

// TestLendRoomTooLate: a request for room that its writer gave up, handled when another one
// has the slot, takes nothing from that one.
func TestLendRoomTooLate(t *testing.T) {
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir, Limit: 1 << 20})
	w := newWriter(t, dir)
	defer w.Close()
	space := kvcache.NewSpace("m", nil)
	f, other := sealed(t, space, space.Root, 1, 50_000), sealed(t, space, space.Root, 2, 50_000)
	slot, late, ticket := askAgain(t, w)
	at, err := s.LendRoom(ctx, w.Name(), slot, ticket, f.Ref, f.Total)
	if err != nil {
		t.Fatal(err)
	}
	b, release, err := w.Room(Loan{Data: s.Data(), ID: s.ID(), Slot: slot, At: at, Size: f.Total})
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	copy(b, f.Bytes())
	if _, err := s.LendRoom(ctx, w.Name(), slot, late, other.Ref, other.Total); !errors.Is(err, context.Canceled) {
		t.Errorf("room for nobody: %v", err)
	}
	churn(t, s, space)
	if string(b) != string(f.Bytes()) {
		t.Fatal("somebody else has written into it")
	}
	if _, err := s.Publish(ctx, w.Name(), slot, 0, f.Ref, f.Total); err != nil { // as older clients do
		t.Fatal(err)
	}
}

// TestPublishTooLate: what was to be published of room that its writer gave up takes nothing from
// the room that the slot has now, be that for another block or for the same one.
func TestPublishTooLate(t *testing.T) {
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir, Limit: 1 << 20})
	w := newWriter(t, dir)
	defer w.Close()
	space := kvcache.NewSpace("m", nil)
	f, other := sealed(t, space, space.Root, 1, 50_000), sealed(t, space, space.Root, 2, 50_000)
	gone := lendRoom(t, s, w, f)
	copy(gone.b, f.Bytes())
	gone.release()
	for _, next := range []*kvcache.Frame{other, f} {
		l := lendRoom(t, s, w, next)
		copy(l.b, next.Bytes())
		if l.slot != gone.slot {
			t.Fatal("it has another slot: the test proves nothing")
		}
		if _, err := s.Publish(ctx, w.Name(), gone.slot, gone.ticket, f.Ref, f.Total); !errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("published: %v", err)
		}
		churn(t, s, space)
		if string(l.b) != string(next.Bytes()) {
			t.Fatal("somebody else has written into it")
		}
		if _, err := s.Publish(ctx, w.Name(), l.slot, l.ticket, next.Ref, next.Total); err != nil {
			t.Error(err)
		}
		l.release()
	}
}

// TestLentRoomOutlivesOwner: the next owner leaves room alone that was lent, and publishes
// it.
func TestLentRoomOutlivesOwner(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir})
	w := newWriter(t, dir)
	defer w.Close()
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 50_000)
	l := lendRoom(t, s, w, f)
	s.Close()
	s = newStore(t, Config{Dir: dir})
	copy(l.b, f.Bytes())
	churn(t, s, space)
	if _, err := s.Publish(context.Background(), w.Name(), l.slot, l.ticket, f.Ref, f.Total); err != nil {
		t.Fatal(err)
	}
	l.release()
	if !has(t, s, f) {
		t.Error("it is not there")
	}
}

// TestWriterDies: what a dead writer held stays for a while, because others may have been
// told of it, also when the owner changes; then it is free.
func TestWriterDies(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir})
	w := newWriter(t, dir)
	space := kvcache.NewSpace("m", nil)
	l := lendRoom(t, s, w, sealed(t, space, space.Root, 1, 50_000))
	if err := errors.Join(unix.Munmap(w.words), w.file.Close()); err != nil { // as the kernel does
		t.Fatal(err)
	}
	now := time.Now()
	for name, at := range map[string]time.Time{"at once": now, "after a while": now.Add(orphaned - time.Second)} {
		if err := s.Sweep(context.Background(), at); err != nil {
			t.Fatal(err)
		}
		if len(s.limbo) != 1 {
			t.Errorf("%s its room is free", name)
		}
	}
	s.Close()
	s = newStore(t, Config{Dir: dir})
	churn(t, s, space)
	for _, b := range l.b {
		if b != 0 {
			t.Fatal("its room was given to somebody else after the owner's end")
		}
	}
	now = time.Now()
	for _, at := range []time.Time{now, now.Add(2 * orphaned)} {
		if err := s.Sweep(context.Background(), at); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.limbo)+len(s.peers) != 0 {
		t.Error("its room is never free again")
	}
}
