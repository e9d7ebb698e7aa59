package sim

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

func newEngine(t testing.TB, cfg Config) *Engine {
	t.Helper()
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

func greedy(n int) worker.Params { return worker.Params{MaxTokens: n, TopLogprobs: -1} }

// collect runs one generation to its end.
func collect(t testing.TB, e *Engine, ids []int32, p worker.Params) (out []int32, finish string) {
	t.Helper()
	for tok, err := range e.Generate(t.Context(), ids, p) {
		if err != nil {
			t.Fatal(err)
		}
		out, finish = append(out, tok.ID), tok.Finish
	}
	return out, finish
}

func TestTokenizerIsReversible(t *testing.T) {
	tok := newTokenizer()
	for _, text := range []string{
		"", " ", "  ", "the river of light", "A", "a", " a", "zzzz", " zzzzz", "Hello, World!\n\n", "naïve — 🙂\x00\xff",
		"abcdefghijklmnopqrstuvwxyz", " abcdefghijklmnopqrstuvwxyz", "a b c d", "the  the",
	} {
		ids := tok.encode(nil, text)
		if got := decodeAll(tok, ids); got != text {
			t.Errorf("%q came back as %q", text, got)
		}
	}
	if n := len(tok.encode(nil, " the river")); n != 2 {
		t.Errorf("two known words took %d tokens", n)
	}
}

func decodeAll(tok *tokenizer, ids []int32) string {
	var b []byte
	for _, id := range ids {
		b = tok.decode(b, id)
	}
	return string(b)
}

func FuzzTokenizer(f *testing.F) {
	f.Add("the quick brown fox — é🙂 \xff  x")
	tok := newTokenizer()
	f.Fuzz(func(t *testing.T, text string) {
		ids := tok.encode(nil, text)
		for _, id := range ids {
			if id < 0 || id >= vocab {
				t.Fatalf("id %d outside the vocabulary", id)
			}
		}
		if got := decodeAll(tok, ids); got != text {
			t.Fatalf("%q came back as %q", text, got)
		}
	})
}

func FuzzInstructions(f *testing.F) {
	f.Add([]byte(`{"ttft_ms":180000,"itl_ms":20,"cut_at":5}`))
	f.Add([]byte(`{"status":500}`))
	e := newEngine(f, Config{})
	f.Fuzz(func(t *testing.T, raw []byte) {
		in, err := parseInstructions(raw)
		if err != nil {
			if err.Status != 400 || err.Param != "sim" {
				t.Fatalf("%v", err)
			}
			return
		}
		fault, ferr := e.Fault(&openai.Request{Sim: raw}, 0)
		if ferr != nil || (in.CutAt != nil) != (fault.CutAt >= 0) {
			t.Fatalf("%+v, %v", fault, ferr)
		}
	})
}

func TestAnswersAreDeterministic(t *testing.T) {
	a, b := newEngine(t, Config{}), newEngine(t, Config{})
	ids := a.tok.encode(nil, "once upon a time")
	sampled := func(seed uint64, choice int) worker.Params {
		p := greedy(40)
		p.Temperature, p.Seed, p.Choice = 1, seed, choice
		return p
	}
	first, _ := collect(t, a, ids, greedy(40))
	for name, c := range map[string]struct {
		e    *Engine
		ids  []int32
		p    worker.Params
		same bool
	}{
		"another engine":      {b, ids, greedy(40), true},
		"seed without chance": {b, ids, worker.Params{MaxTokens: 40, Seed: 9, TopLogprobs: -1}, true},
		"another model":       {newEngine(t, Config{Name: "other"}), ids, greedy(40), false},
		"another prompt":      {b, ids[:len(ids)-1], greedy(40), false},
		"another choice":      {b, ids, worker.Params{MaxTokens: 40, Choice: 1, TopLogprobs: -1}, false},
		"sampled":             {b, ids, sampled(1, 0), false},
	} {
		got, _ := collect(t, c.e, c.ids, c.p)
		if slices.Equal(got, first) != c.same {
			t.Errorf("%s: equal is %v, want %v", name, !c.same, c.same)
		}
	}
	one, _ := collect(t, a, ids, sampled(1, 0))
	again, _ := collect(t, b, ids, sampled(1, 0))
	two, _ := collect(t, b, ids, sampled(2, 0))
	if !slices.Equal(one, again) || slices.Equal(one, two) {
		t.Error("a sampled answer must depend on its seed and on nothing else")
	}
}

// A continuation from prompt and delivered tokens must be the rest of the answer.
func TestContinuation(t *testing.T) {
	e := newEngine(t, Config{AnswerLen: -1})
	ids := e.tok.encode(nil, "continue")
	whole, _ := collect(t, e, ids, greedy(60))
	for _, k := range []int{1, 7, 30, 59} {
		rest, _ := collect(t, e, append(slices.Clone(ids), whole[:k]...), greedy(60-k))
		if diff := cmp.Diff(whole[k:], rest); diff != "" {
			t.Errorf("from token %d: %s", k, diff)
		}
	}
}

func TestHowAnswersEnd(t *testing.T) {
	e := newEngine(t, Config{AnswerLen: 20, ContextLen: 100})
	ids := []int32{idBOS, 'x'}
	for _, c := range []struct {
		name   string
		p      worker.Params
		tokens int
		finish string
	}{
		{"by itself", worker.Params{MaxTokens: 50, TopLogprobs: -1}, 21, "stop"},
		{"at max_tokens", worker.Params{MaxTokens: 20, TopLogprobs: -1}, 20, "length"},
		{"ignore_eos", worker.Params{MaxTokens: 50, TopLogprobs: -1, IgnoreEOS: true}, 50, "length"},
		{"sim.max", worker.Params{MaxTokens: 50, TopLogprobs: -1, Sim: []byte(`{"max":3}`)}, 4, "stop"},
		{"context full", worker.Params{MaxTokens: 5000, TopLogprobs: -1, Sim: []byte(`{"max":0}`)}, 98, "length"},
	} {
		out, finish := collect(t, e, ids, c.p)
		if len(out) != c.tokens || finish != c.finish {
			t.Errorf("%s: %d tokens, %q; want %d, %q", c.name, len(out), finish, c.tokens, c.finish)
		}
	}
}

func TestAnswersAreTextWithSplitCharacters(t *testing.T) {
	e := newEngine(t, Config{AnswerLen: 2000})
	split := false
	var text []byte
	for tok, err := range e.Generate(t.Context(), []int32{idBOS}, greedy(4000)) {
		if err != nil {
			t.Fatal(err)
		}
		split = split || (len(tok.Bytes) > 0 && !utf8.Valid(tok.Bytes))
		text = append(text, tok.Bytes...)
	}
	if !utf8.Valid(text) || !split || strings.Count(string(text), " ") < 1000 {
		t.Errorf("valid %v, characters over several tokens %v: %.200q", utf8.Valid(text), split, text)
	}
}

func TestLogprobs(t *testing.T) {
	e := newEngine(t, Config{})
	p := greedy(30)
	p.TopLogprobs = 3
	for tok, err := range e.Generate(t.Context(), []int32{idBOS}, p) {
		if err != nil {
			t.Fatal(err)
		}
		if len(tok.Top) != 3 || tok.Top[0].ID != tok.ID || tok.Logprob > 0 || tok.Top[1].Logprob > tok.Top[0].Logprob {
			t.Fatalf("token %+v", tok)
		}
	}
}

func TestTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, Config{TTFT: time.Second, PrefillPerToken: time.Millisecond, ITL: 100 * time.Millisecond})
		for _, c := range []struct {
			sim  string
			want []time.Duration // since the start, of the first tokens
		}{
			{``, []time.Duration{1010e6, 1110e6, 1210e6}},
			{`{"ttft_ms":180000,"itl_ms":20}`, []time.Duration{180000e6, 180020e6, 180040e6}},
			{`{"ttft_ms":5,"itl_ms":30,"step_ms":20}`, []time.Duration{10e6, 50e6, 90e6}}, // it starts 10 ms before a step
			{`{"ttft_ms":0,"stall_at":2,"stall_ms":5000}`, []time.Duration{0, 100e6, 5200e6, 5300e6}},
		} {
			start := time.Now()
			var got []time.Duration
			p := greedy(len(c.want))
			p.Sim = []byte(c.sim)
			for _, err := range e.Generate(t.Context(), make([]int32, 10), p) {
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, time.Since(start))
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("%s: %s", c.sim, diff)
			}
		}
	})
}

func TestEndlessStallEndsWithTheClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, Config{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		p := greedy(10)
		p.Sim = []byte(`{"stall_at":3}`)
		tokens := 0
		var last error
		for _, err := range e.Generate(ctx, []int32{idBOS}, p) {
			if last = err; err == nil {
				tokens++
			}
		}
		if tokens != 3 || !errors.Is(last, context.DeadlineExceeded) {
			t.Errorf("%d tokens, then %v", tokens, last)
		}
		if l := e.Load(); l.Running != 0 || l.KVUsage != 0 {
			t.Errorf("the sequence was not freed: %+v", l)
		}
	})
}

func TestQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, Config{MaxSeqs: 1, MaxQueue: 1, ITL: time.Second})
		results := make(chan error, 3)
		run := func() {
			var last error
			for _, err := range e.Generate(t.Context(), []int32{idBOS}, greedy(5)) {
				last = err
			}
			results <- last
		}
		for range 2 {
			go run()
			synctest.Wait()
		}
		if l := e.Load(); l.Running != 1 || l.Waiting != 1 || l.MaxRunning != 1 || l.KVUsage <= 0 {
			t.Errorf("load %+v", l)
		}
		run()
		if err := <-results; !errors.Is(err, worker.ErrBusy) {
			t.Errorf("the third request got %v", err)
		}
		for range 2 {
			if err := <-results; err != nil {
				t.Error(err)
			}
		}
		if l := e.Load(); l.Running != 0 || l.Waiting != 0 || l.GenTokens != 10 || l.PromptTokens != 2 {
			t.Errorf("load afterwards %+v", l)
		}
	})
}

