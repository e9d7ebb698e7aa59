package sim

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// Generate implements worker.Engine.
func (e *Engine) Generate(ctx context.Context, ids []int32, p worker.Params) iter.Seq2[worker.Token, error] {
	return func(yield func(worker.Token, error) bool) {
		in, bad := parseInstructions(p.Sim)
		if bad != nil {
			yield(worker.Token{}, bad)
			return
		}
		if len(ids) == 0 {
			yield(worker.Token{}, openai.Invalid("prompt", "Invalid 'prompt': it holds no token."))
			return
		}
		if _, err := e.fits(ids, "prompt"); err != nil {
			yield(worker.Token{}, err)
			return
		}
		r := p.Request
		if r == nil {
			r = worker.NewRequest(1, 1)
		}
		leave, err := r.Enter(e.take, e.give)
		if err != nil {
			yield(worker.Token{}, err)
			return
		}
		defer leave()
		kv := e.restore(ctx, ids, p)
		if err := e.enter(ctx); err != nil {
			yield(worker.Token{}, err)
			return
		}
		s := e.newSequence(ids, p, in, kv)
		defer s.leave()
		for {
			t, err := s.next(ctx)
			if !yield(t, err) || err != nil || t.Finish != "" {
				return
			}
		}
	}
}

// sequence is one running generation, used by one goroutine.
type sequence struct {
	e         *Engine
	in        Instructions
	p         worker.Params
	ids       []int32 // the last tokens; all that openCharacter looks at
	state     uint64  // hash of all tokens so far
	length    int     // tokens so far, prompt included
	said      int     // tokens generated, those delivered before included
	first     bool    // nothing was generated here yet
	answerLen int     // 0 = no end of its own
	due       time.Time
	itl       time.Duration
	step      time.Duration // tokens are due at multiples of it, 0 = at any time
	text      []byte        // of the current token
	kv        *kvState      // nil = nobody keeps it
	restored  int           // tokens whose KV was
	newest    int32         // token without KV yet, when more is set
	more      bool
}

// newSequence fixes speeds and length for one request; later changes of the
// settings reach later requests only.
func (e *Engine) newSequence(ids []int32, p worker.Params, in Instructions, kv *kvState) *sequence {
	e.mu.Lock()
	over := e.over
	e.mu.Unlock()
	restored := 0
	if kv != nil {
		restored = kv.restored
	}
	ttft := duration(over.ttftMs, e.cfg.TTFT) + time.Duration(len(ids)-restored)*e.cfg.PrefillPerToken
	s := &sequence{
		e: e, in: in, p: p, kv: kv, restored: restored, length: len(ids), said: p.Delivered, first: true, answerLen: e.cfg.AnswerLen,
		due:  time.Now().Add(duration(in.TTFTms, ttft)),
		itl:  duration(in.ITLms, duration(over.itlMs, e.cfg.ITL)),
		step: duration(in.StepMs, 0),
		// The choice is part of the start, so that choices of one request differ.
		state: mix(e.key ^ uint64(p.Choice)<<32),
	}
	if p.Temperature > 0 {
		s.state = mix(s.state ^ p.Seed)
	}
	for _, id := range ids {
		s.state = mix(s.state ^ uint64(id))
	}
	s.ids = append(s.ids, ids[max(0, len(ids)-4):]...)
	if in.Max != nil {
		s.answerLen = *in.Max
	}
	e.held.Add(int64(len(ids)))
	return s
}

// leave frees the sequence and its tokens.
func (s *sequence) leave() {
	s.keep(true)
	s.e.held.Add(-int64(s.length))
	<-s.e.slots
}

// next waits until the token is due and makes it.
func (s *sequence) next(ctx context.Context) (worker.Token, error) {
	if err := s.wait(ctx); err != nil {
		return worker.Token{}, err
	}
	s.keep(false)
	t := worker.Token{ID: s.choose()}
	if s.first {
		s.e.prompts.Add(uint64(s.length - s.restored))
		t.Cached, t.Restored = min(s.restored, s.length-s.p.Delivered), s.restored
		t.Lossy = s.kv != nil && s.kv.lossy
		t.Exact = s.restored >= s.length-s.p.Delivered && s.restored > 0 && !t.Lossy
	}
	if s.answerLen > 0 && s.said+1 > s.answerLen && !s.p.IgnoreEOS {
		t.ID, t.Finish = idEnd, "stop"
	}
	s.text = s.e.tok.decode(s.text[:0], t.ID)
	t.Bytes = s.text
	if s.p.TopLogprobs >= 0 {
		t.Logprob, t.Top = s.logprobs(t)
	}
	s.said++
	s.first = false
	s.length++
	s.e.held.Add(1)
	s.e.generated.Add(1)
	s.state = mix(s.state ^ uint64(t.ID))
	s.newest, s.more = t.ID, true
	if len(s.ids) >= 4 {
		copy(s.ids, s.ids[1:])
		s.ids = s.ids[:3]
	}
	s.ids = append(s.ids, t.ID)
	if t.Finish == "" && (s.said-s.p.Delivered >= s.p.MaxTokens || s.length >= s.e.cfg.ContextLen) {
		t.Finish = "length"
	}
	return t, nil
}

