package sampling

// candidate is a token that may be drawn. Candidates are ordered by logit, then by
// smaller id; the order is total, so a limit means the same whatever way it was
// found.
type candidate struct {
	id     int32
	logit  float32
	weight float64 // exp((logit - largest) / temperature), at most 1
}

// before reports whether c is ordered before d.
func (c *candidate) before(d *candidate) bool {
	return c.logit > d.logit || c.logit == d.logit && c.id < d.id
}

// Buffer is working memory for one goroutine's samplers; it grows to the size of
// the vocabulary once. The zero value is ready.
type Buffer struct {
	all  []candidate // those left, by id
	work []candidate // a copy, permuted while a limit is searched

	ids []int32 // a constraint is asked about
	ok  []bool  // its answer
}

// gather collects the candidates whose logit is at most width below m.
func (b *Buffer) gather(logits []float32, m, width float64) {
	b.all = b.all[:0]
	low := float32(m - width)
	for i, l := range logits {
		if l >= low {
			b.all = append(b.all, candidate{id: int32(i), logit: l})
		}
	}
}

// keepTop leaves the k candidates that come first in order.
func (b *Buffer) keepTop(k int) {
	if k <= 0 || k >= len(b.all) {
		return
	}
	b.work = append(b.work[:0], b.all...)
	nth(b.work, k-1)
	b.keep(b.work[k-1])
}

// weigh computes the weights of what is left.
func (b *Buffer) weigh(m, temperature float64) {
	scale := 1 / temperature
	for i := range b.all {
		if d := float64(b.all[i].logit) - m; d < 0 { // at 0, scale may be infinite
			b.all[i].weight = exp(d * scale)
		} else {
			b.all[i].weight = 1
		}
	}
}

// keepMass leaves the first candidates, in order, whose weights make up the part p.
func (b *Buffer) keepMass(p float64) {
	if p >= 1 {
		return
	}
	b.work = append(b.work[:0], b.all...)
	b.keep(nucleus(b.work, p))
}

// keep leaves last and those before it, still by id.
func (b *Buffer) keep(last candidate) {
	n := 0
	for i := range b.all {
		if !last.before(&b.all[i]) {
			b.all[n] = b.all[i]
			n++
		}
	}
	b.all = b.all[:n]
}

// draw walks the candidates by id until the part u of their weight is behind it.
// u is in [0,1).
func (b *Buffer) draw(u float64) int32 { return b.all[b.drawIndex(u)].id }

// drawIndex is draw for the index; -1 when all weights are 0.
func (b *Buffer) drawIndex(u float64) int {
	total := 0.0
	for i := range b.all {
		total += b.all[i].weight
	}
	left, last := u*total, -1
	for i := range b.all {
		if b.all[i].weight == 0 {
			continue
		}
		last = i
		if left -= b.all[i].weight; left < 0 {
			break
		}
	}
	return last // when rounding left a crumb over, the last one takes it
}

// nth partitions s so that s[k] is what it would be if s were sorted, with
// everything ordered before it on its left: quickselect, linear on average.
func nth(s []candidate, k int) {
	lo, hi := 0, len(s)
	for hi-lo > 1 {
		p := partition(s[lo:hi]) + lo
		switch {
		case p == k:
			return
		case p < k:
			lo = p + 1
		default:
			hi = p
		}
	}
}

// nucleus returns the candidate at which the weights, summed in order, first
// reach p of their total. It is quickselect by weight instead of count: the side
// that does not hold the answer is only summed, never sorted. It permutes s.
func nucleus(s []candidate, p float64) candidate {
	want := 0.0
	for i := range s {
		want += s[i].weight
	}
	want *= p
	lo, hi := 0, len(s) // the answer is in s[lo:hi], want is what must be reached there
	for hi-lo > 1 {
		at := partition(s[lo:hi]) + lo
		left := 0.0
		for i := lo; i < at; i++ {
			left += s[i].weight
		}
		switch {
		case left >= want && at > lo:
			hi = at
		case left+s[at].weight >= want || at+1 == hi:
			return s[at]
		default:
			want -= left + s[at].weight
			lo = at + 1
		}
	}
	return s[lo]
}

// partition moves a middle element to its sorted place, what is ordered before
// it to the left, and returns that place. s is not empty.
func partition(s []candidate) int {
	last := len(s) - 1
	mid := last / 2
	// median of three to the end: sorted input stays linear
	if s[mid].before(&s[0]) {
		s[mid], s[0] = s[0], s[mid]
	}
	if s[last].before(&s[0]) {
		s[last], s[0] = s[0], s[last]
	}
	if s[mid].before(&s[last]) {
		s[mid], s[last] = s[last], s[mid]
	}
	pivot, at := s[last], 0
	for i := range last {
		if s[i].before(&pivot) {
			s[i], s[at] = s[at], s[i]
			at++
		}
	}
	s[at], s[last] = s[last], s[at]
	return at
}
