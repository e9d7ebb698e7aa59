package llamacpp

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/worker"
)

// keeper is the part of a llama.cpp context that moves KV in and out. Like decoder
// it belongs to the loop.
type keeper interface {
	// CopyRange appends the state of positions from up to to of slot to dst.
	CopyRange(dst []byte, slot, from, to int) ([]byte, error)
	// LoadRange adds positions from up to to of a state that CopyRange made to slot,
	// which holds the positions before from. The state may hold more on both sides.
	// After an error the slot is as before.
	LoadRange(slot, from, to int, r worker.KVRange) error
	// ShareRange makes slot to hold positions 0 up to n of slot from, without a copy.
	ShareRange(from, to, n int) error
}

// catchUpMost bounds the tokens that are decoded one at a time for exactness: two
// blocks of the default size. Behind it the wait would be felt.
const catchUpMost = 128

// loadSlice bounds the time that other sequences wait while KV is loaded: it is
// loaded in several turns of the loop when there is much of it.
const loadSlice = 5 * time.Millisecond

var errGap = errors.New("the stored ranges do not join")

// restore loads stored KV of the sequences that have some, for about loadSlice when
// others generate, else all of it.
func (l *loop) restore() {
	started := time.Now()
	for _, s := range l.running {
		for len(s.stored.Ranges) > 0 {
			if s.gone.Load() {
				break // about to be dropped
			}
			l.loadNext(s)
			if time.Since(started) > loadSlice && l.othersWait(s) {
				return
			}
		}
	}
}

// othersWait reports whether a sequence beside s can be decoded now.
func (l *loop) othersWait(s *sequence) bool {
	for _, r := range l.running {
		if r != s && len(r.stored.Ranges) == 0 && !r.resting() {
			return true
		}
	}
	return false
}

// loadNext loads one range of s. Whatever is wrong with it, s goes on with what it
// has and prefills the rest.
func (l *loop) loadNext(s *sequence) {
	begin := time.Now()
	r := s.stored.Ranges[0]
	s.stored.Ranges = s.stored.Ranges[1:]
	to := s.wanted(r)
	err := errGap
	if r.From <= s.cached && s.cached < to {
		err = l.kv.LoadRange(s.slot, s.cached, to, r)
	} else if to <= s.cached && r.From <= s.cached {
		err, s.stored.Ranges = nil, nil // nothing left to gain
		to = s.cached
	}
	s.loading += time.Since(begin)
	if err != nil {
		l.cfg.Log.Warn("stored KV is refused; prefilling instead", "from", r.From, "to", r.To, "err", err)
		l.loaded(s, fmt.Errorf("load KV of tokens %d to %d: %w", r.From, r.To, err))
		return
	}
	l.g.cells.Add(int64(to - s.cached))
	s.cached = to
	if !s.again {
		s.restored = to
	}
	if len(s.stored.Ranges) == 0 {
		l.loaded(s, nil)
	}
}

// loaded ends the loading of stored KV. It may be called again.
func (l *loop) loaded(s *sequence, err error) {
	from, given := s.restored, s.given
	s.lossy = s.lossy || s.stored.Lossy && from > 0
	if s.again {
		// What the sequence has generated here counts as delivered.
		from, given = s.cached, len(s.tokens)
		if err == nil && from > 0 {
			l.g.resumed.Add(1)
		}
	}
	if from >= s.prompt && given-from <= catchUpMost && s.params.CatchUp == worker.CatchUpExact && !s.lossy {
		s.exactFrom, s.exactTo = from, given
	}
	l.unsave(s)
	s.again = false
	done := s.stored.Done
	s.stored = worker.KVChain{}
	if done != nil {
		done(from, s.loading, err)
	}
}

// keep lets the session of s copy what it wants of the KV.
func (l *loop) keep(s *sequence, last bool) {
	if s.params.KV == nil || l.kv == nil {
		return
	}
	if s.fetching { // the session is not to be disturbed
		s.lastStep = s.lastStep || last
		return
	}
	s.params.KV.Step(s.tokens, s.cached, last, func(dst []byte, from, to int) ([]byte, error) {
		if from < 0 || from >= to || to > s.cached {
			return dst, fmt.Errorf("KV of tokens %d to %d: the sequence holds %d", from, to, s.cached)
		}
		return l.kv.CopyRange(dst, s.slot, from, to)
	})
}

// shareLeast is the shortest common prefix worth taking from another sequence.
const shareLeast = 32

// share gives a sequence that has just been admitted the KV of the longest prefix
// that it has in common with a running one. It costs no copy: cells are tagged with
// both sequences. Cells are counted for each sequence as if they were not shared.
func (l *loop) share(s *sequence) {
	if l.kv == nil {
		return
	}
	stored := 0
	if n := len(s.stored.Ranges); n > 0 {
		stored = s.stored.Ranges[n-1].To
	}
	var from *sequence
	best := max(shareLeast-1, stored)
	for _, r := range l.running {
		if r == s {
			continue
		}
		if n := min(common(r.tokens[:r.cached], s.tokens), len(s.tokens)-1); n > best {
			from, best = r, n
		}
	}
	if from == nil {
		return
	}
	if err := l.kv.ShareRange(from.slot, s.slot, best); err != nil {
		l.cfg.Log.Warn("share the KV of a common prefix", "tokens", best, "err", err)
		return
	}
	l.g.cells.Add(int64(best))
	s.cached, s.shared = best, best
	s.stored.Ranges = nil
	l.loaded(s, nil)
}

// common is the length of the longest common prefix.
func common(a, b []int32) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}
