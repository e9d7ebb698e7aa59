package codec

import (
	"slices"

	"github.com/kvmesh/kvmesh/kvcache"
)

// ShapeOf says what matrix is in a part of an engine's state; false = it is not one,
// or not of floats, and stays raw.
type ShapeOf func(p kvcache.Part, part []byte) (Shape, bool)

// FirstBlock is shape for the block with which a chain begins. Models attend to its first
// token, whatever it is, more than to any other; so INT4 leaves its keys and values as
// they are, among the bytes before the matrix. Rows that do not fit there are encoded
// like all others.
func FirstBlock(c kvcache.Codec, shape ShapeOf) ShapeOf {
	if c != kvcache.CodecInt4 {
		return shape
	}
	return func(p kvcache.Part, part []byte) (Shape, bool) {
		s, ok := shape(p, part)
		row := s.Cols * s.Elem.size()
		if ok && s.Rows > 1 && s.Prefix+row <= maxPrefix {
			s.Prefix, s.Rows = s.Prefix+row, s.Rows-1
		}
		return s, ok
	}
}

// Pack encodes the parts of a block's payload and appends them to dst. What has no
// shape, cannot be encoded or would not be smaller stays raw. The parts that it
// returns are those of the frame: their sizes are new, their order is not. They are
// parts itself, changed.
func Pack(dst []byte, c kvcache.Codec, parts []kvcache.Part, payload []byte, shape ShapeOf) ([]byte, []kvcache.Part) {
	for i := range parts {
		p := &parts[i]
		raw := payload[:p.Size]
		payload = payload[p.Size:]
		n := len(dst)
		if s, ok := shape(*p, raw); ok && c != kvcache.CodecRaw {
			s.Plane = p.Plane
			if size, err := EncodedLen(c, s); err == nil && int64(size) < p.Size {
				if dst, err = Append(dst, c, s, raw); err == nil {
					p.Codec, p.Size = c, int64(len(dst)-n)
					continue
				}
			}
		}
		dst = append(dst, raw...)
	}
	return dst, parts
}

// Payload verifies the parts of a frame, decodes them and appends what the engine
// wrote, but for the loss, to dst. Every error but that of a frame that was given back
// is a *kvcache.Refusal.
func Payload(dst []byte, f *kvcache.Frame) ([]byte, error) {
	n := len(dst)
	dst = slices.Grow(dst, decodedLen(f))
	for i, p := range f.Parts {
		b, err := f.Part(i)
		if err == nil {
			dst, err = AppendDecoded(dst, p.Codec, b)
		}
		if err != nil {
			return dst[:n], err
		}
	}
	return dst, nil
}

// decodedLen is the length in bytes of a frame's payload by the headers of its parts,
// which nobody has verified yet: at most sixteen times that of the frame.
func decodedLen(f *kvcache.Frame) (n int) {
	b := f.Bytes()
	for _, p := range f.Parts {
		if p.Offset+p.Size > int64(len(b)) {
			return 0 // it was given back
		}
		// What is refused here is refused again, with its reason, when it is decoded.
		if size, err := DecodedLen(p.Codec, b[p.Offset:p.Offset+p.Size]); err == nil {
			n += size
		}
	}
	return n
}
