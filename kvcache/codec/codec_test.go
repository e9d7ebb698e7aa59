package codec_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/codec"
)

// lossy returns the codecs that change numbers.
func lossy() []kvcache.Codec { return []kvcache.Codec{kvcache.CodecInt8, kvcache.CodecInt4} }

// matrix is a part with numbers as real states have them: keys with a few channels
// that are large in every token.
func matrix(s codec.Shape, seed uint64) []byte {
	rnd := rand.New(rand.NewPCG(seed, 1))
	b := bytes.Repeat([]byte{7}, s.Prefix)
	for range s.Rows {
		for c := range s.Cols {
			x := rnd.NormFloat64() * 0.4
			if s.Plane == kvcache.PlaneKeys && c%29 == 3 {
				x = x*0.5 + 12
			}
			b = appendNumber(b, s.Elem, float32(x))
		}
	}
	return b
}

func appendNumber(b []byte, e codec.Elem, x float32) []byte {
	if e == codec.F16 {
		return binary.LittleEndian.AppendUint16(b, codec.ToHalf(x))
	}
	return binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
}

// numbers reads a part.
func numbers(s codec.Shape, b []byte) (v []float64) {
	for b = b[s.Prefix:]; len(b) > 0; {
		if s.Elem == codec.F16 {
			v, b = append(v, float64(codec.FromHalf(binary.LittleEndian.Uint16(b)))), b[2:]
		} else {
			v, b = append(v, float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))), b[4:]
		}
	}
	return v
}

// relative is the root of the mean square of the error, by that of the numbers.
func relative(want, got []float64) float64 {
	var e, n float64
	for i := range want {
		e += (want[i] - got[i]) * (want[i] - got[i])
		n += want[i] * want[i]
	}
	return math.Sqrt(e / n)
}

// shapes are the sizes at which something begins or ends: groups, tiles, transforms.
func shapes() (all []codec.Shape) {
	for _, e := range []codec.Elem{codec.F16, codec.F32} {
		for _, plane := range []kvcache.Plane{kvcache.PlaneKeys, kvcache.PlaneValues} {
			for _, rows := range []int{1, 3, 63, 64, 65, 130} {
				for _, cols := range []int{1, 7, 63, 64, 65, 96, 128, 256, 320} {
					all = append(all, codec.Shape{Elem: e, Rows: rows, Cols: cols, Prefix: rows % 13, Plane: plane})
				}
			}
		}
	}
	return all
}

func TestRoundTrip(t *testing.T) {
	for _, s := range shapes() {
		part := matrix(s, 1)
		for _, c := range lossy() {
			enc, err := codec.Append([]byte("before"), c, s, part)
			if err != nil {
				t.Fatalf("%v of %+v: %v", c, s, err)
			}
			if n, err := codec.EncodedLen(c, s); err != nil || 6+n != len(enc) || string(enc[:6]) != "before" {
				t.Errorf("%v of %+v: %d bytes, said %d, %v", c, s, len(enc), n, err)
			}
			if n, err := codec.DecodedLen(c, enc[6:]); err != nil || n != len(part) {
				t.Errorf("%v of %+v: decodes to %d bytes of %d, %v", c, s, n, len(part), err)
			}
			got, err := codec.AppendDecoded([]byte("before"), c, enc[6:])
			if err != nil || len(got) != 6+len(part) || string(got[:6]) != "before" || !bytes.Equal(got[6:6+s.Prefix], part[:s.Prefix]) {
				t.Fatalf("%v of %+v: %d bytes of %d, %v", c, s, len(got), len(part), err)
			}
			most := 0.007
			if c == kvcache.CodecInt4 {
				most = 0.11
			}
			if e := relative(numbers(s, part), numbers(s, got[6:])); e > most {
				t.Errorf("%v of %+v: error %.4f, want at most %v", c, s, e, most)
			}
		}
	}
}

