package sampling

import "math"

// candidate is a token that may be drawn. Candidates are ordered by weight, then
// by smaller id; the order is total, so a limit means the same whatever way it
// was found.
type candidate struct {
	id     int32
	weight float64 // exp((logit - largest) / temperature), at most 1
}

// before reports whether c is ordered before d.
func (c candidate) before(d candidate) bool {
	return c.weight > d.weight || c.weight == d.weight && c.id < d.id
}

// Buffer is working memory for one goroutine's samplers; it grows to the size of
// the vocabulary once. The zero value is ready.
type Buffer struct {
	all  []candidate // by id
	work []candidate // permuted while a limit is searched
}

// gather collects the candidates whose logit is at most width below the best.
func (b *Buffer) gather(logits []float32, best int32, width, temperature float64) {
	b.all = b.all[:0]
	m := float64(logits[best])
	low := float32(m - width)
	for i, l := range logits {
		if l >= low {
			b.all = append(b.all, candidate{int32(i), math.Exp((float64(l) - m) / temperature)})
		}
	}
}

// limit returns the last candidate, in order, that top_k and then top_p keep.
func (b *Buffer) limit(topK int, topP float64) candidate {
	none := candidate{id: math.MaxInt32} // after every candidate
	byCount := topK > 0 && topK < len(b.all)
	if !byCount && topP >= 1 {
		return none
	}
	b.work = append(b.work[:0], b.all...)
	last := none
	if byCount {
		nth(b.work, topK-1)
		b.work = b.work[:topK]
		last = b.work[topK-1]
	}
	if topP < 1 {
		last = nucleus(b.work, topP)
	}
	return last
}

// draw walks the kept candidates by id until u of their weight is behind it.
// u is in [0,1).
func (b *Buffer) draw(limit candidate, u float64) int32 {
	total := 0.0
	for _, c := range b.all {
		if !limit.before(c) {
			total += c.weight
		}
	}
	left := u * total
	last := int32(-1)
	for _, c := range b.all {
		if limit.before(c) {
			continue
		}
		last = c.id
		if left -= c.weight; left < 0 {
			break
		}
	}
	return last // rounding may leave a crumb of left over: the last kept one takes it
}

// nth partitions s so that s[k] is what it would be if s were sorted, with
// everything ordered before it on its left.
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
// reach p of their total. It permutes s.
func nucleus(s []candidate, p float64) candidate {
	want := 0.0
	for _, c := range s {
		want += c.weight
	}
	want *= p
	lo, hi := 0, len(s)
	for hi-lo > 1 {
		at := partition(s[lo:hi]) + lo
		left := 0.0
		for _, c := range s[lo:at] {
			left += c.weight
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
	if s[mid].before(s[0]) {
		s[mid], s[0] = s[0], s[mid]
	}
	if s[last].before(s[0]) {
		s[last], s[0] = s[0], s[last]
	}
	if s[mid].before(s[last]) {
		s[mid], s[last] = s[last], s[mid]
	}
	pivot, at := s[last], 0
	for i := range last {
		if s[i].before(pivot) {
			s[i], s[at] = s[at], s[i]
			at++
		}
	}
	s[at], s[last] = s[last], s[at]
	return at
}
