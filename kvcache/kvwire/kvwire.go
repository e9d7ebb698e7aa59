// Package kvwire writes and reads the values that bodies of messages are made of, for the
// protocols of KV nodes: package kvnode's on a host, and the data channel of package kvrpc
// between hosts. All integers are little-endian; a space is fingerprint:32 root:32, and a
// ref is a space, parent:32 and key:32. What a body holds each protocol says itself.
package kvwire

import (
	"encoding/binary"
	"math"

	"github.com/kvmesh/kvmesh/kvcache"
)

// AppendU32 writes 4 bytes of a number.
func AppendU32(b []byte, n int) []byte { return binary.LittleEndian.AppendUint32(b, uint32(n)) }

// AppendU64 writes 8 bytes.
func AppendU64(b []byte, n uint64) []byte { return binary.LittleEndian.AppendUint64(b, n) }

// AppendSize writes 8 bytes of a number that is not negative; see Cursor.Size.
func AppendSize(b []byte, n int) []byte { return AppendU64(b, uint64(n)) }

// AppendSpace writes 64 bytes.
func AppendSpace(b []byte, s kvcache.Space) []byte {
	return append(append(b, s.Fingerprint[:]...), s.Root[:]...)
}

// AppendRef writes 128 bytes.
func AppendRef(b []byte, r kvcache.Ref) []byte {
	return append(append(AppendSpace(b, r.Space), r.Parent[:]...), r.Key[:]...)
}

// AppendIDs writes 4 bytes for each token, without their number.
func AppendIDs(b []byte, ids []int32) []byte {
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return b
}

// Cursor reads a body, which is outside input: nothing is taken for it that is not there.
// It is for one goroutine.
type Cursor struct {
	// B is what is left.
	B []byte
	// Bad says that there was less than wanted, or something else; from then on everything
	// reads as zero, so that it need be looked at only once, at the end.
	Bad bool
}

// Take returns the next n bytes, which are the body's; nil = there are fewer.
func (c *Cursor) Take(n int) []byte {
	if n < 0 || n > len(c.B) {
		c.Bad, c.B = true, nil
		return nil
	}
	b := c.B[:n]
	c.B = c.B[n:]
	return b
}

// Rest returns all that is left, which is the body's.
func (c *Cursor) Rest() []byte { return c.Take(len(c.B)) }

// Whole says whether all was there and nothing is left.
func (c *Cursor) Whole() bool { return !c.Bad && len(c.B) == 0 }

// U8 reads a byte.
func (c *Cursor) U8() uint8 {
	if b := c.Take(1); b != nil {
		return b[0]
	}
	return 0
}

// U32 reads a number of 4 bytes.
func (c *Cursor) U32() int {
	if b := c.Take(4); b != nil {
		return int(binary.LittleEndian.Uint32(b))
	}
	return 0
}

// U64 reads a number of 8 bytes.
func (c *Cursor) U64() uint64 {
	if b := c.Take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// Size reads a number of 8 bytes that is not negative: one that is, is bad.
func (c *Cursor) Size() int {
	n := c.U64()
	if n > math.MaxInt {
		c.Bad = true
		return 0
	}
	return int(n)
}

// Key reads a key.
func (c *Cursor) Key() (k kvcache.Key) {
	copy(k[:], c.Take(len(k)))
	return k
}

// Space reads a space.
func (c *Cursor) Space() (s kvcache.Space) {
	s.Fingerprint = kvcache.Fingerprint(c.Key())
	s.Root = c.Key()
	return s
}

// Ref reads a ref.
func (c *Cursor) Ref() (r kvcache.Ref) {
	r.Space = c.Space()
	r.Parent, r.Key = c.Key(), c.Key()
	return r
}

// IDs reads n tokens into buf, whose memory it uses if that is enough.
func (c *Cursor) IDs(n int, buf []int32) []int32 {
	if n < 0 || n > len(c.B)/4 {
		c.Bad = true
		return nil
	}
	b := c.Take(4 * n)
	buf = buf[:0]
	for ; len(b) > 0; b = b[4:] {
		buf = append(buf, int32(binary.LittleEndian.Uint32(b)))
	}
	return buf
}
