package stack

import (
	"context"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

const (
	// leastFar is how many tokens must be missing for the far tiers to be asked, where no
	// block is near that tells how long they are.
	leastFar = 16
	// mostSpare is the most time that is kept for the last look at the near store; it is
	// an eighth of what there is where that is less.
	mostSpare = 20 * time.Millisecond
)

// Longest implements kvcache.Store. What the far tiers have is in the near store when it
// returns, as far as that was possible by the end of ctx.
func (s *Stack) Longest(ctx context.Context, q kvcache.Query) (kvcache.Match, error) {
	if s.isClosed() {
		return kvcache.Match{}, kvcache.ErrClosed
	}
	m, err := s.near.Longest(ctx, q)
	least := leastFar
	if n := len(m.Blocks); n > 0 {
		// Blocks are of one size, as a rule: nobody has another one for so few tokens.
		least = max(least, m.Blocks[n-1].Tokens)
	}
	if err != nil || len(q.IDs)-m.Tokens() < least || len(s.tiers) == 0 {
		return m, err
	}
	ctx, cancel := s.bound(ctx)
	defer cancel()
	if !s.fetch(ctx, q, m) {
		return m, nil
	}
	again, err := s.near.Longest(ctx, q)
	if err != nil {
		return m, nil // the first answer still holds
	}
	return again, nil
}

// search is a look-up that goes through the tiers.
type search struct {
	s   *Stack
	ctx context.Context
	q   kvcache.Query
	// whole is the time that the caller has for all tokens of the query.
	whole time.Duration

	from    kvcache.Key // the end of what is near or on its way
	at      int         // tokens before that
	common  int         // tokens of the best partial block behind it
	partial *source     // where that is; nil = near, or nowhere
	// ends are the places behind which tiers have said that they have nothing.
	ends  map[*tier]int
	asked []*look // look-ups that have no answer yet
	feeds []*feed
}

// source is a block in a tier.
type source struct {
	t *tier
	b kvcache.Found
}

// fetch brings what follows a match from the far tiers, and says whether anything came. It
// returns when all is there or the time, less some that the caller needs, is over.
func (s *Stack) fetch(ctx context.Context, q kvcache.Query, m kvcache.Match) bool {
	end, _ := ctx.Deadline()
	whole := time.Until(end)
	ctx, cancel := context.WithDeadline(ctx, end.Add(-min(whole/8, mostSpare)))
	defer cancel()
	w := &search{s: s, ctx: ctx, q: q, whole: whole, from: q.From, at: m.Tokens(), common: m.Common, ends: map[*tier]int{}}
	if n := len(m.Blocks); n > 0 {
		w.from = m.Blocks[n-1].Key
	}
	for w.round() && ctx.Err() == nil { // what is missing in one tier may be in another
	}
	if w.partial != nil {
		w.start(w.partial.t, []kvcache.Found{w.partial.b}, w.common)
	}
	total := 0
	for _, f := range w.feeds {
		came, all := f.wait(ctx)
		if total += came; !all {
			break
		}
	}
	return total > 0
}

// moment is how long one tier is waited for before the next one is asked beside it.
const moment = 5 * time.Millisecond

// round asks the tiers for what follows, in their order: each when the one before has
// answered and not had everything, or has taken longer than a moment. It says whether
// anything was found.
func (w *search) round() bool {
	at := w.at
	for _, t := range w.s.tiers {
		end, known := w.ends[t]
		if rest := len(w.q.IDs) - w.at; rest == 0 || known && end == w.at {
			continue
		}
		if l := w.ask(t); l != nil {
			w.asked = append(w.asked, l)
			bounded, cancel := context.WithTimeout(w.ctx, moment)
			w.take(bounded)
			cancel()
		}
	}
	if w.at < len(w.q.IDs) {
		w.take(w.ctx)
	}
	for _, l := range w.asked {
		if w.ctx.Err() != nil {
			l.leave()
			w.s.metrics.cut(l.t, cutDeadline)
		} else if end, ok := w.ctx.Deadline(); ok {
			// Somebody else had everything, and it may run on, but not for ever.
			time.AfterFunc(time.Until(end), l.leave)
		}
	}
	w.asked = nil
	return w.at > at
}

// ask begins a look-up in one tier; nil = it is left out.
func (w *search) ask(t *tier) *look {
	if w.s.owes(t, w.q.Fingerprint) {
		w.s.metrics.cut(t, cutDropped)
		return nil
	}
	if !t.admits() {
		w.s.metrics.cut(t, cutAway)
		return nil
	}
	// Half of what the rest is worth: the other half is for bringing it.
	if !t.look.worth(1, 1, 0, w.worth(len(w.q.IDs)-w.at)/2, time.Now()) {
		w.s.metrics.cut(t, cutSlower)
		return nil
	}
	l := w.s.look(t, kvcache.Query{Space: w.q.Space, From: w.from, First: w.q.First + w.at, IDs: w.q.IDs[w.at:]})
	if l == nil {
		w.s.metrics.cut(t, cutAway)
	}
	return l
}

// take takes the answers that have been asked for, in their order, until ctx ends
// or all is found.
func (w *search) take(ctx context.Context) {
	for len(w.asked) > 0 && w.at < len(w.q.IDs) {
		m, ok := w.asked[0].wait(ctx)
		if !ok {
			return
		}
		l := w.asked[0]
		w.asked = w.asked[1:]
		w.use(l, m)
	}
}

// use begins to bring what one tier has beyond what is on its way already.
func (w *search) use(l *look, m kvcache.Match) {
	first := l.q.First - w.q.First // the place that was asked about
	end := first + m.Tokens()
	w.ends[l.t] = end
	blocks := m.Blocks
	for len(blocks) > 0 && first < w.at {
		first += blocks[0].Tokens
		blocks = blocks[1:]
	}
	if first != w.at {
		return // it has less, or has cut the tokens otherwise
	}
	if n := len(blocks); n > 0 {
		if !w.start(l.t, blocks, end-w.at) {
			return
		}
		w.at, w.from = end, blocks[n-1].Key
		w.common, w.partial = 0, nil
	}
	if m.Common > w.common {
		w.common, w.partial = m.Common, &source{l.t, m.Partial}
	}
}

// worth is the time in which so many tokens would be computed.
func (w *search) worth(tokens int) time.Duration {
	return time.Duration(float64(w.whole) * float64(tokens) / float64(len(w.q.IDs)))
}

// start begins to bring blocks of a tier, if that is worth it.
func (w *search) start(t *tier, blocks []kvcache.Found, tokens int) bool {
	bytes := int64(0)
	for _, b := range blocks {
		bytes += b.Size
	}
	if !t.read.worth(len(blocks), cap(t.slots), bytes/int64(len(blocks)), w.worth(tokens), time.Now()) {
		w.s.metrics.cut(t, cutSlower)
		return false
	}
	w.feeds = append(w.feeds, w.s.feed(w.ctx, t, blocks))
	return true
}
