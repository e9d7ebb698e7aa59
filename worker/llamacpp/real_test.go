//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hybridgroup/yzma/pkg/llama"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// answer generates greedily and returns the ids and the text.
func answer(t *testing.T, e *Engine, ids []int32, n int) ([]int32, string) {
	t.Helper()
	var out []int32
	var text strings.Builder
	for tok, err := range e.Generate(t.Context(), ids, exactly(n)) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, tok.ID)
		text.Write(tok.Bytes)
	}
	return out, text.String()
}

// TestRealModel checks one engine in many ways, because loading takes seconds.
func TestRealModel(t *testing.T) {
	cfg := realConfig(t)
	var progress []float64
	cfg.Progress = func(p float64) { progress = append(progress, p) }
	cfg.CacheDir = t.TempDir()
	cfg.Cells = cfg.ContextLen // little, so that sequences must give way
	e := openReal(t, cfg)

	if !slices.IsSorted(progress) || len(progress) < 2 || progress[len(progress)-1] != 100 {
		t.Errorf("progress was %v, want rising to 100", progress)
	}
	t.Run("counts", func(t *testing.T) {
		if _, text := answer(t, e, tokenize(t, e, "one two three four five six"), 6); !strings.Contains(text, "seven eight") {
			t.Errorf("one two three four five six%q", text)
		}
	})
	t.Run("pieces join to the text", func(t *testing.T) {
		const text = "Grüße, 世界! 👩‍🚀 naïve\n\ttabs <|im_end|> a\x00b"
		var b strings.Builder
		for _, id := range tokenize(t, e, text) {
			b.Write(e.voc.bytes(id))
		}
		if b.String() != text {
			t.Errorf("pieces give %q, want %q", b.String(), text)
		}
	})
	t.Run("vocabulary", func(t *testing.T) {
		if e.voc.size() != e.Model().Vocab || e.voc.bos == "" || len(e.voc.end) == 0 {
			t.Errorf("vocabulary of %d (model says %d), BOS %q, %d end tokens", e.voc.size(), e.Model().Vocab, e.voc.bos, len(e.voc.end))
		}
		for id := range e.voc.end {
			if id < 3 && len(e.voc.bytes(id)) != 0 {
				t.Errorf("end token %d has text %q", id, e.voc.bytes(id))
			}
		}
	})
	t.Run("control tokens", func(t *testing.T) { testRealControlTokens(t, e) })
	t.Run("state by layers", func(t *testing.T) { testRealStateParts(t, e) })
	t.Run("giving way", func(t *testing.T) { testRealGivingWay(t, e) })
	t.Run("embeddings", func(t *testing.T) { testRealEmbeddings(t, e) })
	t.Run("cancel during prefill", func(t *testing.T) { testRealAbort(t, e) })
}

// testRealGivingWay makes three sequences that fit one by one, but not together.
func testRealGivingWay(t *testing.T, e *Engine) {
	text := strings.Repeat("one two three four five six seven eight ", 8)
	before, prompts := e.Load(), 0
	var wg sync.WaitGroup
	var got [3]int
	for i := range got {
		ids := tokenize(t, e, text[i*8:])
		prompts += len(ids)
		p := worker.Params{MaxTokens: 30, TopP: 1, TopLogprobs: -1, IgnoreEOS: true}
		wg.Go(func() {
			n, err := drain(t.Context(), e, ids, p)
			if err != nil {
				t.Errorf("sequence %d: %v after %d tokens", i, err, n)
			}
			got[i] = n
		})
	}
	wg.Wait()
	if got != [3]int{30, 30, 30} {
		t.Errorf("tokens are %v, want 30 each", got)
	}
	l := e.Load()
	if l.Running != 0 || l.KVUsage != 0 {
		t.Errorf("load afterwards is %+v", l)
	}
	if n := l.Preempted - before.Preempted; n == 0 || l.Resumed-before.Resumed != n || int(l.PromptTokens-before.PromptTokens) != prompts {
		t.Errorf("%d gave way and %d went on from their KV; %d tokens were prefilled for prompts of %d",
			n, l.Resumed-before.Resumed, l.PromptTokens-before.PromptTokens, prompts)
	}
}

// testRealAbort leaves while the prompt is being read, in one batch, then checks
// that the next answer is what it was before. A decode that was aborted counts no
// tokens.
func testRealAbort(t *testing.T, e *Engine) {
	ids := tokenize(t, e, "Roses are red, violets are")
	before, _ := answer(t, e, ids, 12)
	long := tokenize(t, e, strings.Repeat("word ", 240))
	counted := e.Load().PromptTokens
	for range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		running := make(chan struct{})
		go func() {
			for e.Load().Running == 0 && ctx.Err() == nil {
				runtime.Gosched()
			}
			cancel()
			close(running)
		}()
		if n, err := drain(ctx, e, long, exactly(1)); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled during prefill: %d tokens, %v", n, err)
		}
		<-running
	}
	if got := e.Load(); got.Running != 0 || got.KVUsage != 0 || got.PromptTokens-counted > 2*uint64(len(long)) {
		t.Errorf("after three aborted prefills of %d tokens: %+v, %d counted", len(long), got, got.PromptTokens-counted)
	}
	if after, _ := answer(t, e, ids, 12); !slices.Equal(before, after) {
		t.Errorf("answer after an abort %v, before %v", after, before)
	}
}

