package sampling

import (
	"errors"
	"fmt"
	"math"
)

// Constraint limits which tokens may come next, as a grammar does. Its state is a
// function of the tokens it has accepted. It is not safe for concurrent use.
type Constraint interface {
	// Allow sets ok[i] to whether ids[i] may come next; ids and ok have one length.
	Allow(ids []int32, ok []bool)
	// Accept takes a token that Allow has allowed.
	Accept(id int32)
	// Close frees what the constraint holds.
	Close()
}

// ErrOutside is returned when a token breaks the constraint that it is said to have
// followed.
var ErrOutside = errors.New("the tokens do not follow the grammar")

// ErrStuck is returned when the constraint allows no token of the vocabulary.
var ErrStuck = errors.New("no token of the model continues the grammar")

// Constrain makes the sampler keep to c, which has accepted nothing yet; past are
// the tokens that the sampler was told of by Observe. The sampler does not close c.
//
// Tokens are drawn without replacement until one is allowed, which gives each the
// probability it has among those allowed, and asks the constraint about one token
// in most steps instead of the whole vocabulary. Only when many were drawn in vain
// all are asked about. top_k, top_p and min_p count before the constraint; if they
// leave nothing that it allows, they are applied to what it allows instead.
func (s *Sampler) Constrain(c Constraint, past []int32) error {
	ok := make([]bool, 1)
	for i := range past {
		if c.Allow(past[i:i+1], ok); !ok[0] {
			return fmt.Errorf("%w: token %d at offset %d", ErrOutside, past[i], i)
		}
		c.Accept(past[i])
	}
	s.limits = c
	return nil
}

// How many tokens are tried before all are asked about, in two calls: most steps
// need one.
const (
	fewTries  = 1
	manyTries = 48
)

// constrained chooses as Next does, within the limits. best is the first of the
// largest logits.
func (s *Sampler) constrained(logits []float32, best int32, buf *Buffer) (int32, error) {
	var id int32
	found := false
	if s.p.Temperature > 0 && !math.IsInf(float64(logits[best]), 1) {
		s.prepare(logits, best, buf)
		id, found = s.drawAllowed(buf)
	} else {
		id, found = s.bestAllowed(logits, best, buf)
	}
	if !found {
		var err error
		if id, err = s.amongAllowed(logits, buf); err != nil {
			return 0, err
		}
	}
	s.limits.Accept(id)
	return id, nil
}

// bestAllowed returns the first allowed one of the most probable tokens.
func (s *Sampler) bestAllowed(logits []float32, best int32, buf *Buffer) (int32, bool) {
	if id, ok := s.firstAllowed(append(buf.ids[:0], best), buf); ok {
		return id, true
	}
	buf.ids = buf.ids[:0]
	for _, a := range top(logits, manyTries, 0) {
		if !math.IsInf(a.Logprob, -1) {
			buf.ids = append(buf.ids, a.ID)
		}
	}
	return s.firstAllowed(buf.ids, buf)
}

// firstAllowed asks about ids, which it keeps in buf.
func (s *Sampler) firstAllowed(ids []int32, buf *Buffer) (int32, bool) {
	buf.ids = ids
	for i, ok := range buf.allowed(s.limits) {
		if ok {
			return ids[i], true
		}
	}
	return 0, false
}

// drawAllowed draws from the prepared candidates until one is allowed.
func (s *Sampler) drawAllowed(buf *Buffer) (int32, bool) {
	numbers := newNumbers(s.p.Seed, s.p.Choice, s.offset)
	for _, n := range [...]int{fewTries, manyTries} {
		buf.ids = buf.ids[:0]
		for range n {
			at := buf.drawIndex(numbers.next())
			if at < 0 {
				break
			}
			buf.all[at].weight = 0
			buf.ids = append(buf.ids, buf.all[at].id)
		}
		if id, ok := s.firstAllowed(buf.ids, buf); ok {
			return id, true
		}
	}
	// The rest, all at once.
	n := 0
	for _, c := range buf.all {
		if c.weight > 0 {
			buf.all[n] = c
			n++
		}
	}
	buf.all, buf.ids = buf.all[:n], buf.ids[:0]
	for _, c := range buf.all {
		buf.ids = append(buf.ids, c.id)
	}
	for i, ok := range buf.allowed(s.limits) {
		if !ok {
			buf.all[i].weight = 0
		}
	}
	if at := buf.drawIndex(numbers.next()); at >= 0 {
		return buf.all[at].id, true
	}
	return 0, false
}

// amongAllowed chooses when no probable token is allowed: it asks about the whole
// vocabulary and starts again with what is left.
func (s *Sampler) amongAllowed(logits []float32, buf *Buffer) (int32, error) {
	buf.ids = buf.ids[:0]
	for i, l := range logits {
		if l > float32(math.Inf(-1)) { // false for NaN
			buf.ids = append(buf.ids, int32(i))
		}
	}
	for i, ok := range buf.allowed(s.limits) {
		if !ok {
			logits[buf.ids[i]] = float32(math.Inf(-1))
		}
	}
	best := argmax(logits)
	if best < 0 {
		return 0, ErrStuck
	}
	if s.p.Temperature > 0 && !math.IsInf(float64(logits[best]), 1) {
		return s.draw(logits, best, buf), nil
	}
	return best, nil
}

// allowed asks c about b.ids; the answer is valid until the next call.
func (b *Buffer) allowed(c Constraint) []bool {
	if cap(b.ok) < len(b.ids) {
		b.ok = make([]bool, len(b.ids), max(64, len(b.ids)))
	}
	b.ok = b.ok[:len(b.ids)]
	if len(b.ids) > 0 {
		c.Allow(b.ids, b.ok)
	}
	return b.ok
}
