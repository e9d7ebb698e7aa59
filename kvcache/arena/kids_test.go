//go:build unix

package arena

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
)

// TestKids holds the order to a sorted slice. Numbers stand for themselves.
func TestKids(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	k := sortKids(nil, cmp.Compare[evict.ID])
	var want []evict.ID
	to := func(id evict.ID) compare { return func(o evict.ID) int { return cmp.Compare(o, id) } }
	for round := range 20_000 {
		id := evict.ID(r.Uint32N(4000))
		at, known := slices.BinarySearch(want, id)
		beside := want[max(0, at-1):min(len(want), at+1)]
		if got := k.beside(to(id)); !slices.Equal(got, beside) {
			t.Fatalf("round %d: beside %d is %v, want %v", round, id, got, beside)
		}
		switch {
		case !known:
			want = slices.Insert(want, at, id)
			k.insert(id, to(id))
		case round%3 == 0:
			want = slices.Delete(want, at, at+1)
			if !k.remove(id, to(id)) {
				t.Fatalf("round %d: %d is not there", round, id)
			}
		}
		if k.remove(5000, to(5000)) {
			t.Fatal("something was removed that is not there")
		}
	}
	if got := slices.Concat(k.chunks...); !slices.Equal(got, want) {
		t.Error("the order is not that of a sorted slice")
	}
	for _, id := range want {
		k.remove(id, to(id))
	}
	if len(k.chunks) != 0 {
		t.Errorf("%d chunks are left of nothing", len(k.chunks))
	}
}

// TestManyKids: among thousands of blocks that follow one, the one that shares the most
// tokens is found, whatever comes and goes, and after reopening.
func TestManyKids(t *testing.T) {
	dir := t.TempDir() + "/store"
	cfg := Config{Dir: dir, Limit: 16 << 20}
	s := newStore(t, cfg)
	ctx := context.Background()
	space := kvcache.NewSpace("m", nil)
	r := rand.New(rand.NewPCG(1, 1))
	random := func() []int32 {
		ids := []int32{7, 7, 7, 7, 7, 7, 7, 7}[:1+r.IntN(8)]
		for i := range ids {
			ids[i] = r.Int32N(6) - 3
		}
		return ids
	}
	known := map[kvcache.Key][]int32{}
	check := func(round int) {
		t.Helper()
		ids := random()
		best, full := 0, 0
		for _, have := range known {
			n := 0
			for n < len(ids) && n < len(have) && ids[n] == have[n] {
				n++
			}
			if n == len(have) {
				full = max(full, n)
			}
			best = max(best, n)
		}
		m, err := s.Longest(ctx, kvcache.Query{Space: space, IDs: ids})
		if err != nil || m.Tokens() != full || full == 0 && m.Common != best {
			t.Fatalf("round %d: %v finds %d and %d tokens, want %d and %d", round, ids, m.Tokens(), m.Common, full, best)
		}
	}
	for round := range 3000 {
		ids := random()
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: ids}, []kvcache.Part{{Size: 1}}, []byte{1})
		if err != nil {
			t.Fatal(err)
		}
		if put(t, s, f); r.IntN(3) > 0 {
			known[f.Key] = ids
		} else {
			s.mu.Lock()
			s.removeLocked(s.index.byKey[f.Key])
			s.mu.Unlock()
			delete(known, f.Key)
		}
		check(round)
	}
	if len(known) < 1000 || len(s.index.sorted) != 1 {
		t.Fatalf("%d blocks, %d orders: the test proves nothing", len(known), len(s.index.sorted))
	}
	s.Close()
	s = newStore(t, cfg)
	for round := range 500 {
		check(round)
	}
}
