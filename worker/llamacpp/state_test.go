package llamacpp

import (
	"encoding/binary"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/codec"
)

func TestStateShape(t *testing.T) {
	part := func(kind uint32, row uint64, size int) []byte {
		b := binary.LittleEndian.AppendUint32(nil, kind)
		b = binary.LittleEndian.AppendUint64(b, row)
		return append(b, make([]byte, size)...)
	}
	keys := kvcache.Part{Layers: 1, Plane: kvcache.PlaneKeys}
	for name, c := range map[string]struct {
		plane kvcache.Plane
		part  []byte
		want  codec.Shape
	}{
		"f16":          {kvcache.PlaneValues, part(1, 512, 3*512), codec.Shape{Elem: codec.F16, Rows: 3, Cols: 256, Prefix: 12, Plane: kvcache.PlaneValues}},
		"f32":          {kvcache.PlaneKeys, part(0, 512, 512), codec.Shape{Elem: codec.F32, Rows: 1, Cols: 128, Prefix: 12, Plane: kvcache.PlaneKeys}},
		"quantized":    {kvcache.PlaneKeys, part(8, 512, 512), codec.Shape{}},
		"description":  {kvcache.PlaneMeta, part(1, 512, 512), codec.Shape{}},
		"half a row":   {kvcache.PlaneKeys, part(1, 512, 700), codec.Shape{}},
		"no row":       {kvcache.PlaneKeys, part(1, 0, 512), codec.Shape{}},
		"huge row":     {kvcache.PlaneKeys, part(1, 1<<63, 512), codec.Shape{}},
		"odd row":      {kvcache.PlaneKeys, part(1, 3, 9), codec.Shape{}},
		"nothing else": {kvcache.PlaneKeys, part(1, 512, 0), codec.Shape{}},
	} {
		p := keys
		p.Plane = c.plane
		if s, ok := StateShape(p, c.part); ok != (c.want != codec.Shape{}) || ok && s != c.want {
			t.Errorf("%s: %+v, %v", name, s, ok)
		}
	}
}
