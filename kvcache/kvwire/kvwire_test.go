package kvwire_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
)

// body is everything that can be written, once.
func body() (b []byte, ref kvcache.Ref, ids []int32) {
	space := kvcache.NewSpace("model", []byte("tenant"))
	ids = []int32{7, -1, math.MaxInt32}
	ref = space.Child(space.Root, ids)
	b = kvwire.AppendRef([]byte{9}, ref)
	b = kvwire.AppendU64(kvwire.AppendSize(kvwire.AppendU32(b, 5), 6), math.MaxUint64)
	return kvwire.AppendIDs(b, ids), ref, ids
}

// TestReadBack: what was written is read, and nothing is left. Each part that is missing is
// noticed, and what follows it reads as nothing.
func TestReadBack(t *testing.T) {
	b, ref, ids := body()
	c := kvwire.Cursor{B: b}
	if n := c.U8(); n != 9 {
		t.Error(n)
	}
	if r := c.Ref(); r != ref {
		t.Error(r)
	}
	if n, m, k := c.U32(), c.Size(), c.U64(); n != 5 || m != 6 || k != math.MaxUint64 {
		t.Error(n, m, k)
	}
	buf := make([]int32, 0, 8)
	if got := c.IDs(3, buf); cmp.Diff(ids, got) != "" || &got[:1][0] != &buf[:1][0] || !c.Whole() || len(c.Rest()) != 0 {
		t.Error(got, c)
	}
	for n := range b {
		c := kvwire.Cursor{B: b[:n]}
		c.U8()
		c.Ref()
		c.U32()
		c.Size()
		c.U64()
		c.IDs(3, nil)
		if !c.Bad || c.Whole() {
			t.Errorf("%d of %d bytes are enough", n, len(b))
		}
	}
}

// TestNotBelieved: numbers that are too large, or negative, are bad, and take no memory.
func TestNotBelieved(t *testing.T) {
	minus := kvwire.AppendU64(nil, math.MaxUint64)
	for name, read := range map[string]func(*kvwire.Cursor){
		"size":         func(c *kvwire.Cursor) { c.Size() },
		"ids":          func(c *kvwire.Cursor) { c.IDs(math.MaxInt, nil) },
		"negative ids": func(c *kvwire.Cursor) { c.IDs(-1, nil) },
		"take":         func(c *kvwire.Cursor) { c.Take(-1) },
	} {
		c := kvwire.Cursor{B: bytes.Clone(minus)}
		if read(&c); !c.Bad {
			t.Errorf("%s is taken", name)
		}
	}
}
