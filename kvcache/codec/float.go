package codec

import (
	"encoding/binary"
	"math"
)

// maxWidth is the largest transform.
const maxWidth = 256

// halfUp scales the bits of a 16 bit float, moved to the place of a 32 bit one's, to
// its value: the exponents differ by 112. It is right for denormal ones too.
const halfUp = 0x1p112

// fromHalf is the value of a finite 16 bit float.
func fromHalf(h uint16) float32 {
	f := math.Float32frombits(uint32(h&0x7fff)<<13) * halfUp
	return math.Float32frombits(math.Float32bits(f) | uint32(h&0x8000)<<16)
}

// toHalf rounds to the nearest 16 bit float, of two equally near to the even one;
// what is too large, or no number, becomes the largest.
func toHalf(f float32) uint16 {
	u := math.Float32bits(f)
	a, sign := u&0x7fffffff, uint16(u>>16)&0x8000
	// What has a normal result takes this branch, which is nearly all there is.
	if a-0x38800000 < 0x477ff000-0x38800000 {
		return sign | uint16((a-0x38000000+0xfff+a>>13&1)>>13)
	}
	if a >= 0x477ff000 {
		return sign | 0x7bff
	}
	// Adding this moves the last bit of a denormal result to the last bit of the sum,
	// which the processor rounds.
	return sign | uint16(math.Float32bits(math.Float32frombits(a)+0.5)-math.Float32bits(0.5))
}

// halfBelow is the largest 16 bit float that is not above f.
func halfBelow(f float32) uint16 {
	h := toHalf(f)
	switch {
	case fromHalf(h) <= f:
		return h
	case h == 0:
		return 0x8001
	case h&0x8000 != 0:
		return h + 1
	}
	return h - 1
}

// halfAbove is the smallest 16 bit float that is not below f, which is not negative.
func halfAbove(f float32) uint16 {
	h := toHalf(f)
	if fromHalf(h) < f {
		h++
	}
	return h
}

// mostF32 is 2¹¹², from which on a sum of maxWidth numbers may not be finite.
const mostF32 = 0x77800000

// load reads numbers until dst is full and returns the index of the first that is too
// large or no number, or -1.
func (e Elem) load(dst []float32, src []byte) int {
	if e == F16 {
		src = src[:2*len(dst)]
		for i := range dst {
			h := uint16(src[2*i]) | uint16(src[2*i+1])<<8
			if h&0x7c00 == 0x7c00 {
				return i
			}
			dst[i] = fromHalf(h)
		}
		return -1
	}
	for i := range dst {
		u := binary.LittleEndian.Uint32(src[4*i:])
		if u&0x7fffffff >= mostF32 {
			return i
		}
		dst[i] = math.Float32frombits(u)
	}
	return -1
}

// store writes numbers.
func (e Elem) store(dst []byte, src []float32) {
	if e == F16 {
		dst = dst[:2*len(src)]
		for i, f := range src {
			h := toHalf(f)
			dst[2*i], dst[2*i+1] = byte(h), byte(h>>8)
		}
		return
	}
	for i, f := range src {
		binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(f))
	}
}

// value reads one number, which may be anything.
func (e Elem) value(b []byte) float32 {
	if e == F16 {
		return fromHalf(binary.LittleEndian.Uint16(b))
	}
	return math.Float32frombits(binary.LittleEndian.Uint32(b))
}

// steps chooses the step and the least value for numbers from lo to hi and up to
// levels above it, such that all of them are in reach, and writes them. It returns
// them as a reader has them; false = they would not be finite.
func (e Elem) steps(stepAt, leastAt []byte, lo, hi, levels float32) (step, least float32, ok bool) {
	// Of two zeros it is chance which one is found to be least or largest: it is 0.
	if lo == 0 {
		lo = 0
	}
	if hi == 0 {
		hi = 0
	}
	if e == F16 {
		l := halfBelow(lo)
		least = fromHalf(l)
		s := halfAbove((hi - least) / levels)
		step = fromHalf(s)
		binary.LittleEndian.PutUint16(leastAt, l)
		binary.LittleEndian.PutUint16(stepAt, s)
		return step, least, l&0x7c00 != 0x7c00 && s&0x7c00 != 0x7c00
	}
	step, least = (hi-lo)/levels, lo
	if step < 0x1p-120 {
		step = 0 // denormal ones have no inverse; nothing is lost
	}
	binary.LittleEndian.PutUint32(leastAt, math.Float32bits(least))
	binary.LittleEndian.PutUint32(stepAt, math.Float32bits(step))
	return step, least, true
}

// butterflies does the transform's sums and differences, two stages at a time.
func butterflies(v []float32) {
	h := 1
	for ; 4*h <= len(v); h *= 4 {
		for at := 0; at < len(v); at += 4 * h {
			a, b := v[at:at+h:at+h], v[at+h:at+2*h:at+2*h]
			c, d := v[at+2*h:at+3*h:at+3*h], v[at+3*h:at+4*h:at+4*h]
			for i := range a {
				s, t, u, w := a[i]+b[i], a[i]-b[i], c[i]+d[i], c[i]-d[i]
				a[i], b[i], c[i], d[i] = s+u, t+w, s-u, t-w
			}
		}
	}
	if h < len(v) {
		a, b := v[:h], v[h:]
		for i := range a {
			a[i], b[i] = a[i]+b[i], a[i]-b[i]
		}
	}
}
