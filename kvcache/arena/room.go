//go:build unix

package arena

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
)

// allocLocked takes room for n bytes behind a block, and makes some if there is none. What
// left for it has left the journal too, before the room is used again.
func (s *Store) allocLocked(n int64, parent kvcache.Key, now time.Time) (extent, error) {
	if n <= 0 || n > s.cfg.Limit-grain {
		s.count.Full.Add(1)
		return extent{}, kvcache.ErrFull // nothing else shall go for what can never fit
	}
	for {
		e, ok := s.room.alloc(grains(n))
		if ok {
			if err := s.readyLocked(e); err != nil {
				s.room.release(e)
				return extent{}, s.count.Failure(err)
			}
			return e, nil
		}
		if !s.evictLocked(now, parent) {
			s.count.Full.Add(1)
			return extent{}, kvcache.ErrFull
		}
	}
}

// readyLocked makes sure that there is memory behind an extent, and that the journal
// does not say any more that something else is in it.
func (s *Store) readyLocked(e extent) error {
	if end := int64(e.end()) * grain; end > s.region.taken {
		if err := s.region.grow(min((end+step-1)/step*step, s.cfg.Limit)); err != nil {
			return err
		}
	}
	return s.log.flush()
}

// patience is how many blocks that are spared a search passes over.
const patience = 128

// evictLocked makes room by one block, and says whether it could. Blocks that a look-up
// has just named are spared while there are others, then those that have just come; the
// one that is to be followed always is. Pins of streams that have ended are given up last.
func (s *Store) evictLocked(now time.Time, parent kvcache.Key) bool {
	s.judgeLocked(now)
	if len(s.limbo) > 0 && s.reapLocked() {
		return true
	}
	ms := now.UnixMilli()
	keep, ok := s.index.byKey[parent]
	if !ok {
		keep = evict.None
	}
	spared := func(leases, fresh bool) evict.Filter {
		f := evict.Filter{Busy: func(id evict.ID) bool {
			e := &s.index.entries[id]
			return e.refs > 0 || id == keep || leases && e.lease > ms || fresh && e.fresh > ms
		}}
		if leases || fresh {
			f.Most = patience
		}
		return f
	}
	id, ok := s.policy.Victim(spared(true, true))
	if !ok && s.reapLocked() {
		return true
	}
	if !ok {
		id, ok = s.policy.Victim(spared(false, true))
	}
	if !ok {
		id, ok = s.policy.Victim(spared(false, false))
	}
	if !ok {
		return s.unpinOldestLocked()
	}
	e := &s.index.entries[id]
	s.count.Evictions.Add(1)
	s.count.EvictedBytes.Add(uint64(e.size))
	s.forgetLocked(id)
	s.policy.Evict(id)
	return true
}

// MakeRoom evicts until seven eighths of limit bytes are used at most, or nothing more
// may go.
func (s *Store) MakeRoom(ctx context.Context, limit int64) error {
	for {
		if err := s.enter(ctx); err != nil {
			return err
		}
		enough := int64(s.room.used)*grain <= limit-limit/8 || !s.evictLocked(time.Now(), kvcache.Key{})
		var err error
		if enough {
			err = s.count.Failure(s.log.flush())
		}
		s.mu.Unlock()
		if enough {
			return err
		}
	}
}

// model is what is known of one fingerprint.
type model struct {
	label  kvcache.Label
	named  uint64 // the order in which models were labelled; 0 is none
	used   time.Time
	spaces []uint32
}

// modelLocked returns the record of a fingerprint.
func (s *Store) modelLocked(f kvcache.Fingerprint) *model {
	m := s.models[f]
	if m == nil {
		m = &model{}
		s.models[f] = m
	}
	return m
}

// usedLocked notes that a model is in use.
func (s *Store) usedLocked(f kvcache.Fingerprint) {
	if m := s.models[f]; m != nil {
		m.used = time.Now()
	}
}

// judgeLocked finds versions of models that are dead: another one of the same name
// came later, and this one has not been used for a while.
func (s *Store) judgeLocked(now time.Time) {
	if now.Sub(s.judged) < time.Second {
		return
	}
	s.judged = now
	newest := map[string]uint64{}
	for _, m := range s.models {
		newest[m.label.Model] = max(newest[m.label.Model], m.named)
	}
	for _, m := range s.models {
		dead := m.named > 0 && m.named < newest[m.label.Model] && now.Sub(m.used) >= s.cfg.DeadAfter
		for _, no := range m.spaces {
			s.policy.SetDead(evict.Owner(no), dead || s.index.spaces[no].dropped)
		}
	}
}