// TestEveryNumber: no number is further off than half a step of its group, and the
// rounding of its type.
func TestEveryNumber(t *testing.T) {
	s := codec.Shape{Elem: codec.F16, Rows: 64, Cols: 1, Plane: kvcache.PlaneKeys}
	for _, span := range []float64{0, 6e-8, 1e-6, 1e-3, 1, 1000, 130000} {
		var part []byte
		for i := range s.Rows {
			part = appendNumber(part, s.Elem, float32(span*(float64(i)/63-0.5)))
		}
		for _, c := range lossy() {
			levels := 255.0
			if c == kvcache.CodecInt4 {
				levels = 15
			}
			enc, err := codec.Append(nil, c, s, part)
			if err != nil {
				t.Fatalf("span %v: %v", span, err)
			}
			got, err := codec.AppendDecoded(nil, c, enc)
			if err != nil {
				t.Fatal(err)
			}
			for i, want := range numbers(s, part) {
				x := numbers(s, got)[i]
				most := (span/levels*1.001+0x1p-24)/2 + math.Abs(want)*0x1p-10 + 0x1p-24
				if math.Abs(x-want) > most {
					t.Errorf("%v, span %v: %v became %v, further off than %v", c, span, want, x, most)
				}
			}
		}
	}
}

// TestSizes holds the ratios that are promised for blocks of 64 tokens.
func TestSizes(t *testing.T) {
	for _, plane := range []kvcache.Plane{kvcache.PlaneKeys, kvcache.PlaneValues} {
		s := codec.Shape{Elem: codec.F16, Rows: 64, Cols: 256, Prefix: 12, Plane: plane}
		for i, least := range []float64{1.85, 3.5} {
			n, err := codec.EncodedLen(lossy()[i], s)
			if ratio := float64(s.Len()) / float64(n); err != nil || ratio < least {
				t.Errorf("%v of plane %d: %.3f times smaller, want %v", lossy()[i], plane, ratio, least)
			}
		}
	}
}

func TestEncodeRefuses(t *testing.T) {
	good := codec.Shape{Elem: codec.F16, Rows: 2, Cols: 300, Plane: kvcache.PlaneValues}
	for name, c := range map[string]struct {
		codec kvcache.Codec
		shape codec.Shape
		cut   int
		want  string
	}{
		"type":    {kvcache.CodecInt8, codec.Shape{Elem: 9, Rows: 1, Cols: 1}, 0, "type 9"},
		"rows":    {kvcache.CodecInt8, codec.Shape{Elem: codec.F16, Cols: 3}, 0, "0 tokens"},
		"columns": {kvcache.CodecInt4, codec.Shape{Elem: codec.F16, Rows: 1, Cols: 1 << 20}, 0, "1048576 channels"},
		"prefix":  {kvcache.CodecInt4, codec.Shape{Elem: codec.F16, Rows: 1, Cols: 1, Prefix: -1}, 0, "-1 bytes before"},
		"codec":   {kvcache.CodecRaw, good, 0, "codec raw"},
		"length":  {kvcache.CodecInt8, good, 1, "1199 bytes, want 1200"},
	} {
		part := make([]byte, 1200-c.cut)
		if out, err := codec.Append([]byte("x"), c.codec, c.shape, part); err == nil || !strings.Contains(err.Error(), c.want) || string(out) != "x" {
			t.Errorf("%s: %q, %v", name, out, err)
		}
	}
}

// TestNotFinite: the first number that has no code is named by its place.
func TestNotFinite(t *testing.T) {
	for _, plane := range []kvcache.Plane{kvcache.PlaneKeys, kvcache.PlaneValues} {
		for _, e := range []codec.Elem{codec.F16, codec.F32} {
			s := codec.Shape{Elem: e, Rows: 70, Cols: 300, Plane: plane}
			for name, bits := range map[string][2]uint32{"infinite": {0x7c00, 0x7f800000}, "no number": {0xfe00, 0xffc00000}} {
				part := matrix(s, 2)
				at := 66*s.Cols + 290
				if e == codec.F16 {
					binary.LittleEndian.PutUint16(part[2*at:], uint16(bits[0]))
				} else {
					binary.LittleEndian.PutUint32(part[4*at:], bits[1])
				}
				for _, c := range lossy() {
					_, err := codec.Append(nil, c, s, part)
					if !errors.Is(err, codec.ErrNotFinite) || !strings.Contains(err.Error(), "token 66, channel 290") {
						t.Errorf("%s, %v, plane %d: %v", name, c, plane, err)
					}
				}
			}
		}
	}
	// Each is a number, and their sums are not.
	s := codec.Shape{Elem: codec.F16, Rows: 1, Cols: 256, Plane: kvcache.PlaneValues}
	part := bytes.Repeat([]byte{0xff, 0x7b}, 256)
	if _, err := codec.Append(nil, kvcache.CodecInt4, s, part); !errors.Is(err, codec.ErrNotFinite) {
		t.Error(err)
	}
}

