//go:build unix

package lmcache

import (
	"fmt"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
)

// layout is the shape of one rank's chunk.
type layout struct {
	Planes int    `json:"planes"`
	Layers int    `json:"layers"`
	Slots  int    `json:"slots"`
	Hidden int    `json:"hidden"`
	DType  string `json:"dtype"`
}

// mostObject bounds a chunk of one rank in bytes.
const mostObject = 4 << 30

// widthOf is how many bytes a number of one of torch's types has; 0 is one not known.
func widthOf(dtype string) int {
	switch dtype {
	case "float64", "int64":
		return 8
	case "float32", "int32":
		return 4
	case "float16", "bfloat16", "int16":
		return 2
	case "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz":
		return 1
	}
	return 0
}

// layoutOf reads what an engine registers. Without slots there is one for each token.
func layoutOf(r *lmcachepb.RegisterKvCacheEngineDrivenContextRequest, chunk int) (layout, error) {
	slots := int64(chunk)
	if r.NumPhysicalSlots != nil {
		slots = r.GetNumPhysicalSlots()
	}
	l := layout{Planes: 2, Layers: int(r.GetNumLayers()), Slots: int(slots), Hidden: int(r.GetHiddenDimSize()), DType: r.GetDtypeStr()}
	if r.GetUseMla() {
		l.Planes = 1
	}
	return l, l.check()
}

// check refuses what cannot be.
func (l layout) check() error {
	const mostSide = 1 << 20
	switch {
	case widthOf(l.DType) == 0:
		return fmt.Errorf("numbers of type %.40q are not known", l.DType)
	case l.Planes < 1 || l.Planes > 2 || l.Layers < 1 || l.Planes*l.Layers > kvcache.MaxParts,
		l.Slots < 1 || l.Slots > kvcache.MaxTokens, l.Hidden < 1 || l.Hidden > mostSide,
		l.part() > mostObject/int64(l.Planes*l.Layers):
		return fmt.Errorf("a chunk of %d planes, %d layers, %d slots and %d numbers cannot be", l.Planes, l.Layers, l.Slots, l.Hidden)
	}
	return nil
}

// part is the bytes of one layer of one plane, and size those of all.
func (l layout) part() int64 { return int64(l.Slots) * int64(l.Hidden) * int64(widthOf(l.DType)) }
func (l layout) size() int64 { return int64(l.Planes) * int64(l.Layers) * l.part() }

// frame is the length of a frame with a chunk of so many tokens.
func (l layout) frame(chunk int) int64 {
	return int64(kvcache.HeaderLen(chunk, l.Planes*l.Layers)) + l.size()
}

// shape is how torch views an object.
func (l layout) shape() []int {
	if l.Planes == 1 {
		return []int{l.Layers, l.Slots, l.Hidden}
	}
	return []int{l.Planes, l.Layers, l.Slots, l.Hidden}
}

// parts lists what an object consists of.
func (l layout) parts() []kvcache.Part {
	planes := []kvcache.Plane{kvcache.PlaneAll}
	if l.Planes == 2 {
		planes = []kvcache.Plane{kvcache.PlaneKeys, kvcache.PlaneValues}
	}
	var list []kvcache.Part
	for _, plane := range planes {
		for layer := range l.Layers {
			list = append(list, kvcache.Part{Layer: uint16(layer), Layers: 1, Plane: plane, Size: l.part()})
		}
	}
	return list
}
