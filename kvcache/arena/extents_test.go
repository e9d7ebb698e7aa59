package arena

import (
	"math/rand/v2"
	"testing"
)

// TestBins: bins are in the order of length, and each length has one.
func TestBins(t *testing.T) {
	last := 0
	for n := uint32(1); n < 1<<20; n++ {
		bin := binOf(n)
		if bin < last || bin > last+1 || bin >= bins {
			t.Fatalf("%d grains are in bin %d, one less in %d", n, bin, last)
		}
		last = bin
	}
	if bin := binOf(1<<32 - 1); bin != bins-1 {
		t.Errorf("the longest run is in bin %d of %d", bin, bins)
	}
}

// TestExtents allocates and frees at random beside a map of every grain.
func TestExtents(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 0))
		const total = 5000
		x := newExtents(1, total)
		grains := [total]bool{0: true}
		mark := func(e extent, taken bool) {
			for g := e.at; g < e.end(); g++ {
				if grains[g] == taken {
					t.Fatalf("seed %d: grain %d of %+v is taken: %v", seed, g, e, taken)
				}
				grains[g] = taken
			}
		}
		var held []extent
		for range 4000 {
			if r.IntN(2) == 0 || len(held) == 0 {
				n := 1 + r.Uint32N(1+r.Uint32N(300))
				e, ok := x.alloc(n)
				if !ok {
					if free := longest(grains[:]); free >= n {
						t.Fatalf("seed %d: no room for %d grains, %d are free in a row", seed, n, free)
					}
					continue
				}
				if e.n != n {
					t.Fatalf("%d grains, want %d", e.n, n)
				}
				mark(e, true)
				held = append(held, e)
			} else {
				i := r.IntN(len(held))
				mark(held[i], false)
				x.release(held[i])
				held[i] = held[len(held)-1]
				held = held[:len(held)-1]
			}
			if r.IntN(1000) == 0 {
				x.reuse(1, append([]extent(nil), held...))
			}
			used := uint32(1)
			for _, e := range held {
				used += e.n
			}
			if x.used != used {
				t.Fatalf("seed %d: %d grains in use, want %d", seed, x.used, used)
			}
		}
		for _, e := range held {
			x.release(e)
		}
		if x.top != 1 || len(x.free) != 0 || len(x.ends) != 0 || x.next(0) >= 0 {
			t.Fatalf("seed %d: an empty arena is %+v", seed, x)
		}
	}
}

// longest is the longest run of free grains.
func longest(grains []bool) (best uint32) {
	n := uint32(0)
	for _, taken := range grains {
		n++
		if taken {
			n = 0
		}
		best = max(best, n)
	}
	return best
}