// wait sleeps until the next token is due, through a stall if one was asked for.
func (s *sequence) wait(ctx context.Context) error {
	if !s.first {
		s.due = s.due.Add(s.itl)
	}
	// One that has stalled a stream does not stall its continuation too.
	if s.in.StallAt != nil && *s.in.StallAt == s.said && (s.p.Delivered == 0 || s.said > s.p.Delivered) {
		if s.in.StallMs == nil {
			return s.sleep(ctx, nil)
		}
		s.due = s.due.Add(duration(s.in.StallMs, 0))
	}
	if at := s.due.Truncate(s.step); s.step > 0 && at.Before(s.due) {
		s.due = at.Add(s.step)
	}
	if d := time.Until(s.due); d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		return s.sleep(ctx, timer.C)
	}
	s.due = time.Now() // a consumer that was late is not caught up with
	select {
	case <-s.e.closed:
		return errClosed
	default:
		return ctx.Err()
	}
}

// sleep blocks until c delivers; a nil c never does.
func (s *sequence) sleep(ctx context.Context, c <-chan time.Time) error {
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.e.closed:
		return errClosed
	}
}

// choose picks the next token from the hash of those before it: the rest of a
// character that has begun, else mostly a word, now and then a sign.
func (s *sequence) choose() int32 {
	if id, open := openCharacter(s.ids); open {
		return id
	}
	h := mix(s.state)
	if s.lies() {
		return s.otherWord(h)
	}
	switch h % 32 {
	case 0:
		return '.'
	case 1:
		return ','
	case 2:
		return '"'
	case 3:
		return '\n'
	case 4, 5:
		if s.answerLen == 0 || s.answerLen-s.said >= utf8.UTFMax { // room to spell it out
			signs := specials()
			return int32(signs[h>>8%uint64(len(signs))][0])
		}
	}
	return s.word(h >> 8)
}

// lies reports whether the next token is to be a wrong one. A continuation of what was
// delivered with it does not lie again.
func (s *sequence) lies() bool {
	return s.in.WrongAt != nil && s.said >= *s.in.WrongAt && s.p.Delivered <= *s.in.WrongAt
}

// otherWord is a word that the hash would not pick.
func (s *sequence) otherWord(h uint64) int32 {
	s.in.WrongAt = nil
	right := s.choose()
	if wrong := s.word(h >> 8); wrong != right {
		return wrong
	}
	return s.word(h>>8 + 1)
}

// word picks a common word by a hash.
func (s *sequence) word(h uint64) int32 { return idWords + int32(h%uint64(len(s.e.tok.words))) }

// logprobs invents probabilities: the chosen token first, then other words.
func (s *sequence) logprobs(t worker.Token) (float64, []worker.Logprob) {
	h := mix(s.state ^ 1)
	own := -float64(h%1000) / 2000
	top := make([]worker.Logprob, 0, s.p.TopLogprobs)
	for i := range s.p.TopLogprobs {
		l := worker.Logprob{ID: t.ID, Bytes: slices.Clone(t.Bytes), Logprob: own}
		if i > 0 {
			l.ID = s.word(h + uint64(i))
			l.Bytes = s.e.tok.decode(nil, l.ID)
			l.Logprob = own - float64(i)
		}
		top = append(top, l)
	}
	slices.SortStableFunc(top, func(a, b worker.Logprob) int { return cmp.Compare(b.Logprob, a.Logprob) })
	return own, top
}

// mix is the finalizer of splitmix64: a bijection that spreads every bit.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// roleID is the token that begins a message of a role; an unknown role, which
// Parse refuses anyway, counts as system.
func roleID(role string) int32 {
	id := idRole0
	for r := range strings.FieldsSeq(roles) {
		if r == role {
			return id
		}
		id++
	}
	return idRole0
}
