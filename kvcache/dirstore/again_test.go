//go:build unix

package dirstore

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// A directory that is removed under two stores, as a whole or but for its name, is made
// again: both use the same one, blocks are found across them, and open tails go on.
func TestDirectoryRemoved(t *testing.T) {
	for name, remove := range map[string]func(dir string) error{
		"whole": os.RemoveAll,
		"its content": func(dir string) error {
			list, err := os.ReadDir(dir)
			for _, e := range list {
				err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
			}
			return err
		},
		"another one in its place": func(dir string) error {
			return errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700))
		},
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			dir := filepath.Join(t.TempDir(), "kv")
			a := byHand(newStore(t, Config{Dir: dir, Log: slog.New(slog.NewTextHandler(&log, nil))}))
			b := byHand(newStore(t, Config{Dir: dir}))
			space := kvcache.Space{Fingerprint: kvcache.Fingerprint{1}}
			put(t, a, sealed(t, space, space.Root, 1, 100))
			tail, err := a.OpenTail(t.Context(), kvcache.TailSpec{Space: space, Stream: "s", Attempt: 1})
			if err != nil {
				t.Fatal(err)
			}
			defer tail.Close()
			if err := tail.Append(kvcache.Range{IDs: []int32{1}, Data: []byte("x")}); err != nil {
				t.Fatal(err)
			}
			if a.gone() || a.look(t.Context(), false) || log.Len() > 0 {
				t.Fatalf("gone before: %s", log.String())
			}
			if err := remove(dir); err != nil {
				t.Fatal(err)
			}
			if !a.gone() || a.look(t.Context(), false) || a.gone() || !b.gone() || b.look(t.Context(), false) {
				t.Fatal("not made again")
			}
			if n := strings.Count(log.String(), "made again"); n != 1 {
				t.Errorf("said %d times: %s", n, log.String())
			}
			frame := sealed(t, space, space.Root, 2, 100)
			put(t, a, frame)
			m, err := b.Longest(t.Context(), kvcache.Query{Space: space, IDs: frame.IDs})
			if err != nil || m.Tokens() != len(frame.IDs) {
				t.Errorf("the other store finds %d tokens of the new block: %v", m.Tokens(), err)
			}
			// The tail's old range is lost: it says so, and takes a new beginning.
			if err := tail.Append(kvcache.Range{First: 1, IDs: []int32{2}, Data: []byte("y")}); !errors.Is(err, kvcache.ErrGap) {
				t.Errorf("append behind what is lost: %v", err)
			}
			if err := tail.Append(kvcache.Range{IDs: []int32{1, 2}, Data: []byte("xy")}); err != nil {
				t.Errorf("append from the start: %v", err)
			}
			if used := a.Stats().Used; used <= 0 || used != b.Stats().Used {
				t.Errorf("used: %d and %d", used, b.Stats().Used)
			}
		})
	}
}

// One that cannot be made again is said once, and is when it can be.
func TestDirectoryCannotBeMade(t *testing.T) {
	var log bytes.Buffer
	parent := filepath.Join(t.TempDir(), "parent")
	dir := filepath.Join(parent, "kv")
	s := byHand(newStore(t, Config{Dir: dir, Log: slog.New(slog.NewTextHandler(&log, nil))}))
	if err := errors.Join(os.RemoveAll(parent), os.WriteFile(parent, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	failed := s.look(t.Context(), false)
	if failed = s.look(t.Context(), failed); !failed || strings.Count(log.String(), "nothing is kept") != 1 {
		t.Errorf("failed %v: %s", failed, log.String())
	}
	space := kvcache.Space{}
	if err := s.Put(t.Context(), sealed(t, space, space.Root, 1, 100)); err == nil {
		t.Error("a block was put nowhere")
	}
	if err := os.Remove(parent); err != nil {
		t.Fatal(err)
	}
	if s.look(t.Context(), failed) {
		t.Errorf("still failing: %s", log.String())
	}
	put(t, s, sealed(t, space, space.Root, 1, 100))
}

// byHand ends what a store does by itself.
func byHand(s *Store) *Store {
	s.stop()
	s.done.Wait()
	return s
}
