package llamacpp

import (
	"context"
	"slices"

	"github.com/kvmesh/kvmesh/worker"
)

// saved is the KV of a sequence that gave way, in this process's memory.
type saved struct {
	ranges []worker.KVRange
	bytes  int64
}

// to is the number of tokens it holds.
func (v saved) to() int {
	if len(v.ranges) == 0 {
		return 0
	}
	return v.ranges[len(v.ranges)-1].To
}

// saveChunk is how many tokens are copied, and later loaded, at once.
const saveChunk = 256

// yield makes a running sequence wait again. Its KV is copied, or found again later
// where its session keeps it, else prompt and answer are prefilled anew. Its sampler
// keeps its offset, so the tokens to come are those that would have come.
func (l *loop) yield(s *sequence) {
	l.save(s)
	l.cfg.Log.Debug("sequence gives way", "priority", s.params.Priority, "tokens", len(s.tokens), "saved", s.saved.to(), "running", len(l.running))
	if s.resting() {
		s.slow, s.age = true, l.arrived // behind those that have waited
		l.arrived++
	}
	s.again = false
	if s.cached > 0 || s.saved.bytes > 0 { // else it has nothing to lose
		s.preempted = true
		l.g.preempted.Add(1)
	}
	l.release(s)
	l.g.waiting.Add(1)
	l.queue(s)
}

// save copies the KV of a running sequence as far as memory for that is left.
func (l *loop) save(s *sequence) {
	if l.kv == nil || s.saved.to() >= s.cached {
		return // the last: it has not yet been loaded again in full
	}
	for from := 0; from < s.cached; {
		to := min(from+saveChunk, s.cached)
		if l.g.saved.Load()+int64(to-from)*l.perToken > l.cfg.PauseBytes {
			l.unsave(s)
			return
		}
		data, err := l.kv.CopyRange(make([]byte, 0, int64(to-from)*l.perToken), s.slot, from, to)
		if err != nil {
			l.cfg.Log.Warn("copy the KV of a sequence that gives way", "from", from, "to", to, "err", err)
			l.unsave(s)
			return
		}
		n := int64(len(data))
		l.perToken = max(n/int64(to-from), 1)
		s.saved.ranges = append(s.saved.ranges, worker.KVRange{From: from, To: to, Data: data})
		s.saved.bytes += n
		l.g.saved.Add(n)
		from = to
	}
}

// unsave forgets the copy of a sequence's KV.
func (l *loop) unsave(s *sequence) {
	l.g.saved.Add(-s.saved.bytes)
	s.saved = saved{}
}

// recall lets a sequence that gave way go on from its KV, as far as somebody has it.
func (l *loop) recall(s *sequence) {
	s.preempted = false
	switch {
	case len(s.saved.ranges) > 0:
		s.stored, s.again = worker.KVChain{Ranges: slices.Clone(s.saved.ranges)}, true
	case l.kv != nil && l.send != nil && s.params.KV != nil:
		l.fetch(s)
	}
}

// fetch asks the session of a sequence for the KV that it keeps, on another goroutine.
// The sequence has no part in a batch until the answer has come.
func (l *loop) fetch(s *sequence) {
	ids, budget := slices.Clone(s.tokens), l.g.prefillTime(len(s.tokens))
	s.fetching = true
	s.errand.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), budget)
		defer cancel()
		chain := s.params.KV.Restore(ctx, ids, budget)
		taken := make(chan struct{})
		if l.send(func(l *loop) { l.fetched(s, chain); close(taken) }) {
			<-taken // whoever waits for the errand waits for that, too
		} else if chain.Done != nil { // the loop has ended
			chain.Done(0, 0, nil)
		}
	})
}

// fetched takes what a session has found. The sequence may have left or given way
// again in the meantime.
func (l *loop) fetched(s *sequence, chain worker.KVChain) {
	s.fetching, s.stored = false, chain
	if s.slot < 0 {
		s.forget()
		if s.lastStep {
			l.keep(s, true)
		}
		return
	}
	s.again = true
	if len(chain.Ranges) == 0 {
		l.loaded(s, nil)
	}
}

// toLoad is the number of cells that stored KV will take once it is loaded.
func (l *loop) toLoad() int {
	n := 0
	for _, s := range l.running {
		if k := len(s.stored.Ranges); k > 0 {
			n += max(s.wanted(s.stored.Ranges[k-1])-s.cached, 0)
		}
	}
	return n
}

// wanted is the position up to which r is of use. The newest token must be decoded
// for its logits.
func (s *sequence) wanted(r worker.KVRange) int {
	to := min(r.To, len(s.tokens)-1)
	if r.Good > 0 {
		to = min(to, r.Good)
	}
	return to
}
