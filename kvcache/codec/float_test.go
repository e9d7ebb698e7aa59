package codec

import (
	"math"
	"math/rand/v2"
	"testing"
)

// ToHalf and FromHalf are for the tests of this package that stand outside.
func ToHalf(f float32) uint16   { return toHalf(f) }
func FromHalf(h uint16) float32 { return fromHalf(h) }

// value16 is a finite 16 bit float by the definition.
func value16(h uint16) float64 {
	sign, exp, frac := 1-2*float64(h>>15), int(h>>10&31), float64(h&0x3ff)
	if exp == 0 {
		return sign * math.Ldexp(frac, -24)
	}
	return sign * math.Ldexp(1024+frac, exp-25)
}

func TestHalves(t *testing.T) {
	for i := range 1 << 16 {
		h := uint16(i)
		if h&0x7c00 == 0x7c00 {
			continue
		}
		f := fromHalf(h)
		if float64(f) != value16(h) || math.Signbit(float64(f)) != (h>>15 == 1) {
			t.Fatalf("%04x is read as %v, want %v", h, f, value16(h))
		}
		if back := toHalf(f); back != h {
			t.Fatalf("%v becomes %04x, want %04x", f, back, h)
		}
	}
}

// TestRounding: each result is nearest, and of two equally near the even one.
func TestRounding(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range 200_000 {
		var f float32
		if i%2 == 0 {
			f = float32(rnd.NormFloat64() * math.Pow(2, float64(rnd.IntN(44)-28)))
		} else { // half way between two
			h := uint16(rnd.UintN(0x7bff))
			f = float32((value16(h) + value16(h+1)) / 2)
		}
		if f < 0 {
			f = -f
		}
		h := toHalf(f)
		d := math.Abs(value16(h) - float64(f))
		if f >= 65504 {
			if h != 0x7bff {
				t.Fatalf("%v becomes %04x", f, h)
			}
			continue
		}
		for _, n := range []uint16{h - 1, h + 1} {
			if n&0x7c00 == 0x7c00 || n>>15 == 1 {
				continue
			}
			if e := math.Abs(value16(n) - float64(f)); e < d || e == d && h&1 == 1 {
				t.Fatalf("%v becomes %04x, %04x is nearer or even", f, h, n)
			}
		}
		if b := halfBelow(f); value16(b) > float64(f) || b != h && b != h-1 {
			t.Fatalf("%04x is below %v", b, f)
		}
		if a := halfAbove(f); value16(a) < float64(f) || a != h && a != h+1 {
			t.Fatalf("%04x is above %v", a, f)
		}
		if b := halfBelow(-f); value16(b) > -float64(f) {
			t.Fatalf("%04x is below %v", b, -f)
		}
	}
	if h := toHalf(float32(math.NaN())); h&0x7fff != 0x7bff {
		t.Errorf("no number becomes %04x", h)
	}
}

// TestRotate: the transform keeps lengths, is its own inverse, and spreads what is in
// one place over all.
func TestRotate(t *testing.T) {
	for width := 1; width <= maxWidth; width *= 2 {
		p := plan{width: width}
		v := make([]float32, 2*width)
		v[width] = 1
		p.rotate(v)
		for i, x := range v {
			want := 0.0
			if i >= width {
				want = 1 / math.Sqrt(float64(width))
			}
			if math.Abs(float64(x)-want) > 1e-6 {
				t.Fatalf("width %d: number %d is %v, want %v", width, i, x, want)
			}
		}
		rnd := rand.New(rand.NewPCG(3, 4))
		for i := range v {
			v[i] = rnd.Float32() - 0.5
		}
		was := append([]float32(nil), v...)
		p.rotate(v)
		p.rotate(v)
		for i := range v {
			if math.Abs(float64(v[i]-was[i])) > 1e-5 {
				t.Fatalf("width %d: %v comes back as %v", width, was[i], v[i])
			}
		}
	}
}
