package codec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Elem is the type of the numbers of a matrix.
type Elem uint8

// The types. IEEE 754, little-endian.
const (
	F16 Elem = iota + 1
	F32
)

// size is the length of a number in bytes.
func (e Elem) size() int {
	if e == F16 {
		return 2
	}
	return 4
}

// Shape describes the matrix in a part.
type Shape struct {
	Elem Elem
	// Rows are tokens, Cols channels.
	Rows, Cols int
	// Prefix is the number of the engine's own bytes before the matrix. They are
	// kept as they are.
	Prefix int
	// Plane says which groups are taken: keys by channel, all else by token.
	Plane kvcache.Plane
}

const (
	// Version 2 is version 1 but for wideGroup; it is written where that is used.
	version     = 1
	versionWide = 2
	headerLen   = 24
	group       = 64
	wideGroup   = 2 * group
	// The limits bound what a decoder believes of a header.
	maxSide   = 1 << 16
	maxPrefix = 4096
)

// ErrNotFinite is in the error for a matrix with a number that no code stands for:
// infinite, not a number, or so large that a sum of some is. Such a part stays raw.
var ErrNotFinite = errors.New("not finite")

// Len is the length in bytes of the part before it is encoded.
func (s Shape) Len() int { return s.Prefix + s.Rows*s.Cols*s.Elem.size() }

// Validate says what is wrong with a shape.
func (s Shape) Validate() error {
	switch {
	case s.Elem != F16 && s.Elem != F32:
		return fmt.Errorf("numbers of type %d: want f16 or f32", s.Elem)
	case s.Rows < 1 || s.Cols < 1 || s.Rows > maxSide || s.Cols > maxSide:
		return fmt.Errorf("matrix of %d tokens and %d channels: 1 to %d each", s.Rows, s.Cols, maxSide)
	case s.Prefix < 0 || s.Prefix > maxPrefix:
		return fmt.Errorf("%d bytes before the matrix: 0 to %d", s.Prefix, maxPrefix)
	}
	return nil
}

// plan is where everything of an encoded part is.
type plan struct {
	Shape
	channels bool // groups of one channel
	bits     int  // of a code
	width    int  // of the transform
	group    int  // numbers that share a step
	params   int  // offset of the steps and least values
	codes    int  // offset of the codes
	row      int  // bytes of a row of codes
	total    int
	kernels  bool // where the processor has them
}

// layOut computes the offsets.
func (p *plan) layOut() {
	p.kernels = p.Elem == F16 && hasKernels()
	p.params = align8(headerLen + p.Prefix)
	n := p.Rows * p.groups(p.Cols)
	if p.channels {
		n = p.groups(p.Rows) * p.Cols
	}
	p.codes = align8(p.params + 2*n*p.Elem.size())
	p.row = (p.Cols*p.bits + 7) / 8
	p.total = p.codes + p.Rows*p.row
}

func align8(n int) int { return (n + 7) &^ 7 }

// groups is the number of groups of n numbers.
func (p *plan) groups(n int) int { return (n + p.group - 1) / p.group }

// planOf chooses how to encode a shape.
func planOf(c kvcache.Codec, s Shape) (plan, error) {
	if err := s.Validate(); err != nil {
		return plan{}, err
	}
	p := plan{Shape: s, channels: s.Plane == kvcache.PlaneKeys, bits: 8, width: 1, group: group}
	switch c {
	case kvcache.CodecInt8:
	case kvcache.CodecInt4:
		p.bits = 4
		for !p.channels && p.width < maxWidth && s.Cols%(2*p.width) == 0 {
			p.width *= 2
		}
		if p.width >= wideGroup {
			p.group = wideGroup
		}
	default:
		return plan{}, fmt.Errorf("codec %v", c)
	}
	p.layOut()
	return p, nil
}

// EncodedLen is the length in bytes that Append adds.
func EncodedLen(c kvcache.Codec, s Shape) (int, error) {
	p, err := planOf(c, s)
	if err != nil {
		return 0, fmt.Errorf("length of an encoded part: %w", err)
	}
	return p.total, nil
}

// Append encodes a part of the given shape and appends it to dst. ErrNotFinite names
// the first number that cannot be encoded. After an error dst is as it was.
func Append(dst []byte, c kvcache.Codec, s Shape, part []byte) ([]byte, error) {
	p, err := planOf(c, s)
	if err == nil && len(part) != s.Len() {
		err = fmt.Errorf("%d bytes, want %d for %d tokens and %d channels", len(part), s.Len(), s.Rows, s.Cols)
	}
	if err != nil {
		return dst, fmt.Errorf("encode a part: %w", err)
	}
	n := len(dst)
	out := slices.Grow(dst, p.total)[:n+p.total]
	if err = p.encode(out[n:], part); err != nil {
		return dst, fmt.Errorf("encode a part: %w", err)
	}
	return out, nil
}

