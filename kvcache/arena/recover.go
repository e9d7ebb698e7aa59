//go:build unix

package arena

import (
	"cmp"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/tailrec"
)

// mostSpaces bounds the numbers of spaces that a journal may have.
const mostSpaces = 1 << 20

// replay is the state that a journal's records add up to. It is pure, and believes nothing
// but the sums of the records: what contradicts itself is sorted out by claims.
type replay struct {
	spaces map[uint32]space         // by number
	number map[kvcache.Space]uint32 // of each, the last
	puts   []replayedPut
	alive  map[int64]int // places in puts by offset
	labels []record
	fences map[streamKey]uint64
	tails  map[uint64]*replayedTail
	last   uint64 // the highest number of a tail
	seq    int
}

// replayedPut is the record of a block and its place in the journal.
type replayedPut struct {
	record
	seq int
}

// replayedTail is a tail with its rooms.
type replayedTail struct {
	record
	rooms []replayedRoom
}

// replayedRoom is a room and when the tail got it.
type replayedRoom struct {
	at, size int64
	seq      int
}

func newReplay() *replay {
	return &replay{
		spaces: map[uint32]space{}, number: map[kvcache.Space]uint32{}, alive: map[int64]int{},
		fences: map[streamKey]uint64{}, tails: map[uint64]*replayedTail{},
	}
}

// apply takes in one record. Records of what is not known do nothing, and those of
// what is known already do not change it.
func (p *replay) apply(r record) {
	p.seq++
	switch r.kind {
	case kindSpace:
		p.space(r)
	case kindPut:
		p.alive[r.at] = len(p.puts)
		p.puts = append(p.puts, replayedPut{r, p.seq})
	case kindRemove:
		delete(p.alive, r.at)
	case kindDrop:
		p.drop(r.in.Fingerprint)
	case kindLabel:
		p.labels = append(p.labels, r)
	case kindFence:
		key := streamKey{r.space, r.key}
		p.fences[key] = max(p.fences[key], r.attempt)
	case kindTail:
		p.last = max(p.last, r.tail)
		if p.tails[r.tail] == nil {
			p.tails[r.tail] = &replayedTail{record: r}
		}
	case kindRoom:
		p.addRoom(r)
	case kindEnd:
		delete(p.tails, r.tail)
	case kindStream:
		key := streamKey{r.space, r.key}
		delete(p.fences, key)
		for no, t := range p.tails {
			if (streamKey{t.space, t.key}) == key {
				delete(p.tails, no)
			}
		}
	}
}

// space notes the number of a space. One that has an earlier number had nothing there when it
// came back, and the journal without that number was not finished.
func (p *replay) space(r record) {
	if r.space >= mostSpaces || p.spaces[r.space].Space == r.in {
		return
	}
	if no, again := p.number[r.in]; again && p.spaces[no].Space == r.in {
		p.spaces[no] = space{Space: r.in, dropped: true}
	}
	p.spaces[r.space], p.number[r.in] = space{Space: r.in}, r.space
}

// addRoom gives a tail one more extent.
func (p *replay) addRoom(r record) {
	t := p.tails[r.tail]
	if t == nil || slices.ContainsFunc(t.rooms, func(o replayedRoom) bool { return o.at == r.at }) {
		return
	}
	t.rooms = append(t.rooms, replayedRoom{r.at, r.size, p.seq})
}

// drop forgets everything of a fingerprint.
func (p *replay) drop(f kvcache.Fingerprint) {
	for no, sp := range p.spaces {
		if sp.Fingerprint == f {
			p.spaces[no] = space{Space: sp.Space, dropped: true}
		}
	}
	p.labels = slices.DeleteFunc(p.labels, func(r record) bool { return r.in.Fingerprint == f })
}

// known says whether a number stands for a space that is there.
func (p *replay) known(no uint32) bool {
	sp, ok := p.spaces[no]
	return ok && !sp.dropped
}

// claim is something that says that an extent is its own, the higher the later.
type claim struct {
	extent
	seq   int
	block int    // a place in puts, or -1
	tail  uint64 // else a tail, or 0 for one that a reader holds
}

// claims lists what lies where, without what cannot be true: outside the arena of so
// many bytes, or in the place of something later. Held extents come last of all.
func (p *replay) claims(limit int64, held []extent) []claim {
	var all []claim
	add := func(at, size int64, c claim) bool {
		if at < grain || at%grain != 0 || size < 1 || size > limit-at {
			return false
		}
		c.extent = extent{uint32(at / grain), grains(size)}
		all = append(all, c)
		return true
	}
	for at, i := range p.alive {
		if p.known(p.puts[i].space) {
			add(at, p.puts[i].size, claim{seq: p.puts[i].seq, block: i})
		}
	}
	for no, t := range p.tails {
		if !p.known(t.space) {
			delete(p.tails, no)
			continue
		}
		for _, r := range t.rooms {
			if !add(r.at, r.size, claim{seq: r.seq, block: -1, tail: no}) {
				delete(p.tails, no)
			}
		}
	}
	slices.SortFunc(all, func(a, b claim) int { return cmp.Compare(a.at, b.at) })
	slices.SortFunc(held, func(a, b extent) int { return cmp.Compare(a.at, b.at) })
	return p.settle(all, held)
}

