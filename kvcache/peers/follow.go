package peers

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

const (
	// mostTails is how many tails are followed; of further ones nothing is copied.
	mostTails = 4096
	// copiers is how many tails are copied at once.
	copiers = 4
	// look is the time between two looks at tails that rest, and how long one rests until
	// what it has is copied.
	look = 250 * time.Millisecond
	// forget is how long a tail rests until it is forgotten.
	forget = 10 * time.Minute
	// copyTime bounds the opening of a copy.
	copyTime = 5 * time.Second
)

// slot is what tails are of: one choice of a stream.
type slot struct {
	space  kvcache.Space
	stream string
	choice int
}

// follower copies tails. Its lock is held for moments only.
type follower struct {
	s     *Store
	queue chan *followed

	mu    sync.Mutex
	tails map[slot]*followed
}

// followed is one tail that is copied.
type followed struct {
	// Guarded by the follower's lock.

	// spec is as which the tail was opened or rotated last; with each other one it begins anew.
	spec kvcache.TailSpec
	// next is where it ends in the near store, and sent where its copy ends.
	next, sent int
	// queued says that it is in the queue, or being copied: by one goroutine at a time.
	queued bool
	// final says that a higher attempt has taken over: there is nothing to be copied.
	final bool
	// grew is when it grew last, and tried when it was last tried to copy it.
	grew, tried time.Time
	// The block behind which the tail was begun, how many of its tokens the copy of the tail
	// before has, and the id of the member with that: nothing is kept any more when the block is
	// somewhere, or that copy nowhere.
	block  kvcache.Key
	kept   int
	keptOn string
	// host is the id of the member that has the copy, and anew says that this counts no more:
	// the copy is to be begun anew.
	host string
	anew bool

	// Of the goroutine that copies.
	writer kvcache.TailWriter // nil = there is none
	on     *member
	at     kvcache.TailSpec // where the writer's tail begins
}

// begin starts the goroutines, which end with the store.
func (f *follower) begin(s *Store) {
	f.s, f.queue, f.tails = s, make(chan *followed, mostTails), map[slot]*followed{}
	for range copiers {
		s.done.Go(func() {
			for {
				select {
				case <-s.ctx.Done():
					return
				case t := <-f.queue:
					f.copy(t)
				}
			}
		})
	}
	s.done.Go(f.watch)
}

// Grew notes that a tail of the near store, as it was opened or rotated last, ends at a
// position now. It never waits.
func (s *Store) Grew(spec kvcache.TailSpec, next int) { s.tails.grew(spec, next, time.Now()) }

func (f *follower) grew(spec kvcache.TailSpec, next int, now time.Time) {
	key := slot{spec.Space, spec.Stream, spec.Choice}
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.tails[key]
	if t == nil {
		if len(f.tails) >= mostTails {
			f.s.metrics.dropped.Inc()
			return
		}
		t = &followed{spec: spec, sent: spec.First}
		f.tails[key] = t
	}
	if spec.Attempt < t.spec.Attempt {
		return
	}
	if spec != t.spec {
		f.beganLocked(t, spec)
	}
	t.next, t.grew = next, now
	if t.next-t.sent >= f.s.cfg.Interval {
		f.offerLocked(t)
	}
}

// beganLocked notes that a tail has begun anew.
func (f *follower) beganLocked(t *followed, spec kvcache.TailSpec) {
	switch {
	case spec.Attempt > t.spec.Attempt:
		t.final, t.kept = false, 0
	case t.kept == 0 || f.s.has(t.block):
		t.block, t.kept, t.keptOn = spec.Parent, max(t.sent-t.spec.First, 0), t.host
	}
	t.spec, t.sent = spec, spec.First
}

// offerLocked queues a tail, unless it is queued.
func (f *follower) offerLocked(t *followed) {
	if t.queued || t.final {
		return
	}
	select {
	case f.queue <- t:
		t.queued = true
	default: // those that were forgotten fill it; the next look finds this one
	}
}

// watch queues tails that rest, or whose copy failed, and forgets those of long ago.
func (f *follower) watch() {
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		select {
		case <-f.s.ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		var old []*followed
		f.mu.Lock()
		for key, t := range f.tails {
			switch {
			case t.queued:
			case now.Sub(t.grew) > forget:
				delete(f.tails, key)
				t.final = true
				old = append(old, t)
			case t.next > t.sent && now.Sub(t.grew) >= look && now.Sub(t.tried) >= look:
				f.offerLocked(t)
			}
		}
		f.mu.Unlock()
		for _, t := range old {
			t.leave() // nobody copies what is not followed
		}
	}
}

// leave ends the use of the copy, of which everything stays.
func (t *followed) leave() {
	if t.writer != nil {
		_ = t.writer.Close() // what it has written is written
		t.writer = nil
	}
}

// drop forgets tails. The caller ends the use of their copies, when it has told the members, which is
// not to wait for that; those that are queued are left by whoever takes them.
func (f *follower) drop(which func(kvcache.TailSpec) bool) (end func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var old []*followed
	for key, t := range f.tails {
		if !which(t.spec) {
			continue
		}
		t.final = true
		delete(f.tails, key)
		if !t.queued {
			old = append(old, t)
		}
	}
	return func() {
		for _, t := range old {
			t.leave()
		}
	}
}

// end ends the use of all copies, when the goroutines have ended.
func (f *follower) end() {
	f.drop(func(kvcache.TailSpec) bool { return true })()
	for len(f.queue) > 0 {
		(<-f.queue).leave()
	}
}

