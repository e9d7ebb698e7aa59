//go:build unix

package kvnode

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/kvmesh/kvmesh/kvcache"
)

// The protocol; see the package comment.
const (
	magic    = "KVN1"
	headLen  = 16
	mostBody = 32 << 20
	// mostData bounds the state of one range of a tail.
	mostData = 1 << 30
	// mostAnswer bounds what a client reads: the tails of one choice.
	mostAnswer = 1 << 30
)

// op is an operation.
type op uint8

const (
	opHello op = 1 + iota
	opLongest
	opGet
	opPut
	opRefused
	opDrop
	opLabel
	opOpen
	opAppend
	opRotate
	opRead
	opForget
	opStats
	opModels
	opRoom
	opFetch
	opReserve
	opPublish
	opTails
	opName
	opErase
	opPeers
)

// status is how an operation ended.
type status uint8

const (
	statusDone status = iota
	statusNotFound
	statusStale
	statusFull
	statusGap
	statusClosed
	statusRefused
	statusFailed
)

// head is the beginning of a request, or of an answer, whose data has no length.
type head struct {
	what       uint8 // op or status
	body, data uint32
}

// put writes a head; b has headLen bytes.
func (h head) put(b []byte) {
	copy(b, magic)
	b[4], b[5], b[6], b[7] = h.what, 0, 0, 0
	binary.LittleEndian.PutUint32(b[8:], h.body)
	binary.LittleEndian.PutUint32(b[12:], h.data)
}

// parseHead reads one, whose body may have so many bytes.
func parseHead(b []byte, most uint32) (h head, err error) {
	h = head{b[4], binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:])}
	if string(b[:4]) != magic || b[5]|b[6]|b[7] != 0 || h.body > most || h.data > mostData {
		return h, fmt.Errorf("the other side does not speak this protocol: % x", b[:headLen])
	}
	return h, nil
}

