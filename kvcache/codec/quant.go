package codec

import "fmt"

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
			dst[i] = byte(min(int32(x), 255))
		}
		return
	}
	for len(v) >= 2 {
		dst[0] = byte(min(int32(v[0]), 15) | min(int32(v[1]), 15)<<4)
		dst, v = dst[1:], v[2:]
	}
	if len(v) == 1 {
		dst[0] = byte(min(int32(v[0]), 15))
	}
}

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
