package checkpoint

import (
	"context"
	"errors"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/codec"
	"github.com/kvmesh/kvmesh/worker"
)

// found is what the store has for a generation.
type found struct {
	match  kvcache.Match
	tail   []kvcache.Range // that continue the chain, the first perhaps from before its end
	good   int             // position up to which the tail's tokens are the wanted ones
	chain  int             // tokens of the full blocks
	bytes  int64
	parent kvcache.Key // of what follows the full blocks
}

// Restore implements worker.KVSession. It returns at its deadline, and when ctx ends, also
// where the store hangs: the look-up is left alone then, and gives back what it finds.
func (s *session) Restore(ctx context.Context, ids []int32, prefill time.Duration) worker.KVChain {
	s.given = len(ids)
	begin := time.Now()
	ctx, cancel := context.WithTimeout(ctx, min(prefill, s.within))
	defer cancel()
	if !s.k.watch.admits(begin) {
		return s.nothing("hung")
	}
	c, end := s.k.watch.begin(begin, false)
	ready := make(chan *loan)
	go func() {
		l := s.lookUp(ctx, ids, prefill)
		end(time.Now())
		select {
		case ready <- l:
		case <-ctx.Done():
			l.release()
		}
	}()
	select {
	case l := <-ready:
		s.next, s.parent, s.tailTo = l.found.chain, l.found.parent, l.found.chain
		s.again(l.bad)
		if l.result != "" {
			return s.nothing(l.result)
		}
		l.ready = time.Since(begin)
		return worker.KVChain{Ranges: l.ranges, Lossy: s.k.cfg.Codec != kvcache.CodecRaw, Done: l.done}
	case <-ctx.Done():
		s.k.watch.leave(c)
		s.k.metrics.left.Inc()
		return s.nothing("late") // or the client has left
	}
}

// nothing counts a look-up that restores nothing.
func (s *session) nothing(result string) worker.KVChain {
	s.k.metrics.restores.WithLabelValues(result).Inc()
	return worker.KVChain{}
}

// lookUp finds and borrows what is worth it. It changes nothing of the session, which may
// have gone on without it.
func (s *session) lookUp(ctx context.Context, ids []int32, prefill time.Duration) *loan {
	begin := time.Now()
	f := s.find(ctx, ids)
	l := &loan{s: s, found: f, bad: f.chain, looked: time.Since(begin)}
	if f.bytes == 0 {
		l.result = "miss"
		if ctx.Err() != nil {
			l.result = "late"
		}
		return l
	}
	// What is restored has not to be prefilled; the rest takes its time either way, and
	// what the look-up took is gone.
	saved := time.Duration(float64(prefill) * float64(max(f.chain, f.good)) / float64(len(ids)))
	if cost := time.Duration(float64(f.bytes) / float64(s.k.rate.Load()) * float64(time.Second)); cost > saved || l.looked+cost > s.within {
		l.result = "slower"
		return l
	}
	l.take(ctx)
	if len(l.ranges) == 0 {
		l.release()
		l.result = "refused"
	}
	return l
}

// find looks up the longest chain and what continues it.
func (s *session) find(ctx context.Context, ids []int32) found {
	f := found{parent: s.space.Root}
	// A store may bring blocks from far away meanwhile; some of the time is for loading.
	bounded, cancel := share(ctx)
	m, err := s.k.cfg.Store.Longest(bounded, kvcache.Query{Space: s.space, IDs: ids, Resume: s.resumed})
	cancel()
	if err != nil {
		s.note("longest", err)
	}
	f.match, f.chain = m, m.Tokens()
	for _, b := range m.Blocks {
		f.bytes += b.Size
		f.parent = b.Key
	}
	// A stream that nobody continues has no tail.
	if s.tail.spec.Attempt > 0 {
		s.findTail(ctx, ids, &f)
	}
	if f.good > f.chain+m.Common {
		f.match.Common = 0
		for _, r := range f.tail {
			f.bytes += int64(len(r.Data))
		}
	} else if f.tail = nil; m.Common > 0 {
		f.good = f.chain + m.Common
		f.bytes += m.Partial.Size
	}
	return f
}

// share ends after three quarters of the time that ctx has.
func share(ctx context.Context) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, end.Add(-time.Until(end)/4))
}

// findTail picks the tail that leads furthest.
func (s *session) findTail(ctx context.Context, ids []int32, f *found) {
	tails, err := s.k.cfg.Store.ReadTail(ctx, s.space, s.tail.spec.Stream, s.tail.spec.Choice)
	if err != nil {
		s.note("tail", err)
		return
	}
	for _, t := range tails {
		if t.First > f.chain || !s.follows(t, ids) {
			continue
		}
		ranges, good := match(t.Ranges, ids, f.chain)
		if good > f.good {
			f.tail, f.good = ranges, good
		}
	}
}

// follows reports whether a tail's parent is what ids have before it.
func (s *session) follows(t kvcache.Tail, ids []int32) bool {
	if t.First%s.k.cfg.Block != 0 {
		return false // written with blocks of another size
	}
	return s.keyAt(ids, t.First) == t.Parent
}

