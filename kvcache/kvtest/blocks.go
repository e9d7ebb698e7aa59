package kvtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

func testBlocks(t *testing.T, h Harness) {
	s := h.fresh(t)
	space := kvcache.NewSpace("model", []byte("salt"))
	frames := chain(space, tokens(1, 64*5), 64, 5000)
	if has(t, s, frames[0].Ref) {
		t.Error("an empty store has a block")
	}
	put(t, s, frames...)
	for _, f := range frames {
		l, err := s.Get(context.Background(), f.Ref)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(l.Bytes(), f.Bytes()) {
			t.Error("the frame is not as it was put")
		}
		if l.First != f.First || !slices.Equal(l.IDs, f.IDs) || len(l.Parts) != 2 {
			t.Errorf("header %+v, want %+v", l.Header, f.Header)
		}
		if b, err := l.Part(1); err != nil || !bytes.Equal(b, content(f.Key, 0, 5000)[2500:]) {
			t.Errorf("part 1 alone: %v", err)
		}
		l.Release()
	}
	// One token, one byte, one long block.
	small := block(space, space.Root, 0, []int32{7}, 1)
	large := block(space, small.Key, 1, tokens(2, 5000), 3<<20)
	put(t, s, small, large)
	if !has(t, s, small.Ref) || !has(t, s, large.Ref) {
		t.Error("blocks of unusual size are missing")
	}
	if st, ok := stats(s); ok && (st.Puts != 7 || st.Hits != 7 || st.Misses != 1 || st.PutBytes < 3<<20 || st.HitBytes != st.PutBytes) {
		t.Errorf("counted %+v", st)
	}
}

func testWriteOnce(t *testing.T, h Harness) {
	s := h.fresh(t)
	space := kvcache.NewSpace("model", nil)
	ids := tokens(1, 64)
	first := block(space, space.Root, 0, ids, 5000)
	second := blockBy(space, space.Root, 0, ids, func(key kvcache.Key) []byte { return content(key, 1, 7000) })
	if first.Key != second.Key {
		t.Fatal("the test's blocks differ in key")
	}
	put(t, s, first, second, first)
	if !has(t, s, first.Ref) {
		t.Error("the block is gone")
	}
	if st, ok := stats(s); ok && (st.Puts != 1 || st.Duplicates != 2) {
		t.Errorf("%d puts and %d duplicates, want 1 and 2", st.Puts, st.Duplicates)
	}
	// The store has copied it.
	clear(first.Bytes())
	if !has(t, s, second.Ref) {
		t.Error("the block is gone")
	}
}

func testLongest(t *testing.T, h Harness) {
	s := h.fresh(t)
	space := kvcache.NewSpace("model", nil)
	ids := tokens(1, 64*4)
	frames := chain(space, ids, 64, 100)
	if m := longest(t, s, space, ids); len(m.Blocks) != 0 || m.Common != 0 {
		t.Errorf("an empty store matches %+v", m)
	}
	put(t, s, frames[:3]...)
	branch := slices.Clone(ids[64:128])
	branch[40]++
	put(t, s, block(space, frames[0].Key, 64, branch, 100))

	other := slices.Clone(ids)
	other[100], other[140] = -1, -1
	for _, c := range []struct {
		name   string
		ids    []int32
		blocks int
		common int
	}{
		{"all", ids, 3, 0},
		{"nothing", nil, 0, 0},
		{"unknown", tokens(2, 300), 0, 0},
		{"one token", ids[:1], 0, 1},
		{"shorter than a block", ids[:63], 0, 63},
		{"exactly one", ids[:64], 1, 0},
		{"one and a token", ids[:65], 1, 1},
		{"inside the third", ids[:130], 2, 2},
		{"diverging in the second", other, 1, 36},
		{"the branch", slices.Concat(ids[:64], branch, ids[128:]), 2, 0},
		{"inside the branch", slices.Concat(ids[:64], branch[:50]), 1, 50},
		{"where both branches agree", slices.Concat(ids[:64], branch[:40], []int32{-5}), 1, 40},
	} {
		m := longest(t, s, space, c.ids)
		if len(m.Blocks) != c.blocks || m.Common != c.common || m.Tokens() != 64*c.blocks {
			t.Errorf("%s: %d blocks and %d tokens, want %d and %d", c.name, len(m.Blocks), m.Common, c.blocks, c.common)
		}
		checkMatch(t, s, kvcache.Query{Space: space, IDs: c.ids}, m)
	}
	// From within the chain.
	q := kvcache.Query{Space: space, From: frames[0].Key, First: 64, IDs: ids[64:]}
	m, err := s.Longest(context.Background(), q)
	if err != nil || len(m.Blocks) != 2 {
		t.Errorf("from the first block: %d blocks, %v", len(m.Blocks), err)
	}
	checkMatch(t, s, q, m)
	// What comes later is found, whatever was remembered of its parent.
	put(t, s, frames[3])
	if m := longest(t, s, space, ids); len(m.Blocks) != 4 {
		t.Errorf("%d blocks after another put, want 4", len(m.Blocks))
	}
}

