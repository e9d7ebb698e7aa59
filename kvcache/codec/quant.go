package codec

import (
	"fmt"
	"math"
)

// levels is the largest code.
func (p *plan) levels() float32 { return float32(int(1)<<p.bits - 1) }

// notFinite names a number by its place.
func notFinite(row, col int) error {
	return fmt.Errorf("token %d, channel %d: %w", row, col, ErrNotFinite)
}

// tile is a square of a matrix, small enough for the stack and the first cache.
type tile [group][group]float32

// encodeChannels encodes with groups of one channel. b is the whole part, m the matrix.
func (p *plan) encodeChannels(b, m []byte) error {
	var t tile
	size := p.Elem.size()
	for r0 := 0; r0 < p.Rows; r0 += group {
		rows := min(group, p.Rows-r0)
		params := p.params + 2*p.Cols*size*(r0/group)
		for c0 := 0; c0 < p.Cols; c0 += group {
			cols := min(group, p.Cols-c0)
			for r := range rows {
				if bad := p.load(t[r][:cols], m[((r0+r)*p.Cols+c0)*size:]); bad >= 0 {
					return notFinite(r0+r, c0+bad)
				}
			}
			codes := b[p.codes+r0*p.row+c0*p.bits/8:]
			if bad := p.encodeTile(&t, rows, cols, b[params+c0*size:], codes); bad >= 0 {
				return notFinite(r0, c0+bad)
			}
		}
	}
	return nil
}

// encodeTile writes the steps, the least values and the codes of a tile, and returns
// the first channel that is too large, or -1.
func (p *plan) encodeTile(t *tile, rows, cols int, params, codes []byte) int {
	size, levels := p.Elem.size(), p.levels()
	lo, hi := t[0], t[0]
	for r := 1; r < rows; r++ {
		p.widen(lo[:], hi[:], t[r][:cols])
	}
	k := scales{mask: maskEach}
	for c := range cols {
		step, least, ok := p.Elem.steps(params[c*size:], params[(p.Cols+c)*size:], lo[c], hi[c], levels)
		if !ok {
			return c
		}
		k.least[c], k.factor[c] = least, inverse(step)
	}
	for r := range rows {
		p.quantize(codes[r*p.row:], t[r][:cols], &k)
	}
	return -1
}

// inverse is 1/step, and 0 for a group of equal numbers.
func inverse(step float32) float32 {
	if step == 0 {
		return 0
	}
	return 1 / step
}

// pack writes codes that are to be cut to whole numbers.
func (p *plan) pack(dst []byte, v []float32) {
	if p.bits == 8 {
		dst = dst[:len(v)]
		for i, x := range v {
			dst[i] = byte(max(0, min(int32(x), 255)))
		}
		return
	}
	for len(v) >= 2 {
		dst[0] = code4(v[0]) | code4(v[1])<<4
		dst, v = dst[1:], v[2:]
	}
	if len(v) == 1 {
		dst[0] = code4(v[0])
	}
}

func code4(x float32) byte { return byte(max(0, min(int32(x), 15))) }

// unpack reads codes as numbers.
func (p *plan) unpack(v []float32, src []byte) {
	if p.bits == 8 {
		src = src[:len(v)]
		for i, c := range src {
			v[i] = float32(c)
		}
		return
	}
	for len(v) >= 2 {
		v[0], v[1] = float32(src[0]&15), float32(src[0]>>4)
		src, v = src[1:], v[2:]
	}
	if len(v) == 1 {
		v[0] = float32(src[0] & 15)
	}
}

// decodeChannels is the inverse of encodeChannels.
func (p *plan) decodeChannels(m, b []byte) {
	var x [group]float32
	k := scales{mask: maskEach}
	size := p.Elem.size()
	for r0 := 0; r0 < p.Rows; r0 += group {
		params := p.params + 2*p.Cols*size*(r0/group)
		for c0 := 0; c0 < p.Cols; c0 += group {
			cols := min(group, p.Cols-c0)
			for c := range cols {
				at := params + (c0+c)*size
				k.factor[c], k.least[c] = p.Elem.value(b[at:]), p.Elem.value(b[at+p.Cols*size:])
			}
			for r := r0; r < min(r0+group, p.Rows); r++ {
				p.dequantize(x[:cols], b[p.codes+r*p.row+c0*p.bits/8:], &k)
				p.store(m[(r*p.Cols+c0)*size:], x[:cols])
			}
		}
	}
}

