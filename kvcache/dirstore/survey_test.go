//go:build unix

package dirstore

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// fill puts a chain of n blocks of a model and a tail behind it.
func fill(t *testing.T, s *Store, model string, n int) (space kvcache.Space, refs []kvcache.Ref, w kvcache.TailWriter) {
	t.Helper()
	space = kvcache.NewSpace(model+" weights", []byte("salt"))
	if err := s.Label(t.Context(), space.Fingerprint, kvcache.Label{Model: model, Text: model + " weights"}); err != nil {
		t.Fatal(err)
	}
	parent := space.Root
	for i := range n {
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: 2 * i, IDs: []int32{int32(i), 7}}, []kvcache.Part{{Size: 5000}}, make([]byte, 5000))
		if err == nil {
			err = s.Put(t.Context(), f)
		}
		if err != nil {
			t.Fatal(err)
		}
		parent, refs = f.Key, append(refs, f.Ref)
	}
	w, err := s.OpenTail(t.Context(), kvcache.TailSpec{Space: space, Stream: model, Parent: parent, First: 2 * n})
	if err == nil {
		err = w.Append(kvcache.Range{First: 2 * n, IDs: []int32{9}, Data: []byte("kv")})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return space, refs, w
}

func TestModels(t *testing.T) {
	s := newStore(t, Config{})
	if models, err := s.Models(t.Context()); err != nil || len(models) != 0 {
		t.Errorf("a new store has %v, %v", models, err)
	}
	b, _, _ := fill(t, s, "b", 3)
	a, _, _ := fill(t, s, "a", 1)
	// The first label stays.
	if err := s.Label(t.Context(), a.Fingerprint, kvcache.Label{Model: "other"}); err != nil {
		t.Fatal(err)
	}
	models, err := s.Models(t.Context())
	if err != nil || len(models) != 2 {
		t.Fatalf("%+v, %v", models, err)
	}
	for i, want := range []struct {
		space  kvcache.Space
		name   string
		blocks int
	}{{a, "a", 1}, {b, "b", 3}} {
		m := models[i]
		if m.Fingerprint != want.space.Fingerprint || m.Label != (kvcache.Label{Model: want.name, Text: want.name + " weights"}) ||
			m.Blocks != want.blocks || m.BlockBytes < int64(5000*want.blocks) || m.Tails != 1 || m.TailBytes < tailHeaderLen || m.Used.IsZero() {
			t.Errorf("model %d: %+v", i, m)
		}
	}
}

// TestInvalidation: blocks of a dropped fingerprint are refused at once, also by a
// process that had looked them up, its writers are told, its bytes are free, and
// another model's stay.
func TestInvalidation(t *testing.T) {
	s := newStore(t, Config{})
	other := newStore(t, Config{Dir: s.dir})
	kept, _, _ := fill(t, s, "kept", 1)
	if err := s.recount(); err != nil {
		t.Fatal(err)
	}
	before := s.Stats().Used
	space, refs, w := fill(t, s, "dropped", 8)
	q := kvcache.Query{Space: space, IDs: []int32{0, 7, 1, 7, 2, 7}}
	if m, err := other.Longest(t.Context(), q); err != nil || m.Tokens() != 6 {
		t.Fatalf("%d tokens, %v", m.Tokens(), err)
	}
	if err := s.Drop(t.Context(), space.Fingerprint); err != nil {
		t.Fatal(err)
	}
	if m, err := other.Longest(t.Context(), q); err != nil || m.Tokens() != 0 || m.Common != 0 {
		t.Errorf("dropped, and found: %d tokens, %v", m.Tokens(), err)
	}
	for _, ref := range refs {
		if _, err := other.Get(t.Context(), ref); !errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("dropped, and lent: %v", err)
		}
	}
	if err := w.Append(kvcache.Range{First: 17, IDs: []int32{9}, Data: []byte("kv")}); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("a writer of a dropped model goes on: %v", err)
	}
	if used := other.Stats().Used; used > before {
		t.Errorf("%d bytes in use, %d before", used, before)
	}
	models, err := s.Models(t.Context())
	if err != nil || len(models) != 1 || models[0].Fingerprint != kept.Fingerprint || models[0].Blocks != 1 {
		t.Errorf("%+v, %v", models, err)
	}
}

