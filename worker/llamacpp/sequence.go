package llamacpp

import (
	"sync/atomic"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sampling"
)

// outBuffer is how many tokens a sequence may be ahead of its consumer: a second or
// so of a small model, enough to tell a consumer that has stopped from one that is
// scheduled late.
const outBuffer = 32

// sequence is one call of Generate. The fields of the first paragraph do not
// change; the second paragraph is shared by the loop and the consumer; the rest
// belongs to the loop.
type sequence struct {
	prompt int // tokens of the prompt
	params worker.Params

	out  chan worker.Token // closed after the last token, or after err was set
	err  error
	gone atomic.Bool // the consumer has left and is about to say so

	tokens  []int32 // prompt and answer
	cached  int     // how many of tokens are in the KV; the newest one never is before the next decode
	slot    int     // sequence id in the context, -1 while it waits
	ended   bool    // out is closed; the loop has forgotten the sequence
	sampler *sampling.Sampler
}

func newSequence(ids []int32, p worker.Params) *sequence {
	s := &sequence{
		prompt:  len(ids),
		params:  p,
		out:     make(chan worker.Token, outBuffer),
		tokens:  make([]int32, len(ids), len(ids)+min(p.MaxTokens, 256)),
		slot:    -1,
		sampler: sampling.New(p),
	}
	copy(s.tokens, ids)
	s.sampler.Prompt(ids)
	return s
}

// pending is how many tokens must be decoded before the next one can be chosen.
func (s *sequence) pending() int { return len(s.tokens) - s.cached }

// resting reports that the consumer must take a token first. Only the loop sends,
// so room that is seen stays.
func (s *sequence) resting() bool { return len(s.out) == cap(s.out) }

// end closes the way to the consumer, with the error it will see after the tokens
// it has not taken, or nil after a token with Finish.
func (s *sequence) end(err error) {
	s.err, s.ended = err, true
	close(s.out)
}
