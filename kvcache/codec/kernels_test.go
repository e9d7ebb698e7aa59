package codec

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// HasKernels is for the benchmarks, which stand outside.
func HasKernels() bool { return hasKernels() }

// twins returns a plan with kernels and the same one in pure Go.
func twins(t testing.TB, c kvcache.Codec, s Shape) (fast, pure plan) {
	t.Helper()
	if !hasKernels() {
		t.Skip("this processor has no kernels: pure Go is all there is")
	}
	fast, err := planOf(c, s)
	if err != nil {
		t.Fatal(err)
	}
	pure = fast
	fast.kernels, pure.kernels = true, false
	return fast, pure
}

// both encodes a part with both twins, and decodes what comes out with both.
func both(t testing.TB, c kvcache.Codec, s Shape, part []byte) {
	t.Helper()
	fast, pure := twins(t, c, s)
	got, want := make([]byte, fast.total), make([]byte, fast.total)
	err, err2 := fast.encode(got, part), pure.encode(want, part)
	if fmt.Sprint(err) != fmt.Sprint(err2) || errors.Is(err, ErrNotFinite) != errors.Is(err2, ErrNotFinite) {
		t.Fatalf("%v of %+v: kernels say %v, pure Go %v", c, s, err, err2)
	}
	if err != nil {
		return
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%v of %+v: byte %d is not that of pure Go", c, s, differ(got, want))
	}
	decodeBoth(t, &fast, &pure, want)
}

// decodeBoth decodes an encoded part with both twins.
func decodeBoth(t testing.TB, fast, pure *plan, enc []byte) {
	t.Helper()
	got, want := make([]byte, fast.Len()), make([]byte, fast.Len())
	fast.decode(got, enc)
	pure.decode(want, enc)
	if !bytes.Equal(got, want) {
		t.Fatalf("%+v, decoded: byte %d is not that of pure Go", fast, differ(got, want))
	}
}