// TestGolden reads parts that another program made from the package comment: they are
// the format, so there is no flag to rewrite them.
func TestGolden(t *testing.T) {
	for name, c := range map[string]kvcache.Codec{
		"int8-keys-f16": kvcache.CodecInt8, "int8-values-f16": kvcache.CodecInt8, "int4-keys-f32": kvcache.CodecInt4,
		"int4-values-f16": kvcache.CodecInt4, "int4-values-f32": kvcache.CodecInt4, "int4-values-wide-f16": kvcache.CodecInt4,
	} {
		text, err := os.ReadFile("testdata/" + name + ".hex")
		if err != nil {
			t.Fatal(err)
		}
		enc, want, _ := strings.Cut(string(text), "\n\n")
		got, err := codec.AppendDecoded(nil, c, unhex(t, enc))
		if err != nil || !bytes.Equal(got, unhex(t, want)) {
			t.Errorf("%s: %v\n%s", name, err, hex.Dump(got))
		}
	}
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestDecodeRefuses changes headers; all that is refused says why by its reason.
func TestDecodeRefuses(t *testing.T) {
	s := codec.Shape{Elem: codec.F16, Rows: 3, Cols: 128, Prefix: 4, Plane: kvcache.PlaneValues}
	good, err := codec.Append(nil, kvcache.CodecInt4, s, matrix(s, 3))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(b []byte) []byte
		want   kvcache.Reason
	}{
		"empty":      {func([]byte) []byte { return nil }, kvcache.ReasonTorn},
		"short":      {func(b []byte) []byte { return b[:len(b)-1] }, kvcache.ReasonTorn},
		"long":       {func(b []byte) []byte { return append(b, 0) }, kvcache.ReasonTorn},
		"version":    {func(b []byte) []byte { b[0] = 3; return b }, kvcache.ReasonVersion},
		"version 1":  {func(b []byte) []byte { b[0] = 1; return b }, kvcache.ReasonCodec},
		"wide keys":  {func(b []byte) []byte { b[2], b[4] = 1, 1; return b }, kvcache.ReasonCodec},
		"type":       {func(b []byte) []byte { b[1] = 0; return b }, kvcache.ReasonTorn},
		"groups":     {func(b []byte) []byte { b[2] = 2; return b }, kvcache.ReasonCodec},
		"bits":       {func(b []byte) []byte { b[3] = 8; return b }, kvcache.ReasonCodec},
		"width 0":    {func(b []byte) []byte { b[4] = 0; return b }, kvcache.ReasonCodec},
		"width 3":    {func(b []byte) []byte { b[4] = 3; return b }, kvcache.ReasonCodec},
		"width 512":  {func(b []byte) []byte { b[4], b[5] = 0, 2; return b }, kvcache.ReasonCodec},
		"group size": {func(b []byte) []byte { b[6] = 64; return b }, kvcache.ReasonCodec},
		"rows":       {func(b []byte) []byte { b[8]++; return b }, kvcache.ReasonTorn},
		"many rows":  {func(b []byte) []byte { b[11] = 0xff; return b }, kvcache.ReasonTorn},
		"no columns": {func(b []byte) []byte { b[12] = 0; return b }, kvcache.ReasonTorn},
		"prefix":     {func(b []byte) []byte { b[18] = 0xff; return b }, kvcache.ReasonTorn},
		"spare":      {func(b []byte) []byte { b[20] = 1; return b }, kvcache.ReasonCodec},
	} {
		out, err := codec.AppendDecoded([]byte("x"), kvcache.CodecInt4, c.change(bytes.Clone(good)))
		r, ok := errors.AsType[*kvcache.Refusal](err)
		if !ok || r.Reason != c.want || string(out) != "x" {
			t.Errorf("%s: %q, %v", name, out, err)
		}
	}
	if _, err := codec.AppendDecoded(nil, kvcache.CodecInt8, good); err == nil {
		t.Error("INT4 is read as INT8")
	}
	if _, err := codec.DecodedLen(9, good); err == nil {
		t.Error("an unknown codec is read")
	}
}

