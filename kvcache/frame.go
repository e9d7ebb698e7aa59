package kvcache

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// The limits of a frame. They bound what a reader allocates for a header before
// it knows that the header is whole.
const (
	// Version is the version of frames that Seal writes and Decode reads, and
	// VersionEncrypted that of encrypted ones; see Form.
	Version          = 1
	VersionEncrypted = 2
	// MaxTokens and MaxParts are the most tokens and parts of one frame.
	MaxTokens = 65536
	MaxParts  = 4096
	// MaxSize is the largest frame in bytes.
	MaxSize = 1 << 40

	// IDsAt is where the token ids begin in a frame, in bytes: 4 for each, little-endian.
	IDsAt = 176

	magic     = "KVMB"
	fixedLen  = IDsAt
	alignment = 64 // of the payload, for vector loads by whoever reads it in place
)

// Meta is what the writer of a block knows about it besides its bytes.
type Meta struct {
	Space
	Parent Key
	// First is the position of IDs[0] in its sequence.
	First int
	IDs   []int32
}

// Header is everything in a frame but the payload.
type Header struct {
	Ref
	// First is the position of IDs[0] in its sequence.
	First int
	IDs   []int32
	Parts []Part
	// Len is the length of the header, and Total that of the frame, in bytes.
	Len, Total int64
}

// Frame is a view of a frame's bytes whose header has been verified. It owns no
// memory. It is safe for concurrent readers.
type Frame struct {
	Header
	data []byte
	// pieces has the parts, where not all of them are there; nil = all are, in data.
	pieces [][]byte
	// refused, if any, is told of each refusal of a part.
	refused func(error)
	// proven says that the parts were verified, and that nobody can have changed them since.
	proven bool
}

// HeaderLen returns how many bytes of a frame come before its payload.
func HeaderLen(tokens, parts int) int {
	return align(align(fixedLen+4*tokens, 8)+partLen*parts, alignment)
}

// align rounds up to a multiple of a power of two.
func align(n, to int) int { return (n + to - 1) &^ (to - 1) }

// Seal makes a frame of a payload that lies in buf behind HeaderLen(tokens,
// parts) bytes of room, and ends with buf. It writes the header and copies no
// payload. The sizes of the parts, in the order in which they lie in the payload,
// add up to all of it; Seal fills in their offsets and sums. The frame refers to
// buf, m.IDs and parts.
func Seal(buf []byte, m Meta, parts []Part) (*Frame, error) {
	return Plain.seal(buf, m, m.Key(m.Parent, m.IDs), parts)
}

// SealEncrypted is Seal for a frame whose parts are encrypted, under a key that is not
// that of its tokens.
func SealEncrypted(buf []byte, m Meta, key Key, parts []Part) (*Frame, error) {
	return Encrypted.seal(buf, m, key, parts)
}

func (form Form) seal(buf []byte, m Meta, key Key, parts []Part) (*Frame, error) {
	if n := len(m.IDs); n < 1 || n > MaxTokens {
		return nil, fmt.Errorf("seal a frame of %d tokens: 1 to %d wanted", n, MaxTokens)
	}
	if n := len(parts); n < 1 || n > MaxParts {
		return nil, fmt.Errorf("seal a frame of %d parts: 1 to %d wanted", n, MaxParts)
	}
	if m.First < 0 {
		return nil, fmt.Errorf("seal a frame at position %d", m.First)
	}
	h := Header{
		Ref: Ref{m.Space, m.Parent, key}, First: m.First, IDs: m.IDs, Parts: parts,
		Len: int64(HeaderLen(len(m.IDs), len(parts))), Total: int64(len(buf)),
	}
	if h.Total < h.Len || h.Total > MaxSize {
		return nil, fmt.Errorf("seal a frame of %d bytes: header has %d", h.Total, h.Len)
	}
	at := h.Len
	for i := range parts {
		p := &parts[i]
		if p.Codec >= codecs {
			return nil, fmt.Errorf("seal a frame: part %d has codec %d", i, p.Codec)
		}
		if p.Size < 0 || p.Size > h.Total-at {
			return nil, fmt.Errorf("seal a frame: part %d of %d bytes leaves the payload", i, p.Size)
		}
		p.Offset = at
		at += p.Size
		p.Sum = Sum(buf[p.Offset:at])
	}
	if at != h.Total {
		return nil, fmt.Errorf("seal a frame: parts end at byte %d of %d", at, h.Total)
	}
	h.write(buf[:h.Len], form.version())
	return &Frame{Header: h, data: buf}, nil
}

