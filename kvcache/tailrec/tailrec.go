// Package tailrec is the format of the records that tails consist of, wherever a
// store keeps them. A record is a header and the data of one kvcache.Range,
// little-endian:
//
//	 0    4  magic "KVMR"
//	 4    4  CRC32C of bytes [0,4) and [8,header length)
//	 8    4  header length; the data begins there, at a multiple of 64 of its place
//	12    4  n, the number of tokens, 1 to 512
//	16    8  mark: what tells the record's place, in the way of the store
//	24    8  position of the first token
//	32    8  length of the data
//	40    8  XXH3-64 of the data
//	48    1  codec
//	49    7  0
//	56   4n  token ids
//	      …  0 up to the header length
//	         the data
//
// A writer writes the data before the header: a header that is there then proves
// that its data is too.
package tailrec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"

	"github.com/kvmesh/kvmesh/kvcache"
)

const (
	// Magic begins every record.
	Magic = "KVMR"
	// MaxTokens keeps a record's header smaller than a page.
	MaxTokens = 512

	fixed     = 56
	dataAlign = 64 // of the data in its place
)

// ErrEnd says that no record begins here: the end of the tail, or a record that
// is being written or never was finished.
var ErrEnd = errors.New("end of the tail")

// Want is what a record must say to be the one that is expected.
type Want struct {
	Mark uint64
	// First is the position of its first token.
	First int
}

// Check says what is wrong with a range that is to be a record.
func Check(r kvcache.Range) error {
	if len(r.IDs) < 1 || len(r.IDs) > MaxTokens || len(r.Data) == 0 || r.Codec != kvcache.CodecRaw {
		return fmt.Errorf("append %d tokens in %d bytes of codec %d: want 1 to %d, some, and %d",
			len(r.IDs), len(r.Data), r.Codec, MaxTokens, kvcache.CodecRaw)
	}
	return nil
}

// HeaderLen returns how many bytes come before the data of a record of n tokens
// that begins at an offset of its place.
func HeaderLen(at int64, n int) int64 {
	return (at+int64(fixed+4*n)+dataAlign-1)&^(dataAlign-1) - at
}

// AppendHeader appends the header of a record that begins at an offset to b.
func AppendHeader(b []byte, at int64, mark uint64, r kvcache.Range) []byte {
	begin, size := len(b), int(HeaderLen(at, len(r.IDs)))
	b = slices.Grow(b, size)[:begin+size]
	h := b[begin:]
	clear(h)
	le := binary.LittleEndian
	copy(h, Magic)
	le.PutUint32(h[8:], uint32(size))
	le.PutUint32(h[12:], uint32(len(r.IDs)))
	le.PutUint64(h[16:], mark)
	le.PutUint64(h[24:], uint64(r.First))
	le.PutUint64(h[32:], uint64(len(r.Data)))
	le.PutUint64(h[40:], kvcache.Sum(r.Data))
	h[48] = byte(r.Codec)
	for i, id := range r.IDs {
		le.PutUint32(h[fixed+4*i:], uint32(id))
	}
	le.PutUint32(h[4:], sum(h))
	return b
}

// sum is the CRC32C of a header without the field that holds it.
func sum(h []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli) // made once by the package
	return crc32.Update(crc32.Checksum(h[:4], table), table, h[8:])
}

// Parse reads the record at an offset of b and returns where the next one begins.
// The data is b's. The error is ErrEnd where there is no record that is wanted, and a
// *kvcache.Refusal where there is one and its data is not as it was written.
func Parse(b []byte, at int64, want Want) (r kvcache.Range, end int64, err error) {
	le := binary.LittleEndian
	if at < 0 || at > int64(len(b))-fixed || string(b[at:at+4]) != Magic {
		return r, 0, ErrEnd
	}
	h := b[at:]
	size, n, length := int64(le.Uint32(h[8:])), int64(le.Uint32(h[12:])), int64(le.Uint64(h[32:]))
	// In this order nothing is read behind the end of b, whatever the lengths say.
	if n < 1 || n > MaxTokens || size != HeaderLen(at, int(n)) || size > int64(len(h)) || sum(h[:size]) != le.Uint32(h[4:]) {
		return r, 0, ErrEnd
	}
	if le.Uint64(h[16:]) != want.Mark || int(le.Uint64(h[24:])) != want.First || length < 1 || length > int64(len(h))-size {
		return r, 0, ErrEnd
	}
	r = kvcache.Range{First: want.First, IDs: make([]int32, n), Codec: kvcache.Codec(h[48]), Data: h[size : size+length : size+length]}
	if r.Codec != kvcache.CodecRaw {
		return r, 0, &kvcache.Refusal{Reason: kvcache.ReasonCodec, Detail: "range of a tail"}
	}
	if kvcache.Sum(r.Data) != le.Uint64(h[40:]) {
		return r, 0, &kvcache.Refusal{Reason: kvcache.ReasonChecksum, Detail: "range of a tail"}
	}
	for i := range r.IDs {
		r.IDs[i] = int32(le.Uint32(h[fixed+4*i:]))
	}
	return r, at + size + length, nil
}
