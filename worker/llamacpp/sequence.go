package llamacpp

import (
	"cmp"
	"sync"
	"sync/atomic"
	"time"

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
	given  int // prompt and delivered tokens
	params worker.Params

	out  chan worker.Token // closed after the last token, or after err was set
	err  error
	gone atomic.Bool // the consumer has left and is about to say so

	age     uint64  // counts up in order of arrival
	tokens  []int32 // prompt and answer
	cached  int     // how many of tokens are in the KV; the newest one never is before the next decode
	slot    int     // sequence id in the context, -1 while it waits
	ended   bool    // out is closed; the loop has forgotten the sequence
	sampler *sampling.Sampler

	// stored is what is left to load; the consumer's until the sequence is queued.
	stored   worker.KVChain
	loading  time.Duration // spent on loading so far
	restored int           // tokens whose KV was loaded
	shared   int           // tokens whose KV came from a running sequence
	lossy    bool          // some of what was loaded may have been quantized
	// Tokens from exactFrom up to exactTo are decoded one at a time.
	exactFrom, exactTo int
	mixed              bool // others were in a batch that should have been a single token
	begun              bool // a token was sent

	preempted bool  // it gave way and has not been started again
	slow      bool  // it gave way because its consumer was behind
	saved     saved // its KV at that time, until it is loaded again
	again     bool  // stored is KV of its own from before it gave way
	// fetching says that its session is looking for stored KV, beside the loop, in
	// errand; lastStep that the session is to be told of the end after that.
	fetching, lastStep bool
	errand             sync.WaitGroup
}

func newSequence(ids []int32, p worker.Params) *sequence {
	if p.Request == nil {
		p.Request = worker.NewRequest(1, 1)
	}
	s := &sequence{
		prompt:  len(ids) - p.Delivered,
		given:   len(ids),
		params:  p,
		out:     make(chan worker.Token, outBuffer),
		tokens:  make([]int32, len(ids), len(ids)+min(p.MaxTokens, 256)),
		slot:    -1,
		sampler: sampling.New(p),
	}
	copy(s.tokens, ids)
	s.sampler.Prompt(ids[:s.prompt])
	s.sampler.Observe(ids[s.prompt:]...)
	return s
}

// chunk is how many tokens of s may be decoded in one batch.
func (s *sequence) chunk() int {
	if s.exactFrom <= s.cached && s.cached < s.exactTo {
		return 1
	}
	return s.pending()
}

// forget gives stored KV back that was not loaded.
func (s *sequence) forget() {
	done := s.stored.Done
	s.stored = worker.KVChain{}
	if done != nil {
		done(s.restored, s.loading, nil)
	}
}

// pending is how many tokens must be decoded before the next one can be chosen.
func (s *sequence) pending() int { return len(s.tokens) - s.cached }

// resting reports that the consumer must take a token first. Only the loop sends,
// so room that is seen stays.
func (s *sequence) resting() bool { return len(s.out) == cap(s.out) }

// ready reports that s can be decoded: it loads no stored KV and its consumer has
// room for what comes.
func (s *sequence) ready() bool {
	return len(s.stored.Ranges) == 0 && !s.fetching && !s.resting()
}

// back reports that a waiting sequence has use for a place. One whose consumer was
// behind must have caught up by half, or it would come and go with every token.
func (s *sequence) back() bool {
	return !s.resting() && (!s.slow || len(s.out) <= cap(s.out)/2)
}

// order sorts by priority, then by age.
func order(a, b *sequence) int {
	return cmp.Or(cmp.Compare(b.params.Priority, a.params.Priority), cmp.Compare(a.age, b.age))
}

// end closes the way to the consumer, with the error it will see after the tokens
// it has not taken, or nil after a token with Finish.
func (s *sequence) end(err error) {
	s.err, s.ended = err, true
	close(s.out)
}
