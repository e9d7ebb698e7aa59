//go:build unix

package kvrpc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
)

// The data channel; see the package comment.
const (
	magic   = "KVP1"
	family  = "KVP" // of all versions
	headLen = 24
	// mostBody bounds the body of a request, and mostIndex that of an answer.
	mostBody  = 128 << 10
	mostIndex = 16 << 20
)

// op is an operation.
type op uint8

const (
	opGet op = 1 + iota
	opPut
	opAppend
	opTails
	opOffer
)

// mostAhead is the most of a frame that may come with the offer of it.
const mostAhead = 4 << 20

// status is how an operation ended.
type status uint8

const (
	statusDone status = iota
	statusNotFound
	statusStale
	statusFull
	statusGap
	statusUnknown
	statusRefused
	statusFailed
	statusVersion
)

// errNonsense says that the other side does not speak the protocol, or not rightly.
var errNonsense = errors.New("the other side does not speak this protocol")

// errVersion says that it speaks another version of it.
var errVersion = errors.New("the other side speaks another version of this protocol")

// errUnknown says that the peer has no tail of a number.
var errUnknown = fmt.Errorf("tail: %w", kvcache.ErrNotFound)

// head is the beginning of a request, or of an answer.
type head struct {
	what uint8 // op or status
	body uint32
	data uint64
	sum  uint32
}

// putHead makes the head of a message whose body lies in b behind room for the head.
func putHead(b []byte, what uint8, data uint64) {
	le := binary.LittleEndian
	copy(b, magic)
	b[4], b[5], b[6], b[7] = what, 0, 0, 0
	le.PutUint32(b[12:], uint32(len(b)-headLen))
	le.PutUint64(b[16:], data)
	le.PutUint32(b[8:], messageSum(b[:headLen], b[headLen:]))
}

// messageSum is the CRC32C of a head without the field that holds it, and of a body.
func messageSum(h, body []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli) // made once by the package
	return crc32.Update(crc32.Update(crc32.Checksum(h[:8], table), table, h[12:headLen]), table, body)
}

// parseHead reads a head, whose body may have so many bytes. Its sum covers the body and is
// not yet checked.
func parseHead(b []byte, most uint32) (h head, err error) {
	le := binary.LittleEndian
	h = head{what: b[4], body: le.Uint32(b[12:]), data: le.Uint64(b[16:]), sum: le.Uint32(b[8:])}
	switch {
	case string(b[:len(family)]) == family && string(b[:len(magic)]) != magic:
		return h, errVersion
	case string(b[:len(magic)]) != magic || b[5]|b[6]|b[7] != 0 || h.body > most || h.data > kvcache.MaxSize:
		return h, fmt.Errorf("%w: % x", errNonsense, b[:headLen])
	}
	return h, nil
}

// check says whether head and body are as they were sent.
func (h head) check(b, body []byte) error {
	if messageSum(b, body) != h.sum {
		return fmt.Errorf("%w: checksum of a message", errNonsense)
	}
	return nil
}

// statusOf is how an error is told, and the body that goes with it.
func statusOf(err error) (status, []byte) {
	if r, ok := errors.AsType[*kvcache.Refusal](err); ok {
		return statusRefused, append([]byte{byte(r.Reason)}, cut(r.Detail)...)
	}
	// An unknown tail is one that was not found, too.
	for s := statusUnknown; s >= statusNotFound; s-- {
		if errors.Is(err, known(s)) {
			return s, nil
		}
	}
	if err != nil {
		return statusFailed, []byte(cut(err.Error()))
	}
	return statusDone, nil
}

// cut keeps a text short.
func cut(s string) string { return s[:min(len(s), 400)] }

// known is the error that has a status of its own, or nil.
func known(s status) error {
	switch s {
	case statusNotFound:
		return kvcache.ErrNotFound
	case statusStale:
		return kvcache.ErrStale
	case statusFull:
		return kvcache.ErrFull
	case statusGap:
		return kvcache.ErrGap
	case statusUnknown:
		return errUnknown
	case statusVersion:
		return errVersion
	}
	return nil
}

// errorOf is the error that a status tells.
func errorOf(s status, body []byte) error {
	if s == statusRefused && len(body) > 0 && int(body[0]) < len(kvcache.Reasons()) {
		return &kvcache.Refusal{Reason: kvcache.Reason(body[0]), Detail: string(body[1:])}
	}
	if err := known(s); err != nil {
		return err
	}
	return fmt.Errorf("the peer says: %.200q", body)
}

// toldError is an error that the peer tells: the connection is well.
type toldError struct{ error }

// Unwrap lets errors.Is see what it is.
func (e toldError) Unwrap() error { return e.error }

// told says whether an error is one that the peer tells.
func told(err error) bool {
	_, ok := errors.AsType[toldError](err)
	return ok
}

// The writers of bodies.

// appendTails writes the index of tails.
func appendTails(b []byte, tails []kvcache.Tail) []byte {
	for _, t := range tails {
		b = append(kvwire.AppendU64(b, uint64(t.Attempt)), t.Parent[:]...)
		b = kvwire.AppendU32(kvwire.AppendU64(b, uint64(t.First)), len(t.Ranges))
		for _, r := range t.Ranges {
			b = kvwire.AppendU32(append(b, byte(r.Codec)), len(r.IDs))
			b = kvwire.AppendU64(kvwire.AppendU64(b, uint64(len(r.Data))), kvcache.Sum(r.Data))
			b = kvwire.AppendIDs(b, r.IDs)
		}
	}
	return b
}

// cursor reads a body.
type cursor struct{ kvwire.Cursor }

// cursorOf is a cursor at the beginning of a body.
func cursorOf(b []byte) cursor { return cursor{kvwire.Cursor{B: b}} }

// tails reads what appendTails wrote, and takes the states from data, of which nothing may
// be left. A range whose state is wrong ends its tail: the rest is of no use.
func (c *cursor) tails(spec kvcache.TailSpec, data []byte) (list []kvcache.Tail, wrong error) {
	states := cursorOf(data)
	for len(c.B) > 0 && !c.Bad {
		t := kvcache.Tail{TailSpec: spec}
		t.Attempt, t.Parent, t.First = c.Size(), c.Key(), c.Size()
		next, ended := t.First, false
		for n := c.U32(); n > 0 && !c.Bad; n-- {
			codec, ids, size, sum := c.U8(), c.U32(), c.Size(), c.U64()
			r := kvcache.Range{First: next, Codec: kvcache.Codec(codec), IDs: c.IDs(ids, nil), Data: states.Take(size)}
			if next += len(r.IDs); next < 0 || states.Bad {
				c.Bad = true
				break
			}
			if !ended && kvcache.Sum(r.Data) != sum {
				ended, wrong = true, kvcache.Refuse(kvcache.ReasonChecksum, "range of a tail on its way")
			}
			if !ended {
				t.Ranges = append(t.Ranges, r)
			}
		}
		list = append(list, t)
	}
	if !states.Whole() {
		c.Bad = true
	}
	return list, wrong
}
