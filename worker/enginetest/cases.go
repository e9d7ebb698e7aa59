package enginetest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// describes: a model says who it is, and a fresh engine holds nothing.
func (s *suite) describes() {
	m := s.e.Model()
	if m.Name == "" || m.Fingerprint == "" || m.ContextLen < 64 || m.Vocab < 2 {
		s.Errorf("Model() = %+v: want a name, a fingerprint, a context of at least 64 and a vocabulary", m)
	}
	if l := s.e.Load(); l.MaxRunning < 2 {
		s.Errorf("MaxRunning = %d, want at least 2", l.MaxRunning)
	}
	s.idle("start")
}

// tokenizesPrompts: each prompt of a list by its index, ids as they are, and text with
// NUL, emoji or the names of special tokens is no error.
func (s *suite) tokenizesPrompts() {
	req := s.request(openai.Completions, `{"model":"m","prompt":["Hello there","Bye"]}`)
	first, err1 := s.e.Tokenize(req, 0)
	second, err2 := s.e.Tokenize(req, 1)
	if err1 != nil || err2 != nil {
		s.Fatalf("Tokenize: %v, %v", err1, err2)
	}
	if len(first) == 0 || len(second) == 0 || slices.Equal(first, second) {
		s.Errorf("prompts give %v and %v, want two different lists", first, second)
	}
	again, err3 := s.e.Tokenize(s.request(openai.Completions, fmt.Sprintf(`{"model":"m","prompt":%s}`, list(first))), 0)
	if err3 != nil || !slices.Equal(again, first) {
		s.Errorf("ids as a prompt give %v, %v; want them as they are: %v", again, err3, first)
	}
	empty, err := openai.ParseTokenize([]byte(`{"prompt":"","add_special_tokens":false}`))
	if err != nil {
		s.Fatal(err)
	}
	if got, err := s.e.Tokenize(empty.Request, 0); err != nil || len(got) != 0 {
		s.Errorf("an empty text gives %v, %v; want no tokens", got, err)
	}
	for _, odd := range []string{`a\u0000b`, `\ud83d\ude00 \u200d`, `<|im_end|></s><eos>`, ` `} {
		if _, err := s.e.Tokenize(s.request(openai.Completions, `{"model":"m","prompt":"x`+odd+`"}`), 0); err != nil {
			s.Errorf("Tokenize of %q: %v", odd, err)
		}
	}
}

// tokenizesChat: messages reach the model, content may be a string or parts, and a
// bad message is a client's error that names it.
func (s *suite) tokenizesChat() {
	body := func(text string) string {
		return `{"model":"m","messages":[{"role":"user","content":"` + text + `"},{"role":"assistant","content":"ok"},{"role":"user","content":[{"type":"text","text":"go"}]}]}`
	}
	one, err1 := s.e.Tokenize(s.request(openai.Chat, body("Hello")), 0)
	two, err2 := s.e.Tokenize(s.request(openai.Chat, body("Goodbye")), 0)
	if err1 != nil || err2 != nil {
		s.Fatalf("Tokenize: %v, %v", err1, err2)
	}
	if len(one) == 0 || slices.Equal(one, two) {
		s.Errorf("different messages give %v and %v", one, two)
	}
	_, err := s.e.Tokenize(s.request(openai.Chat, `{"model":"m","messages":[{"content":"x"}]}`), 0)
	s.wantParam(err, "messages[0].role")
}

// refusesForeignIDs: ids outside the vocabulary and empty prompts are errors in both
// places where they can come in, and the engine survives them.
func (s *suite) refusesForeignIDs() {
	vocab := s.e.Model().Vocab
	_, err := s.e.Tokenize(s.request(openai.Completions, fmt.Sprintf(`{"model":"m","prompt":[1,%d]}`, vocab)), 0)
	s.wantParam(err, "prompt")
	for _, id := range []int32{-1, int32(vocab), math.MaxInt32} {
		if toks, err := s.collect([]int32{1, id}, greedy(4)); err == nil {
			s.Errorf("Generate with token id %d gave %d tokens, want an error", id, len(toks))
		}
	}
	if toks, err := s.collect(nil, greedy(4)); err == nil {
		s.Errorf("Generate without a prompt gave %d tokens, want an error", len(toks))
	}
	s.idle("refused prompts")
	s.generate(s.prompt("still alive"), greedy(2))
}