// checkMatch checks all that can be said of an answer alone: the chain hangs
// together, begins as the query does, and its blocks can be read.
func checkMatch(t testing.TB, s kvcache.Store, q kvcache.Query, m kvcache.Match) {
	t.Helper()
	parent, at := q.From, 0
	if parent == (kvcache.Key{}) {
		parent = q.Root
	}
	for i, b := range m.Blocks {
		if at+b.Tokens > len(q.IDs) || b.First != q.First+at || b.Ref != q.Child(parent, q.IDs[at:at+b.Tokens]) {
			t.Fatalf("block %d is %+v", i, b)
		}
		if !has(t, s, b.Ref) {
			t.Fatalf("block %d of a chain is missing", i)
		}
		parent, at = b.Key, at+b.Tokens
	}
	if m.Common == 0 {
		return
	}
	p := m.Partial
	l, err := s.Get(context.Background(), p.Ref)
	if err != nil {
		t.Fatalf("partial block: %v", err)
	}
	defer l.Release()
	if p.Parent != parent || p.First != q.First+at || len(l.IDs) != p.Tokens || p.Size != l.Total || m.Common >= p.Tokens ||
		at+m.Common > len(q.IDs) || !slices.Equal(l.IDs[:m.Common], q.IDs[at:at+m.Common]) {
		t.Fatalf("partial block %+v with %d common tokens", p, m.Common)
	}
}

// testLongestModel compares random trees of blocks of several sizes with a search
// over all of them.
func testLongestModel(t *testing.T, h Harness) {
	space := kvcache.NewSpace("model", nil)
	for seed := range uint64(8) {
		r := rand.New(rand.NewPCG(seed, 1))
		s := h.fresh(t)
		// Three kinds of token: many prefixes are shared.
		random := func(n int) []int32 {
			ids := make([]int32, n)
			for i := range ids {
				ids[i] = r.Int32N(3)
			}
			return ids
		}
		known := []*kvcache.Frame{{Header: kvcache.Header{Ref: kvcache.Ref{Space: space, Key: space.Root}}}}
		for range 60 {
			parent := known[r.IntN(len(known))]
			f := block(space, parent.Key, parent.First+len(parent.IDs), random(1+r.IntN(4)), 10)
			put(t, s, f)
			known = append(known, f)
		}
		for range 60 {
			ids := random(r.IntN(12))
			full, part := search(known[1:], space.Root, ids)
			m := longest(t, s, space, ids)
			if m.Tokens() != full || m.Common != part {
				t.Fatalf("seed %d, %v: %d+%d tokens, want %d+%d", seed, ids, m.Tokens(), m.Common, full, part)
			}
			checkMatch(t, s, kvcache.Query{Space: space, IDs: ids}, m)
		}
	}
}