// Encode makes a frame of a payload that lies elsewhere, in buf if that is large
// enough. It copies the payload once; Seal does without.
func Encode(buf []byte, m Meta, parts []Part, payload []byte) (*Frame, error) {
	n := HeaderLen(len(m.IDs), len(parts))
	if size := n + len(payload); cap(buf) < size {
		buf = make([]byte, size)
	} else {
		buf = buf[:size]
	}
	copy(buf[n:], payload)
	return Seal(buf, m, parts)
}

// write fills b, which is as long as the header.
func (h *Header) write(b []byte, version uint16) {
	clear(b)
	le := binary.LittleEndian
	copy(b, magic)
	le.PutUint16(b[4:], version)
	le.PutUint32(b[12:], uint32(h.Len))
	le.PutUint64(b[16:], uint64(h.Total))
	le.PutUint64(b[24:], uint64(h.First))
	le.PutUint32(b[32:], uint32(len(h.IDs)))
	le.PutUint32(b[36:], uint32(len(h.Parts)))
	copy(b[40:], h.Fingerprint[:])
	copy(b[72:], h.Root[:])
	copy(b[104:], h.Parent[:])
	copy(b[136:], h.Key[:])
	at := len(appendIDs(b[:fixedLen], h.IDs))
	for i := range h.Parts {
		h.Parts[i].put(b[align(at, 8)+i*partLen:])
	}
	le.PutUint32(b[8:], headerSum(b))
}

// headerSum is the CRC32C of a header without the field that holds it.
func headerSum(b []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli) // made once by the package
	return crc32.Update(crc32.Checksum(b[:8], table), table, b[12:])
}

// HeaderNeed returns how many bytes DecodeHeader needs of a frame that begins
// with b. 24 bytes of b are enough; a *Refusal says why it is no frame.
func HeaderNeed(b []byte) (int, error) {
	le := binary.LittleEndian
	switch {
	case len(b) < 24:
		return 0, Refuse(ReasonTorn, "%d bytes", len(b))
	case string(b[:4]) != magic:
		return 0, Refuse(ReasonMagic, "no frame")
	case le.Uint16(b[4:]) != Version && le.Uint16(b[4:]) != VersionEncrypted:
		return 0, Refuse(ReasonVersion, "version %d, this reader knows %d and %d", le.Uint16(b[4:]), Version, VersionEncrypted)
	}
	n := int64(le.Uint32(b[12:]))
	if n < fixedLen || n > int64(HeaderLen(MaxTokens, MaxParts)) || n%alignment != 0 || int64(le.Uint64(b[16:])) < n {
		return 0, Refuse(ReasonTorn, "header of %d bytes", n)
	}
	return int(n), nil
}

// DecodeHeader reads and verifies the header of a frame that begins with b: its
// version, its lengths, its checksum and that its key is that of its tokens. It
// does not look at the payload and keeps nothing of b.
func DecodeHeader(b []byte) (Header, error) { return Plain.DecodeHeader(b) }

// DecodeHeader is DecodeHeader for frames of a form; others are refused. The key of an
// encrypted frame is not proved by its tokens.
func (form Form) DecodeHeader(b []byte) (Header, error) {
	n, err := HeaderNeed(b)
	if err != nil {
		return Header{}, err
	}
	if len(b) < n {
		return Header{}, Refuse(ReasonTorn, "%d bytes of a header of %d", len(b), n)
	}
	b = b[:n]
	le := binary.LittleEndian
	if headerSum(b) != le.Uint32(b[8:]) {
		return Header{}, Refuse(ReasonChecksum, "header")
	}
	if v := le.Uint16(b[4:]); v != form.version() {
		return Header{}, Refuse(ReasonVersion, "version %d where %d is kept", v, form.version())
	}
	h, err := parseHeader(b)
	if err == nil && form == Plain && h.Space.Key(h.Parent, h.IDs) != h.Key {
		err = Refuse(ReasonKey, "the key is not that of the tokens")
	}
	if err != nil {
		return Header{}, err
	}
	return h, nil
}

// parseHeader reads a header that is as it was written. Its writer may still
// have been wrong, so nothing is believed.
func parseHeader(b []byte) (Header, error) {
	le := binary.LittleEndian
	tokens, parts := le.Uint32(b[32:]), le.Uint32(b[36:])
	h := Header{First: int(le.Uint64(b[24:])), Len: int64(len(b)), Total: int64(le.Uint64(b[16:]))}
	if tokens < 1 || tokens > MaxTokens || parts < 1 || parts > MaxParts || h.First < 0 || h.Total > MaxSize ||
		len(b) != HeaderLen(int(tokens), int(parts)) {
		return Header{}, Refuse(ReasonTorn, "%d tokens and %d parts at %d in a header of %d bytes", tokens, parts, h.First, len(b))
	}
	copy(h.Fingerprint[:], b[40:])
	copy(h.Root[:], b[72:])
	copy(h.Parent[:], b[104:])
	copy(h.Key[:], b[136:])
	h.IDs = parseIDs(b[fixedLen:], int(tokens))
	h.Parts = make([]Part, parts)
	index, at := b[align(fixedLen+4*len(h.IDs), 8):], h.Len
	for i := range h.Parts {
		p := &h.Parts[i]
		p.parse(index[i*partLen:])
		if p.Offset != at || p.Size < 0 || p.Size > h.Total-at {
			return Header{}, Refuse(ReasonTorn, "part %d has %d bytes at %d of %d", i, p.Size, p.Offset, h.Total)
		}
		if p.Codec >= codecs {
			return Header{}, Refuse(ReasonCodec, "part %d has codec %d", i, p.Codec)
		}
		at += p.Size
	}
	if at != h.Total {
		return Header{}, Refuse(ReasonTorn, "parts end at byte %d of %d", at, h.Total)
	}
	return h, nil
}