func TestOpenEndsWithItsContext(t *testing.T) {
	cfg := realConfig(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("changed my mind")
	cfg.Progress = func(float64) { cancel(why) }
	if _, err := Open(ctx, cfg); !errors.Is(err, why) {
		t.Errorf("Open with a context that ended: %v, want %v", err, why)
	}
}

func TestOpenWithoutFiles(t *testing.T) {
	dir := t.TempDir()
	model := filepath.Join(dir, "m.gguf")
	_, err := Open(t.Context(), Config{LibDir: dir, ModelPath: model})
	wantWords(t, err, "m.gguf", "no such file")
}

func TestOpenBrokenModel(t *testing.T) {
	cfg := realConfig(t)
	cfg.ModelPath = filepath.Join(t.TempDir(), "broken.gguf")
	if err := os.WriteFile(cfg.ModelPath, append([]byte("GGUF\x03\x00\x00\x00"), make([]byte, 64)...), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := Open(t.Context(), cfg)
	wantWords(t, err, "broken.gguf", "llama.cpp:")
}

func TestOneLibraryPerProcess(t *testing.T) {
	cfg := tinyConfig(t)
	openReal(t, cfg)
	cfg.LibDir = t.TempDir()
	_, err := Open(t.Context(), cfg)
	wantWords(t, err, "already loaded")
}

func TestForeignLayoutIsRefused(t *testing.T) {
	openReal(t, tinyConfig(t)) // loads the library
	m, c := llama.ModelDefaultParams(), llama.ContextDefaultParams()
	if err := checkLayout(m, c); err != nil {
		t.Fatalf("the pinned pair: %v", err)
	}
	c.SwaFull, c.KVUnified = c.KVUnified, c.SwaFull // as one more bool before them would
	wantWords(t, checkLayout(m, c), engineVersion, "yzma")
}

// TestTemplatesAgreeWithLlama compares the Jinja renderings with llama.cpp's own
// code for templates that it knows by heart.
func TestTemplatesAgreeWithLlama(t *testing.T) {
	openReal(t, tinyConfig(t)) // loads the library
	messages := []openai.Message{
		{Role: "user", Content: "Hello"}, {Role: "assistant", Content: "Hi!\nHow?"}, {Role: "user", Content: "Fine, <b> & {{ you }}"},
	}
	for name, source := range map[string]string{
		"chatml": chatML,
		"gemma":  "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
		"llama3": "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
	} {
		tm, err := newTemplate(source, "", "")
		if err != nil {
			t.Fatal(err)
		}
		got, err := tm.render(conversation{messages: messages})
		if err != nil {
			t.Fatal(err)
		}
		var chat []llama.ChatMessage
		for _, m := range messages {
			chat = append(chat, llama.NewChatMessage(m.Role, m.Content))
		}
		buf := make([]byte, 4096)
		n := llama.ChatApplyTemplate(source, chat, true, buf)
		if n <= 0 {
			t.Errorf("%s: llama.cpp does not know the template", name)
			continue
		}
		if want := string(buf[:n]); got != want {
			t.Errorf("%s: %q\nllama.cpp: %q", name, got, want)
		}
	}
}

// testRealEmbeddings: near texts are nearer than far ones, and a text has the same
// vector whatever is generated beside it.
func testRealEmbeddings(t *testing.T, e *Engine) {
	embed := func(text string) []float32 {
		t.Helper()
		v, err := e.Embed(t.Context(), tokenize(t, e, text))
		if err != nil {
			t.Fatal(err)
		}
		if len(v) != e.EmbeddingSize() {
			t.Fatalf("%d dimensions, want %d", len(v), e.EmbeddingSize())
		}
		return v
	}
	dot := func(a, b []float32) (sum float64) {
		for i := range a {
			sum += float64(a[i]) * float64(b[i])
		}
		return sum
	}
	cat, kitten, tax := embed("The cat sleeps on the sofa."), embed("A kitten is sleeping on the couch."), embed("Quarterly tax filings are due in March.")
	if near, far := dot(cat, kitten), dot(cat, tax); near <= far || math.Abs(dot(cat, cat)-1) > 1e-4 {
		t.Errorf("near texts at %g, far ones at %g, itself at %g", near, far, dot(cat, cat))
	}
	long := strings.Repeat("The cat sleeps on the sofa. ", 9)
	alone := embed(long)
	var wg sync.WaitGroup
	wg.Go(func() { answer(t, e, tokenize(t, e, "one two three"), 20) })
	if same := dot(alone, embed(long)); same < 0.9999 {
		t.Errorf("beside a generation the vector is at %g of itself", same)
	}
	wg.Wait()
}