// droppedLocked says whether a tail was forgotten.
func (f *follower) droppedLocked(t *followed) bool {
	return f.tails[slot{t.spec.Space, t.spec.Stream, t.spec.Choice}] != t
}

// Behind is how many tokens of followed tails are on no other host.
func (s *Store) Behind() (tokens int64) {
	f := &s.tails
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.tails {
		if t.final {
			continue
		}
		tokens += int64(max(t.next-t.sent, 0))
		if t.kept > 0 && s.has(t.block) {
			t.kept = 0
		}
		if t.kept > 0 && s.cfg.Waits(t.block) {
			// The block counts as a whole where blocks are counted that wait.
			tokens -= int64(t.kept)
		}
	}
	return tokens
}

// copy copies what is new of a tail.
func (f *follower) copy(t *followed) {
	f.mu.Lock()
	spec, sent, dropped := t.spec, t.sent, f.droppedLocked(t)
	t.tried = time.Now()
	f.mu.Unlock()
	if !dropped {
		dropped = f.copied(t, spec, f.send(t, spec, sent))
	}
	if dropped {
		t.leave() // it is queued, as far as others know, and so nobody else's
	}
}

// copied notes how the copying of a tail has ended, unless that was dropped meanwhile.
func (f *follower) copied(t *followed, spec kvcache.TailSpec, err error) (dropped bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.droppedLocked(t) {
		return true
	}
	t.queued = false
	switch {
	case err == nil:
		if t.next-t.sent >= f.s.cfg.Interval { // it has grown meanwhile
			f.offerLocked(t)
		}
	case errors.Is(err, kvcache.ErrStale):
		t.final = t.spec.Attempt == spec.Attempt
	default:
		f.s.cfg.Log.Debug("copy a tail to a KV peer", "err", err)
	}
	return false
}

// send appends what the near store has of a tail, from sent on, to its copy.
func (f *follower) send(t *followed, spec kvcache.TailSpec, sent int) error {
	s := f.s
	ctx, cancel := context.WithTimeout(s.ctx, copyTime)
	defer cancel()
	tails, err := s.cfg.Near.ReadTail(ctx, spec.Space, spec.Stream, spec.Choice)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(tails, func(near kvcache.Tail) bool { return near.TailSpec == spec })
	if i < 0 {
		return nil // it has gone on meanwhile
	}
	if fresh, err := f.ready(ctx, t, spec); err != nil {
		return err
	} else if fresh {
		sent = spec.First
		f.note(t, spec, sent)
	}
	for _, r := range tails[i].Ranges {
		if r.First < sent {
			continue
		}
		if err := s.admit(s.ctx, int64(len(r.Data))); err != nil {
			return err
		}
		begin := time.Now()
		err := t.writer.Append(r)
		if s.called(s.ctx, t.on, begin, err) != nil {
			t.leave()
			f.lost(t, spec)
			return err
		}
		s.metrics.bytes.WithLabelValues("tail").Add(float64(len(r.Data)))
		s.metrics.tailTokens.Add(float64(len(r.IDs)))
		f.note(t, spec, r.First+len(r.IDs))
	}
	return nil
}

// note notes where the copy of a tail ends, unless it has begun anew meanwhile.
func (f *follower) note(t *followed, spec kvcache.TailSpec, sent int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.spec == spec && !t.anew {
		t.sent, t.host = sent, t.on.ID
	}
}

// lostOn notes that copies on a member do not count any more.
func (f *follower) lostOn(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.tails {
		if t.keptOn == id {
			t.kept = 0
		}
		if t.host == id {
			t.sent, t.anew = t.spec.First, true
		}
	}
}

// beginsAnew says, once, whether the copy of a tail is to be begun anew.
func (f *follower) beginsAnew(t *followed) (anew bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	anew, t.anew = t.anew, false
	return anew
}

// lost notes that the copy of a tail is on a host that does not answer.
func (f *follower) lost(t *followed, spec kvcache.TailSpec) {
	f.note(t, spec, spec.First)
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.keptOn == t.on.ID {
		t.kept = 0
	}
}

// keepsNothing notes that the copy of the tail before is there no longer.
func (f *follower) keepsNothing(t *followed) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t.kept = 0
}

// ready makes the writer one of the tail that spec says, on a member that is there. It says
// whether that is empty.
func (f *follower) ready(ctx context.Context, t *followed, spec kvcache.TailSpec) (fresh bool, err error) {
	s := f.s
	if anew := f.beginsAnew(t); t.writer != nil && (anew || s.passedOver(t.on)) {
		t.leave()
		f.lost(t, spec)
	}
	if t.writer != nil && t.at == spec {
		return false, nil
	}
	before := t.at
	before.Parent, before.First = spec.Parent, spec.First
	if t.writer != nil && before == spec && s.has(spec.Parent) {
		begin := time.Now()
		err := t.writer.Rotate(spec.Parent, spec.First)
		if s.called(ctx, t.on, begin, err) == nil {
			t.at = spec
			f.keepsNothing(t)
			return true, nil
		}
		t.leave()
		if errors.Is(err, kvcache.ErrStale) {
			return false, err
		}
	}
	t.leave()
	w, on, err := s.openTail(ctx, spec)
	if err != nil {
		return false, err
	}
	t.writer, t.on, t.at = w, on, spec
	return true, nil
}

// passedOver says whether a member is not to be used.
func (s *Store) passedOver(m *member) bool {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	return !m.gone.IsZero() || now.Before(m.until)
}
