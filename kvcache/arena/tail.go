//go:build unix

package arena

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/tailrec"
)

// tails are the open ends of streams. They are guarded by the store's lock.
type tails struct {
	byNo    map[uint64]*tail
	streams map[streamKey]*stream
	last    uint64 // number given to a tail
	// anchors counts the tails, and the pins that linger, behind each block, whether
	// the block is there or not.
	anchors map[kvcache.Key]int
	linger  []lingering // by time
}

func newTails() tails {
	return tails{byNo: map[uint64]*tail{}, streams: map[streamKey]*stream{}, anchors: map[kvcache.Key]int{}}
}

// streamKey names a stream; its id comes from outside and may be long.
type streamKey struct {
	space uint32
	id    kvcache.Key // SHA-256
}

// stream is what all tails of one stream share.
type stream struct {
	attempt uint64 // the highest
	tails   []*tail
	used    time.Time // the last append
}

// lingering is a pin that outlives its tail.
type lingering struct {
	key   kvcache.Key
	until time.Time
}

// tail is one tail: records in extents, in order.
type tail struct {
	no      uint64
	key     streamKey
	choice  uint32
	attempt uint64
	first   int
	parent  kvcache.Key

	rooms []tailRoom
	at    int // the room that the next record goes into, if it fits
	next  int // position of the next token

	busy    int  // calls that read or write its rooms without the lock
	writing bool // one of them writes
	gone    bool // to be freed when it is not busy
}

// tailRoom is one extent of a tail and how much of it is records.
type tailRoom struct {
	extent
	used int64
}

// bytes is what a tail's records take.
func (t *tail) bytes() (n int64) {
	for _, r := range t.rooms {
		n += r.used
	}
	return n
}

// record is the one that begins a tail.
func (t *tail) record() record {
	return record{
		kind: kindTail, space: t.key.space, choice: t.choice, tail: t.no, attempt: t.attempt,
		first: int64(t.first), parent: t.parent, key: t.key.id,
	}
}

// record is the one of a room of a tail.
func (r tailRoom) record(no uint64) record {
	return record{kind: kindRoom, tail: no, at: int64(r.extent.at) * grain, size: int64(r.n) * grain}
}

// records lists everything that is known of streams and tails, in an order in which
// it can be replayed.
func (ts *tails) records() (all []record) {
	for key, st := range ts.streams {
		all = append(all, record{kind: kindFence, space: key.space, attempt: st.attempt, key: key.id})
		for _, t := range st.tails {
			all = append(all, t.record())
			for _, r := range t.rooms {
				all = append(all, r.record(t.no))
			}
		}
	}
	return all
}

// OpenTail implements kvcache.Tails. The writer is a *TailWriter.
func (s *Store) OpenTail(ctx context.Context, spec kvcache.TailSpec) (kvcache.TailWriter, error) {
	if spec.Stream == "" || spec.Choice < 0 || spec.Choice > math.MaxInt32 || spec.Attempt < 0 || spec.First < 0 {
		return nil, fmt.Errorf("open tail: bad choice %d, attempt %d or position %d, or no stream", spec.Choice, spec.Attempt, spec.First)
	}
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	key := streamKey{s.spaceLocked(spec.Space), sha256.Sum256([]byte(spec.Stream))}
	st := s.tails.streams[key]
	if st == nil {
		st = &stream{}
		s.tails.streams[key] = st
	}
	if attempt := uint64(spec.Attempt); st.attempt > attempt {
		s.count.Stale.Add(1)
		return nil, fmt.Errorf("open tail: %w", kvcache.ErrStale)
	} else if st.attempt < attempt || len(st.tails) == 0 {
		st.attempt = attempt
		s.log.add(record{kind: kindFence, space: key.space, attempt: attempt, key: key.id})
	}
	t := &tail{key: key, choice: uint32(spec.Choice), attempt: uint64(spec.Attempt), parent: spec.Parent, first: spec.First}
	s.beginLocked(st, t)
	if err := s.log.flush(); err != nil {
		s.endLocked(t)
		return nil, s.count.Failure(fmt.Errorf("open tail: %w", err))
	}
	return &TailWriter{s: s, no: t.no, next: spec.First}, nil
}

// beginLocked numbers a tail and takes it in. The journal is not written yet.
func (s *Store) beginLocked(st *stream, t *tail) {
	s.tails.last++
	t.no, t.next = s.tails.last, t.first
	s.takeInLocked(st, t)
	st.used = time.Now()
	s.log.add(t.record())
}

// takeInLocked adds a numbered tail to its stream, and pins what is before it.
func (s *Store) takeInLocked(st *stream, t *tail) {
	s.tails.byNo[t.no] = t
	st.tails = append(st.tails, t)
	s.tails.anchors[t.parent]++
	if id, ok := s.index.byKey[t.parent]; ok {
		s.policy.Pin(id)
	}
}

// endLocked forgets a tail and frees its room. Its stream and what is pinned are the
// caller's. The journal is not written yet.
func (s *Store) endLocked(t *tail) {
	delete(s.tails.byNo, t.no)
	s.log.add(record{kind: kindEnd, tail: t.no})
	if st := s.tails.streams[t.key]; st != nil {
		st.tails = slices.DeleteFunc(st.tails, func(o *tail) bool { return o == t })
	}
	t.gone = true
	s.freeTailLocked(t)
}

