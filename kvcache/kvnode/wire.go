//go:build unix

package kvnode

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
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
	opEpochs
	opSetEpoch
	opResume
	opSurvey
	opLend
	opKnown
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

// appendMatch writes the answer to a look-up.
func appendMatch(b []byte, m kvcache.Match) []byte {
	b = kvwire.AppendU32(b, m.Common)
	found := m.Blocks
	if m.Common > 0 {
		found = append(found[:len(found):len(found)], m.Partial)
	}
	for _, f := range found {
		b = append(append(b, f.Parent[:]...), f.Key[:]...)
		b = kvwire.AppendSize(kvwire.AppendU32(kvwire.AppendSize(b, f.First), f.Tokens), int(f.Size))
	}
	return b
}

// appendTails writes tails without what the asker knows.
func appendTails(b []byte, tails []kvcache.Tail) []byte {
	for _, t := range tails {
		b = append(kvwire.AppendSize(b, t.Attempt), t.Parent[:]...)
		b = kvwire.AppendU32(kvwire.AppendSize(b, t.First), len(t.Ranges))
		for _, r := range t.Ranges {
			b = kvwire.AppendIDs(kvwire.AppendU32(kvwire.AppendU32(b, len(r.IDs)), len(r.Data)), r.IDs)
			b = append(b, r.Data...)
		}
	}
	return b
}

// cursor reads a body.
type cursor struct{ kvwire.Cursor }

// cursorOf is a cursor at the beginning of a body.
func cursorOf(b []byte) cursor { return cursor{kvwire.Cursor{B: b}} }

// query reads a look-up.
func (c *cursor) query() (q kvcache.Query) {
	q.Space, q.From, q.First = c.Space(), c.Key(), c.Size()
	q.IDs = c.IDs(len(c.B)/4, nil)
	return q
}

// match reads the answer to one.
func (c *cursor) match(space kvcache.Space) (m kvcache.Match) {
	m.Common = c.U32()
	for len(c.B) > 0 && !c.Bad {
		ref := kvcache.Ref{Space: space, Parent: c.Key(), Key: c.Key()}
		m.Blocks = append(m.Blocks, kvcache.Found{Ref: ref, First: c.Size(), Tokens: c.U32(), Size: int64(c.Size())})
	}
	if m.Common > 0 {
		if len(m.Blocks) == 0 {
			c.Bad = true
			return m
		}
		m.Partial = m.Blocks[len(m.Blocks)-1]
		m.Blocks = m.Blocks[:len(m.Blocks)-1]
	}
	return m
}

// tails reads what appendTails wrote. The data is b's.
func (c *cursor) tails(space kvcache.Space, stream string, choice int) (list []kvcache.Tail) {
	for len(c.B) > 0 && !c.Bad {
		t := kvcache.Tail{TailSpec: kvcache.TailSpec{Space: space, Stream: stream, Choice: choice}}
		t.Attempt, t.Parent, t.First = c.Size(), c.Key(), c.Size()
		next := t.First
		for n := c.U32(); n > 0 && !c.Bad; n-- {
			ids, size := c.U32(), c.U32()
			r := kvcache.Range{First: next, IDs: c.IDs(ids, nil), Data: c.Take(size)}
			next += len(r.IDs)
			t.Ranges = append(t.Ranges, r)
		}
		list = append(list, t)
	}
	return list
}

// spec reads where a tail begins.
func (c *cursor) spec() (s kvcache.TailSpec) {
	s.Space, s.Parent, s.Choice, s.Attempt, s.First = c.Space(), c.Key(), c.U32(), c.Size(), c.Size()
	s.Stream = string(c.Rest())
	return s
}

// appendSpec writes it.
func appendSpec(b []byte, s kvcache.TailSpec) []byte {
	b = append(kvwire.AppendSpace(b, s.Space), s.Parent[:]...)
	b = kvwire.AppendSize(kvwire.AppendSize(kvwire.AppendU32(b, s.Choice), s.Attempt), s.First)
	return append(b, s.Stream...)
}
