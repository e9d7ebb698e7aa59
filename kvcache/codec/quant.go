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
				if bad := p.Elem.load(t[r][:cols], m[((r0+r)*p.Cols+c0)*size:]); bad >= 0 {
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
		for c, x := range t[r][:cols] {
			if x < lo[c] {
				lo[c] = x
			}
			if x > hi[c] {
				hi[c] = x
			}
		}
	}
	var inv [group]float32
	for c := range cols {
		step, least, ok := p.Elem.steps(params[c*size:], params[(p.Cols+c)*size:], lo[c], hi[c], levels)
		if !ok {
			return c
		}
		lo[c], inv[c] = least, inverse(step)
	}
	for r := range rows {
		row := t[r][:cols]
		for c, x := range row {
			row[c] = (x-lo[c])*inv[c] + 0.5
		}
		p.pack(codes[r*p.row:], row)
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
	var step, least, v [group]float32
	size := p.Elem.size()
	for r0 := 0; r0 < p.Rows; r0 += group {
		params := p.params + 2*p.Cols*size*(r0/group)
		for c0 := 0; c0 < p.Cols; c0 += group {
			cols := min(group, p.Cols-c0)
			for c := range cols {
				at := params + (c0+c)*size
				step[c], least[c] = p.Elem.value(b[at:]), p.Elem.value(b[at+p.Cols*size:])
			}
			for r := r0; r < min(r0+group, p.Rows); r++ {
				x := v[:cols]
				p.unpack(x, b[p.codes+r*p.row+c0*p.bits/8:])
				for c := range x {
					// The product is rounded before the sum, on every processor alike.
					x[c] = float32(x[c]*step[c]) + least[c]
				}
				p.Elem.store(m[(r*p.Cols+c0)*size:], x)
			}
		}
	}
}

// encodeTokens encodes with groups of one token, after the transform.
func (p *plan) encodeTokens(b, m []byte) error {
	var room [maxWidth]float32
	size := p.Elem.size()
	for r := range p.Rows {
		for c0 := 0; c0 < p.Cols; c0 += maxWidth {
			v := room[:min(maxWidth, p.Cols-c0)]
			if bad := p.Elem.load(v, m[(r*p.Cols+c0)*size:]); bad >= 0 {
				return notFinite(r, c0+bad)
			}
			rotate(v, p.width)
			at := p.params + 2*size*(r*groups(p.Cols)+c0/group)
			codes := b[p.codes+r*p.row+c0*p.bits/8:]
			for g := 0; g < len(v); g += group {
				w := v[g:min(g+group, len(v))]
				if !p.encodeGroup(b[at:], codes[g*p.bits/8:], w) {
					return notFinite(r, c0+g)
				}
				at += 2 * size
			}
		}
	}
	return nil
}

// encodeGroup writes one group; false = it is too large.
func (p *plan) encodeGroup(params, codes []byte, v []float32) bool {
	lo, hi := v[0], v[0]
	for _, x := range v {
		if x < lo {
			lo = x
		}
		if x > hi {
			hi = x
		}
	}
	step, least, ok := p.Elem.steps(params, params[p.Elem.size():], lo, hi, p.levels())
	if !ok {
		return false
	}
	inv := inverse(step)
	for i, x := range v {
		v[i] = (x-least)*inv + 0.5
	}
	p.pack(codes, v)
	return true
}

// decodeTokens is the inverse of encodeTokens.
func (p *plan) decodeTokens(m, b []byte) {
	var room [maxWidth]float32
	size := p.Elem.size()
	for r := range p.Rows {
		for c0 := 0; c0 < p.Cols; c0 += maxWidth {
			v := room[:min(maxWidth, p.Cols-c0)]
			p.unpack(v, b[p.codes+r*p.row+c0*p.bits/8:])
			at := p.params + 2*size*(r*groups(p.Cols)+c0/group)
			for g := 0; g < len(v); g += group {
				step, least := p.Elem.value(b[at:]), p.Elem.value(b[at+size:])
				w := v[g:min(g+group, len(v))]
				for i := range w {
					w[i] = float32(w[i]*step) + least
				}
				at += 2 * size
			}
			rotate(v, p.width)
			p.Elem.store(m[(r*p.Cols+c0)*size:], v)
		}
	}
}
