package arena

import (
	"cmp"
	"math/bits"
	"slices"
)

// extent is a run of grains in the arena.
type extent struct{ at, n uint32 }

// end is the first grain behind an extent.
func (e extent) end() uint32 { return e.at + e.n }

// overlaps says whether two extents have a grain in common.
func (e extent) overlaps(o extent) bool { return e.at < o.end() && o.at < e.end() }

// extents knows which grains are free. It is pure, and not safe for concurrent use.
// What is free below top is in bins by length; from top on nothing was ever used, so
// that memory is touched only when it is needed.
type extents struct {
	top, total uint32
	used       uint32
	free       map[uint32]freeRun // by first grain
	ends       map[uint32]uint32  // first grain of a free run by the grain behind it
	bins       [bins][]uint32     // first grains, unordered
	filled     [bins/64 + 1]uint64
}

// freeRun is one free run: its length and where it is in its bin.
type freeRun struct {
	n   uint32
	pos int
}

const (
	exact   = 64 // runs up to this length have a bin for each length
	perStep = 8  // longer ones this many between two powers of two
	bins    = exact + perStep*(32-6)
)

// newExtents makes one of some grains, of which all before first are taken.
func newExtents(first, total uint32) *extents {
	return &extents{top: first, total: total, used: first, free: map[uint32]freeRun{}, ends: map[uint32]uint32{}}
}

// binOf is the bin for runs of n grains; all runs in a later bin are longer.
func binOf(n uint32) int {
	if n <= exact {
		return int(n) - 1
	}
	log := bits.Len32(n) - 1
	return exact + (log-6)*perStep + int(n>>(log-3)) - perStep
}

// alloc takes n grains.
func (x *extents) alloc(n uint32) (extent, bool) {
	at, ok := x.find(n)
	if !ok {
		if n > x.total-x.top {
			return extent{}, false
		}
		e := extent{x.top, n}
		x.top += n
		x.used += n
		return e, true
	}
	run := x.free[at]
	x.drop(at)
	if run.n > n {
		x.put(extent{at + n, run.n - n})
	}
	x.used += n
	return extent{at, n}, true
}

// find chooses a free run of at least n grains: a close fit of its own bin, else one
// of the next bin that has any.
func (x *extents) find(n uint32) (at uint32, ok bool) {
	own := binOf(n)
	if at, ok = x.fits(own, n, 16); ok {
		return at, true
	}
	if bin := x.next(own + 1); bin >= 0 {
		return x.bins[bin][len(x.bins[bin])-1], true
	}
	return x.fits(own, n, len(x.bins[own]))
}

// fits looks for the closest fit among the last most runs of a bin.
func (x *extents) fits(bin int, n uint32, most int) (at uint32, ok bool) {
	list := x.bins[bin]
	best := uint32(0)
	for _, start := range list[max(0, len(list)-most):] {
		if have := x.free[start].n; have >= n && (!ok || have < best) {
			at, best, ok = start, have, true
			if have == n {
				break
			}
		}
	}
	return at, ok
}

// next is the first bin from one on that is not empty, or -1.
func (x *extents) next(bin int) int {
	for w := bin / 64; w < len(x.filled); w++ {
		word := x.filled[w]
		if w == bin/64 {
			word &= ^uint64(0) << (bin % 64)
		}
		if word != 0 {
			return w*64 + bits.TrailingZeros64(word)
		}
	}
	return -1
}

// release gives an extent back, joined with what is free beside it.
func (x *extents) release(e extent) {
	x.used -= e.n
	if before, ok := x.ends[e.at]; ok {
		n := x.free[before].n
		x.drop(before)
		e = extent{before, n + e.n}
	}
	if behind, ok := x.free[e.end()]; ok {
		x.drop(e.end())
		e.n += behind.n
	}
	if e.end() == x.top {
		x.top = e.at
		return
	}
	x.put(e)
}

// put adds a free run, and drop removes one.
func (x *extents) put(e extent) {
	bin := binOf(e.n)
	x.free[e.at] = freeRun{e.n, len(x.bins[bin])}
	x.ends[e.end()] = e.at
	x.bins[bin] = append(x.bins[bin], e.at)
	x.filled[bin/64] |= 1 << (bin % 64)
}

func (x *extents) drop(at uint32) {
	run := x.free[at]
	bin := binOf(run.n)
	list := x.bins[bin]
	last := list[len(list)-1]
	list[run.pos] = last
	if last != at {
		x.free[last] = freeRun{x.free[last].n, run.pos}
	}
	x.bins[bin] = list[:len(list)-1]
	if len(list) == 1 {
		x.filled[bin/64] &^= 1 << (bin % 64)
	}
	delete(x.free, at)
	delete(x.ends, at+run.n)
}

// reuse begins anew with some extents taken. They do not overlap and lie between the
// first grain and the last.
func (x *extents) reuse(first uint32, taken []extent) {
	*x = *newExtents(first, x.total)
	slices.SortFunc(taken, func(a, b extent) int { return cmp.Compare(a.at, b.at) })
	for _, e := range taken {
		if e.at > x.top {
			x.put(extent{x.top, e.at - x.top})
		}
		x.top = e.end()
		x.used += e.n
	}
}