// encodeTokens encodes with groups of one token, after the transform.
func (p *plan) encodeTokens(b, m []byte) error {
	var room [maxWidth]float32
	var k scales
	size := p.Elem.size()
	for r := range p.Rows {
		for c0 := 0; c0 < p.Cols; c0 += maxWidth {
			x := room[:min(maxWidth, p.Cols-c0)]
			if bad := p.load(x, m[(r*p.Cols+c0)*size:]); bad >= 0 {
				return notFinite(r, c0+bad)
			}
			p.rotate(x)
			at := p.params + 2*size*(r*p.groups(p.Cols)+c0/p.group)
			codes := b[p.codes+r*p.row+c0*p.bits/8:]
			for g := 0; g < len(x); g += p.group {
				y := x[g:min(g+p.group, len(x))]
				lo, hi := p.span(y)
				if p.group == wideGroup {
					lo, hi = p.narrow((*[wideGroup]float32)(y), lo, hi, &k)
				}
				step, least, ok := p.Elem.steps(b[at:], b[at+size:], lo, hi, p.levels())
				if !ok {
					return notFinite(r, c0+g)
				}
				k.one(least, inverse(step))
				p.quantize(codes[g*p.bits/8:], y, &k)
				at += 2 * size
			}
		}
	}
	return nil
}

// narrow returns the ends of a group's codes: its least and its largest number, or some of
// the way between them cut off at both ends, which makes the steps of all others shorter,
// whichever loses less. It uses k.
func (p *plan) narrow(x *[wideGroup]float32, lo, hi float32, k *scales) (float32, float32) {
	const part = 0.05
	inset := float32((hi - lo) * part)
	whole := p.lost(x, lo, hi, k)
	if whole < float32(math.Inf(1)) && p.lost(x, lo+inset, hi-inset, k) < whole {
		return lo + inset, hi - inset
	}
	return lo, hi
}

// lost is the sum of the squares of what numbers lose by codes from lo to hi; infinite if
// there are no such codes. It uses k.
func (p *plan) lost(x *[wideGroup]float32, lo, hi float32, k *scales) float32 {
	var codes [wideGroup]byte
	var params [8]byte
	step, least, ok := p.Elem.steps(params[:4], params[4:], lo, hi, p.levels())
	if !ok {
		return float32(math.Inf(1))
	}
	y := *x
	k.one(least, inverse(step))
	p.quantize(codes[:], y[:], k)
	k.one(least, step)
	p.dequantize(y[:], codes[:], k)
	return squares(x, &y)
}

// squares is the sum of the squares of the differences, always in the same order.
func squares(x, y *[wideGroup]float32) float32 {
	var s, t, u, v float32
	for i := 0; i < wideGroup; i += 4 {
		a, b, c, d := x[i]-y[i], x[i+1]-y[i+1], x[i+2]-y[i+2], x[i+3]-y[i+3]
		s += float32(a * a)
		t += float32(b * b)
		u += float32(c * c)
		v += float32(d * d)
	}
	return s + t + (u + v)
}

// decodeTokens is the inverse of encodeTokens.
func (p *plan) decodeTokens(m, b []byte) {
	var room [maxWidth]float32
	var k scales
	size := p.Elem.size()
	for r := range p.Rows {
		for c0 := 0; c0 < p.Cols; c0 += maxWidth {
			x := room[:min(maxWidth, p.Cols-c0)]
			at := p.params + 2*size*(r*p.groups(p.Cols)+c0/p.group)
			codes := b[p.codes+r*p.row+c0*p.bits/8:]
			for g := 0; g < len(x); g += p.group {
				k.one(p.Elem.value(b[at+size:]), p.Elem.value(b[at:]))
				p.dequantize(x[g:min(g+p.group, len(x))], codes[g*p.bits/8:], &k)
				at += 2 * size
			}
			p.rotate(x)
			p.store(m[(r*p.Cols+c0)*size:], x)
		}
	}
}
