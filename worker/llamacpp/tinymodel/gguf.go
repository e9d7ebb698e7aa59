package tinymodel

import (
	"encoding/binary"
	"math"
)

// file is a GGUF file of version 3 in the making. All integers are little-endian:
//
//	"GGUF", version u32, tensors u64, fields u64
//	fields:  key, type u32, value; a text is its length u64 and its bytes, a list the
//	         type of its elements u32, their number u64 and themselves
//	tensors: name, dimensions u32, sizes u64 (the innermost first), type u32, offset u64
//	padding up to a multiple of alignment, then the tensors' data, each aligned alike
type file struct {
	fields, index, data []byte
	nFields, nTensors   uint64
}

// The types of fields.
const (
	typeUint32  = 4
	typeInt32   = 5
	typeFloat32 = 6
	typeBool    = 7
	typeText    = 8
	typeList    = 9
)

// alignment is the format's default.
const alignment = 32

func appendText(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(s))), s...)
}

// field begins a field of a type.
func (g *file) field(key string, kind uint32) {
	g.nFields++
	g.fields = binary.LittleEndian.AppendUint32(appendText(g.fields, key), kind)
}

func (g *file) text(key, value string) {
	g.field(key, typeText)
	g.fields = appendText(g.fields, value)
}

func (g *file) number(key string, value uint32) {
	g.field(key, typeUint32)
	g.fields = binary.LittleEndian.AppendUint32(g.fields, value)
}

func (g *file) float(key string, value float32) {
	g.field(key, typeFloat32)
	g.fields = binary.LittleEndian.AppendUint32(g.fields, math.Float32bits(value))
}

func (g *file) flag(key string, value bool) {
	g.field(key, typeBool)
	b := byte(0)
	if value {
		b = 1
	}
	g.fields = append(g.fields, b)
}

// list begins a field that is a list.
func (g *file) list(key string, kind uint32, n int) {
	g.field(key, typeList)
	g.fields = binary.LittleEndian.AppendUint32(g.fields, kind)
	g.fields = binary.LittleEndian.AppendUint64(g.fields, uint64(n))
}

func (g *file) texts(key string, values []string) {
	g.list(key, typeText, len(values))
	for _, v := range values {
		g.fields = appendText(g.fields, v)
	}
}

func (g *file) ints(key string, values []int32) {
	g.list(key, typeInt32, len(values))
	for _, v := range values {
		g.fields = binary.LittleEndian.AppendUint32(g.fields, uint32(v))
	}
}

// tensor adds a tensor of single precision with the given sizes.
func (g *file) tensor(name string, values []float32, sizes ...int) {
	g.nTensors++
	g.index = binary.LittleEndian.AppendUint32(appendText(g.index, name), uint32(len(sizes)))
	for _, n := range sizes {
		g.index = binary.LittleEndian.AppendUint64(g.index, uint64(n))
	}
	g.index = binary.LittleEndian.AppendUint32(g.index, 0) // single precision
	g.data = pad(g.data)
	g.index = binary.LittleEndian.AppendUint64(g.index, uint64(len(g.data)))
	for _, v := range values {
		g.data = binary.LittleEndian.AppendUint32(g.data, math.Float32bits(v))
	}
}

func pad(b []byte) []byte { return append(b, make([]byte, -len(b)&(alignment-1))...) }

// bytes is the finished file.
func (g *file) bytes() []byte {
	b := binary.LittleEndian.AppendUint32([]byte("GGUF"), 3)
	b = binary.LittleEndian.AppendUint64(b, g.nTensors)
	b = binary.LittleEndian.AppendUint64(b, g.nFields)
	b = append(append(b, g.fields...), g.index...)
	return append(pad(b), g.data...)
}
