//go:build unix

package dirstore

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/kvcache"
)

// cut truncates a file from outside.
func cut(t *testing.T, name string, size int64) {
	t.Helper()
	if err := os.Truncate(name, size); err != nil {
		t.Fatal(err)
	}
}

// TestControlIsCut cuts the words that two processes share: neither dies, the file is
// whole again at the first use, and what it counted at the next sweep.
func TestControlIsCut(t *testing.T) {
	a := newStore(t, Config{})
	b := newStore(t, Config{Dir: a.dir})
	space := kvcache.NewSpace("m", nil)
	first := sealed(t, space, space.Root, 1, 10)
	put(t, a, first)
	used := a.Stats().Used
	for _, size := range []int64{0, 8, 16, 4096} {
		control := filepath.Join(a.dir, controlName)
		cut(t, control, size)
		for _, s := range []*Store{b, a} {
			s.Stats()
			if m, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: first.IDs}); err != nil || len(m.Blocks) != 1 {
				t.Errorf("cut to %d: %+v, %v", size, m, err)
			}
		}
		put(t, b, sealed(t, space, first.Key, int32(10+size), 10))
		if st, err := os.Stat(control); err != nil || st.Size() != controlSize {
			t.Errorf("cut to %d: the file is not whole again: %v, %v", size, st, err)
		}
	}
	if err := a.Sweep(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	if got, want := b.Stats().Used, 5*used+room(controlSize); got != want {
		t.Errorf("%d bytes in use, want %d", got, want)
	}
}

// TestControlIsLost cuts a control file that is out of reach by then: the process goes on
// alone.
func TestControlIsLost(t *testing.T) {
	s := newStore(t, Config{})
	held, err := os.OpenFile(filepath.Join(s.dir, controlName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := os.Remove(held.Name()); err != nil {
		t.Fatal(err)
	}
	if err := held.Truncate(0); err != nil {
		t.Fatal(err)
	}
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 10)
	put(t, s, f)
	if m, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: f.IDs}); err != nil || len(m.Blocks) != 1 {
		t.Errorf("%+v, %v", m, err)
	}
	if err := s.Sweep(t.Context(), time.Now()); err != nil {
		t.Error(err)
	}
	if s.Stats().Used != room(f.Total) {
		t.Errorf("%d bytes in use", s.Stats().Used)
	}
}