// refusesLongPrompts: a prompt that leaves no room for an answer is OpenAI's
// context_length_exceeded, with the field of the endpoint as param.
func (s *suite) refusesLongPrompts() {
	limit := s.e.Model().ContextLen
	long := strings.Repeat("word ", 3*limit)
	tooLong := func(err error, params ...string) {
		if oe := s.wantParam(err, params...); oe != nil && oe.Code != "context_length_exceeded" {
			s.Errorf("code is %q, want context_length_exceeded", oe.Code)
		}
	}
	_, err := s.e.Tokenize(s.request(openai.Completions, `{"model":"m","prompt":"`+long+`"}`), 0)
	tooLong(err, "prompt")
	_, err = s.e.Tokenize(s.request(openai.Chat, `{"model":"m","messages":[{"role":"user","content":"`+long+`"}]}`), 0)
	tooLong(err, "messages")
	_, err = s.collect(make([]int32, limit), greedy(1))
	tooLong(err, "prompt")
}

// maxTokens: exactly so many tokens, Finish on the last one only, all of it freed
// when the consumer sees the end, and counted.
func (s *suite) maxTokens() {
	prompt := s.prompt("One two three")
	before := s.e.Load()
	for _, n := range []int{1, 2, 17} {
		out := s.generate(prompt, greedy(n))
		if len(out) != n {
			s.Errorf("MaxTokens %d gave %d tokens", n, len(out))
		}
		for i, tok := range out {
			want := ""
			if i == len(out)-1 {
				want = "length"
			}
			if tok.Finish != want {
				s.Errorf("MaxTokens %d: token %d has Finish %q, want %q", n, i, tok.Finish, want)
			}
			if tok.ID < 0 || int(tok.ID) >= s.e.Model().Vocab {
				s.Errorf("token id %d is outside the vocabulary", tok.ID)
			}
		}
		s.idle("a whole generation")
	}
	after := s.e.Load()
	if got := after.GenTokens - before.GenTokens; got != 1+2+17 {
		s.Errorf("GenTokens grew by %d, want 20", got)
	}
	if after.PromptTokens == before.PromptTokens {
		s.Error("PromptTokens did not grow")
	}
}

// contextEnd: the answer ends with the context, whatever MaxTokens says.
func (s *suite) contextEnd() {
	limit := s.e.Model().ContextLen
	prompt := s.prompt("go")
	full := slices.Clone(prompt)
	for len(full) < limit-3 {
		full = append(full, prompt[len(prompt)-1])
	}
	out := s.generate(full, greedy(100))
	if len(out) != 3 || out[len(out)-1].Finish != "length" {
		s.Errorf("with room for 3 tokens: %d tokens, Finish %q, want 3 and length", len(out), out[len(out)-1].Finish)
	}
}

// deterministic: the same prompt, parameters and seed give the same tokens on an
// engine that does nothing else.
func (s *suite) deterministic() {
	prompt := s.prompt("The quick brown fox")
	for name, p := range map[string]worker.Params{"greedy": greedy(10), "seeded": sampled(10, 42, 0)} {
		one, two := ids(s.generate(prompt, p)), ids(s.generate(prompt, p))
		if !slices.Equal(one, two) {
			s.Errorf("%s: two runs differ:\n%v\n%v", name, one, two)
		}
	}
}

// sampledByKey: seed and choice both change what is drawn.
func (s *suite) sampledByKey() {
	prompt := s.prompt("The quick brown fox")
	base := ids(s.generate(prompt, sampled(10, 42, 0)))
	if other := ids(s.generate(prompt, sampled(10, 42, 1))); slices.Equal(base, other) {
		s.Errorf("choices 0 and 1 give the same tokens: %v", base)
	}
	if other := ids(s.generate(prompt, sampled(10, 43, 0))); slices.Equal(base, other) {
		s.Errorf("seeds 42 and 43 give the same tokens: %v", base)
	}
}

// logprobs: present when asked for, at most 0, the alternatives in order, and at
// temperature 0 the chosen token is the first of them.
func (s *suite) logprobs() {
	p := greedy(4)
	p.TopLogprobs = 3
	for i, tok := range s.generate(s.prompt("Once upon a time"), p) {
		if tok.Logprob > 1e-6 || math.IsNaN(tok.Logprob) || len(tok.Top) != 3 {
			s.Fatalf("token %d: logprob %g with %d alternatives, want at most 0 with 3", i, tok.Logprob, len(tok.Top))
		}
		if tok.Top[0].ID != tok.ID || math.Abs(tok.Top[0].Logprob-tok.Logprob) > 1e-4 {
			s.Errorf("token %d: greedy chose %d at %g, but the most probable is %d at %g", i, tok.ID, tok.Logprob, tok.Top[0].ID, tok.Top[0].Logprob)
		}
		if !slices.IsSortedFunc(tok.Top, func(a, b worker.Logprob) int {
			return -compare(a.Logprob, b.Logprob)
		}) {
			s.Errorf("token %d: alternatives are not in order: %+v", i, tok.Top)
		}
	}
	p.TopLogprobs = 0
	if tok := s.generate(s.prompt("Once"), p)[0]; len(tok.Top) != 0 || tok.Logprob == 0 {
		s.Errorf("TopLogprobs 0: logprob %g with %d alternatives, want one without", tok.Logprob, len(tok.Top))
	}
}

