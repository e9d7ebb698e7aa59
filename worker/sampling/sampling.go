// Package sampling turns the logits of one decoding step into a token. It is
// pure: a step's result is a function of the request's parameters, the tokens
// chosen so far, the offset and the logits, so a stream that moves to another
// worker goes on as it would have. Nothing here sorts the vocabulary: every step
// is a few linear passes over it.
//
// Order of operations, as in vLLM: logit_bias, repetition, presence and frequency
// penalties, temperature, min_p, top_k, top_p, draw. Reported log-probabilities are those of
// the model itself, before any of them.
package sampling

import (
	"errors"
	"math"

	"github.com/kvmesh/kvmesh/worker"
)

// ErrNoLogits is returned when no logit is a number; the model or its KV is broken.
var ErrNoLogits = errors.New("the model gave no usable logits")

// cutoff bounds the weights that take part in a draw: tokens below e^-32 of the
// most probable one are left out. With a vocabulary of 2^18 all of them together
// weigh less than 4e-9 of it.
const cutoff = 32

// Alternative is one token with its log-probability (natural log).
type Alternative struct {
	ID      int32
	Logprob float64
}

// Pick is the outcome of one step.
type Pick struct {
	ID      int32
	Logprob float64       // of ID; only when log-probabilities were asked for
	Top     []Alternative // most probable first; only when asked for; owned by the caller
}

// Sampler chooses the tokens of one choice of one request. Its state is what it has
// chosen, nothing else: New and Observe rebuild it anywhere. It is not safe for
// concurrent use.
type Sampler struct {
	p      worker.Params // MaxTokens, IgnoreEOS and Sim mean nothing here
	counts map[int32]int // how often each token was generated, 0 for one only in the prompt; nil without penalties
	offset uint64        // tokens generated so far
	limits Constraint    // nil = none
}

// New returns a sampler at offset 0.
func New(p worker.Params) *Sampler {
	s := &Sampler{p: p}
	if p.Presence != 0 || p.Frequency != 0 || s.repeats() {
		s.counts = make(map[int32]int)
	}
	return s
}

// repeats reports whether a repetition penalty is on.
func (s *Sampler) repeats() bool { return s.p.Repetition != 0 && s.p.Repetition != 1 }

// Prompt tells the prompt's ids, which the repetition penalty counts too. Call it
// once, before Next.
func (s *Sampler) Prompt(ids []int32) {
	if !s.repeats() {
		return
	}
	for _, id := range ids {
		s.counts[id] += 0
	}
}

// Observe counts ids as generated, as if Next had returned them: penalties and
// offset go on from there.
func (s *Sampler) Observe(ids ...int32) {
	s.offset += uint64(len(ids))
	if s.counts == nil {
		return
	}
	for _, id := range ids {
		s.counts[id]++
	}
}

// Next chooses the next token and counts it. It changes logits in place. buf is
// working memory that samplers of one goroutine may share.
func (s *Sampler) Next(logits []float32, buf *Buffer) (Pick, error) {
	var pick Pick
	var total float64 // log of the sum of all exponentials
	if s.p.TopLogprobs >= 0 {
		total = logSumExp(logits)
		pick.Top = top(logits, s.p.TopLogprobs, total)
	}
	changed := s.adjust(logits)
	best := argmax(logits)
	if best < 0 {
		return Pick{}, ErrNoLogits
	}
	pick.ID = best
	if s.limits != nil {
		var err error
		if pick.ID, err = s.constrained(logits, best, buf); err != nil {
			return Pick{}, err
		}
	} else if s.p.Temperature > 0 && !math.IsInf(float64(logits[best]), 1) {
		pick.ID = s.draw(logits, best, buf)
	}
	if s.p.TopLogprobs >= 0 {
		raw, ok := changed[pick.ID]
		if !ok {
			raw = logits[pick.ID] // a token that was chosen was not made impossible
		}
		pick.Logprob = float64(raw) - total
	}
	s.Observe(pick.ID)
	return pick, nil
}