// readBody reads a body into buf if that is large enough.
func readBody(r io.Reader, n uint32, buf []byte) ([]byte, error) {
	if uint32(cap(buf)) < n {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	_, err := io.ReadFull(r, buf)
	return buf, err
}

// statusOf is how an error is told, and the body that goes with it.
func statusOf(err error) (status, []byte) {
	if r, ok := errors.AsType[*kvcache.Refusal](err); ok {
		return statusRefused, append([]byte{byte(r.Reason)}, r.Detail...)
	}
	for s, known := range known() {
		if errors.Is(err, known) {
			return s, nil
		}
	}
	if err != nil {
		return statusFailed, []byte(err.Error())
	}
	return statusDone, nil
}

// known are the errors that have a status.
func known() map[status]error {
	return map[status]error{
		statusNotFound: kvcache.ErrNotFound, statusStale: kvcache.ErrStale, statusFull: kvcache.ErrFull,
		statusGap: kvcache.ErrGap, statusClosed: kvcache.ErrClosed,
	}
}

// errorOf is the error that a status tells.
func errorOf(s status, body []byte) error {
	switch {
	case s == statusDone:
		return nil
	case s == statusRefused && len(body) > 0 && int(body[0]) < len(kvcache.Reasons()):
		return &kvcache.Refusal{Reason: kvcache.Reason(body[0]), Detail: string(body[1:])}
	case known()[s] != nil:
		return known()[s]
	}
	return fmt.Errorf("KV node: %.200s", body)
}

// The writers of bodies.

func appendU32(b []byte, n int) []byte { return binary.LittleEndian.AppendUint32(b, uint32(n)) }
func appendU64(b []byte, n int) []byte { return binary.LittleEndian.AppendUint64(b, uint64(n)) }

func appendSpace(b []byte, s kvcache.Space) []byte {
	return append(append(b, s.Fingerprint[:]...), s.Root[:]...)
}

func appendRef(b []byte, r kvcache.Ref) []byte {
	return append(append(appendSpace(b, r.Space), r.Parent[:]...), r.Key[:]...)
}

func appendIDs(b []byte, ids []int32) []byte {
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return b
}

// appendMatch writes the answer to a look-up.
func appendMatch(b []byte, m kvcache.Match) []byte {
	b = appendU32(b, m.Common)
	found := m.Blocks
	if m.Common > 0 {
		found = append(found[:len(found):len(found)], m.Partial)
	}
	for _, f := range found {
		b = append(append(b, f.Parent[:]...), f.Key[:]...)
		b = appendU64(appendU32(appendU64(b, f.First), f.Tokens), int(f.Size))
	}
	return b
}

// appendTails writes tails without what the asker knows.
func appendTails(b []byte, tails []kvcache.Tail) []byte {
	for _, t := range tails {
		b = append(appendU64(b, t.Attempt), t.Parent[:]...)
		b = appendU32(appendU64(b, t.First), len(t.Ranges))
		for _, r := range t.Ranges {
			b = appendIDs(appendU32(appendU32(b, len(r.IDs)), len(r.Data)), r.IDs)
			b = append(b, r.Data...)
		}
	}
	return b
}

// cursor reads a body. bad says that there was less than wanted, or something else; from
// then on everything reads as zero, so that it need be looked at only once, at the end.
type cursor struct {
	b   []byte
	bad bool
}

// take returns the next n bytes.
func (c *cursor) take(n int) []byte {
	if n < 0 || n > len(c.b) {
		c.bad, c.b = true, nil
		return nil
	}
	b := c.b[:n]
	c.b = c.b[n:]
	return b
}

// rest returns all that is left.
func (c *cursor) rest() []byte { return c.take(len(c.b)) }

func (c *cursor) u32() int {
	if b := c.take(4); b != nil {
		return int(binary.LittleEndian.Uint32(b))
	}
	return 0
}

// u64 reads a number that is not negative.
func (c *cursor) u64() int {
	b := c.take(8)
	if b == nil {
		return 0
	}
	n := binary.LittleEndian.Uint64(b)
	if n > math.MaxInt {
		c.bad = true
		return 0
	}
	return int(n)
}

func (c *cursor) key() (k kvcache.Key) {
	copy(k[:], c.take(len(k)))
	return k
}

func (c *cursor) space() (s kvcache.Space) {
	s.Fingerprint = kvcache.Fingerprint(c.key())
	s.Root = c.key()
	return s
}

func (c *cursor) ref() (r kvcache.Ref) {
	r.Space = c.space()
	r.Parent, r.Key = c.key(), c.key()
	return r
}

// ids reads n of them into buf.
func (c *cursor) ids(n int, buf []int32) []int32 {
	if n < 0 || n > len(c.b)/4 {
		c.bad = true
		return nil
	}
	b := c.take(4 * n)
	buf = buf[:0]
	for ; len(b) > 0; b = b[4:] {
		buf = append(buf, int32(binary.LittleEndian.Uint32(b)))
	}
	return buf
}

// query reads a look-up.
func (c *cursor) query() (q kvcache.Query) {
	q.Space, q.From, q.First = c.space(), c.key(), c.u64()
	q.IDs = c.ids(len(c.b)/4, nil)
	return q
}

// match reads the answer to one.
func (c *cursor) match(space kvcache.Space) (m kvcache.Match) {
	m.Common = c.u32()
	for len(c.b) > 0 && !c.bad {
		ref := kvcache.Ref{Space: space, Parent: c.key(), Key: c.key()}
		m.Blocks = append(m.Blocks, kvcache.Found{Ref: ref, First: c.u64(), Tokens: c.u32(), Size: int64(c.u64())})
	}
	if m.Common > 0 {
		if len(m.Blocks) == 0 {
			c.bad = true
			return m
		}
		m.Partial = m.Blocks[len(m.Blocks)-1]
		m.Blocks = m.Blocks[:len(m.Blocks)-1]
	}
	return m
}

// tails reads what appendTails wrote. The data is b's.
func (c *cursor) tails(space kvcache.Space, stream string, choice int) (list []kvcache.Tail) {
	for len(c.b) > 0 && !c.bad {
		t := kvcache.Tail{TailSpec: kvcache.TailSpec{Space: space, Stream: stream, Choice: choice}}
		t.Attempt, t.Parent, t.First = c.u64(), c.key(), c.u64()
		next := t.First
		for n := c.u32(); n > 0 && !c.bad; n-- {
			ids, size := c.u32(), c.u32()
			r := kvcache.Range{First: next, IDs: c.ids(ids, nil), Data: c.take(size)}
			next += len(r.IDs)
			t.Ranges = append(t.Ranges, r)
		}
		list = append(list, t)
	}
	return list
}

// spec reads where a tail begins.
func (c *cursor) spec() (s kvcache.TailSpec) {
	s.Space, s.Parent, s.Choice, s.Attempt, s.First = c.space(), c.key(), c.u32(), c.u64(), c.u64()
	s.Stream = string(c.rest())
	return s
}

// appendSpec writes it.
func appendSpec(b []byte, s kvcache.TailSpec) []byte {
	b = append(appendSpace(b, s.Space), s.Parent[:]...)
	b = appendU64(appendU64(appendU32(b, s.Choice), s.Attempt), s.First)
	return append(b, s.Stream...)
}