func TestNothingIsAllocated(t *testing.T) {
	for _, plane := range []kvcache.Plane{kvcache.PlaneKeys, kvcache.PlaneValues} {
		s := codec.Shape{Elem: codec.F16, Rows: 64, Cols: 256, Plane: plane}
		part := matrix(s, 4)
		enc, dec := make([]byte, 0, len(part)), make([]byte, 0, len(part))
		for _, c := range lossy() {
			if n := testing.AllocsPerRun(10, func() {
				b, err := codec.Append(enc, c, s, part)
				if err == nil {
					_, err = codec.AppendDecoded(dec, c, b)
				}
				if err != nil {
					t.Error(err)
				}
			}); n != 0 {
				t.Errorf("%v of plane %d: %v allocations", c, plane, n)
			}
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, plane := range []kvcache.Plane{kvcache.PlaneKeys, kvcache.PlaneValues} {
		s := codec.Shape{Elem: codec.F16, Rows: 2, Cols: 66, Prefix: 3, Plane: plane}
		for _, c := range lossy() {
			b, err := codec.Append(nil, c, s, matrix(s, 5))
			if err != nil {
				f.Fatal(err)
			}
			f.Add(byte(c), b)
		}
	}
	f.Fuzz(func(t *testing.T, c byte, b []byte) {
		n, err := codec.DecodedLen(kvcache.Codec(c), b)
		out, err2 := codec.AppendDecoded(nil, kvcache.Codec(c), b)
		if (err == nil) != (err2 == nil) || err == nil && len(out) != n {
			t.Fatalf("%d bytes, %v; said %d, %v", len(out), err2, n, err)
		}
		if _, ok := errors.AsType[*kvcache.Refusal](err2); err2 != nil && !ok {
			t.Fatalf("error %v is no refusal", err2)
		}
		if len(out) > 16*len(b) {
			t.Fatalf("%d bytes of %d", len(out), len(b))
		}
	})
}

// FuzzEncode: whatever numbers come, the result decodes to as many that are finite.
func FuzzEncode(f *testing.F) {
	f.Add(uint8(0), uint8(70), []byte{0, 1, 0xff, 0x7b, 0, 0x80, 1, 0})
	f.Add(uint8(7), uint8(64), []byte{0, 0x3c})
	f.Fuzz(func(t *testing.T, kind, cols uint8, b []byte) {
		s := codec.Shape{Elem: codec.F16 + codec.Elem(kind&1), Cols: int(cols), Plane: kvcache.PlaneKeys + kvcache.Plane(kind>>1&1)}
		c := lossy()[kind>>2&1]
		size := 2 + 2*int(kind&1)
		if s.Cols == 0 || len(b)/size < s.Cols {
			return
		}
		s.Rows = len(b) / size / s.Cols
		b = b[:s.Len()]
		enc, err := codec.Append(nil, c, s, b)
		if errors.Is(err, codec.ErrNotFinite) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		out, err := codec.AppendDecoded(nil, c, enc)
		if err != nil || len(out) != len(b) {
			t.Fatalf("%d bytes of %d, %v", len(out), len(b), err)
		}
		for i, x := range numbers(s, out) {
			if math.IsNaN(x) || math.Abs(x) >= math.MaxFloat32 {
				t.Fatalf("number %d became %v", i, x)
			}
		}
	})
}
