//go:build unix

package arena

import (
	"context"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/tailrec"
)

// TailWriter appends to one tail of a store. It is for one goroutine at a time.
type TailWriter struct {
	s    *Store
	no   uint64
	next int    // position of the next token, as this writer knows it
	head []byte // the last record's header, kept for its memory
	done bool
}

// No is the tail's number. It outlives the process, and is given once per arena.
func (w *TailWriter) No() uint64 { return w.no }

// Next is the position of the token that the next range begins with.
func (w *TailWriter) Next() int { return w.next }

// Writer returns a writer of a tail that was opened before, in this process or one
// before it, that goes on at position next. What the tail has from there on was not
// acknowledged to whoever asks, and is cut off. ErrStale says that the tail is gone or
// a higher attempt has taken over, ErrGap that no record ends at next.
func (s *Store) Writer(ctx context.Context, no uint64, next int) (*TailWriter, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	t, err := s.tailLocked(no)
	if err != nil {
		return nil, err
	}
	if t.writing {
		return nil, kvcache.ErrGap // by somebody whose end is not known yet
	}
	if t.next != next {
		if err := s.cutLocked(t, next); err != nil {
			return nil, err
		}
	}
	return &TailWriter{s: s, no: no, next: next}, nil
}

// tailLocked returns a tail that may be written to.
func (s *Store) tailLocked(no uint64) (*tail, error) {
	t := s.tails.byNo[no]
	if t == nil || s.tails.streams[t.key].attempt > t.attempt {
		s.count.Stale.Add(1)
		return nil, kvcache.ErrStale
	}
	return t, nil
}

// cutLocked forgets the records of a tail from a position on.
func (s *Store) cutLocked(t *tail, from int) error {
	next := t.first
	for i := range t.rooms {
		room := &t.rooms[i]
		b := s.bytes(room.extent)
		for at := int64(0); at < room.used; {
			if next == from {
				clear(b[at:min(at+8, int64(len(b)))])
				room.used, t.at, t.next = at, i, from
				for j := i + 1; j < len(t.rooms); j++ {
					t.rooms[j].used = 0
					clear(s.bytes(t.rooms[j].extent)[:8])
				}
				return nil
			}
			r, end, err := tailrec.Parse(b[:room.used], at, tailrec.Want{Mark: t.no, First: next})
			if err != nil {
				return kvcache.ErrGap
			}
			at, next = end, next+len(r.IDs)
		}
	}
	return kvcache.ErrGap
}

// Append implements kvcache.TailWriter.
func (w *TailWriter) Append(r kvcache.Range) error {
	if w.done {
		return kvcache.ErrClosed
	}
	s := w.s
	t, b, at, err := s.placeFor(w, r)
	if err != nil {
		return err
	}
	// The tail is busy, so nobody takes the room away. The end of what will be there
	// is marked first, then come the data, and the header last: it vouches for them.
	w.head = tailrec.AppendHeader(w.head[:0], at, w.no, r)
	data := at + int64(len(w.head))
	end := data + int64(len(r.Data))
	clear(b[end:min(end+8, int64(len(b)))])
	copy(b[data:], r.Data)
	copy(b[at:], w.head)

	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.leaveLocked()
	t.busy--
	t.writing = false
	if t.gone {
		s.freeTailLocked(t)
		s.count.Stale.Add(1)
		return kvcache.ErrStale
	}
	t.rooms[t.at].used = end
	t.next += len(r.IDs)
	w.next = t.next
	s.tails.streams[t.key].used = time.Now()
	s.count.Appends.Add(1)
	s.count.AppendBytes.Add(uint64(len(r.Data)))
	return nil
}

// placeFor finds or makes room for a record, and marks the tail as busy, so that its rooms
// stay where they are while the record is written without the lock. It returns the room
// and where in it the record begins.
func (s *Store) placeFor(w *TailWriter, r kvcache.Range) (t *tail, b []byte, at int64, err error) {
	if err := s.enter(context.Background()); err != nil {
		return nil, nil, 0, err
	}
	defer s.mu.Unlock()
	if t, err = s.tailLocked(w.no); err != nil {
		return nil, nil, 0, err
	}
	if r.First != w.next || r.First != t.next || t.writing {
		return nil, nil, 0, kvcache.ErrGap
	}
	if err := tailrec.Check(r); err != nil {
		return nil, nil, 0, err
	}
	if at, err = s.roomForLocked(t, r); err != nil {
		return nil, nil, 0, err
	}
	t.busy++
	t.writing = true
	s.out++
	return t, s.bytes(t.rooms[t.at].extent), at, nil
}

// roomForLocked moves a tail to a room that a record fits into, and returns where in
// it.
func (s *Store) roomForLocked(t *tail, r kvcache.Range) (at int64, err error) {
	for i := t.at; i < len(t.rooms); i++ {
		at := t.rooms[i].used
		if at+tailrec.HeaderLen(at, len(r.IDs))+int64(len(r.Data)) <= int64(t.rooms[i].n)*grain {
			t.at = i
			return at, nil
		}
	}
	need := tailrec.HeaderLen(0, len(r.IDs)) + int64(len(r.Data))
	e, ok := s.room.alloc(grains(max(need, s.growth(len(t.rooms)))))
	if ok {
		if err := s.readyLocked(e); err != nil {
			s.room.release(e)
			return 0, s.count.Failure(err)
		}
	} else if e, err = s.allocLocked(need, t.parent, time.Now()); err != nil {
		return 0, err
	}
	room := tailRoom{extent: e}
	// What an earlier owner left there must not read as a record.
	clear(s.bytes(e)[:8])
	s.log.add(room.record(t.no))
	if err := s.log.flush(); err != nil {
		// It waits in the journal as the tail's, so it stays the tail's.
		t.rooms = append(t.rooms, room)
		return 0, s.count.Failure(err)
	}
	t.rooms = append(t.rooms, room)
	t.at = len(t.rooms) - 1
	return 0, nil
}

// growth is the size of a tail's next room: more and more, up to 1 MiB or a small part
// of the arena.
func (s *Store) growth(rooms int) int64 {
	return min(int64(64<<10)<<min(rooms, 4), s.cfg.Limit/64)
}

// Rotate implements kvcache.TailWriter.
func (w *TailWriter) Rotate(parent kvcache.Key, first int) error {
	if w.done {
		return kvcache.ErrClosed
	}
	if first < 0 {
		return fmt.Errorf("rotate tail to position %d", first)
	}
	s := w.s
	if err := s.enter(context.Background()); err != nil {
		return err
	}
	defer s.mu.Unlock()
	old, err := s.tailLocked(w.no)
	if err != nil {
		return err
	}
	st := s.tails.streams[old.key]
	t := &tail{key: old.key, choice: old.choice, attempt: old.attempt, parent: parent, first: first}
	before := append([]*tail(nil), st.tails...)
	s.beginLocked(st, t)
	for _, o := range before {
		if o.choice == t.choice && o.attempt <= t.attempt {
			s.endLocked(o)
			s.unanchorLocked(o.parent)
		}
	}
	w.no, w.next = t.no, first
	// What waits for the journal is written later, and before any of the room is used
	// again.
	return s.count.Failure(s.log.flush())
}

// Close implements kvcache.TailWriter.
func (w *TailWriter) Close() error {
	w.done = true
	return nil
}
