package peers

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

const (
	// probeEvery is the time between two probes of a member, and probeTime the most that one
	// takes.
	probeEvery, probeTime = 2 * time.Second, 2 * time.Second
	// patience is how long a member may fail until what it has counts as being nowhere.
	patience = 5 * time.Second
	// missedWait is the most between two times that blocks are offered to a member that answers
	// probes and takes none.
	missedWait = 5 * time.Minute
)

// Prober is a peer that can be asked whether it is there, which costs it next to nothing. It
// names its memory: by another name than before, what was put there is gone. "" = it does not
// tell.
type Prober interface {
	Probe(ctx context.Context) (memory string, err error)
}

// errLost says that what was put on a member counts no more.
var errLost = errors.New("it has left, is away or has lost its memory meanwhile")

// watch probes all members, until the store is closed.
func (s *Store) watch() {
	tick := time.NewTicker(probeEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
		s.mu.Lock()
		for _, m := range s.members {
			s.probeLocked(m)
		}
		s.mu.Unlock()
	}
}

// probeLocked has a member probed, unless that is being done.
func (s *Store) probeLocked(m *member) {
	p, can := m.peer.(Prober)
	if !can || m.probing || s.closed || !m.gone.IsZero() {
		return
	}
	m.probing = true
	s.done.Go(func() { s.probe(m, p) })
}

// probe probes a member.
func (s *Store) probe(m *member, p Prober) {
	ctx, cancel := context.WithTimeout(s.ctx, probeTime)
	defer cancel()
	begin := time.Now()
	memory, err := p.Probe(ctx)
	err = s.called(ctx, m, begin, err)
	switch s.probed(m, memory, err, time.Now()) {
	case copiesLost:
		s.lost(m.ID)
	case copiesBack:
		s.lost()
	}
}

// news is what a probe has found out.
type news int

const (
	noNews     news = iota
	copiesLost      // what the member had counts no more
	copiesBack      // what it has counts again, or it can be given what it had to miss
)

// probed notes what a probe has found.
func (s *Store) probed(m *member, memory string, err error, now time.Time) news {
	s.mu.Lock()
	defer s.mu.Unlock()
	m.probing = false
	if s.closed || s.members[m.ID] != m {
		return noNews
	}
	if err != nil {
		if m.away || m.failing.IsZero() || now.Sub(m.failing) < patience {
			return noNews
		}
		m.away = true
		s.cfg.Log.Warn("KV peer is away: what it has counts as being on no other host", "peer", m.ID)
		return copiesLost
	}
	found := noNews
	if m.missed && !now.Before(m.retry) {
		m.missed, found = false, copiesBack
		m.wait = min(max(2*m.wait, probeEvery), missedWait)
		m.retry = now.Add(m.wait)
	}
	if m.away {
		m.away, found = false, copiesBack
		s.urgeLocked(m.ID)
		s.cfg.Log.Info("KV peer is back", "peer", m.ID)
	}
	if memory == "" || memory == m.memory {
		return found
	}
	if m.memory != "" {
		m.memories++
		found = copiesLost
		s.purgeLocked(m.ID)
		s.cfg.Log.Warn("KV peer has another memory than before: what it had is copied again", "peer", m.ID)
	}
	m.memory = memory
	return found
}

// purgeLocked forgets what a member had.
func (s *Store) purgeLocked(id string) {
	for key, h := range s.holders {
		if slices.Contains(h.ids, id) {
			s.unheardLocked(key, id)
		}
	}
}

// lost tells of members whose copies count no more; without any, that some count again.
func (s *Store) lost(ids ...string) {
	for _, id := range ids {
		s.tails.lostOn(id)
	}
	if s.cfg.Lost != nil {
		s.cfg.Lost()
	}
}

// missedBy notes that a block is on too few members: who was not there is to be given it.
func (s *Store) missedBy(asked []*member) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, live := range s.live {
		if m := s.members[live.ID]; m != nil && !slices.Contains(asked, m) {
			m.missed = true
		}
	}
}

// took notes that a member has taken a block, and takes more.
func (s *Store) took(m *member) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m.retry, m.wait = time.Time{}, 0
}

// memories says how often a member has been found to have another memory.
func (s *Store) memories(m *member) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return m.memories
}

// presentLocked is how many members have a block, as far as is known, that are there.
func (s *Store) presentLocked(key kvcache.Key) (n int) {
	for _, id := range s.holders[key].ids {
		if m := s.members[id]; m != nil && m.present() {
			n++
		}
	}
	return n
}

// present says whether what a member has counts.
func (m *member) present() bool { return m.gone.IsZero() && !m.away }

// Missing are those of some blocks that are on fewer other hosts than they are to be, as far
// as is known, and as those that are there could have them.
func (s *Store) Missing(blocks []kvcache.Found) (list []kvcache.Found) {
	s.mu.Lock()
	defer s.mu.Unlock()
	there := 0
	for m := range maps.Values(s.members) {
		if m.present() {
			there++
		}
	}
	want := max(min(s.cfg.Copies-1, there), 1)
	for _, b := range blocks {
		if s.presentLocked(b.Key) < want {
			list = append(list, b)
		}
	}
	return list
}