// TestEntries finds what is spoiled and removes it.
func TestEntries(t *testing.T) {
	s := newStore(t, Config{})
	space, refs, _ := fill(t, s, "m", 4)
	flip := func(path string, at int64) {
		b, err := os.ReadFile(filepath.Join(s.dir, path))
		if err == nil {
			b[at] ^= 1
			err = errors.Join(os.Remove(filepath.Join(s.dir, path)), os.WriteFile(filepath.Join(s.dir, path), b, 0o600))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	flip(blockName(refs[1]), 50)   // the header
	flip(blockName(refs[2]), 4000) // the payload
	if err := os.Rename(filepath.Join(s.dir, blockName(refs[3])), filepath.Join(s.dir, childrenDir(space.Fingerprint, refs[3].Parent), refs[0].Key.String())); err != nil {
		t.Fatal(err)
	}
	for _, whole := range []bool{false, true} {
		var reasons []string
		tails, tokens := 0, 0
		for e := range s.Entries(t.Context(), space.Fingerprint, whole) {
			if e.Tail {
				tails++
			}
			tokens += len(e.Header.IDs)
			if r, ok := errors.AsType[*kvcache.Refusal](e.Err); ok {
				reasons = append(reasons, r.Reason.String())
			} else if e.Err != nil {
				t.Error(e.Err)
			}
		}
		slices.Sort(reasons)
		want := []string{"checksum", "key"}
		if whole {
			want = []string{"checksum", "checksum", "key"}
		}
		if tails != 1 || !slices.Equal(reasons, want) {
			t.Errorf("whole %v: %d tails, reasons %v, want %v", whole, tails, reasons, want)
		}
	}
	if err := s.recount(); err != nil {
		t.Fatal(err)
	}
	for e := range s.Entries(t.Context(), space.Fingerprint, true) {
		if e.Err != nil {
			if err := s.Remove(t.Context(), e); err != nil {
				t.Error(err)
			}
		}
	}
	if m, err := s.Models(t.Context()); err != nil || m[0].Blocks != 1 || m[0].Tails != 1 {
		t.Errorf("%+v, %v", m, err)
	}
	used := s.Stats().Used
	if err := s.recount(); err != nil || s.Stats().Used != used {
		t.Errorf("%d bytes were counted, there are %d (%v)", used, s.Stats().Used, err)
	}
	if err := s.Remove(t.Context(), Entry{Path: "control"}); err == nil {
		t.Error("the control file can be removed as a block")
	}
}

// TestMakeRoom evicts down to the limit, and removes models of which nothing is left.
func TestMakeRoom(t *testing.T) {
	wide := newStore(t, Config{})
	space, _, w := fill(t, wide, "m", 20)
	w.Close()
	if err := wide.DropTail(t.Context(), space, "m"); err != nil {
		t.Fatal(err)
	}
	s := newStore(t, Config{Dir: wide.dir, Limit: 100_000})
	if err := s.MakeRoom(t.Context()); err != nil {
		t.Fatal(err)
	}
	models, err := s.Models(t.Context())
	if used := s.Stats().Used; err != nil || used > 87_500 || len(models) != 1 || models[0].Blocks == 0 {
		t.Errorf("%d bytes in use, %+v, %v", used, models, err)
	}
	for e := range s.Entries(t.Context(), space.Fingerprint, false) {
		if err := s.Remove(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.MakeRoom(t.Context()); err != nil {
		t.Fatal(err)
	}
	if models, err := s.Models(t.Context()); err != nil || len(models) != 0 {
		t.Errorf("%+v, %v", models, err)
	}
}