func compare(a, b float64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// breakFrees: leaving the loop frees the sequence before Generate returns.
func (s *suite) breakFrees() {
	n := 0
	for _, err := range s.e.Generate(s.ctx, s.prompt("Count with me"), greedy(1000)) {
		if err != nil {
			s.Fatal(err)
		}
		if n++; n == 3 {
			break
		}
	}
	s.idle("leaving the loop")
}

// cancelFrees: the end of ctx is the last error, and frees likewise. A context that
// had ended before starts nothing.
func (s *suite) cancelFrees() {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	n := 0
	var last error
	for _, err := range s.e.Generate(ctx, s.prompt("Count with me"), greedy(10000)) {
		last = err
		if n++; n == 3 {
			cancel()
		}
	}
	if !errors.Is(last, context.Canceled) {
		s.Errorf("after cancel the last error is %v, want context.Canceled", last)
	}
	s.idle("cancel")
	if _, err := collect(ctx, s.e, s.prompt("x"), greedy(1)); !errors.Is(err, context.Canceled) {
		s.Errorf("with an ended context: %v, want context.Canceled", err)
	}
	s.idle("an ended context")
}

// hold starts n generations whose consumers stop after one token, and returns a
// func that ends them.
func (s *suite) hold(n int) (release func()) {
	gate := make(chan struct{})
	var started, done sync.WaitGroup
	prompt := s.prompt("hold")
	for range n {
		started.Add(1)
		done.Go(func() {
			first := sync.OnceFunc(started.Done)
			defer first()
			for range s.e.Generate(s.ctx, prompt, greedy(10000)) {
				first()
				<-gate
				return
			}
		})
	}
	started.Wait()
	return sync.OnceFunc(func() {
		close(gate)
		done.Wait()
	})
}

// cancelWhileWaiting: a request beyond those that run can leave the queue.
func (s *suite) cancelWhileWaiting() {
	release := s.hold(s.e.Load().MaxRunning)
	defer release()
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	prompt := s.prompt("wait")
	var wg sync.WaitGroup
	wg.Go(func() {
		for _, err := range s.e.Generate(ctx, prompt, greedy(10000)) {
			if err != nil && !errors.Is(err, context.Canceled) {
				s.Errorf("a cancelled generation ends with %v", err)
			}
			<-ctx.Done()
		}
	})
	s.await("one request more than fit", func(l worker.Load) bool { return l.Running+l.Waiting > l.MaxRunning })
	cancel()
	wg.Wait()
	release()
	s.idle("cancel while waiting")
}

// concurrent: more generations than sequences all end, each with its own length.
func (s *suite) concurrent() {
	n := 2*s.e.Load().MaxRunning + 1
	var wg sync.WaitGroup
	for i := range n {
		prompt := s.prompt(strings.Repeat("number ", i+1))
		wg.Go(func() {
			out, err := s.collect(prompt, sampled(4+i, uint64(i), 0))
			if err != nil || len(out) != 4+i {
				s.Errorf("generation %d of %d: %d tokens, %v; want %d", i, n, len(out), err, 4+i)
			}
		})
	}
	wg.Wait()
	s.idle("concurrent generations")
}

// slowConsumer: a consumer that stopped reading holds up nobody else.
func (s *suite) slowConsumer() {
	release := s.hold(1)
	defer release()
	out := s.generate(s.prompt("I am in a hurry"), greedy(16))
	if len(out) != 16 {
		s.Errorf("beside a stopped consumer: %d tokens, want 16", len(out))
	}
	release()
	s.idle("a slow consumer")
}

// closeTwice: Close ends what runs, may be repeated, and Generate then gives an error.
func (s *suite) closeTwice() {
	release := s.hold(2)
	defer release()
	prompt := s.prompt("to be cut")
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = s.collect(prompt, greedy(100000)) // cut or refused: it must end
	}()
	if err := s.e.Close(); err != nil {
		s.Errorf("first Close: %v", err)
	}
	if err := s.e.Close(); err != nil {
		s.Errorf("second Close: %v", err)
	}
	release()
	select {
	case <-done:
	case <-s.ctx.Done():
		s.Fatal("Close left a generation running")
	}
	if _, err := s.collect([]int32{1}, greedy(1)); err == nil {
		s.Error("Generate after Close gave no error")
	}
	s.idle("Close")
}

// list is the JSON of ids.
func list(ids []int32) string {
	return strings.ReplaceAll(fmt.Sprint(ids), " ", ",")
}
