package arena

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/kvmesh/kvmesh/kvcache"
)

// The records of the journal; see the package comment for their bytes.
const (
	journalMagic   = "KVMJ"
	journalVersion = 1
	journalHeader  = 64

	recordFixed = 8
	mostRecord  = 8192 // bytes, for a label
)

// kind says what a record notes.
type kind uint8

const (
	kindSpace  kind = 1 + iota // a number for a space
	kindPut                    // a block is there
	kindRemove                 // the block at an offset is not
	kindDrop                   // nothing of a fingerprint is
	kindLabel                  // whose KV a fingerprint's is
	kindFence                  // the highest attempt at a stream
	kindTail                   // a tail begins
	kindRoom                   // a tail has one more extent
	kindEnd                    // a tail is gone
	kindStream                 // a stream is gone, with its fence and tails
)

// record is one change of the index. Which fields count depends on the kind.
type record struct {
	kind kind
	// space is the number of a space, given by a record of kindSpace before.
	space uint32
	// at is where a block or extent lies in the arena, and size its length in bytes.
	at, size int64
	// first is the position of the first token of a block or tail, and tokens how many
	// there are in a block.
	first  int64
	tokens uint32
	// choice and attempt are those of a tail; a fence has the highest attempt.
	choice  uint32
	attempt uint64
	tail    uint64 // number of a tail
	// parent is the block before a block or tail.
	parent kvcache.Key
	key    kvcache.Key // of a block; of a stream the hash of its id
	in     kvcache.Space
	text   []byte // of a label
}

// checksum is the CRC32C of everything in the arena's and the journal's own format.
func checksum(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }

// recordSum is that of a record. The arena's identity goes into it, so that no
// record of another journal is ever taken for one of this.
func recordSum(id arenaID, b []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli)
	return crc32.Update(crc32.Checksum(id[:], table), table, b[4:])
}

// appendRecord appends a record's bytes to b.
func appendRecord(b []byte, id arenaID, r record) []byte {
	le := binary.LittleEndian
	begin := len(b)
	b = append(b, 0, 0, 0, 0, 0, 0, byte(r.kind), 0)
	switch r.kind {
	case kindSpace:
		b = le.AppendUint32(b, r.space)
		b = append(append(b, r.in.Fingerprint[:]...), r.in.Root[:]...)
	case kindPut:
		b = le.AppendUint32(le.AppendUint32(b, r.space), r.tokens)
		b = le.AppendUint64(le.AppendUint64(le.AppendUint64(b, uint64(r.at)), uint64(r.size)), uint64(r.first))
		b = append(append(b, r.parent[:]...), r.key[:]...)
	case kindRemove:
		b = le.AppendUint64(b, uint64(r.at))
	case kindDrop:
		b = append(b, r.in.Fingerprint[:]...)
	case kindLabel:
		b = append(append(b, r.in.Fingerprint[:]...), r.text...)
	case kindFence:
		b = append(le.AppendUint64(le.AppendUint32(b, r.space), r.attempt), r.key[:]...)
	case kindTail:
		b = le.AppendUint32(le.AppendUint32(b, r.space), r.choice)
		b = le.AppendUint64(le.AppendUint64(le.AppendUint64(b, r.tail), r.attempt), uint64(r.first))
		b = append(append(b, r.parent[:]...), r.key[:]...)
	case kindRoom:
		b = le.AppendUint64(le.AppendUint64(le.AppendUint64(b, r.tail), uint64(r.at)), uint64(r.size))
	case kindEnd:
		b = le.AppendUint64(b, r.tail)
	case kindStream:
		b = append(le.AppendUint32(b, r.space), r.key[:]...)
	}
	rec := b[begin:]
	le.PutUint16(rec[4:], uint16(len(rec)))
	le.PutUint32(rec, recordSum(id, rec))
	return b
}

// errTorn says that no whole record is there.
var errTorn = errors.New("no whole record")

// parseRecord reads the record that b begins with and returns its length. The error
// is errTorn for one that is cut or damaged. The label's text is b's.
func parseRecord(b []byte, id arenaID) (r record, n int, err error) {
	le := binary.LittleEndian
	if len(b) < recordFixed {
		return r, 0, errTorn
	}
	n = int(le.Uint16(b[4:]))
	if n < recordFixed || n > mostRecord || n > len(b) || recordSum(id, b[:n]) != le.Uint32(b) {
		return r, 0, errTorn
	}
	r.kind = kind(b[6])
	c := cursor{b: b[recordFixed:n]}
	switch r.kind {
	case kindSpace:
		r.space = c.u32()
		c.key(r.in.Fingerprint[:])
		c.key(r.in.Root[:])
	case kindPut:
		r.space, r.tokens, r.at, r.size, r.first = c.u32(), c.u32(), c.i64(), c.i64(), c.i64()
		c.key(r.parent[:])
		c.key(r.key[:])
	case kindRemove:
		r.at = c.i64()
	case kindDrop:
		c.key(r.in.Fingerprint[:])
	case kindLabel:
		c.key(r.in.Fingerprint[:])
		r.text, c.b = c.b, nil
	case kindFence:
		r.space, r.attempt = c.u32(), uint64(c.i64())
		c.key(r.key[:])
	case kindTail:
		r.space, r.choice, r.tail, r.attempt, r.first = c.u32(), c.u32(), uint64(c.i64()), uint64(c.i64()), c.i64()
		c.key(r.parent[:])
		c.key(r.key[:])
	case kindRoom:
		r.tail, r.at, r.size = uint64(c.i64()), c.i64(), c.i64()
	case kindEnd:
		r.tail = uint64(c.i64())
	case kindStream:
		r.space = c.u32()
		c.key(r.key[:])
	default:
		return r, 0, fmt.Errorf("a record of kind %d: %w", r.kind, errTorn)
	}
	if c.short || len(c.b) != 0 {
		return r, 0, errTorn
	}
	return r, n, nil
}

// cursor reads fields one after another; short says that there were too few bytes, after
// which every field is zero.
type cursor struct {
	b     []byte
	short bool
}

func (c *cursor) take(n int) []byte {
	if n > len(c.b) {
		c.short = true
		return make([]byte, n)
	}
	b := c.b[:n]
	c.b = c.b[n:]
	return b
}

func (c *cursor) u32() uint32   { return binary.LittleEndian.Uint32(c.take(4)) }
func (c *cursor) i64() int64    { return int64(binary.LittleEndian.Uint64(c.take(8))) }
func (c *cursor) key(to []byte) { copy(to, c.take(len(to))) }

// journalHead writes the header of a journal.
func journalHead(id arenaID) []byte {
	b := make([]byte, journalHeader)
	copy(b, journalMagic)
	binary.LittleEndian.PutUint16(b[4:], journalVersion)
	copy(b[16:], id[:])
	binary.LittleEndian.PutUint32(b[journalHeader-4:], checksum(b[:journalHeader-4]))
	return b
}

// ofArena says whether b begins with the header of an arena's journal.
func ofArena(b []byte, id arenaID) bool {
	return len(b) >= journalHeader && string(b[:journalHeader]) == string(journalHead(id))
}
