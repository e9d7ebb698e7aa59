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
	feeds   []*feed
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
	w := &search{s: s, ctx: ctx, q: q, whole: whole, from: q.From, at: m.Tokens(), common: m.Common}
	if n := len(m.Blocks); n > 0 {
		w.from = m.Blocks[n-1].Key
	}
	for i := 0; i < len(s.tiers) && ctx.Err() == nil; {
		if i++; w.ask(s.tiers[i-1]) {
			i = 0 // what is missing in one tier may be in another
		}
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

// ask looks for what follows in one tier, begins to bring it, and says whether that is
// longer than what is there.
func (w *search) ask(t *tier) bool {
	rest := w.q.IDs[w.at:]
	if len(rest) == 0 {
		return false
	}
	if !t.admits() {
		w.s.metrics.cut(t, cutAway)
		return false
	}
	// Half of what the rest is worth: the other half is for bringing it.
	begin := time.Now()
	if !t.look.worth(1, 1, 0, w.worth(len(rest))/2, begin) {
		w.s.metrics.cut(t, cutSlower)
		return false
	}
	q := kvcache.Query{Space: w.q.Space, From: w.from, First: w.q.First + w.at, IDs: rest}
	m, ok := ask(w.ctx, t, func() kvcache.Match {
		m, err := t.Store.Longest(w.s.ctx, q)
		if err != nil {
			w.s.cfg.Log.Debug("look up KV in a far tier", "tier", t.Name, "err", err)
			return kvcache.Match{}
		}
		t.look.note(time.Since(begin), 0)
		return m
	})
	if !ok {
		w.s.metrics.cut(t, cutDeadline)
		return false
	}
	n := len(m.Blocks)
	if n > 0 {
		if !w.start(t, m.Blocks, m.Tokens()) {
			return false
		}
		w.at, w.from = w.at+m.Tokens(), m.Blocks[n-1].Key
		w.common, w.partial = 0, nil
	}
	if m.Common > w.common {
		w.common, w.partial = m.Common, &source{t, m.Partial}
	}
	return n > 0
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
