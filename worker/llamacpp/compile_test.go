package llamacpp

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/kvmesh/kvmesh/worker"
)

// TestGrammarIsCompiledOnce: the choices of a request, and other requests beside it, share
// what was compiled; it goes with the last of them.
func TestGrammarIsCompiledOnce(t *testing.T) {
	cfg := fakeConfig()
	cfg.MaxQueue = 64
	e := startFake(t, cfg, newFakeContext(t, 256))
	defer e.Close()
	tok := new(grammarTokenizer)
	e.text = tok
	ctx, end := context.WithCancel(t.Context())
	p := worker.Params{MaxTokens: 3, TopP: 1, TopLogprobs: -1, Grammar: "any"}
	var all sync.WaitGroup
	for range 3 {
		if err := e.Constrain(ctx, "any"); err != nil {
			t.Fatal(err)
		}
		for choice := range 8 {
			all.Go(func() {
				p := p
				p.Choice = choice
				if n, err := drain(ctx, e, []int32{'x'}, p); n != 3 || err != nil {
					t.Errorf("%d tokens, %v", n, err)
				}
				if ok, err := e.Follow(p, bytesOf("ab")); !ok || err != nil {
					t.Error(ok, err)
				}
			})
		}
	}
	all.Wait()
	if n := tok.made.Load(); n != 1 {
		t.Errorf("compiled %d times", n)
	}
	if n := tok.open.Load(); n != 1 {
		t.Errorf("%d constraints are there, want the one that is kept", n)
	}
	end()
	for tok.open.Load() != 0 {
		runtime.Gosched()
	}
	if err := e.Constrain(t.Context(), "bad"); err == nil {
		t.Error("a bad grammar passed")
	}
	e.compiler.mu.Lock()
	defer e.compiler.mu.Unlock()
	if n := len(e.compiler.use); n != 0 {
		t.Errorf("%d grammars are kept", n)
	}
}

// TestCompilingForNobody: whoever leaves does not wait for a compilation, what comes of it
// is freed, and one whose turn has not come is not begun.
func TestCompilingForNobody(t *testing.T) {
	e := startFake(t, fakeConfig(), newFakeContext(t, 256))
	defer e.Close()
	tok := &grammarTokenizer{slow: make(chan struct{}), goOn: make(chan struct{})}
	e.text = tok
	left := errors.New("left")
	ctx, leave := context.WithCancelCause(t.Context())
	answers := make(chan error)
	for i := range compilesAtOnce {
		go func() { answers <- e.Constrain(ctx, fmt.Sprint("slow", i)) }()
		<-tok.slow
	}
	// No turn is left.
	p := worker.Params{MaxTokens: 3, TopP: 1, TopLogprobs: -1, Grammar: "waits"}
	go func() { answers <- e.Constrain(ctx, "waits") }()
	go func() {
		_, err := drain(ctx, e, []int32{'x'}, p)
		answers <- err
	}()
	leave(left)
	for range compilesAtOnce + 2 {
		if err := <-answers; !errors.Is(err, left) {
			t.Errorf("whoever left has %v", err)
		}
	}
	made := tok.made.Load()
	for range compilesAtOnce {
		tok.goOn <- struct{}{}
	}
	if n, err := drain(t.Context(), e, []int32{'x'}, p); n != 3 || err != nil {
		t.Errorf("the next one has %d tokens, %v", n, err)
	}
	for tok.open.Load() != 0 {
		runtime.Gosched()
	}
	if n := tok.made.Load(); made != compilesAtOnce || n != made+1 {
		t.Errorf("%d were compiled before and %d in all, want %d and one more", made, n, compilesAtOnce)
	}
}

// TestTinyGrammarSpellsUTF8: where a grammar leaves a character open, the tokens of bytes
// make whole ones, and as many as the schema allows. llama.cpp would take 0xF5 and more.
func TestTinyGrammarSpellsUTF8(t *testing.T) {
	e := openReal(t, tinyConfig(t))
	for _, schema := range []string{`{"type":"string","pattern":"^[^a]{6}$"}`, `{"type":"string","minLength":4,"maxLength":6}`, `{"type":"string","pattern":"^[\\x{80}-\\x{10ffff}]{5}$"}`} {
		wide := 0
		for seed := range uint64(12) {
			p := worker.Params{MaxTokens: 60, TopP: 1, TopLogprobs: -1, Temperature: 2, Seed: seed, Grammar: realGrammar(t, schema)}
			toks, text := constrained(t, e, tokenize(t, e, "a"), p)
			if !utf8.ValidString(text) {
				t.Errorf("%s: %q is no UTF-8", schema, text)
			}
			if toks[len(toks)-1].Finish != "stop" {
				t.Errorf("%s: no end of %q", schema, text)
				continue
			}
			wantValid(t, schema, text)
			if len(text) > utf8.RuneCountInString(text) {
				wide++
			}
		}
		if wide == 0 {
			t.Errorf("%s: no character had several bytes, which shows nothing", schema)
		}
	}
}

// TestTinyLargestGrammar: as many choices as one likes share the largest grammar that a
// schema may have.
func TestTinyLargestGrammar(t *testing.T) {
	e := openReal(t, tinyConfig(t))
	p := worker.Params{MaxTokens: 4, TopP: 1, TopLogprobs: -1, Temperature: 1, Grammar: realGrammar(t,
		`{"type":"object","properties":{"a":{"type":"string","maxLength":2000},"b":{"type":"string","maxLength":1999},"c":{"type":"string","maxLength":1998},"d":{"type":"string","maxLength":1997}},"required":["a","b","c","d"]}`)}
	ctx, end := context.WithCancel(t.Context())
	defer end()
	if err := e.Constrain(ctx, p.Grammar); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for choice := range 16 {
		all.Go(func() {
			p := p
			p.Choice = choice
			if n, err := drain(ctx, e, tokenize(t, e, "a"), p); n != 4 || err != nil {
				t.Errorf("%d tokens, %v", n, err)
			}
		})
	}
	all.Wait()
}

func TestSpells(t *testing.T) {
	for _, c := range []struct {
		part, text string
		want       bool
	}{
		{"", "a", true},
		{"", "é", true},
		{"", "\xf4", true},
		{"", "\xf5", false},
		{"", "\xff", false},
		{"", "\xc0", false},
		{"", "\x80", false},
		{"", "ab\xf0\x9f", true},
		{"", "a\xf4\x90", false},
		{"", "\xed\xa0", false},
		{"", "\xe0\x80", false},
		{"\xf0\x9f", "\x99", true},
		{"\xf0\x9f", "\x99\x82x", true},
		{"\xf0\x9f", "x", false},
		{"\xf0\x9f", "\x99\x82\x82", false},
		{"\xf4", "\x8f\xbf\xbf", true},
		{"\xf4", "\x90", false},
		{"\xc3", "\xa9\xc3", true},
		{"\xc3", "\xa9\xc1", false},
	} {
		if got := spells([]byte(c.part), []byte(c.text)); got != c.want {
			t.Errorf("%q after %q: %v", c.text, c.part, got)
		}
	}
	for text, want := range map[string]string{"": "", "a": "", "é": "", "a\xc3": "\xc3", "\xf0\x9f\x99": "\xf0\x9f\x99", "\xff": ""} {
		if got := unfinished([]byte(text)); string(got) != want {
			t.Errorf("%q ends in %q, want %q", text, got, want)
		}
	}
}
