package codec_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/codec"
)

// state is a payload of a description, keys, values, values that are not finite, and
// something unknown.
func state() (parts []kvcache.Part, payload []byte, shape codec.ShapeOf) {
	keys := codec.Shape{Elem: codec.F16, Rows: 64, Cols: 128, Prefix: 12}
	bad := matrix(keys, 9)
	bad[13] = 0x7c // infinite or no number
	bad[12] = 0
	for _, p := range []struct {
		part kvcache.Part
		data []byte
	}{
		{kvcache.Part{Plane: kvcache.PlaneMeta}, []byte("description")},
		{kvcache.Part{Layers: 1, Plane: kvcache.PlaneKeys}, matrix(keys, 7)},
		{kvcache.Part{Layers: 1, Plane: kvcache.PlaneValues}, matrix(keys, 8)},
		{kvcache.Part{Layers: 1, Plane: kvcache.PlaneValues}, bad},
		{kvcache.Part{Layers: 1, Kind: kvcache.Snapshot}, []byte{1, 2, 3}},
	} {
		p.part.Size = int64(len(p.data))
		parts, payload = append(parts, p.part), append(payload, p.data...)
	}
	return parts, payload, func(_ kvcache.Part, part []byte) (codec.Shape, bool) {
		return keys, len(part) == keys.Len()
	}
}

// TestFrame packs a state, puts it into a frame and has it back.
func TestFrame(t *testing.T) {
	for _, c := range []kvcache.Codec{kvcache.CodecRaw, kvcache.CodecInt8, kvcache.CodecInt4} {
		parts, payload, shape := state()
		room := kvcache.HeaderLen(2, len(parts))
		buf, parts := codec.Pack(make([]byte, room), c, parts, payload, shape)
		space := kvcache.NewSpace("model", nil)
		f, err := kvcache.Seal(buf, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{1, 2}}, parts)
		if err != nil {
			t.Fatal(err)
		}
		g, err := kvcache.Decode(f.Bytes(), f.Ref)
		if err != nil || g.Codec() != c {
			t.Fatalf("%v: codec %v, %v", c, g.Codec(), err)
		}
		for i, want := range []kvcache.Codec{0, c, c, 0, 0} {
			if g.Parts[i].Codec != want {
				t.Errorf("%v: part %d is %v, want %v", c, i, g.Parts[i].Codec, want)
			}
		}
		got, err := codec.Payload([]byte("x"), g)
		if err != nil || len(got) != 1+len(payload) || got[0] != 'x' {
			t.Fatalf("%v: %d bytes of %d, %v", c, len(got), 1+len(payload), err)
		}
		if got = got[1:]; bytes.Equal(got, payload) != (c == kvcache.CodecRaw) {
			t.Errorf("%v: equal: %v", c, c != kvcache.CodecRaw)
		}
		raw := len(payload) - 3 - int(parts[3].Size)
		if parts[3].Codec == kvcache.CodecRaw && !bytes.Equal(got[raw:], payload[raw:]) {
			t.Errorf("%v: what stays raw was changed", c)
		}

		f.Bytes()[f.Parts[2].Offset+40] ^= 1
		b, err := codec.Payload([]byte("x"), g)
		if r, ok := errors.AsType[*kvcache.Refusal](err); !ok || r.Reason != kvcache.ReasonChecksum || string(b) != "x" {
			t.Errorf("%v: a flipped bit: %q, %v", c, b, err)
		}
	}
}

// TestFirstBlock: INT4 leaves the first token of a chain as it is, if it fits, and that
// costs little.
func TestFirstBlock(t *testing.T) {
	for _, cols := range []int{128, 1024, 2048} {
		s := codec.Shape{Elem: codec.F16, Rows: 64, Cols: cols, Prefix: 12}
		row := 2 * cols
		shape := func(kvcache.Part, []byte) (codec.Shape, bool) { return s, true }
		var payload []byte
		for _, s.Plane = range []kvcache.Plane{kvcache.PlaneKeys, kvcache.PlaneValues} {
			payload = append(payload, matrix(s, uint64(cols))...)
		}
		for _, c := range lossy() {
			size := int64(s.Len())
			parts := []kvcache.Part{{Plane: kvcache.PlaneKeys, Size: size}, {Plane: kvcache.PlaneValues, Size: size}}
			b, parts := codec.Pack(nil, c, parts, payload, codec.FirstBlock(c, shape))
			if ratio := float64(len(payload)) / float64(len(b)); c == kvcache.CodecInt4 && ratio < 3.46 {
				t.Errorf("%d channels: %.3f times smaller", cols, ratio)
			}
			for i, p := range parts {
				want := payload[i*s.Len() : (i+1)*s.Len()]
				got, err := codec.AppendDecoded(nil, c, b[:p.Size])
				if err != nil || len(got) != len(want) {
					t.Fatalf("%d channels, %v, part %d: %d bytes of %d, %v", cols, c, i, len(got), len(want), err)
				}
				kept := c == kvcache.CodecInt4 && cols < 2048
				if bytes.Equal(got[:12+row], want[:12+row]) != kept || bytes.Equal(got[12+row:12+2*row], want[12+row:12+2*row]) {
					t.Errorf("%d channels, %v, part %d: the first token is as it was: %v; or the second is", cols, c, i, !kept)
				}
				b = b[p.Size:]
			}
		}
	}
}

// TestFrameWithWrongPart: the sum is right and the writer was not.
func TestFrameWithWrongPart(t *testing.T) {
	space := kvcache.NewSpace("model", nil)
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{1}},
		[]kvcache.Part{{Size: 4}, {Codec: kvcache.CodecInt8, Size: 30}}, make([]byte, 34))
	if err != nil {
		t.Fatal(err)
	}
	b, err := codec.Payload([]byte("x"), f)
	if r, ok := errors.AsType[*kvcache.Refusal](err); !ok || r.Reason != kvcache.ReasonVersion || string(b) != "x" {
		t.Errorf("%q, %v", b, err)
	}
}