// encode writes all of an encoded part to b, which is as long as it.
func (p *plan) encode(b, part []byte) error {
	clear(b[:p.codes])
	p.putHeader(b)
	copy(b[headerLen:], part[:p.Prefix])
	if p.channels {
		return p.encodeChannels(b, part[p.Prefix:])
	}
	return p.encodeTokens(b, part[p.Prefix:])
}

// AppendDecoded decodes a part and appends what the engine wrote, but for the loss,
// to dst. Every error is a *kvcache.Refusal, after which dst is as it was. It
// believes nothing of the part, and grows dst by at most sixteen times its length.
func AppendDecoded(dst []byte, c kvcache.Codec, part []byte) ([]byte, error) {
	if c == kvcache.CodecRaw {
		return append(dst, part...), nil
	}
	p, err := parseHeader(c, part)
	if err != nil {
		return dst, err
	}
	n := len(dst)
	out := slices.Grow(dst, p.Len())[:n+p.Len()]
	p.decode(out[n:], part)
	return out, nil
}

// decode writes all that an encoded part decodes to to out, which is as long as it.
func (p *plan) decode(out, part []byte) {
	copy(out, part[headerLen:headerLen+p.Prefix])
	if p.channels {
		p.decodeChannels(out[p.Prefix:], part)
	} else {
		p.decodeTokens(out[p.Prefix:], part)
	}
}

// DecodedLen is the length in bytes that AppendDecoded adds, or its error.
func DecodedLen(c kvcache.Codec, part []byte) (int, error) {
	if c == kvcache.CodecRaw {
		return len(part), nil
	}
	p, err := parseHeader(c, part)
	return p.Len(), err
}

// putHeader writes the header; b is zero there.
func (p *plan) putHeader(b []byte) {
	le := binary.LittleEndian
	b[0], b[1], b[3] = version, byte(p.Elem), byte(p.bits)
	if p.group == wideGroup {
		b[0] = versionWide
	}
	if p.channels {
		b[2] = 1
	}
	le.PutUint16(b[4:], uint16(p.width))
	le.PutUint16(b[6:], uint16(p.group))
	le.PutUint32(b[8:], uint32(p.Rows))
	le.PutUint32(b[12:], uint32(p.Cols))
	le.PutUint32(b[16:], uint32(p.Prefix))
}

// parseHeader reads a header and checks that the part has the length it says.
func parseHeader(c kvcache.Codec, b []byte) (plan, error) {
	if c != kvcache.CodecInt8 && c != kvcache.CodecInt4 {
		return plan{}, kvcache.Refuse(kvcache.ReasonCodec, "%v", c)
	}
	if len(b) < headerLen {
		return plan{}, kvcache.Refuse(kvcache.ReasonTorn, "%d bytes of an encoded part", len(b))
	}
	le := binary.LittleEndian
	if b[0] != version && b[0] != versionWide {
		return plan{}, kvcache.Refuse(kvcache.ReasonVersion, "encoded part of version %d, this reader knows %d and %d", b[0], version, versionWide)
	}
	p := plan{
		Shape:    Shape{Elem: Elem(b[1]), Rows: int(le.Uint32(b[8:])), Cols: int(le.Uint32(b[12:])), Prefix: int(le.Uint32(b[16:]))},
		channels: b[2] == 1, bits: int(b[3]), width: int(le.Uint16(b[4:])), group: group,
	}
	if b[0] == versionWide {
		p.group = wideGroup
	}
	if err := p.Validate(); err != nil {
		return plan{}, kvcache.Refuse(kvcache.ReasonTorn, "encoded part: %v", err)
	}
	want := 8
	if c == kvcache.CodecInt4 {
		want = 4
	}
	switch {
	case p.bits != want:
		return plan{}, kvcache.Refuse(kvcache.ReasonCodec, "part with codes of %d bits as %v", p.bits, c)
	case b[2] > 1 || int(le.Uint16(b[6:])) != p.group || p.channels && p.group != group || le.Uint32(b[20:]) != 0:
		return plan{}, kvcache.Refuse(kvcache.ReasonCodec, "encoded part with unknown groups")
	case p.width < 1 || p.width > maxWidth || p.width&(p.width-1) != 0 || p.Cols%p.width != 0 || p.channels && p.width != 1:
		return plan{}, kvcache.Refuse(kvcache.ReasonCodec, "encoded part with a transform of width %d over %d channels", p.width, p.Cols)
	}
	p.layOut()
	if len(b) != p.total {
		return plan{}, kvcache.Refuse(kvcache.ReasonTorn, "encoded part of %d bytes, want %d", len(b), p.total)
	}
	return p, nil
}