// parseIDs reads n token ids.
func parseIDs(b []byte, n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return ids
}

// Decode verifies that b is exactly one frame and that of the block want. It
// leaves the parts, which Part, Payload and Verify check. Every error is a
// *Refusal. The frame refers to b.
func Decode(b []byte, want Ref) (*Frame, error) { return Plain.Decode(b, want) }

// Decode is Decode for frames of a form.
func (form Form) Decode(b []byte, want Ref) (*Frame, error) {
	h, err := form.DecodeHeader(b)
	if err != nil {
		return nil, err
	}
	if h.Total != int64(len(b)) {
		return nil, Refuse(ReasonTorn, "%d bytes of a frame of %d", len(b), h.Total)
	}
	if err := h.Check(want); err != nil {
		return nil, err
	}
	return &Frame{Header: h, data: b}, nil
}

// Proven makes a frame of bytes whose header is h, and whose parts the caller has verified
// as they came, in memory that nobody else writes to: they are not verified again.
func Proven(b []byte, h Header) *Frame { return &Frame{Header: h, data: b, proven: true} }

// PartsOf returns the indices of the parts that hold layers from up to to, of any
// group, and of those that belong to no layer, without which the others say nothing.
func (h *Header) PartsOf(from, to int) []int {
	var out []int
	for i, p := range h.Parts {
		if first := int(p.Layer); p.Layers == 0 || first < to && first+int(p.Layers) > from {
			out = append(out, i)
		}
	}
	return out
}

// Check refuses a header that is not that of the block want.
func (h *Header) Check(want Ref) error {
	switch {
	case h.Fingerprint != want.Fingerprint:
		return Refuse(ReasonForeign, "of another model or layout")
	case h.Root != want.Root:
		return Refuse(ReasonForeign, "of another tenant")
	case h.Parent != want.Parent || h.Key != want.Key:
		return Refuse(ReasonKey, "another block")
	}
	return nil
}

// Bytes returns the whole frame, for those who store or send it; nil where it has some parts only.
func (f *Frame) Bytes() []byte { return f.data }

// Part returns the bytes of part i after it has verified them, on each call, unless the
// frame is Proven. ErrAbsent says that it was not asked for; see Ranged.
func (f *Frame) Part(i int) ([]byte, error) {
	p := f.Parts[i]
	var b []byte
	switch {
	case f.pieces != nil && f.pieces[i] == nil:
		return nil, fmt.Errorf("part %d: %w", i, ErrAbsent)
	case f.pieces != nil:
		b = f.pieces[i]
	case int64(len(f.data)) != f.Total:
		return nil, ErrClosed // it was lent and given back
	default:
		b = f.data[p.Offset : p.Offset+p.Size : p.Offset+p.Size]
	}
	if !f.proven && Sum(b) != p.Sum {
		err := Refuse(ReasonChecksum, "part %d", i)
		if f.refused != nil {
			f.refused(err)
		}
		return nil, err
	}
	return b, nil
}

// Verify checks all parts.
func (f *Frame) Verify() error {
	for i := range f.Parts {
		if _, err := f.Part(i); err != nil {
			return err
		}
	}
	return nil
}

// Codec returns the codec of the parts that are not raw, and of several the highest;
// CodecRaw if all are what the engine wrote.
func (h *Header) Codec() Codec {
	c := CodecRaw
	for _, p := range h.Parts {
		c = max(c, p.Codec)
	}
	return c
}

// Payload returns the bytes of all parts, as the engine wrote them, after it has
// verified them, on each call. A frame with parts that are not raw is refused:
// codec.Payload decodes it.
func (f *Frame) Payload() ([]byte, error) {
	if c := f.Codec(); c != CodecRaw {
		return nil, Refuse(ReasonCodec, "the payload is encoded as %v", c)
	}
	if err := f.Verify(); err != nil {
		return nil, err
	}
	return f.data[f.Len:], nil
}