func differ(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// kinds are matrices by what is hard about their numbers: n 16 bit floats each.
func kinds(n int) map[string][]uint16 {
	rnd := rand.New(rand.NewPCG(7, 8))
	all := map[string][]uint16{}
	for name, next := range map[string]func() uint16{
		"normal":      func() uint16 { return toHalf(float32(rnd.NormFloat64())) },
		"wide":        func() uint16 { return toHalf(float32(rnd.NormFloat64() * math.Pow(2, float64(rnd.IntN(40)-24)))) },
		"denormal":    func() uint16 { return uint16(rnd.UintN(0x400)) | uint16(rnd.UintN(2)<<15) },
		"zeros":       func() uint16 { return uint16(rnd.UintN(2) << 15) },
		"minus zero":  func() uint16 { return 0x8000 },
		"not below 0": func() uint16 { return []uint16{0, 0x8000, uint16(rnd.UintN(0x3c00))}[rnd.IntN(3)] },
		"not above 0": func() uint16 { return []uint16{0, 0x8000, 0x8000 | uint16(rnd.UintN(0x3c00))}[rnd.IntN(3)] },
		"equal":       func() uint16 { return 0x3555 },
		"large":       func() uint16 { return 0x7bff ^ uint16(rnd.UintN(2)<<15) ^ uint16(rnd.UintN(8)) },
		"finite":      func() uint16 { return uint16(rnd.UintN(0x7c00)) | uint16(rnd.UintN(2)<<15) },
		"few infinite": func() uint16 {
			if rnd.IntN(n) == 0 {
				return 0x7c00 | uint16(rnd.UintN(0x400))
			}
			return uint16(rnd.UintN(0x3c00)) | uint16(rnd.UintN(2)<<15)
		},
	} {
		v := make([]uint16, n)
		for i := range v {
			v[i] = next()
		}
		all[name] = v
	}
	return all
}

func halves(v []uint16) (b []byte) {
	for _, h := range v {
		b = binary.LittleEndian.AppendUint16(b, h)
	}
	return b
}

// TestTwins: kernels and pure Go write the same bytes for every width of a row up to two
// groups and more, and refuse the same.
func TestTwins(t *testing.T) {
	const most = 130
	for name, v := range kinds(most * 66) {
		t.Run(name, func(t *testing.T) {
			numbers := halves(v)
			for _, plane := range []kvcache.Plane{kvcache.PlaneKeys, kvcache.PlaneValues} {
				for _, c := range []kvcache.Codec{kvcache.CodecInt8, kvcache.CodecInt4} {
					for cols := 1; cols <= most; cols++ {
						s := Shape{Elem: F16, Rows: 1 + cols%5, Cols: cols, Prefix: cols % 9, Plane: plane}
						both(t, c, s, slices.Concat(make([]byte, s.Prefix), numbers[:2*s.Rows*cols]))
					}
					for _, cols := range []int{1, 96, 128} {
						both(t, c, Shape{Elem: F16, Rows: 66, Cols: cols, Plane: plane}, numbers[:2*66*cols])
					}
					for _, cols := range []int{256, 264, 320, 512, 1024} {
						both(t, c, Shape{Elem: F16, Rows: 3, Cols: cols, Plane: plane}, numbers[:2*3*cols])
					}
				}
			}
		})
	}
}

// TestTwinsDecodeAnything: a reader's steps, least values and codes may be any bytes, and
// the transform of any width.
func TestTwinsDecodeAnything(t *testing.T) {
	rnd := rand.NewChaCha8([32]byte{5})
	for _, plane := range []kvcache.Plane{kvcache.PlaneKeys, kvcache.PlaneValues} {
		for _, c := range []kvcache.Codec{kvcache.CodecInt8, kvcache.CodecInt4} {
			for _, cols := range []int{1, 2, 7, 8, 31, 33, 64, 66, 72, 100, 128, 250, 256, 272, 512} {
				s := Shape{Elem: F16, Rows: 1 + cols%70, Cols: cols, Plane: plane}
				fast, pure := twins(t, c, s)
				for width := 1; width <= maxWidth && cols%width == 0 && (width == 1 || !fast.channels); width *= 2 {
					fast.width, pure.width = width, width
					enc := make([]byte, fast.total)
					_, _ = rnd.Read(enc)
					decodeBoth(t, &fast, &pure, enc)
				}
			}
		}
	}
}

// TestTwinsOfRows: with scales that no group has, so that numbers are too large for a code,
// and rows that are longer than a group.
func TestTwinsOfRows(t *testing.T) {
	rnd := rand.New(rand.NewPCG(9, 10))
	var k scales
	for j := range k.least {
		k.least[j], k.factor[j] = -rnd.Float32(), rnd.Float32()
	}
	for _, c := range []kvcache.Codec{kvcache.CodecInt8, kvcache.CodecInt4} {
		fast, pure := twins(t, c, Shape{Elem: F16, Rows: 1, Cols: 1})
		for n := 1; n <= 300; n++ {
			k.mask = []int{maskEach, maskOne}[n%2]
			x := make([]float32, n)
			for i := range x {
				x[i] = rnd.Float32() * 3 * fast.levels()
			}
			size := (n*fast.bits + 7) / 8
			got, want := make([]byte, size), make([]byte, size)
			fast.quantize(got, slices.Clone(x), &k)
			pure.quantize(want, slices.Clone(x), &k)
			if !bytes.Equal(got, want) {
				t.Fatalf("%v of %d numbers: code byte %d is not that of pure Go", c, n, differ(got, want))
			}
			y := make([]float32, n)
			fast.dequantize(x, want, &k)
			pure.dequantize(y, want, &k)
			if !slices.Equal(x, y) {
				t.Fatalf("%v of %d numbers: decoded they are not those of pure Go", c, n)
			}
		}
	}
}

// TestTwinsNameTheFirst: what is not finite is named by the first place, wherever in a
// vector it stands and whatever follows.
func TestTwinsNameTheFirst(t *testing.T) {
	p, _ := twins(t, kvcache.CodecInt8, Shape{Elem: F16, Rows: 1, Cols: 1})
	x := make([]float32, 80)
	for n := 1; n <= len(x); n++ {
		for at := range n {
			v := make([]uint16, n)
			v[n-1] = 0x7c00
			v[at] = 0xfc01
			if bad := p.load(x[:n], halves(v)); bad != at {
				t.Fatalf("%d of %d numbers is named as %d", at, n, bad)
			}
		}
	}
}

// TestZeros: parts that differ in the signs of zeros only are encoded alike, so it does
// not matter in which order somebody looks for the least number.
func TestZeros(t *testing.T) {
	for _, plane := range []kvcache.Plane{kvcache.PlaneKeys, kvcache.PlaneValues} {
		s := Shape{Elem: F16, Rows: 5, Cols: 75, Plane: plane}
		want, err := Append(nil, kvcache.CodecInt8, s, make([]byte, s.Len()))
		if err != nil {
			t.Fatal(err)
		}
		for _, kind := range []string{"zeros", "minus zero"} {
			got, err := Append(nil, kvcache.CodecInt8, s, halves(kinds(s.Len() / 2)[kind]))
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s, plane %d: byte %d is not that of zeros, %v", kind, plane, differ(got, want), err)
			}
		}
	}
}

