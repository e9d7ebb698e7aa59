package prompts

import (
	"container/list"
	"encoding/binary"
	"hash/maphash"
	"sync"
	"time"
)

const (
	// step is the bytes of text between two beginnings that are found again.
	step = 128
	// mostIDs and mostSteps bound a Table: 16 MB, and about as much.
	mostIDs   = 4 << 20
	mostSteps = 1 << 18
	// idle is how long tokens are kept that nobody asks for.
	idle = 15 * time.Minute
)

// text is a prompt's text as it is found again: the hash of each of its beginnings, shortest first,
// and the last one of all of it.
type text struct {
	hashes []uint64
	bytes  int
}

// Table keeps the token ids of texts. The zero value is not ready. It is safe for concurrent use.
type Table struct {
	seed maphash.Seed

	mu    sync.Mutex // guards what follows; held for less than a millisecond
	at    map[uint64]*entry
	order *list.List // of *entry, the one that was used last in front
	ids   int
}

// entry is what is known of one text.
type entry struct {
	text
	ids  []int32
	used time.Time
	el   *list.Element
}

// NewTable makes an empty table.
func NewTable() *Table {
	return &Table{seed: maphash.MakeSeed(), at: map[uint64]*entry{}, order: list.New()}
}

// hash reads the text of a prompt, which the parts make up. Texts with different heads have
// nothing in common.
func (t *Table) hash(head []byte, parts ...[]byte) text {
	var out text
	last := maphash.Bytes(t.seed, head)
	var room [8 + step]byte
	chunk := room[:8]
	cut := func() {
		binary.LittleEndian.PutUint64(chunk, last)
		last = maphash.Bytes(t.seed, chunk)
		out.hashes = append(out.hashes, last)
		chunk = chunk[:8]
	}
	for _, p := range parts {
		out.bytes += len(p)
		for len(p) > 0 {
			n := min(len(p), len(room)-len(chunk))
			if chunk, p = append(chunk, p[:n]...), p[n:]; len(chunk) == len(room) {
				cut()
			}
		}
	}
	cut() // the rest, be it nothing
	return out
}

// find returns the tokens of the longest beginning of x that is known, and about how many x has in
// all. Whole says that it has no others.
func (t *Table) find(now time.Time, x text) (ids []int32, about int, whole bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire(now)
	var e *entry
	n := 0
	for ; n < len(x.hashes); n++ {
		found := t.at[x.hashes[n]]
		if found == nil {
			break
		}
		e = found
	}
	if e == nil {
		return nil, 0, false
	}
	e.used = now
	t.order.MoveToFront(e.el)
	if n == len(x.hashes) {
		return e.ids, len(e.ids), true
	}
	known := min(len(e.ids), len(e.ids)*n*step/max(e.bytes, 1))
	return e.ids[:known], max(known, len(e.ids)*x.bytes/max(e.bytes, 1)), false
}

// learn keeps the tokens of a text. It keeps ids.
func (t *Table) learn(now time.Time, x text, ids []int32) {
	if len(ids) > mostIDs || len(x.hashes) > mostSteps {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire(now)
	e := &entry{text: x, ids: ids, used: now}
	e.el = t.order.PushFront(e)
	t.ids += len(ids)
	for _, h := range x.hashes {
		t.at[h] = e
	}
	for t.ids > mostIDs || len(t.at) > mostSteps {
		t.drop(t.order.Back())
	}
}

// expire drops what nobody has asked for.
func (t *Table) expire(now time.Time) {
	for el := t.order.Back(); el != nil && now.Sub(el.Value.(*entry).used) > idle; el = t.order.Back() {
		t.drop(el)
	}
}

// drop drops an entry, but not the beginnings that it shares with a younger one.
func (t *Table) drop(el *list.Element) {
	e := t.order.Remove(el).(*entry)
	t.ids -= len(e.ids)
	for _, h := range e.hashes {
		if t.at[h] == e {
			delete(t.at, h)
		}
	}
}

// size is how many token ids there are.
func (t *Table) size() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ids
}