// match returns the ranges behind the position from whose tokens are those of ids, and
// the position up to which they are.
func match(ranges []kvcache.Range, ids []int32, from int) (used []kvcache.Range, good int) {
	for _, r := range ranges {
		n := 0
		for n < len(r.IDs) && r.First+n < len(ids) && r.IDs[n] == ids[r.First+n] {
			n++
		}
		if n > 0 && r.First+n > from {
			used, good = append(used, r), r.First+n
		}
		if n < len(r.IDs) {
			break
		}
	}
	return used, good
}

// note counts an error of a look-up, and a refusal by its reason.
func (s *session) note(op string, err error) {
	if r, ok := errors.AsType[*kvcache.Refusal](err); ok {
		s.k.metrics.refused.WithLabelValues(r.Reason.String()).Inc()
		s.k.cfg.Log.Warn("stored KV is refused", "reason", r.Reason, "detail", r.Detail)
		return
	}
	// That a look-up takes too long, or that nobody waits for it, is no failure.
	if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
		s.k.metrics.failed.WithLabelValues(op).Inc()
	}
	s.k.cfg.Log.Debug("look up KV", "op", op, "err", err)
}

// again lets the blocks from position to be published once more: what is stored of
// them is not good.
func (s *session) again(to int) {
	size := s.k.cfg.Block
	if to -= to % size; to < s.next {
		s.next, s.tailTo, s.parent, s.unkeyed = to, to, s.space.Root, to > 0
	}
}

// loan is stored KV while the engine reads it.
type loan struct {
	s      *session
	found  found
	result string        // why there is none; "" = there is some
	bad    int           // position from which the stored blocks are not good
	looked time.Duration // that it took to find it
	ready  time.Duration // that it took to find and verify it
	ranges []worker.KVRange
	lent   []*kvcache.Lent
}

// take borrows and verifies everything, up to the first thing that is not good.
func (l *loan) take(ctx context.Context) {
	f := &l.found
	blocks := f.match.Blocks
	if f.match.Common > 0 {
		blocks = append(blocks[:len(blocks):len(blocks)], f.match.Partial)
	}
	if n := l.borrow(ctx, blocks); n < len(f.match.Blocks) {
		l.bad = blocks[n].First
		l.weed(ctx, blocks[n+1:])
		return
	}
	if f.match.Common > 0 {
		return
	}
	for i, r := range f.tail {
		kr := worker.KVRange{From: r.First, To: r.First + len(r.IDs), Data: r.Data}
		if i == len(f.tail)-1 {
			kr.Good = f.good
		}
		l.ranges = append(l.ranges, kr)
	}
}

// weed looks at the blocks behind a bad one: whatever spoiled that may have spoiled
// more, and a store removes what it refuses, so that good blocks can take its place.
func (l *loan) weed(ctx context.Context, blocks []kvcache.Found) {
	for _, b := range blocks {
		lent, err := l.s.k.cfg.Store.Get(ctx, b.Ref)
		if err == nil {
			err = lent.Verify()
			lent.Release()
		}
		if err != nil {
			l.s.note("get", err)
		}
	}
}

// borrow adds blocks, each verified, and returns how many: those before the first that is
// not there or refused. Of the partial one, behind the others, only what is common is good.
func (l *loan) borrow(ctx context.Context, blocks []kvcache.Found) (n int) {
	refs := make([]kvcache.Ref, len(blocks))
	for i, b := range blocks {
		refs[i] = b.Ref
	}
	for lent, err := range kvcache.GetEach(ctx, l.s.k.cfg.Store, refs) {
		var data []byte
		if err == nil {
			if data, err = payload(lent); err != nil {
				lent.Release()
			}
		}
		if err != nil {
			l.s.note("get", err)
			return n
		}
		b := blocks[n]
		l.lent = append(l.lent, lent)
		r := worker.KVRange{From: b.First, To: b.First + b.Tokens, Data: data}
		if m := l.found.match; m.Common > 0 && n == len(m.Blocks) {
			r.Good = b.First + m.Common
		}
		l.ranges = append(l.ranges, r)
		n++
	}
	return n
}

// payload verifies a block and returns what the engine wrote.
func payload(lent *kvcache.Lent) ([]byte, error) {
	if lent.Codec() == kvcache.CodecRaw {
		return lent.Payload()
	}
	return codec.Payload(nil, lent.Frame)
}

// done is called by the engine when it has loaded what it could.
func (l *loan) done(tokens int, took time.Duration, err error) {
	l.release()
	m := l.s.k.metrics
	m.restored.Add(float64(tokens))
	switch {
	case err != nil:
		m.refused.WithLabelValues("engine").Inc()
		m.restores.WithLabelValues("refused").Inc()
	case tokens == 0:
		m.restores.WithLabelValues("unused").Inc()
	default:
		m.restores.WithLabelValues("restored").Inc()
		m.restoreTime.Observe((l.ready + took).Seconds())
		// Of what is in memory by now: how long it was on its way to there is the
		// store's to know.
		rate := int64(float64(l.found.bytes) / max((l.ready-l.looked+took).Seconds(), 1e-6))
		l.s.k.rate.Store((3*l.s.k.rate.Load() + rate) / 4)
	}
}

func (l *loan) release() {
	for _, b := range l.lent {
		b.Release()
	}
	l.lent = nil
}
