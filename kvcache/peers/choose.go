package peers

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/placement"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

const (
	// runBlocks is how many blocks of a chain are on the same members.
	runBlocks = 16
	// mostKnown bounds what is remembered of blocks; each time it is reached, all is
	// forgotten, which costs look-ups and nothing else.
	mostKnown = 1 << 16
	// mostAsked is how many members one look-up asks at once.
	mostAsked = 8
	// rest is how long a member is passed over that failed.
	rest = time.Second
	// hung is after how long a call that has no answer counts as a failure of the member,
	// and not of the caller, who had little time.
	hung = 250 * time.Millisecond
)

// run is the part of a chain that a block is in: its first block, and how many it has up to
// this one.
type run struct {
	start kvcache.Key
	n     int
}

// place returns the key by which a block that is put is placed.
func (s *Store) place(ref kvcache.Ref) kvcache.Key {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.runs[ref.Key]
	if !ok {
		r = run{ref.Key, 1}
		if p, ok := s.runs[ref.Parent]; ok && p.n < runBlocks {
			r = run{p.start, p.n + 1}
		}
		if len(s.runs) >= mostKnown {
			clear(s.runs)
		}
		s.runs[ref.Key] = r
	}
	return r.start
}

// writers are the members that may keep a copy of what is of a space, the best first, without those
// that are to be passed over, or have yet to forget the space; passed says whether there are such.
func (s *Store) writers(space kvcache.Space, key kvcache.Key) (list []*member, passed bool) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	owing := s.owingLocked(space, now)
	for _, m := range placement.Replicas(s.live, s.cfg.Self, key) {
		if mm := s.members[m.ID]; mm != nil && !now.Before(mm.until) && !slices.Contains(owing, mm) {
			list = append(list, mm)
		} else {
			passed = true
		}
	}
	return list, passed
}

// readers are the members to ask for what is of a space: those that hold, by their ids, then those
// that placement names and named for the keys, then others; but none that has yet to forget it.
func (s *Store) readers(space kvcache.Space, hold []string, keys ...kvcache.Key) (list []*member) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	owing := s.owingLocked(space, now)
	add := func(id string) {
		m := s.members[id]
		if m != nil && len(list) < mostAsked && !now.Before(m.until) && !slices.Contains(list, m) && !slices.Contains(owing, m) {
			list = append(list, m)
		}
	}
	for _, id := range hold {
		add(id)
	}
	// This host is a source as well, and a member in the eyes of the others.
	sets := [][]placement.Member{append(slices.Clone(s.live), s.cfg.Self)}
	for _, p := range slices.Backward(s.past) {
		if now.Before(p.until) {
			sets = append(sets, append(slices.Clone(p.members), s.cfg.Self))
		}
	}
	for _, set := range sets {
		for _, key := range keys {
			for _, m := range placement.Readers(set, key, s.cfg.Copies-1) {
				add(m.ID)
			}
		}
	}
	for _, set := range sets {
		for _, m := range placement.Rank(set, keys[0]) {
			add(m.ID)
		}
	}
	return list
}

// holding is a block's space, and the ids of the members that have the block.
type holding struct {
	space kvcache.Space
	ids   []string
}

// without is what there is when a member is not among them.
func (h holding) without(id string) holding {
	h.ids = slices.DeleteFunc(slices.Clone(h.ids), func(has string) bool { return has == id })
	return h
}

// heard notes that a member has a block, as it said after its memory had been another one so often,
// and says whether that counts: not where it has left, is away or has lost its memory since.
func (s *Store) heard(m *member, memories int, ref kvcache.Ref, tokens int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.size = tokens
	if s.members[m.ID] != m || m.memories != memories {
		return false
	}
	if len(s.holders) >= mostKnown {
		clear(s.holders)
	}
	if ids := s.holders[ref.Key].ids; !slices.Contains(ids, m.ID) {
		s.holders[ref.Key] = holding{ref.Space, append(ids, m.ID)}
	}
	return m.present()
}

// unheard notes that a member does not have a block.
func (s *Store) unheard(key kvcache.Key, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unheardLocked(key, id)
}

func (s *Store) unheardLocked(key kvcache.Key, id string) {
	if s.holders[key] = s.holders[key].without(id); len(s.holders[key].ids) == 0 {
		delete(s.holders, key)
	}
}

// has says whether a member that is there is known to have a block.
func (s *Store) has(key kvcache.Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.presentLocked(key) > 0
}

// holdersOf are the ids of the members that are known to have a block.
func (s *Store) holdersOf(key kvcache.Key) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.holders[key].ids
}

// called notes how a call of a member went that began at a time, and returns its error. What
// its caller ended says nothing of the member, unless it had time enough.
func (s *Store) called(ctx context.Context, m *member, begin time.Time, err error) error {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err == nil || answered(err):
		back := !m.failing.IsZero() || m.answered.IsZero()
		if m.answered.IsZero() {
			s.urgeLocked(m.ID)
		}
		m.until, m.wrong, m.failing, m.answered = time.Time{}, "", time.Time{}, now
		if back {
			s.probeLocked(m) // with which memory?
		}
	case errors.Is(context.Cause(ctx), context.Canceled), ctx.Err() != nil && now.Sub(begin) < hung:
	default:
		if m.wrong == "" {
			s.cfg.Log.Warn("KV peer fails and is passed over", "peer", m.ID, "err", err)
		}
		if m.failing.IsZero() {
			m.failing = now
		}
		m.until = now.Add(rest)
		if m.wrong == "" || !errors.Is(err, remote.ErrAway) { // that says less than what was before
			m.wrong = err.Error()
		}
		s.metrics.failed.WithLabelValues(m.ID).Inc()
	}
	return err
}

// answered says whether an error is about what was asked for, and not about the member.
func answered(err error) bool {
	_, refused := errors.AsType[*kvcache.Refusal](err)
	return refused || errors.Is(err, kvcache.ErrNotFound) || errors.Is(err, kvcache.ErrFull) || errors.Is(err, kvcache.ErrStale) || errors.Is(err, kvcache.ErrGap)
}

// errNobody says that no other host can be asked.
func errNobody() error { return errors.Join(errors.New("no KV peer is there"), remote.ErrAway) }

// admit waits until so many bytes may be written.
func (s *Store) admit(ctx context.Context, bytes int64) error {
	if s.pace == nil {
		return nil
	}
	for bytes > 0 {
		n := min(bytes, int64(s.pace.Burst()))
		if err := s.pace.WaitN(ctx, int(n)); err != nil {
			return err
		}
		bytes -= n
	}
	return nil
}
