package llamacpp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/grammar"
	"github.com/kvmesh/kvmesh/worker/sampling"
)

// alternating is a constraint that wants a and b in turn.
type alternating struct {
	at   int
	open *atomic.Int64
}

func (a *alternating) Allow(ids []int32, ok []bool) {
	for i, id := range ids {
		ok[i] = id == int32("ab"[a.at%2])
	}
}

func (a *alternating) Accept(int32) { a.at++ }

func (a *alternating) Close() { a.open.Add(-1) }

func (a *alternating) Clone() (sampling.Constraint, error) {
	a.open.Add(1)
	return &alternating{open: a.open}, nil
}

// grammarTokenizer compiles every grammar but "bad" to alternating.
type grammarTokenizer struct {
	bytesTokenizer
	open, made atomic.Int64
	slow, goOn chan struct{} // "slow" sends to the first, and then receives from the other
}

func (g *grammarTokenizer) Grammar(text string) (prototype, error) {
	g.made.Add(1)
	if strings.HasPrefix(text, "slow") {
		g.slow <- struct{}{}
		<-g.goOn
	}
	if text == "bad" {
		return nil, errors.New("refused")
	}
	g.open.Add(1)
	return &alternating{open: &g.open}, nil
}

func TestGrammarHoldsAndIsFreed(t *testing.T) {
	e := startFake(t, fakeConfig(), newFakeContext(t, 256))
	defer e.Close()
	tok := new(grammarTokenizer)
	e.text = tok
	p := worker.Params{MaxTokens: 7, TopP: 1, TopLogprobs: -1, Grammar: "any", Temperature: 1}
	text := func(ids []int32, p worker.Params) (string, error) {
		var out strings.Builder
		for tok, err := range e.Generate(t.Context(), ids, p) {
			if err != nil {
				return out.String(), err
			}
			out.Write(tok.Bytes)
		}
		return out.String(), nil
	}
	if got, err := text([]int32{'x'}, p); err != nil || got != "abababa" {
		t.Errorf("%q, %v", got, err)
	}
	p.Delivered = 3
	if got, err := text([]int32{'x', 'a', 'b', 'a'}, p); err != nil || got != "bababab" {
		t.Errorf("after three tokens %q, %v", got, err)
	}
	if _, err := text([]int32{'x', 'a', 'a', 'a'}, p); !errors.Is(err, sampling.ErrOutside) {
		t.Errorf("delivered tokens outside the grammar: %v", err)
	}
	for text, want := range map[string]bool{"": true, "a": true, "ab": true, "aa": false, "b": false, "abx": false} {
		if ok, err := e.Follow(p, bytesOf(text)); err != nil || ok != want {
			t.Errorf("Follow(%q) is %v, %v; want %v", text, ok, err, want)
		}
	}
	p.Delivered = 0
	for range e.Generate(t.Context(), []int32{'x'}, p) {
		break
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range e.Generate(ctx, []int32{'x'}, p) {
		cancel()
	}
	func() {
		defer func() { _ = recover() }()
		for range e.Generate(t.Context(), []int32{'x'}, p) {
			panic("consumer")
		}
	}()
	if n := tok.open.Load(); n != 0 {
		t.Errorf("%d constraints were not freed", n)
	}
	if err := e.Constrain(t.Context(), "bad"); err == nil {
		t.Error("a bad grammar passed")
	}
	if err := e.Constrain(t.Context(), "a\x00b"); err == nil {
		t.Error("a grammar with NUL passed")
	}
	p.Grammar = "bad"
	if _, err := e.Follow(p, nil); err == nil {
		t.Error("a bad grammar was followed")
	}
	if _, err := text([]int32{'x'}, p); err == nil {
		t.Error("a bad grammar generated")
	}
	if l := e.Load(); l.Running != 0 || l.KVUsage != 0 {
		t.Errorf("load afterwards is %+v", l)
	}
	e.text = bytesTokenizer{}
	if err := e.Constrain(t.Context(), "any"); !errors.Is(err, errNoGrammar) {
		t.Errorf("without grammars: %v", err)
	}
}

// bytesOf is a text as the bytes that bytesTokenizer makes of it.
func bytesOf(text string) []int32 {
	ids, _ := bytesTokenizer{}.Tokenize(text, false) // never fails
	return ids
}

// realSchemas are followed by the real model.
var realSchemas = map[string]string{
	"person":    `{"type":"object","properties":{"name":{"type":"string","maxLength":12},"age":{"type":"integer","minimum":0,"maximum":120},"tags":{"type":"array","items":{"enum":["a","b\"c","é世🙂"]},"maxItems":2},"note":{"type":["string","null"],"maxLength":12}},"required":["name","age","tags","note"],"additionalProperties":false}`,
	"optional":  `{"type":"object","properties":{"a":{"type":"number","minimum":-3,"maximum":3},"b":{"type":"boolean"},"when":{"type":"string","format":"date-time"}},"required":["b"]}`,
	"recursive": `{"$ref":"#/$defs/n","$defs":{"n":{"type":"object","properties":{"v":{"type":"integer","minimum":1,"maximum":9},"next":{"anyOf":[{"type":"null"},{"$ref":"#/$defs/n"}]}},"required":["v","next"],"additionalProperties":false}}}`,
	"pattern":   `{"type":"object","properties":{"id":{"type":"string","pattern":"^[A-Z]{3}-[0-9]{4}$"},"host":{"type":"string","format":"ipv4"},"q":{"type":"string","pattern":"^[^a]{2,8}$"}},"required":["id","host","q"]}`,
	"any":       ``,
}

// realGrammar converts one of realSchemas; "" is any object.
func realGrammar(t testing.TB, schema string) string {
	t.Helper()
	if schema == "" {
		return grammar.Object()
	}
	text, bad := grammar.FromSchema([]byte(schema), "p", false)
	if bad != nil {
		t.Fatal(bad)
	}
	return text
}

// wantValid checks that an answer is JSON and follows the schema.
func wantValid(t *testing.T, schema, answer string) {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(answer))
	if err != nil {
		t.Fatalf("%q is no JSON: %v", answer, err)
	}
	if schema == "" {
		schema = `{"type":"object"}`
	}
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("s.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("s.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Validate(v); err != nil {
		t.Fatalf("%q: %v", answer, err)
	}
}

// TestRealGrammar has the real model follow each schema greedily, and one of them at
// random: in a string every word of its vocabulary has to be asked about then.
func TestRealGrammar(t *testing.T) {
	cfg := realConfig(t)
	cfg.MaxSeqs, cfg.Cells = 6, 1024 // all at once: a batch costs little more than a token
	e := openReal(t, cfg)
	runs := []grammarRun{{"person", 1.5, 1}}
	for name := range realSchemas {
		runs = append(runs, grammarRun{name, 0, 0})
	}
	if n := testGrammar(t, e, runs); n < 3 {
		t.Errorf("only %d answers ended by themselves, the rest shows little", n)
	}
	for _, bad := range []string{"root ::= root \"a\"", "nothing", "root ::= missing"} {
		if err := e.Constrain(t.Context(), bad); err == nil {
			t.Errorf("grammar %q passed", bad)
		}
	}
}

// TestTinyGrammar lets a model of random weights follow them, which tries everything
// that they allow.
func TestTinyGrammar(t *testing.T) {
	e := openReal(t, tinyConfig(t))
	var runs []grammarRun
	for name := range realSchemas {
		for seed := range uint64(6) {
			runs = append(runs, grammarRun{name, 1.5, seed})
		}
	}
	if n := testGrammar(t, e, runs); n < 6 {
		t.Errorf("only %d answers ended by themselves, the rest shows little", n)
	}
}

// grammarRun is one answer to one of realSchemas.
type grammarRun struct {
	name        string
	temperature float64
	seed        uint64
}

// testGrammar: whatever the model would rather say, an answer that ends by itself
// follows the schema, one that is cut says length, and one that goes on after any of its
// tokens still follows it. It returns how many ended by themselves.
func testGrammar(t *testing.T, e *Engine, runs []grammarRun) int64 {
	prompt := tokenize(t, e, "Answer in JSON:\n")
	var ended atomic.Int64
	t.Run("schemas", func(t *testing.T) {
		for _, r := range runs {
			t.Run(fmt.Sprintf("%s at %g, %d", r.name, r.temperature, r.seed), func(t *testing.T) {
				t.Parallel()
				schema := realSchemas[r.name]
				p := worker.Params{MaxTokens: 60, TopP: 1, TopLogprobs: -1, Temperature: r.temperature, Seed: r.seed, Grammar: realGrammar(t, schema)}
				toks, text := constrained(t, e, prompt, p)
				if last := toks[len(toks)-1]; last.Finish != "stop" {
					if last.Finish != "length" || len(toks) != 60 {
						t.Errorf("%d tokens, finish %q", len(toks), last.Finish)
					}
					return
				}
				ended.Add(1)
				wantValid(t, schema, text)
				if r.temperature > 0 {
					testGrammarResume(t, e, prompt, p, toks, schema)
				}
			})
		}
	})
	return ended.Load()
}

// constrained generates to the end; the bytes of the tokens are copied into text.
func constrained(t *testing.T, e *Engine, ids []int32, p worker.Params) ([]worker.Token, string) {
	t.Helper()
	var toks []worker.Token
	var text strings.Builder
	for tok, err := range e.Generate(t.Context(), ids, p) {
		if err != nil {
			t.Fatalf("%v after %q", err, text.String())
		}
		text.Write(tok.Bytes)
		toks = append(toks, tok)
	}
	return toks, text.String()
}

// testGrammarResume goes on after some of an answer's tokens, on prefilled KV.
func testGrammarResume(t *testing.T, e *Engine, prompt []int32, p worker.Params, toks []worker.Token, schema string) {
	for at := len(toks) / 3; at < len(toks); at += 1 + len(toks)/2 {
		ids := append([]int32(nil), prompt...)
		var delivered strings.Builder
		for _, tok := range toks[:at] {
			ids = append(ids, tok.ID)
			delivered.Write(e.TokenBytes(tok.ID))
		}
		p.Delivered, p.MaxTokens = at, 60-at
		rest, text := constrained(t, e, ids, p)
		if rest[len(rest)-1].Finish == "stop" {
			wantValid(t, schema, delivered.String()+text)
		}
	}
}

// TestRealGrammarAsksTheLikely: sorting tokens out by their first bytes changes no
// answer, at any place of a text with characters of one to four bytes.
func TestRealGrammarAsksTheLikely(t *testing.T) {
	e := openReal(t, realConfig(t))
	c, err := e.grammar(t.Context(), grammar.Object())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	k := e.keep(c, false)
	all := make([]int32, e.voc.size())
	for i := range all {
		all[i] = int32(i)
	}
	got, want := make([]bool, len(all)), make([]bool, len(all))
	for _, id := range tokenize(t, e, `{"é": ["世🙂\u00e9", -1.5e3, true], "b": {}}`)[1:] {
		k.Allow(all, got)
		for i := range all {
			if i%1000 == 0 {
				k.Allow(all[i:min(i+1000, len(all))], want[i:min(i+1000, len(all))]) // few enough to be asked about all
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("before %q the answers differ", e.voc.bytes(id))
		}
		if !got[id] {
			t.Fatalf("%q is not allowed", e.voc.bytes(id))
		}
		k.Accept(id)
	}
	if k.Allow(all, got); slices.IndexFunc(all, func(id int32) bool { return got[id] != e.voc.ends(id) }) >= 0 {
		t.Error("behind the object something else than the end is allowed")
	}
}

// BenchmarkGrammar measures what a grammar costs a step: asking about one token, as
// nearly every step does, and about the whole vocabulary, as the worst one does.
func BenchmarkGrammar(b *testing.B) {
	e := openReal(b, realConfig(b))
	c, err := e.grammar(b.Context(), realGrammar(b, realSchemas["person"]))
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	all := make([]int32, e.voc.size())
	for i := range all {
		all[i] = int32(i)
	}
	k := e.keep(c, false)
	for _, state := range []string{"", `{"name": "x`} { // almost nothing may come, almost everything
		if state != "" {
			for _, id := range tokenize(b, e, state)[1:] {
				k.Accept(id)
			}
		}
		for _, ids := range [][]int32{all[1000:1001], all[1000:1048], all} {
			ok := make([]bool, len(ids))
			b.Run(fmt.Sprintf("in=%q/tokens=%d", state, len(ids)), func(b *testing.B) {
				for b.Loop() {
					k.Allow(ids, ok)
				}
			})
		}
	}
	b.Run("compile", func(b *testing.B) {
		g := realGrammar(b, realSchemas["person"])
		for b.Loop() {
			if err := e.Constrain(b.Context(), g); err != nil {
				b.Fatal(err)
			}
		}
	})
	for _, g := range []string{"", grammar.Object()} {
		name := "answer=free"
		if g != "" {
			name = "answer=object"
		}
		b.Run(name, func(b *testing.B) {
			tokens := 0
			for b.Loop() {
				n, err := drain(b.Context(), e, []int32{2, 100, 200}, worker.Params{MaxTokens: 48, TopP: 1, TopLogprobs: -1, Temperature: 1, Seed: 3, Grammar: g, IgnoreEOS: g == ""})
				if err != nil {
					b.Fatal(err)
				}
				tokens += n
			}
			b.ReportMetric(float64(tokens)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}