// TestFenceIsCut: the writer of a tail whose fence is cut has errors, and no other harm.
func TestFenceIsCut(t *testing.T) {
	s := newStore(t, Config{})
	space := kvcache.NewSpace("m", nil)
	w, err := s.OpenTail(t.Context(), kvcache.TailSpec{Space: space, Stream: "s"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	r := kvcache.Range{IDs: []int32{1}, Data: []byte("x")}
	if err := w.Append(r); err != nil {
		t.Fatal(err)
	}
	cut(t, filepath.Join(s.dir, streamDir(space.Fingerprint, "s"), fenceName), 0)
	r.First = 1
	if err := w.Append(r); !errors.Is(err, errFault) {
		t.Errorf("append behind a cut fence: %v", err)
	}
	if err := w.Rotate(space.Root, 0); !errors.Is(err, errFault) {
		t.Errorf("rotate behind a cut fence: %v", err)
	}
	if tails, err := s.ReadTail(t.Context(), space, "s", 0); err != nil || len(tails) != 1 {
		t.Errorf("%d tails, %v", len(tails), err)
	}
	if _, err := s.OpenTail(t.Context(), kvcache.TailSpec{Space: space, Stream: "s", Attempt: 1}); err == nil {
		t.Error("opened behind a cut fence")
	}
	if err := s.DropTail(t.Context(), space, "s"); err != nil {
		t.Error(err)
	}
	if _, err := s.OpenTail(t.Context(), kvcache.TailSpec{Space: space, Stream: "s", Attempt: 1}); err != nil {
		t.Errorf("after the drop: %v", err)
	}
}

// TestBlockIsCutWhileLent: what is lent stays what it was, for engines that read it in C.
func TestBlockIsCutWhileLent(t *testing.T) {
	s := newStore(t, Config{})
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 100_000)
	put(t, s, f)
	l, err := s.Get(t.Context(), f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	cut(t, filepath.Join(s.dir, blockName(f.Ref)), 0)
	if _, err := l.Payload(); err != nil {
		t.Error(err)
	}
	if _, err := s.Get(t.Context(), f.Ref); err == nil || s.Stats().Refused[kvcache.ReasonTorn] != 1 {
		t.Errorf("a block that was cut: %v", err)
	}
}

// irregular are things that are no files, and hold up or mislead whoever opens them.
func irregular(t *testing.T) map[string]func(name string) error {
	return map[string]func(name string) error{
		"fifo": func(name string) error { return unix.Mkfifo(name, 0o600) },
		"socket": func(name string) error {
			short := filepath.Join("/tmp", filepath.Base(t.TempDir())+"-sock") // names of sockets are short
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
			if err != nil {
				return err
			}
			l.SetUnlinkOnClose(false)
			return errors.Join(l.Close(), os.Rename(short, name))
		},
		"folder": func(name string) error { return os.Mkdir(name, 0o700) },
	}
}

// TestIrregularFiles puts something else in the place of every file of a store: nothing
// waits for it, and it is refused by reason.
func TestIrregularFiles(t *testing.T) {
	for kind, make := range irregular(t) {
		t.Run(kind, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			s := newStore(t, Config{})
			space := kvcache.NewSpace("m", nil)
			f := sealed(t, space, space.Root, 1, 10)
			put(t, s, f)
			w, err := s.OpenTail(ctx, kvcache.TailSpec{Space: space, Stream: "s", Attempt: 1})
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			if err := s.Label(ctx, space.Fingerprint, kvcache.Label{Model: "m"}); err != nil {
				t.Fatal(err)
			}
			replace := func(name string) {
				t.Helper()
				name = filepath.Join(s.dir, name)
				if err := errors.Join(os.Remove(name), make(name)); err != nil {
					t.Fatal(err)
				}
			}
			stream := streamDir(space.Fingerprint, "s")
			replace(blockName(f.Ref))
			replace(stream + "/" + tailName(0, 1, 1))
			replace(stream + "/" + fenceName)
			replace(modelDir(space.Fingerprint) + "/" + labelName)
			replace(controlName)
			if _, err := s.Get(ctx, f.Ref); err == nil {
				t.Error("a block is none")
			}
			if m, err := s.Longest(ctx, kvcache.Query{Space: space, IDs: f.IDs}); err != nil || len(m.Blocks) > 0 {
				t.Errorf("looked up %+v, %v", m, err)
			}
			if tails, err := s.ReadTail(ctx, space, "s", 0); err != nil || len(tails) > 0 {
				t.Errorf("%d tails, %v", len(tails), err)
			}
			if _, err := s.OpenTail(ctx, kvcache.TailSpec{Space: space, Stream: "s", Attempt: 2}); err == nil {
				t.Error("a fence is none")
			}
			if models, err := s.Models(ctx); err != nil || len(models) != 1 || models[0].Label.Model != "" {
				t.Errorf("%+v, %v", models, err)
			}
			for e := range s.Entries(ctx, space.Fingerprint, true) {
				t.Errorf("listed %+v", e)
			}
			if err := s.Sweep(ctx, time.Now()); err != nil {
				t.Error(err)
			}
			if _, err := Open(Config{Dir: s.dir}); err == nil {
				t.Error("a control file is none")
			}
			if got := s.Stats().Refused[kvcache.ReasonKind]; got < 2 {
				t.Errorf("%d refused", got)
			}
			put(t, s, f)
			if m, err := s.Longest(ctx, kvcache.Query{Space: space, IDs: f.IDs}); err != nil || len(m.Blocks) != 1 {
				t.Errorf("put anew: %+v, %v", m, err)
			}
		})
	}
}

// TestCloseWaitsNotForEver: neither Close nor whoever comes after it waits for a call that
// hangs.
func TestCloseWaitsNotForEver(t *testing.T) {
	s := newStore(t, Config{})
	s.patience = time.Millisecond
	if err := s.enter(t.Context()); err != nil { // a call that hangs
		t.Fatal(err)
	}
	if err := s.Close(); err == nil {
		t.Error("closed while a call hangs")
	}
	if err := s.Drop(t.Context(), kvcache.Fingerprint{}); !errors.Is(err, kvcache.ErrClosed) {
		t.Errorf("a call after that: %v", err)
	}
	s.Stats()
	s.patience = time.Minute
	s.leave()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