// Drop implements kvcache.Store. From its beginning on nothing of the model is found;
// when it ends, the room of its blocks is free.
func (s *Store) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	m := s.models[f]
	if m == nil {
		s.mu.Unlock()
		return nil
	}
	defer s.walkLocked()()
	gone := map[uint32]bool{}
	for _, no := range m.spaces {
		gone[no] = true
		s.index.spaces[no].dropped = true
		delete(s.index.spaceOf, s.index.spaces[no].Space)
		s.policy.SetDead(evict.Owner(no), true)
		s.dropTailsLocked(no)
	}
	delete(s.models, f)
	s.log.add(record{kind: kindDrop, in: kvcache.Space{Fingerprint: f}})
	err := s.log.flush()
	s.mu.Unlock()
	if err != nil {
		return s.count.Failure(fmt.Errorf("drop model %s: %w", f, err))
	}
	return s.reclaim(ctx, gone)
}

// reclaim removes the blocks of spaces, some at a time so that others get their turn.
func (s *Store) reclaim(ctx context.Context, gone map[uint32]bool) error {
	const batch = 4096
	for from := 0; ; from += batch {
		if err := s.enter(ctx); err != nil {
			return err
		}
		to := min(from+batch, len(s.index.entries))
		for id := from; id < to; id++ {
			if e := &s.index.entries[id]; e.live && gone[e.space] {
				s.removeLocked(evict.ID(id))
			}
		}
		done := to == len(s.index.entries)
		if done {
			for no := range gone {
				s.policy.SetDead(evict.Owner(no), false) // it has nothing any more
			}
		}
		err := s.count.Failure(s.log.flush())
		s.mu.Unlock()
		if done || err != nil {
			return err
		}
	}
}

// background keeps house now and then.
func (s *Store) background(ctx context.Context) {
	if s.cfg.Prefault {
		s.warm(ctx)
	}
	tick := time.NewTicker(s.cfg.SweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			if err := s.Sweep(ctx, now); err != nil && ctx.Err() == nil {
				s.cfg.Log.Warn("arena: sweep", "dir", s.cfg.Dir, "err", err)
			}
		}
	}
}

// warm fills the page tables, a step at a time.
func (s *Store) warm(ctx context.Context) {
	for at := int64(0); at < s.cfg.Limit && ctx.Err() == nil; at += step {
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return
		}
		s.out++
		s.mu.Unlock()
		populate(s.region.b[at:min(at+step, s.cfg.Limit)])
		s.mu.Lock()
		s.leaveLocked()
		s.mu.Unlock()
	}
}

// Sweep drops tails that nobody has appended to for Config.TailTTL, ends pins whose
// time has come, takes back what readers that are gone were reading, and rewrites the
// journal if that has grown. The store does so by itself every Config.SweepEvery.
func (s *Store) Sweep(ctx context.Context, now time.Time) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	s.expireLocked(now)
	s.unpinLocked(now)
	s.buryLocked(now)
	s.reapLocked()
	err := s.log.flush()
	grown := s.log.grown()
	s.mu.Unlock()
	if grown {
		err = errors.Join(err, s.compact(ctx))
	}
	return s.count.Failure(err)
}

// compact rewrites the journal, some blocks at a time so that others get their turn.
func (s *Store) compact(ctx context.Context) error {
	const batch = 4096
	for from := -1; ; from += batch {
		if err := s.enter(ctx); err != nil {
			s.mu.Lock()
			s.log.giveUp()
			s.mu.Unlock()
			return err
		}
		done, err := s.compactLocked(from, batch)
		if err != nil {
			s.log.giveUp()
		}
		s.mu.Unlock()
		if done || err != nil {
			return err
		}
		if from < 0 {
			from = -batch
		}
	}
}

// compactLocked does one step: before the first blocks what is not a block.
func (s *Store) compactLocked(from, batch int) (done bool, err error) {
	if from < 0 {
		if s.log.next != nil {
			return true, nil // another call is at it
		}
		if err := s.log.compact(); err != nil {
			return false, err
		}
		s.retireLocked()
		s.rewriteLocked()
		return false, s.log.flushNext()
	}
	to := min(from+batch, len(s.index.entries))
	for id := from; id < to; id++ {
		if e := &s.index.entries[id]; e.live && !s.index.spaces[e.space].dropped {
			s.log.rewrite(e.record())
		}
	}
	if to < len(s.index.entries) {
		return false, s.log.flushNext()
	}
	if err := s.log.swap(); err != nil {
		return true, err
	}
	s.releaseLocked()
	return true, nil
}

// rewriteLocked writes what is known of spaces, models and tails.
func (s *Store) rewriteLocked() {
	for no, sp := range s.index.spaces {
		if !sp.dropped {
			s.log.rewrite(record{kind: kindSpace, space: uint32(no), in: sp.Space})
		}
	}
	for _, r := range s.labelRecordsLocked() {
		s.log.rewrite(r)
	}
	for _, r := range s.tails.records() {
		s.log.rewrite(r)
	}
}