// freeTailLocked frees the room of a tail that is gone, once nobody is at work in it.
func (s *Store) freeTailLocked(t *tail) {
	if !t.gone || t.busy > 0 {
		return
	}
	for _, r := range t.rooms {
		s.room.release(r.extent)
	}
	t.rooms = nil
}

// unanchorLocked ends one pin of the block before a tail.
func (s *Store) unanchorLocked(key kvcache.Key) {
	if s.tails.anchors[key]--; s.tails.anchors[key] <= 0 {
		delete(s.tails.anchors, key)
	}
	if id, ok := s.index.byKey[key]; ok {
		s.policy.Unpin(id)
	}
}

// unpinLocked ends the pins whose time has come.
func (s *Store) unpinLocked(now time.Time) {
	for len(s.tails.linger) > 0 && !now.Before(s.tails.linger[0].until) {
		s.unpinOldestLocked()
	}
}

// unpinOldestLocked ends the oldest pin that lingers, and says whether there was one.
func (s *Store) unpinOldestLocked() bool {
	if len(s.tails.linger) == 0 {
		return false
	}
	s.unanchorLocked(s.tails.linger[0].key)
	s.tails.linger = s.tails.linger[1:]
	return true
}

// DropTail implements kvcache.Tails.
func (s *Store) DropTail(ctx context.Context, space kvcache.Space, stream string) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	no, ok := s.index.spaceOf[space]
	if !ok {
		return nil
	}
	s.dropStreamLocked(streamKey{no, sha256.Sum256([]byte(stream))}, time.Now())
	return s.count.Failure(s.log.flush())
}

// dropStreamLocked forgets a stream. What its tails follow stays pinned a while: a
// conversation often goes on.
func (s *Store) dropStreamLocked(key streamKey, now time.Time) {
	st := s.tails.streams[key]
	if st == nil {
		return
	}
	delete(s.tails.streams, key)
	for _, t := range st.tails {
		s.endLocked(t)
		s.tails.linger = append(s.tails.linger, lingering{t.parent, now.Add(s.cfg.Linger)})
	}
	s.log.add(record{kind: kindStream, space: key.space, key: key.id})
}

// dropTailsLocked forgets all streams of a space that is going.
func (s *Store) dropTailsLocked(space uint32) {
	for _, key := range slices.Collect(maps.Keys(s.tails.streams)) {
		if key.space == space {
			s.dropStreamLocked(key, time.Time{})
		}
	}
	s.unpinLocked(time.Now())
}

// expireLocked forgets the streams that nobody has appended to for too long.
func (s *Store) expireLocked(now time.Time) {
	for _, key := range slices.Collect(maps.Keys(s.tails.streams)) {
		if now.Sub(s.tails.streams[key].used) > s.cfg.TailTTL {
			s.dropStreamLocked(key, now)
			s.count.Expired.Add(1)
		}
	}
}

// ReadTail implements kvcache.Tails.
func (s *Store) ReadTail(ctx context.Context, space kvcache.Space, stream string, choice int) ([]kvcache.Tail, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	no, ok := s.index.spaceOf[space]
	var found []snapshot
	if st := s.tails.streams[streamKey{no, sha256.Sum256([]byte(stream))}]; ok && st != nil {
		for _, t := range st.tails {
			if int(t.choice) == choice {
				found = append(found, snapshot{t, slices.Clone(t.rooms), t.parent, t.first})
				t.busy++
				s.out++
			}
		}
	}
	s.mu.Unlock()
	slices.SortFunc(found, func(a, b snapshot) int {
		return cmp.Or(cmp.Compare(b.t.attempt, a.t.attempt), cmp.Compare(b.t.no, a.t.no))
	})
	var list []kvcache.Tail
	for _, f := range found {
		out := kvcache.Tail{TailSpec: kvcache.TailSpec{
			Space: space, Stream: stream, Choice: choice, Attempt: int(f.t.attempt), Parent: f.parent, First: f.first,
		}}
		var err error
		out.Ranges, err = s.read(f)
		s.count.Refusal(err)
		list = append(list, out)
		s.mu.Lock()
		f.t.busy--
		s.freeTailLocked(f.t)
		s.leaveLocked()
		s.mu.Unlock()
	}
	return list, nil
}

// snapshot is a tail as a reader found it.
type snapshot struct {
	t      *tail
	rooms  []tailRoom
	parent kvcache.Key
	first  int
}

// read copies the records of a tail, up to the first that is not right.
func (s *Store) read(f snapshot) (ranges []kvcache.Range, err error) {
	next := f.first
	for _, room := range f.rooms {
		b := s.bytes(room.extent)[:room.used]
		for at := int64(0); at < room.used; {
			r, end, err := tailrec.Parse(b, at, tailrec.Want{Mark: f.t.no, First: next})
			if errors.Is(err, tailrec.ErrEnd) {
				// It was there when it was published.
				err = &kvcache.Refusal{Reason: kvcache.ReasonTorn, Detail: "record of a tail"}
			}
			if err != nil {
				return ranges, err
			}
			r.Data = slices.Clone(r.Data)
			ranges = append(ranges, r)
			at, next = end, next+len(r.IDs)
		}
	}
	return ranges, nil
}
