package llamacpp

import (
	"encoding/binary"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/codec"
)

// StateParts cuts a range of KV, as this engine copies it out, into its description and
// the keys and the values of each layer, so that each can be read and verified alone.
// It copies nothing. nil = the bytes are not in the form that it knows, and are one
// part.
//
// llama.cpp v0.5 writes, little-endian, a magic number and the sequence's id, u32 each,
// and then for each cache; a model with windowed layers has two, each with its own
// group, in which layers count from 0:
//
//	streams u32 (1 here), cells u32
//	for each cell: position i32, sequences u32, their ids i32
//	transposed u32 (0 here), layers u32
//	for each layer: type i32, bytes of a row u64, a row for each cell   (keys)
//	for each layer: the same                                          (values)
func StateParts(data []byte, tokens int) []kvcache.Part {
	r := stateReader{data: data, tokens: tokens}
	r.bad = r.u32() != stateMagic
	for r.skip(4); !r.bad && r.at < len(data); {
		r.cache()
	}
	if r.bad {
		return nil
	}
	return r.parts
}

// stateMagic begins the state of a sequence.
const stateMagic = 0xaf143cd8

// stateReader walks over a state.
type stateReader struct {
	data       []byte
	tokens     int
	at, marked int // marked: where the part that is being read began
	parts      []kvcache.Part
	group      uint16
	bad        bool
}

// mostLayers bounds what is believed of a state; no model has as many.
const mostLayers = 1024

// cache reads one cache.
func (r *stateReader) cache() {
	if r.u32() != 1 || r.u32() != uint32(r.tokens) {
		r.bad = true
		return
	}
	for range r.tokens {
		r.skip(4)
		n := r.u32()
		if r.bad = r.bad || n > 256; r.bad {
			return
		}
		r.skip(4 * int64(n))
	}
	transposed, layers := r.u32(), r.u32()
	if transposed != 0 || layers < 1 || layers > mostLayers {
		r.bad = true
		return
	}
	r.cut(kvcache.Part{Plane: kvcache.PlaneMeta})
	for _, plane := range []kvcache.Plane{kvcache.PlaneKeys, kvcache.PlaneValues} {
		for i := range layers {
			r.skip(4)
			row := r.u64()
			if row < 1 || row > 1<<32 {
				r.bad = true
				return
			}
			r.skip(int64(row) * int64(r.tokens))
			r.cut(kvcache.Part{Layer: uint16(i), Layers: 1, Plane: plane})
		}
	}
	r.group++
}

// cut ends a part.
func (r *stateReader) cut(p kvcache.Part) {
	p.Group, p.Size = r.group, int64(r.at-r.marked)
	r.marked = r.at
	r.parts = append(r.parts, p)
}

// skip passes n bytes.
func (r *stateReader) skip(n int64) {
	if r.bad || n > int64(len(r.data)-r.at) {
		r.bad = true
		return
	}
	r.at += int(n)
}

func (r *stateReader) u32() uint32 {
	at := r.at
	if r.skip(4); r.bad {
		return 0
	}
	return binary.LittleEndian.Uint32(r.data[at:])
}

func (r *stateReader) u64() uint64 {
	at := r.at
	if r.skip(8); r.bad {
		return 0
	}
	return binary.LittleEndian.Uint64(r.data[at:])
}

// StateShape says what matrix is in a part that StateParts has cut; false = it is not
// one, or not of floats. A tensor's type is 0 for f32 and 1 for f16.
func StateShape(p kvcache.Part, part []byte) (codec.Shape, bool) {
	const prefix = 12 // type and bytes of a row
	if p.Plane != kvcache.PlaneKeys && p.Plane != kvcache.PlaneValues || len(part) <= prefix {
		return codec.Shape{}, false
	}
	s := codec.Shape{Elem: codec.F32, Prefix: prefix, Plane: p.Plane}
	size := 4
	switch binary.LittleEndian.Uint32(part) {
	case 0:
	case 1:
		s.Elem, size = codec.F16, 2
	default:
		return codec.Shape{}, false
	}
	row := binary.LittleEndian.Uint64(part[4:])
	if row < 1 || row > uint64(len(part)) || (len(part)-prefix)%int(row) != 0 || int(row)%size != 0 {
		return codec.Shape{}, false
	}
	s.Rows, s.Cols = (len(part)-prefix)/int(row), int(row)/size
	return s, s.Validate() == nil
}
