package kvcache

import (
	"encoding/binary"
	"fmt"

	"github.com/zeebo/xxh3"
)

// Kind is how a state group depends on the tokens before it.
type Kind uint8

// The kinds. A chain can be restored only when its windowed groups cover the
// last window of tokens and a snapshot was taken at its last token.
const (
	// Positional state has one entry per token, for good.
	Positional Kind = iota
	// Windowed state has one entry per token, for the last Window tokens only.
	Windowed
	// Snapshot state is that of a recurrent layer after the block's last token.
	Snapshot
)

// Plane is which half of the attention state a part holds.
type Plane uint8

// The planes.
const (
	PlaneAll Plane = iota
	PlaneKeys
	PlaneValues
	// PlaneMeta is the engine's own description of the others.
	PlaneMeta
)

// Codec is how a part's bytes are encoded.
type Codec uint8

// The codecs. Package codec encodes and decodes.
const (
	// CodecRaw is what the engine wrote.
	CodecRaw Codec = iota
	// CodecInt8 and CodecInt4 are quantized: smaller, and not quite what it wrote.
	CodecInt8
	CodecInt4

	codecs // how many there are
)

// String is the codec's name in flags and messages.
func (c Codec) String() string {
	switch c {
	case CodecRaw:
		return "raw"
	case CodecInt8:
		return "int8"
	case CodecInt4:
		return "int4"
	}
	return fmt.Sprintf("codec %d", uint8(c))
}

// ParseCodec reads what String wrote of a known codec.
func ParseCodec(s string) (Codec, error) {
	for c := range codecs {
		if c.String() == s {
			return c, nil
		}
	}
	return CodecRaw, fmt.Errorf("codec %q: want raw, int8 or int4", s)
}

// Part is one entry of a frame's index: the state of a group of layers.
type Part struct {
	// Group is the state group in the engine's numbering.
	Group uint16
	// Layer is the first of Layers layers; Layers is 0 for what belongs to none.
	Layer, Layers uint16
	Kind          Kind
	Plane         Plane
	Codec         Codec
	// Window is the width of a windowed group in tokens.
	Window uint32
	// Size is the length in bytes.
	Size int64
	// Offset is from the start of the frame, and Sum the XXH3-64 of the bytes.
	// Seal fills both.
	Offset int64
	Sum    uint64
}

// partLen is the length of an index entry.
const partLen = 48

// put writes an index entry; b has partLen zero bytes.
func (p *Part) put(b []byte) {
	le := binary.LittleEndian
	le.PutUint16(b[0:], p.Group)
	le.PutUint16(b[2:], p.Layer)
	le.PutUint16(b[4:], p.Layers)
	b[6], b[7], b[8] = byte(p.Kind), byte(p.Plane), byte(p.Codec)
	le.PutUint32(b[12:], p.Window)
	le.PutUint64(b[16:], uint64(p.Offset))
	le.PutUint64(b[24:], uint64(p.Size))
	le.PutUint64(b[32:], p.Sum)
}

// parse reads an index entry into its place: a copy of so many small fields costs more than
// they do. Offsets and sizes may be negative or wrong.
func (p *Part) parse(b []byte) {
	le := binary.LittleEndian
	b = b[:partLen]
	p.Group = le.Uint16(b[0:])
	p.Layer = le.Uint16(b[2:])
	p.Layers = le.Uint16(b[4:])
	p.Kind = Kind(b[6])
	p.Plane = Plane(b[7])
	p.Codec = Codec(b[8])
	p.Window = le.Uint32(b[12:])
	p.Offset = int64(le.Uint64(b[16:]))
	p.Size = int64(le.Uint64(b[24:]))
	p.Sum = le.Uint64(b[32:])
}

// Sum is the checksum of parts and ranges: XXH3-64 with seed 0.
func Sum(b []byte) uint64 { return xxh3.Hash(b) }