// TestTwinsOfFloats: conversions are equal for every 16 bit float, and for 32 bit ones at
// and beside each of those and half way between them, and in steps over all others.
func TestTwinsOfFloats(t *testing.T) {
	fast, pure := twins(t, kvcache.CodecInt8, Shape{Elem: F16, Rows: 1, Cols: 1})
	var x [8]float32
	for i := range 1 << 16 {
		h := uint16(i)
		if bad := fast.load(x[:], halves(slices.Repeat([]uint16{0, h}, 4))); bad >= 0 {
			if bad != 1 || h&0x7c00 != 0x7c00 {
				t.Fatalf("%04x is refused at %d", h, bad)
			}
			continue
		}
		if math.Float32bits(x[7]) != math.Float32bits(fromHalf(h)) {
			t.Fatalf("%04x is read as %v", h, x[7])
		}
	}
	check := func(u uint32) {
		for i := range x {
			x[i] = math.Float32frombits(u ^ uint32(i&1)<<31)
		}
		var got, want [16]byte
		fast.store(got[:], x[:])
		pure.store(want[:], x[:])
		if got != want {
			t.Fatalf("%08x becomes %x, want %x", u, got, want)
		}
	}
	for h := range uint32(0x7c01) {
		u := math.Float32bits(fromHalf(uint16(h)))
		for d := range uint32(3) {
			check(u + d - 1)
			check(u + 0x1000 + d - 1)
		}
		if h < 0x400 { // denormal ones are equally far apart
			u = math.Float32bits((float32(h) + 0.5) * 0x1p-24)
			check(u - 1)
			check(u)
			check(u + 1)
		}
	}
	for u := uint64(0); u < 1<<32; u += 65521 {
		check(uint32(u))
	}
}

// FuzzTwins holds kernels and pure Go equal for any matrix. Its numbers are those of a
// pattern over and over: a fuzzer is quick with little input.
func FuzzTwins(f *testing.F) {
	all := kinds(12)
	for i, name := range slices.Sorted(maps.Keys(all)) {
		f.Add(uint8(i), uint8(1+i), uint8(1+i*25), halves(all[name]))
	}
	f.Fuzz(func(t *testing.T, kind, rows, cols uint8, pattern []byte) {
		s := Shape{Elem: F16, Rows: int(rows), Cols: int(cols), Plane: kvcache.PlaneKeys + kvcache.Plane(kind&1)}
		if kind&4 != 0 {
			s.Cols *= 2
		}
		if s.Validate() != nil || len(pattern) == 0 {
			return
		}
		part := bytes.Repeat(pattern, s.Len()/len(pattern)+1)[:s.Len()]
		both(t, []kvcache.Codec{kvcache.CodecInt8, kvcache.CodecInt4}[kind>>1&1], s, part)
	})
}

// FuzzTwinsDecode holds them equal for any part that a reader takes.
func FuzzTwinsDecode(f *testing.F) {
	for _, c := range []kvcache.Codec{kvcache.CodecInt8, kvcache.CodecInt4} {
		s := Shape{Elem: F16, Rows: 2, Cols: 72, Plane: kvcache.PlaneValues}
		enc, err := Append(nil, c, s, halves(kinds(2 * 72)["normal"]))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(byte(c), enc)
	}
	f.Fuzz(func(t *testing.T, codec byte, enc []byte) {
		p, err := parseHeader(kvcache.Codec(codec), enc)
		if err != nil || p.Elem != F16 || !hasKernels() {
			return
		}
		pure := p
		pure.kernels = false
		decodeBoth(t, &p, &pure, enc)
	})
}