// search is the plainest look-up: every frame at every step.
func search(known []*kvcache.Frame, parent kvcache.Key, ids []int32) (full, part int) {
	for _, f := range known {
		if f.Parent != parent {
			continue
		}
		n := 0
		for n < len(f.IDs) && n < len(ids) && f.IDs[n] == ids[n] {
			n++
		}
		a, b := 0, n
		if n == len(f.IDs) {
			a, b = search(known, f.Key, ids[n:])
			a += n
		}
		if a > full || a == full && b > part {
			full, part = a, b
		}
	}
	return full, part
}

// testSpaces: what differs in model or tenant never meets.
func testSpaces(t *testing.T, h Harness) {
	s := h.fresh(t)
	ids := tokens(1, 128)
	spaces := []kvcache.Space{
		kvcache.NewSpace("model", nil), kvcache.NewSpace("model", []byte("a")), kvcache.NewSpace("model", []byte("b")),
		kvcache.NewSpace("model 2", nil), kvcache.NewSpace("model 2", []byte("a")),
	}
	for i, space := range spaces {
		for _, other := range spaces[i:] {
			if m := longest(t, s, other, ids); len(m.Blocks) != 0 || m.Common != 0 {
				t.Fatal("a block of another space was found")
			}
		}
		put(t, s, chain(space, ids, 64, 100)...)
	}
	// A key that leaked does not open another's block, and does not destroy it.
	refs := chain(spaces[1], ids, 64, 100)
	for _, wrong := range []kvcache.Space{spaces[0], spaces[2]} {
		ref := refs[0].Ref
		ref.Space = wrong
		before := refusals(s)
		_, err := s.Get(context.Background(), ref)
		wantRefusal(t, err, kvcache.ReasonForeign)
		if _, ok := stats(s); ok && refusals(s) != before+1 {
			t.Error("the refusal is not counted")
		}
		m, err := s.Longest(context.Background(), kvcache.Query{Space: wrong, From: refs[0].Key, First: 64, IDs: ids[64:]})
		if err != nil || len(m.Blocks) != 0 {
			t.Errorf("a look-up from another tenant's block finds %d, %v", len(m.Blocks), err)
		}
	}
	ref := refs[0].Ref
	ref.Fingerprint = spaces[3].Fingerprint
	if l, err := s.Get(context.Background(), ref); err == nil {
		l.Release()
		t.Error("a block of another model was handed out")
	}
	for _, space := range spaces {
		if m := longest(t, s, space, ids); len(m.Blocks) != 2 {
			t.Errorf("%d blocks, want 2", len(m.Blocks))
		}
	}
}

// testLent: what is lent stays readable while the store goes on.
func testLent(t *testing.T, h Harness) {
	s := h.fresh(t)
	space := kvcache.NewSpace("model", nil)
	f := block(space, space.Root, 0, tokens(1, 64), 100_000)
	put(t, s, f)
	var lent []*kvcache.Lent
	for range 3 {
		l, err := s.Get(context.Background(), f.Ref)
		if err != nil {
			t.Fatal(err)
		}
		lent = append(lent, l)
	}
	lent[0].Release()
	lent[0].Release()
	if _, err := lent[0].Payload(); err == nil {
		t.Error("a released block can be read")
	}
	if err := s.Drop(context.Background(), space.Fingerprint); err != nil {
		t.Fatal(err)
	}
	check := func(l *kvcache.Lent) {
		t.Helper()
		if b, err := l.Payload(); err != nil || !bytes.Equal(b, content(f.Key, 0, 100_000)) {
			t.Errorf("a lent block has changed: %v", err)
		}
		l.Release()
	}
	check(lent[1])
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	check(lent[2])
}