func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, Config{ITL: time.Second})
		go func() {
			time.Sleep(1500 * time.Millisecond)
			e.Close()
		}()
		var last error
		for _, err := range e.Generate(t.Context(), []int32{idBOS}, greedy(100)) {
			last = err
		}
		if !errors.Is(last, errClosed) || e.Close() != nil {
			t.Errorf("after Close: %v", last)
		}
		for _, err := range e.Generate(t.Context(), []int32{idBOS}, greedy(1)) {
			last = err
		}
		if !errors.Is(last, errClosed) {
			t.Errorf("a closed engine gave %v", last)
		}
	})
}

func TestInstructionsAreStrict(t *testing.T) {
	e := newEngine(t, Config{})
	for _, raw := range []string{`{"cut":1}`, `{"cut_at":-1}`, `{"status":200}`, `{"ttft_ms":"1"}`, `{"itl_ms":-5}`, `[]`, `7`, `null`} {
		_, err := e.Fault(&openai.Request{Sim: []byte(raw)}, 0)
		var e *openai.Error
		if !errors.As(err, &e) || e.Status != http.StatusBadRequest || !strings.HasPrefix(e.Param, "sim") {
			t.Errorf("%s: %v", raw, err)
		}
	}
	got, err := e.Fault(&openai.Request{Sim: []byte(`{"cut_at":5,"error_at":0,"truncate_at":7,"malformed_at":3,"cut_inside":true,"no_done":true,"status":503}`)}, 0)
	want := worker.Fault{Status: 503, CutAt: 5, CutInside: true, ErrorAt: 0, Truncate: 7, Malformed: 3, NoDone: true}
	if err != nil || got != want {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	for attempt, want := range map[int]int{0: -1, 1: -1, 2: 5} {
		req := &openai.Request{Sim: []byte(`{"cut_at":5,"attempt":2}`)}
		if got, err := e.Fault(req, attempt); err != nil || got.CutAt != want || (req.Sim != nil) != (want == 5) {
			t.Errorf("for attempt 2, in attempt %d: %+v, %s, %v", attempt, got, req.Sim, err)
		}
	}
	if got, err := e.Fault(&openai.Request{}, 0); err != nil || got != worker.NoFault() {
		t.Errorf("without instructions: %+v, %v", got, err)
	}
}

func TestControl(t *testing.T) {
	e := newEngine(t, Config{})
	h := e.Handler()
	post := func(body string) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/sim", strings.NewReader(body)))
		return w.Code
	}
	if code := post(`{"running":40,"waiting":3,"kv_usage":0.5}`); code != 200 {
		t.Fatalf("status %d", code)
	}
	if l := e.Load(); l.Running != 40 || l.Waiting != 3 || l.KVUsage != 0.5 {
		t.Errorf("load %+v", l)
	}
	if post(`{"running":null}`) != 200 || e.Load().Running != 0 || e.Load().Waiting != 3 {
		t.Errorf("null must clear one setting: %+v", e.Load())
	}
	for _, bad := range []string{`{"run":1}`, `{"running":-1}`, `{"waiting":"x"}`, ``, `[1]`} {
		if code := post(bad); code != http.StatusBadRequest {
			t.Errorf("%s: status %d", bad, code)
		}
	}
	if l := e.Load(); l.Waiting != 3 {
		t.Errorf("a refused change changed %+v", l)
	}
	e.SetLoad(new(5), nil)
	if l := e.Load(); l.Running != 5 || l.Waiting != 0 {
		t.Errorf("SetLoad: %+v", l)
	}
}

