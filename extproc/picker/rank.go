package picker

import (
	"cmp"
	"slices"
)

// ranked is a worker with what decides its place.
type ranked struct {
	w           *worker
	order       int
	score       float64
	load        int64
	utilization float64
	chosen      uint64 // number of the last choice that it won, 0 for never
	held        int    // tokens of the prompt that it need not compute
}

const (
	// mostHeld is the most of the work of a request that a worker is taken to be spared that holds
	// its prompt.
	mostHeld = 2. / 3
	// answerWorth is about how many tokens of a prompt take the time of the rest of an answer, so
	// that a short prompt moves nobody.
	answerWorth = 256
	// heldRoom is the part of a worker's capacity up to which some requests more or less are not felt.
	heldRoom = 1. / 4
)

// holds counts what a worker holds of a prompt of so many tokens: as requests that it has fewer, a
// share of those that it has, or of heldRoom if that is more. So one that holds all of a long prompt may
// have three times as many as one that holds nothing, or a sixth of its capacity. It
// counts within a line only, so never over health, breaker or zone, and not where the request would have
// to wait: that takes longer than to compute the prompt elsewhere.
func (c *ranked) holds(held, of int) {
	if held <= 0 || c.full() {
		return
	}
	of = max(of, held)
	c.held = held
	spared := mostHeld * float64(held) / float64(of+answerWorth)
	load := float64(c.load + 1)
	c.score *= max(load-spared*max(load, heldRoom*c.w.capacity), load/64) / load
}

// before reports whether c goes before o. Of equals the one that was chosen
// longer ago goes first, which spreads ties evenly.
func (c ranked) before(o ranked) bool {
	switch {
	case c.order != o.order:
		return c.order < o.order
	case c.score != o.score:
		return c.score < o.score
	case c.chosen != o.chosen:
		return c.chosen < o.chosen
	}
	return c.w.ID < o.w.ID
}

// full says that one more request would have to wait.
func (c ranked) full() bool {
	if c.w.load.maxRunning > 0 {
		return c.load >= int64(c.w.load.maxRunning)
	}
	return c.utilization >= 1
}

// ranking keeps the best few of many workers in order, without sorting them all.
type ranking struct {
	most int
	top  []ranked

	home     ranked // the session's worker
	homeHash uint64
	hasHome  bool
}

// add offers one worker.
func (r *ranking) add(c ranked) {
	n := len(r.top)
	if n == r.most && (n == 0 || !c.before(r.top[n-1])) {
		return
	}
	at := n
	for at > 0 && c.before(r.top[at-1]) {
		at--
	}
	r.top = slices.Insert(r.top, at, c)
	if len(r.top) > r.most {
		r.top = r.top[:r.most]
	}
}

// affine offers one worker as the session's home: the highest hash wins
// (rendezvous hashing), so that a worker that comes or goes moves only the
// sessions it wins or held.
func (r *ranking) affine(c ranked, hash uint64) {
	if !r.hasHome || hash > r.homeHash {
		r.home, r.homeHash, r.hasHome = c, hash, true
	}
}

// stick puts the home first unless it is full or broken, and reports whether it
// did.
func (r *ranking) stick() bool {
	if !r.hasHome || r.home.order == orderBroken || r.home.full() {
		return false
	}
	at := slices.IndexFunc(r.top, func(c ranked) bool { return c.w == r.home.w })
	if at >= 0 {
		r.top = slices.Delete(r.top, at, at+1)
	} else if len(r.top) == r.most {
		r.top = r.top[:r.most-1]
	}
	r.top = slices.Insert(r.top, 0, r.home)
	return true
}

// nearTie is the ratio of scores up to which two workers count as equally loaded:
// their loads are estimates, and a weight moves in steps of a tenth.
const nearTie = 1.25

// spread lets workers that are about as good as the first take turns. Without it
// a light, steady traffic would all go to the one whose weight is a little higher.
func (r *ranking) spread() {
	n := 0
	for n < len(r.top) && r.top[n].order == r.top[0].order && r.top[n].score <= nearTie*r.top[0].score {
		n++
	}
	slices.SortFunc(r.top[:n], func(a, b ranked) int {
		return cmp.Or(cmp.Compare(a.chosen, b.chosen), cmp.Compare(a.score, b.score), cmp.Compare(a.w.ID, b.w.ID))
	})
}

// mix is the finalizer of SplitMix64: every bit of x reaches every bit of the
// result.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