func testDrop(t *testing.T, h Harness) {
	s := h.fresh(t)
	ids := tokens(1, 64*3)
	old, tenant, other := kvcache.NewSpace("old", nil), kvcache.NewSpace("old", []byte("t")), kvcache.NewSpace("new", nil)
	for _, space := range []kvcache.Space{old, tenant, other} {
		put(t, s, chain(space, ids, 64, 100)...)
		longest(t, s, space, ids) // remembered, maybe
	}
	for range 2 { // the second time there is nothing left
		if err := s.Drop(context.Background(), old.Fingerprint); err != nil {
			t.Fatal(err)
		}
	}
	for _, space := range []kvcache.Space{old, tenant} {
		if m := longest(t, s, space, ids); len(m.Blocks) != 0 {
			t.Errorf("%d blocks of a dropped model are found", len(m.Blocks))
		}
		if has(t, s, chain(space, ids, 64, 100)[0].Ref) {
			t.Error("a block of a dropped model is handed out")
		}
	}
	if m := longest(t, s, other, ids); len(m.Blocks) != 3 {
		t.Errorf("%d blocks of another model, want 3", len(m.Blocks))
	}
	put(t, s, chain(old, ids, 64, 100)...)
	if m := longest(t, s, old, ids); len(m.Blocks) != 3 {
		t.Errorf("%d blocks after the model came back, want 3", len(m.Blocks))
	}
}

func testClosed(t *testing.T, h Harness) {
	s := h.fresh(t)
	space := kvcache.NewSpace("model", nil)
	f := block(space, space.Root, 0, tokens(1, 64), 100)
	ended, end := context.WithCancel(context.Background())
	end()
	if err := s.Put(ended, f); !errors.Is(err, context.Canceled) {
		t.Errorf("put after the end of its context: %v", err)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
	ctx := context.Background()
	_, get := s.Get(ctx, f.Ref)
	_, look := s.Longest(ctx, kvcache.Query{Space: space, IDs: f.IDs})
	for name, err := range map[string]error{
		"put": s.Put(ctx, f), "get": get, "longest": look, "drop": s.Drop(ctx, space.Fingerprint),
	} {
		if !errors.Is(err, kvcache.ErrClosed) {
			t.Errorf("%s after close: %v", name, err)
		}
	}
	stats(s) // does not crash
}

// testConcurrent has many goroutines write, read, look up and drop the same
// chains; the race detector and the content of the blocks judge.
func testConcurrent(t *testing.T, h Harness) {
	s := h.open(t, newDir(t), 8*h.Limit)
	space := kvcache.NewSpace("model", nil)
	var all [][]*kvcache.Frame
	var ids [][]int32
	for seed := range uint64(4) {
		ids = append(ids, tokens(seed, 16*8))
		all = append(all, chain(space, ids[seed], 16, int(h.Limit/32)))
	}
	var wg sync.WaitGroup
	failures := make(chan error, 1000)
	for g := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 2))
			for range 60 {
				c := r.IntN(len(all))
				if err := oneTurn(s, r, space, ids[c], all[c]); err != nil {
					failures <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(failures)
	for err := range failures {
		t.Error(err)
	}
}

// oneTurn does one random thing to one chain.
func oneTurn(s kvcache.Store, r *rand.Rand, space kvcache.Space, ids []int32, frames []*kvcache.Frame) error {
	ctx := context.Background()
	if r.IntN(20) == 0 {
		return s.Drop(ctx, space.Fingerprint)
	}
	if r.IntN(2) == 0 {
		f := frames[r.IntN(len(frames))]
		if err := s.Put(ctx, f); err != nil && !errors.Is(err, kvcache.ErrFull) {
			return err
		}
		return nil
	}
	m, err := s.Longest(ctx, kvcache.Query{Space: space, IDs: ids})
	if err != nil {
		return err
	}
	for i, b := range m.Blocks {
		if b.Ref != frames[i].Ref {
			return fmt.Errorf("block %d of a chain is %v, want %v", i, b.Key, frames[i].Key)
		}
		l, err := s.Get(ctx, b.Ref)
		if errors.Is(err, kvcache.ErrNotFound) {
			return nil // evicted or dropped meanwhile
		}
		if err != nil {
			return err
		}
		got, err := l.Payload()
		if err == nil && !bytes.Equal(got, content(b.Key, 0, len(got))) {
			err = errors.New("a payload is not its block's")
		}
		l.Release()
		if err != nil {
			return err
		}
	}
	return nil
}
