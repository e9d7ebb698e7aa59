package codec

import "math"

// scales are what makes numbers to codes and back: those of a group of one channel
// each, or one pair that is there eight times, as wide as a vector.
type scales struct {
	least [group]float32
	// factor is the step for a reader and its inverse for a writer.
	factor [group]float32
	// mask is what of a number's index finds its scales.
	mask int
}

const (
	maskEach = group - 1
	maskOne  = 7
)

// one sets the scales of all numbers.
func (k *scales) one(least, factor float32) {
	for i := range maskOne + 1 {
		k.least[i], k.factor[i] = least, factor
	}
	k.mask = maskOne
}

// The methods below work on the numbers of a row. Each begins with a kernel, if the
// plan has them, and goes on in pure Go, which can do it all: that is what other
// processors run, and what the kernels are tested against.

// load reads numbers until x is full and returns the index of the first that is too
// large or no number, or -1.
func (p *plan) load(x []float32, src []byte) int {
	size, done := p.Elem.size(), 0
	src = src[:len(x)*size]
	if p.kernels {
		done = loadHalves(x, src)
	}
	if bad := p.Elem.load(x[done:], src[done*size:]); bad >= 0 {
		return done + bad
	}
	return -1
}

// store writes numbers.
func (p *plan) store(dst []byte, x []float32) {
	size, done := p.Elem.size(), 0
	dst = dst[:len(x)*size]
	if p.kernels {
		done = storeHalves(dst, x)
	}
	p.Elem.store(dst[done*size:], x[done:])
}

// widen makes each lo at most, and each hi at least, the number in its place.
func (p *plan) widen(lo, hi, x []float32) {
	lo, hi = lo[:len(x)], hi[:len(x)]
	done := 0
	if p.kernels {
		done = widen(lo, hi, x)
	}
	for i := done; i < len(x); i++ {
		if x[i] < lo[i] {
			lo[i] = x[i]
		}
		if x[i] > hi[i] {
			hi[i] = x[i]
		}
	}
}

// span returns the least and the largest number; of two zeros, either.
func (p *plan) span(x []float32) (lo, hi float32) {
	lo, hi, done := x[0], x[0], 0
	if p.kernels {
		lo, hi, done = span(x)
	}
	for _, f := range x[done:] {
		if f < lo {
			lo = f
		}
		if f > hi {
			hi = f
		}
	}
	return lo, hi
}

// quantize writes the codes of numbers; what is beyond the last code on either side gets
// that. It may change x.
func (p *plan) quantize(dst []byte, x []float32, k *scales) {
	dst = dst[:(len(x)*p.bits+7)/8]
	done := 0
	switch {
	case p.kernels && p.bits == 8:
		done = quantize8(dst, x, k)
	case p.kernels:
		done = quantize4(dst, x, k)
	}
	for i := done; i < len(x); i++ {
		j := i & k.mask
		// The product is rounded before the sum, on every processor alike.
		x[i] = float32((x[i]-k.least[j])*k.factor[j]) + 0.5
	}
	p.pack(dst[done*p.bits/8:], x[done:])
}

// dequantize reads codes as the numbers that they stand for.
func (p *plan) dequantize(x []float32, src []byte, k *scales) {
	src = src[:(len(x)*p.bits+7)/8]
	done := 0
	switch {
	case p.kernels && p.bits == 8:
		done = dequantize8(x, src, k)
	case p.kernels:
		done = dequantize4(x, src, k)
	}
	p.unpack(x[done:], src[done*p.bits/8:])
	for i := done; i < len(x); i++ {
		j := i & k.mask
		x[i] = float32(x[i]*k.factor[j]) + k.least[j] // rounded twice, as above
	}
}

// rotate transforms each run of numbers as wide as the plan says by the Hadamard
// matrix, scaled so that it is its own inverse. The length of x is a multiple of it.
func (p *plan) rotate(x []float32) {
	if p.width == 1 {
		return
	}
	scale := float32(1 / math.Sqrt(float64(p.width)))
	done := 0
	if p.kernels {
		done = hadamard(x, p.width, scale)
	}
	for x = x[done:]; len(x) > 0; x = x[p.width:] {
		butterflies(x[:p.width])
		for i := range p.width {
			x[i] *= scale
		}
	}
}
