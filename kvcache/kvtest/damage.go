package kvtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// testTamper damages stored blocks in every way: each is refused with a reason,
// counted, and then gone, so that the block can be put again.
func testTamper(t *testing.T, h Harness) {
	if h.Tamper == nil {
		t.Skip("the harness cannot tamper")
	}
	dir := newDir(t)
	s := h.open(t, dir, plenty)
	space := kvcache.NewSpace("model", nil)
	frames := chain(space, tokens(1, 8*3), 8, 300)
	f, other := frames[1], frames[2]
	foreign := block(kvcache.NewSpace("model 2", nil), frames[0].Key, f.First, f.IDs, 300)
	tenant := block(kvcache.NewSpace("model", []byte("t")), frames[0].Key, f.First, f.IDs, 300)
	replace := func(b []byte) func([]byte) []byte { return func([]byte) []byte { return slices.Clone(b) } }

	cases := map[string]func([]byte) []byte{
		"empty":              replace(nil),
		"zeros":              func(b []byte) []byte { return make([]byte, len(b)) },
		"longer":             func(b []byte) []byte { return append(b, 0) },
		"twice":              func(b []byte) []byte { return append(b, b...) },
		"another block":      replace(other.Bytes()),
		"another model's":    replace(foreign.Bytes()),
		"another tenant's":   replace(tenant.Bytes()),
		"payload of another": func(b []byte) []byte { return append(b[:f.Len:f.Len], other.Bytes()[other.Len:]...) },
	}
	for n := 0; n < len(f.Bytes()); n += 13 {
		cases[fmt.Sprintf("cut to %d bytes", n)] = func(b []byte) []byte { return b[:n] }
		cases[fmt.Sprintf("flip in byte %d", n)] = func(b []byte) []byte { b[n] ^= 1 << (n % 8); return b }
	}
	for name, change := range cases {
		put(t, s, frames...)
		if !has(t, s, f.Ref) {
			t.Fatalf("before %s: the block is missing", name)
		}
		if err := h.Tamper(dir, f.Ref, change); errors.Is(err, ErrSame) {
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		before := refusals(s)
		if err := readBlock(s, f.Ref); err == nil {
			t.Errorf("%s: served", name)
		} else if _, ok := errors.AsType[*kvcache.Refusal](err); !ok {
			t.Errorf("%s: %v is no refusal", name, err)
		}
		if _, ok := stats(s); ok && refusals(s) == before {
			t.Errorf("%s: not counted", name)
		}
		if has(t, s, f.Ref) || !has(t, s, frames[0].Ref) || !has(t, s, other.Ref) {
			t.Errorf("%s: what was wrong is still there, or what was right is gone", name)
		}
	}
	lookUpDamaged(t, h, frames)
}

// lookUpDamaged opens a store anew, which has to read headers: a block with a
// wrong one ends the chain.
func lookUpDamaged(t *testing.T, h Harness, frames []*kvcache.Frame) {
	dir := newDir(t)
	if h.Shared || h.Lasting {
		s := h.open(t, dir, plenty)
		put(t, s, frames...)
		s.Close()
		if err := h.Tamper(dir, frames[1].Ref, func(b []byte) []byte { b[180]++; return b }); err != nil {
			t.Fatal(err)
		}
		s = h.open(t, dir, plenty)
		ids := slices.Concat(frames[0].IDs, frames[1].IDs, frames[2].IDs)
		if m := longest(t, s, frames[0].Space, ids); len(m.Blocks) != 1 || m.Common != 0 {
			t.Errorf("%d blocks and %d tokens behind a damaged header, want 1 and 0", len(m.Blocks), m.Common)
		}
		if _, ok := stats(s); ok && refusals(s) != 1 {
			t.Errorf("%d refusals, want 1", refusals(s))
		}
	}
}

// readBlock reads all of a block.
func readBlock(s kvcache.Store, ref kvcache.Ref) error {
	l, err := s.Get(context.Background(), ref)
	if err != nil {
		return err
	}
	defer l.Release()
	_, err = l.Payload()
	return err
}

// testLimit writes ten times what fits.
func testLimit(t *testing.T, h Harness) {
	s := h.open(t, newDir(t), h.Limit)
	space := kvcache.NewSpace("model", nil)
	size := int(h.Limit / 40)
	for seed := range uint64(50) {
		ids := tokens(seed, 16*8)
		put(t, s, chain(space, ids, 16, size)...)
		if m := longest(t, s, space, ids); len(m.Blocks) != 8 {
			t.Fatalf("%d of 8 blocks of the chain that was just written", len(m.Blocks))
		}
		if st, ok := stats(s); ok && (st.Used > st.Limit || st.Used <= 0) {
			t.Fatalf("%d bytes in use, limit %d", st.Used, st.Limit)
		}
		if seed%5 != 0 {
			continue // the rest is slow
		}
		// What has gone is not named any more.
		for old := range seed {
			ids := tokens(old, 16*8)
			checkMatch(t, s, kvcache.Query{Space: space, IDs: ids}, longest(t, s, space, ids))
		}
		// Of each chain there is a head or nothing: no block without those before.
		for old := range seed {
			frames := chain(space, tokens(old, 16*8), 16, size)
			gap := false
			for i, f := range frames {
				if ok := exists(t, s, f.Ref); ok && gap {
					t.Fatalf("chain %d has block %d but not the one before", old, i)
				} else if !ok {
					gap = true
				}
			}
		}
	}
	if st, ok := stats(s); ok && (st.Evictions == 0 || st.EvictedBytes == 0) {
		t.Errorf("counted %+v", st)
	}
	huge := block(space, space.Root, 0, tokens(1000, 16), int(h.Limit))
	if err := s.Put(context.Background(), huge); !errors.Is(err, kvcache.ErrFull) {
		t.Errorf("a block larger than the store: %v", err)
	}
	if has(t, s, huge.Ref) {
		t.Error("a refused block is there")
	}
	if st, ok := stats(s); ok && st.Full == 0 {
		t.Error("not counted as full")
	}
}

// exists says whether a block is there, by a look-up that does not count as its
// use if the store can tell.
func exists(t testing.TB, s kvcache.Store, ref kvcache.Ref) bool {
	t.Helper()
	l, err := s.Get(context.Background(), ref)
	if errors.Is(err, kvcache.ErrNotFound) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	return true
}
