package worker_test

import (
	"encoding/json"
	"math"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// bare hides an engine's optional abilities.
type bare struct{ worker.Engine }

// startBare runs a worker over an engine without optional abilities.
func startBare(t *testing.T) *running {
	t.Helper()
	r := &running{engine: newSim(t, sim.Config{})}
	r.run(t, worker.Config{Open: opener(bare{r.engine})})
	<-r.Changed()
	return r
}

func cosine(a, b []float32) float64 {
	sum := 0.0
	for i := range a {
		sum += float64(a[i]) * float64(b[i])
	}
	return sum
}

func TestEmbeddings(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{Aliases: []string{"alias"}})
	get := func(body string) openai.EmbeddingList {
		t.Helper()
		return decode[openai.EmbeddingList](t, r.post(t, "/v1/embeddings", body), 200)
	}
	texts := get(`{"model":"sim","input":["the quiet river","the quiet river stone","painter doctor"]}`)
	if texts.Object != "list" || texts.Model != "sim" || len(texts.Data) != 3 {
		t.Fatalf("answer is %+v", texts)
	}
	ids := 0
	for i, d := range texts.Data {
		if n := cosine(d.Embedding.Values, d.Embedding.Values); d.Object != "embedding" || d.Index != i || math.Abs(n-1) > 1e-5 {
			t.Errorf("element %d is %q, index %d, of length² %g", i, d.Object, d.Index, n)
		}
		text := []string{"the quiet river", "the quiet river stone", "painter doctor"}[i]
		tokens := decode[openai.Tokenized](t, r.post(t, "/tokenize", `{"prompt":"`+text+`"}`), 200)
		ids += tokens.Count
		raw, _ := json.Marshal(tokens.Tokens)
		same := get(`{"model":"alias","encoding_format":"base64","input":` + string(raw) + `}`)
		if !slices.Equal(same.Data[0].Embedding.Values, d.Embedding.Values) || !same.Data[0].Embedding.Base64 {
			t.Errorf("ids of %q as base64 give another vector than the text", text)
		}
	}
	if texts.Usage != (openai.EmbeddingUsage{PromptTokens: ids, TotalTokens: ids}) {
		t.Errorf("usage is %+v, want %d tokens", texts.Usage, ids)
	}
	v := func(i int) []float32 { return texts.Data[i].Embedding.Values }
	if near, far := cosine(v(0), v(1)), cosine(v(0), v(2)); near <= far {
		t.Errorf("texts that share words are at %g, others at %g", near, far)
	}
	get(`{"model":"sim","input":"x","dimensions":64}`)
}

func TestEmbeddingsRefuse(t *testing.T) {
	r := start(t, sim.Config{ContextLen: 64}, worker.Config{})
	long := make([]int, 80)
	raw, _ := json.Marshal(long)
	for body, want := range map[string]struct {
		status int
		param  string
	}{
		`{"model":"other","input":"x"}`:                       {404, "model"},
		`{"model":"sim","input":"x","dimensions":32}`:         {400, "dimensions"},
		`{"model":"sim","input":["x",7]}`:                     {400, "input[1]"},
		`{"model":"sim","input":["x",[99999999]]}`:            {400, "input"},
		`{"model":"sim","input":` + string(raw) + `}`:         {400, "input"},
		`{"model":"sim","input":"x","encoding_format":"f16"}`: {400, "encoding_format"},
	} {
		if e := decode[apiError](t, r.post(t, "/v1/embeddings", body), want.status); e.param() != want.param {
			t.Errorf("%.60s: param %q, want %q", body, e.param(), want.param)
		}
	}
	b := startBare(t)
	if e := decode[apiError](t, b.post(t, "/v1/embeddings", `{"model":"sim","input":"x"}`), 400); e.param() != "model" {
		t.Errorf("engine without embeddings: %+v", e)
	}
}

func TestTokenizeEndpoints(t *testing.T) {
	r := start(t, sim.Config{ContextLen: 100}, worker.Config{})
	tokenize := func(body string) openai.Tokenized {
		t.Helper()
		return decode[openai.Tokenized](t, r.post(t, "/tokenize", body), 200)
	}
	whole := tokenize(`{"model":"sim","prompt":"the river é","return_token_strs":true}`)
	plain := tokenize(`{"prompt":"the river é","add_special_tokens":false}`)
	if whole.MaxModelLen != 100 || whole.Count != len(whole.Tokens) || len(whole.Strings) != whole.Count || plain.Strings != nil {
		t.Errorf("answers are %+v and %+v", whole, plain)
	}
	if !slices.Equal(plain.Tokens, whole.Tokens[1:]) {
		t.Errorf("without special tokens %v, with them %v", plain.Tokens, whole.Tokens)
	}
	if last := whole.Strings[whole.Count-1]; last != `bytes:\xa9` {
		t.Errorf("a part of a character is named %q", last)
	}
	raw, _ := json.Marshal(plain)
	if back := decode[openai.Detokenized](t, r.post(t, "/detokenize", string(raw)), 200); back.Prompt != "the river é" {
		t.Errorf("text came back as %q", back.Prompt)
	}
	messages := `{"messages":[{"role":"user","content":"hi"}]`
	open, closed := tokenize(messages+`}`), tokenize(messages+`,"add_generation_prompt":false}`)
	if open.Count != closed.Count+1 || !slices.Equal(open.Tokens[:closed.Count], closed.Tokens) {
		t.Errorf("chat tokens are %v, without the prompt for the answer %v", open.Tokens, closed.Tokens)
	}
	for path, body := range map[string]string{"/tokenize": `{"model":"no","prompt":"x"}`, "/detokenize": `{"model":"no","tokens":[1]}`} {
		if e := decode[apiError](t, r.post(t, path, body), 404); e.code() != "model_not_found" {
			t.Errorf("%s: %+v", path, e)
		}
	}
	if e := decode[apiError](t, r.post(t, "/detokenize", `{"tokens":[99999999]}`), 400); e.param() != "tokens" {
		t.Errorf("foreign id: %+v", e)
	}
	b := startBare(t)
	for path, body := range map[string]string{"/detokenize": `{"tokens":[1]}`, "/tokenize": `{"prompt":"x","return_token_strs":true}`} {
		if e := decode[apiError](t, b.post(t, path, body), 400); e.param() == "" {
			t.Errorf("%s on an engine that cannot decode: %+v", path, e)
		}
	}
}