// settle drops the claims that contradict later ones, and tails that lost a room.
func (p *replay) settle(all []claim, held []extent) []claim {
	var kept []claim
	for _, c := range all {
		clash := clashes(held, c.extent)
		for !clash && len(kept) > 0 && kept[len(kept)-1].end() > c.at {
			if kept[len(kept)-1].seq > c.seq {
				clash = true
				break
			}
			p.lose(kept[len(kept)-1])
			kept = kept[:len(kept)-1]
		}
		if clash {
			p.lose(c)
			continue
		}
		kept = append(kept, c)
	}
	// A tail goes with any of its rooms.
	return slices.DeleteFunc(kept, func(c claim) bool { return c.block < 0 && p.tails[c.tail] == nil })
}

// clashes says whether an extent overlaps one of a sorted list that is not equal.
func clashes(sorted []extent, e extent) bool {
	i, _ := slices.BinarySearchFunc(sorted, e.at, func(o extent, at uint32) int { return cmp.Compare(o.end(), at+1) })
	return i < len(sorted) && sorted[i].at < e.end() && sorted[i] != e
}

// lose forgets what has lost its place.
func (p *replay) lose(c claim) {
	if c.block < 0 {
		delete(p.tails, c.tail)
	}
}

// recover fills index, policy and room from the journal and from what readers hold.
func (s *Store) recover(now time.Time) (err error) {
	p := newReplay()
	var cut int64
	if s.log, cut, err = openJournal(s.root, s.region.id, s.region.renew, p.apply); err != nil {
		return err
	}
	if cut > 0 {
		s.cfg.Log.Info("arena: the end of the journal was not whole", "dir", s.cfg.Dir, "bytes", cut)
	}
	held, err := s.findPeers()
	if err != nil {
		return err
	}
	claims := p.claims(s.cfg.Limit, held)
	if n := len(claims); n > 0 {
		if err := s.region.grow(int64(claims[n-1].end()) * grain); err != nil {
			return err
		}
	}
	s.recoverSpaces(p, now)
	s.recoverTails(p, now)
	// In the order in which they were put, which is the order in which they age.
	slices.SortFunc(claims, func(a, b claim) int { return cmp.Compare(a.seq, b.seq) })
	taken := make([]extent, 0, len(claims))
	s.index.reserve(len(claims))
	for _, c := range claims {
		if c.block >= 0 {
			r := p.puts[c.block]
			if _, twice := s.index.byKey[r.key]; twice {
				continue
			}
			s.insertLocked(entry{
				key: r.key, parent: r.parent, at: c.at, n: c.n, size: r.size, first: r.first, tokens: r.tokens, space: r.space,
			})
			s.log.live += putRecord
		}
		taken = append(taken, c.extent)
	}
	s.room.reuse(1, append(taken, s.adoptHeld(held)...))
	s.log.live += int64(128 * len(s.tails.byNo))
	return nil
}

// recoverSpaces takes over spaces and labels.
func (s *Store) recoverSpaces(p *replay, now time.Time) {
	for _, no := range slices.Sorted(maps.Keys(p.spaces)) {
		for int(no) > len(s.index.spaces) {
			s.index.spaces = append(s.index.spaces, space{dropped: true})
		}
		s.index.spaces = append(s.index.spaces, p.spaces[no])
		if p.known(no) {
			s.addSpaceLocked(no, p.spaces[no].Space)
		}
	}
	for _, r := range p.labels {
		m := s.modelLocked(r.in.Fingerprint)
		var l kvcache.Label
		if m.named == 0 && json.Unmarshal(r.text, &l) == nil {
			s.named++
			m.label, m.named = l, s.named
		}
	}
	for _, m := range s.models {
		m.used = now
	}
}

// recoverTails takes over streams and tails, each up to its last whole record.
func (s *Store) recoverTails(p *replay, now time.Time) {
	s.tails.last = p.last
	for key, attempt := range p.fences {
		if p.known(key.space) {
			s.tails.streams[key] = &stream{attempt: attempt, used: now}
		}
	}
	var nos []uint64
	for no := range p.tails {
		nos = append(nos, no)
	}
	slices.Sort(nos)
	for _, no := range nos {
		r := p.tails[no]
		t := &tail{
			no: no, key: streamKey{r.space, r.key}, choice: r.choice, attempt: r.attempt, parent: r.parent,
			first: int(r.first), next: int(r.first),
		}
		st := s.tails.streams[t.key]
		if st == nil {
			st = &stream{attempt: t.attempt, used: now}
			s.tails.streams[t.key] = st
		}
		for _, room := range r.rooms {
			t.rooms = append(t.rooms, tailRoom{extent: extent{uint32(room.at / grain), grains(room.size)}})
		}
		s.scan(t)
		s.takeInLocked(st, t)
	}
}

// scan finds the records of a tail. A room ends with the first that is not whole, or not
// the next one; later rooms may go on where it ends, since a record that did not fit
// went into a new one.
func (s *Store) scan(t *tail) {
	for i := range t.rooms {
		room := &t.rooms[i]
		b := s.bytes(room.extent)
		for {
			r, end, err := tailrec.Parse(b, room.used, tailrec.Want{Mark: t.no, First: t.next})
			if err != nil {
				if !errors.Is(err, tailrec.ErrEnd) {
					s.count.Refusal(err)
				}
				break
			}
			room.used, t.at, t.next = end, i, t.next+len(r.IDs)
		}
	}
}