// adjust applies logit_bias and the penalties, and returns the logits they
// replaced (only collected when log-probabilities are wanted).
func (s *Sampler) adjust(logits []float32) map[int32]float32 {
	var old map[int32]float32
	if s.p.TopLogprobs >= 0 && len(s.p.LogitBias)+len(s.counts) > 0 {
		old = make(map[int32]float32, len(s.p.LogitBias)+len(s.counts))
	}
	change := func(id int32, to func(float32) float32) {
		if id < 0 || int(id) >= len(logits) {
			return
		}
		if _, ok := old[id]; !ok && old != nil {
			old[id] = logits[id]
		}
		logits[id] = to(logits[id])
	}
	for id, bias := range s.p.LogitBias {
		change(id, func(l float32) float32 { return l + float32(bias) })
	}
	for id, n := range s.counts {
		change(id, func(l float32) float32 { return s.penalize(l, n) })
	}
	return old
}

// penalize lowers the logit of a token that was generated n times, or is in the
// prompt. The repetition penalty divides, so that one above 1 always lowers.
func (s *Sampler) penalize(l float32, n int) float32 {
	if s.repeats() {
		if l > 0 {
			l /= float32(s.p.Repetition)
		} else {
			l *= float32(s.p.Repetition)
		}
	}
	if n > 0 {
		l -= float32(s.p.Presence + float64(n)*s.p.Frequency)
	}
	return l
}

// draw samples at a temperature above 0. best is the index of the largest logit.
func (s *Sampler) draw(logits []float32, best int32, buf *Buffer) int32 {
	s.prepare(logits, best, buf)
	return buf.draw(newNumbers(s.p.Seed, s.p.Choice, s.offset).next())
}

// prepare fills buf with the weighed candidates that the limits leave.
func (s *Sampler) prepare(logits []float32, best int32, buf *Buffer) {
	// min_p is a bound on the logits too: w >= p means logit >= largest + T·ln p.
	width := s.p.Temperature * cutoff
	if s.p.MinP > 0 {
		width = min(width, -s.p.Temperature*math.Log(s.p.MinP))
	}
	m := float64(logits[best])
	buf.gather(logits, m, width)
	buf.keepTop(s.p.TopK)
	buf.weigh(m, s.p.Temperature)
	buf.keepMass(s.p.TopP)
}

// argmax returns the first index of the largest logit, -1 when none is a number
// above -Inf.
func argmax(logits []float32) int32 {
	at, best := -1, float32(math.Inf(-1))
	for i, l := range logits {
		if l > best { // false for NaN
			at, best = i, l
		}
	}
	return int32(at)
}

// logSumExp returns the log of the sum of all exponentials, those far below the
// largest left out.
func logSumExp(logits []float32) float64 {
	best := argmax(logits)
	if best < 0 {
		return math.Inf(-1)
	}
	m := float64(logits[best])
	low := float32(m - cutoff)
	sum := 0.0
	for _, l := range logits {
		if l >= low {
			sum += exp(float64(l) - m)
		}
	}
	return m + math.Log(sum)
}

// top returns the n largest logits as log-probabilities, ties by id. n is at most
// a few tens: nearly every logit fails one comparison and is done.
func top(logits []float32, n int, total float64) []Alternative {
	n = min(n, len(logits))
	if n <= 0 {
		return nil
	}
	out := make([]Alternative, 0, n)
	low := math.Inf(-1)
	for i, l := range logits {
		v := float64(l)
		if math.IsNaN(v) || len(out) == n && v <= low {
			continue
		}
		at := len(out)
		for at > 0 && out[at-1].Logprob < v {
			at--
		}
		if len(out) < n {
			out = append(out, Alternative{})
		}
		copy(out[at+1:], out[at:])
		out[at] = Alternative{ID: int32(i), Logprob: v}
		low = out[len(out)-1].Logprob
	}
	for i := range out {
		out[i].Logprob -= total
	}
	return out
}