func BenchmarkGenerate(b *testing.B) {
	e := newEngine(b, Config{ContextLen: 1 << 30, AnswerLen: -1})
	b.ReportAllocs()
	n := 0
	for _, err := range e.Generate(b.Context(), []int32{idBOS}, greedy(b.N)) {
		if err != nil {
			b.Fatal(err)
		}
		n++
	}
	if n != b.N {
		b.Fatal(n)
	}
}

func TestTokenize(t *testing.T) {
	e := newEngine(t, Config{ContextLen: 64})
	parse := func(ep openai.Endpoint, body string) *openai.Request {
		t.Helper()
		r, err := openai.Parse(ep, []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	chat := parse(openai.Chat, `{"model":"m","messages":[{"role":"system","content":" the"},{"role":"user","content":" of"}]}`)
	got, err := e.Tokenize(chat, 0)
	want := []int32{idBOS, roleID("system"), idWords, idTurn, roleID("user"), idWords + 1, idTurn, roleID("assistant")}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v: %s", err, diff)
	}
	text := parse(openai.Completions, `{"model":"m","prompt":[" the river",[600,97]]}`)
	for i, want := range []string{" the river", string(e.Decode([]int32{600})) + "a"} {
		ids, err := e.Tokenize(text, i)
		if err != nil || string(e.Decode(ids)) != want {
			t.Errorf("prompt %d is %q, %v; want %q", i, e.Decode(ids), err, want)
		}
	}
	if _, err := e.Tokenize(text, 2); err == nil {
		t.Error("a third prompt of two was tokenized")
	}
}

func TestDecodeOfIDsWithoutText(t *testing.T) {
	e := newEngine(t, Config{})
	last := chunkID("zzzz")
	for _, id := range []int32{-1, idBOS, idEnd, idTurn, idChunks - 1, idChunks, idChunks + 27, last + 1, vocab, 1<<31 - 1} {
		if got := e.Decode([]int32{'a', id, 'b'}); string(got) != "ab" && id != last+1 {
			t.Errorf("id %d decodes to %q", id, got)
		}
	}
	if got := e.Decode([]int32{last}); string(got) != "zzzz" {
		t.Errorf("the last chunk is %q", got)
	}
}

func TestConfig(t *testing.T) {
	for name, c := range map[string]Config{
		"context": {ContextLen: -1}, "sequences": {MaxSeqs: -1}, "time": {TTFT: -1}, "pace": {ITL: -1}, "prefill": {PrefillPerToken: -1},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("a negative %s was accepted", name)
		}
	}
	e := newEngine(t, Config{})
	m := e.Model()
	if m.Name != "sim" || m.ContextLen != 8192 || e.Load().MaxRunning != 64 || m.Created == 0 {
		t.Errorf("%+v, %+v", m, e.Load())
	}
	if other := newEngine(t, Config{Name: "x"}).Model().Fingerprint; other == m.Fingerprint {
		t.Errorf("two models share the fingerprint %q", other)
	}
}

func TestSpeedCanBeChangedWhileRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, Config{TTFT: time.Second})
		h := e.Handler()
		took := func() time.Duration {
			begin := time.Now()
			collect(t, e, []int32{idBOS}, greedy(3))
			return time.Since(begin)
		}
		for _, c := range []struct {
			body string
			want time.Duration
		}{
			{`{}`, time.Second},
			{`{"ttft_ms":500,"itl_ms":100}`, 700 * time.Millisecond},
			{`{"ttft_ms":null}`, 1200 * time.Millisecond},
			{`{"ttft_ms":0,"itl_ms":0}`, 0},
		} {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/sim", strings.NewReader(c.body)))
			if got := took(); w.Code != 200 || got != c.want {
				t.Errorf("%s: status %d, an answer takes %v, want %v", c.body, w.Code, got, c.want)
			}
		}
	})
}

func TestControlMethods(t *testing.T) {
	h := newEngine(t, Config{MaxSeqs: 5}).Handler()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/sim", nil))
	if w.Code != 200 || !strings.Contains(w.Body.String(), `"max_running":5`) {
		t.Errorf("GET: %d %s", w.Code, w.Body)
	}
	w = httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodDelete, "/sim", nil))
	if w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") == "" {
		t.Errorf("DELETE: %d", w.Code)
	}
}
