package worker_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

const (
	chatPath = "/v1/chat/completions"
	textPath = "/v1/completions"
)

func TestChat(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{Aliases: []string{"gpt-x"}})
	resp := r.post(t, chatPath, `{"model":"gpt-x","max_tokens":12,"messages":[{"role":"user","content":"hello"}]}`)
	if got := resp.Header.Get(names.Worker); got != "w1" {
		t.Errorf("worker header %q", got)
	}
	got := decode[openai.ChatCompletion](t, resp, 200)
	if got.Object != "chat.completion" || got.Model != "sim" || !strings.HasPrefix(got.ID, "chatcmpl-") || got.Created == 0 {
		t.Errorf("%+v", got)
	}
	c := got.Choices[0]
	if c.Message.Role != "assistant" || c.Message.Content == "" || c.FinishReason == nil || *c.FinishReason != "length" {
		t.Errorf("%+v", c)
	}
	if u := got.Usage; u.CompletionTokens != 12 || u.PromptTokens < 4 || u.TotalTokens != u.PromptTokens+12 || u.PromptTokensDetails == nil {
		t.Errorf("usage %+v", u)
	}
}

// What streams must be what the same request answers whole.
func TestStreamEqualsWhole(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	text := decode[openai.Completion](t, r.post(t, textPath, `{"model":"sim","max_tokens":60,"prompt":"stop here"}`), 200).Choices[0].Text
	stop, err := json.Marshal([]string{text[40:47], "never said"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, path, body string
		choices          int
	}{
		{"chat", chatPath, `"messages":[{"role":"user","content":"hi"}],"max_tokens":100,"temperature":0`, 1},
		{"chat n", chatPath, `"messages":[{"role":"user","content":"hi"}],"max_tokens":50,"n":3,"seed":7`, 3},
		{"chat to its own end", chatPath, `"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}],"sim":{"max":9}`, 1},
		{"completion", textPath, `"prompt":"once upon","max_tokens":200,"temperature":0`, 1},
		{"default length", textPath, `"prompt":"once upon"`, 1},
		{"prompts and n", textPath, `"prompt":["one","two é","three"],"n":2,"max_tokens":30,"seed":-5`, 6},
		{"echo", textPath, `"prompt":["say \"é\" 🙂","\n"],"echo":true,"max_tokens":20,"temperature":0`, 2},
		{"ids", textPath, `"prompt":[600,601,602],"max_tokens":20,"echo":true`, 1},
		{"lists of ids", textPath, `"prompt":[[600],[601,97]],"max_tokens":20`, 2},
		{"stop", textPath, `"prompt":"stop here","max_tokens":60,"stop":` + string(stop), 1},
		{"ignore_eos", textPath, `"prompt":"x","max_tokens":300,"ignore_eos":true`, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			body := `{"model":"sim","seed":1,` + c.body
			if strings.Contains(c.body, `"seed"`) {
				body = `{"model":"sim",` + c.body
			}
			want := wholeAnswer(t, r.post(t, c.path, body+"}"))
			resp := r.post(t, c.path, body+`,"stream":true,"stream_options":{"include_usage":true}}`)
			if got := resp.Header.Get("Content-Type"); !strings.HasPrefix(got, "text/event-stream") {
				t.Errorf("content type %q", got)
			}
			s := readStream(resp.Body)
			if !s.whole() {
				t.Fatalf("the stream ended with %v after %d events", s.err, len(s.events))
			}
			if diff := cmp.Diff(want, s.joined(t, c.choices)); diff != "" {
				t.Errorf("-whole +stream:\n%s", diff)
			}
		})
	}
}

// wholeAnswer reads a response without streaming, of either endpoint.
func wholeAnswer(t *testing.T, resp *http.Response) answer {
	t.Helper()
	got := decode[struct {
		Choices []struct {
			Text         string
			Message      *openai.ChatMessage
			FinishReason string `json:"finish_reason"`
		}
		Usage openai.Usage
	}](t, resp, 200)
	a := answer{Usage: got.Usage}
	for _, c := range got.Choices {
		text := c.Text
		if c.Message != nil {
			text = c.Message.Content
		}
		if text == "" || c.FinishReason == "" {
			t.Errorf("empty choice %+v", c)
		}
		a.Texts, a.Reasons = append(a.Texts, text), append(a.Reasons, c.FinishReason)
	}
	return a
}

func TestStopStringIsNotSent(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	plain := wholeAnswer(t, r.post(t, textPath, `{"model":"sim","max_tokens":60,"prompt":"x","temperature":0}`)).Texts[0]
	runes := []rune(plain)
	for _, at := range []int{0, 1, 20, len(runes) - 5} {
		want := string(runes[at : at+5])
		stop, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		got := wholeAnswerOrEmpty(t, r.post(t, textPath, `{"model":"sim","max_tokens":60,"prompt":"x","temperature":0,"stop":`+string(stop)+`}`))
		if i := strings.Index(plain, want); got.Text != plain[:i] || got.FinishReason == nil || *got.FinishReason != "stop" {
			t.Errorf("stop %q: %q, want %q", want, got.Text, plain[:i])
		}
	}
}

func wholeAnswerOrEmpty(t *testing.T, resp *http.Response) openai.TextChoice {
	t.Helper()
	return decode[openai.Completion](t, resp, 200).Choices[0]
}

func TestStreamChunks(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	for _, c := range []struct {
		path, body    string
		usage         bool
		first, object string
	}{
		{chatPath, `"messages":[{"role":"user","content":"hi"}]`, true, `"delta":{"role":"assistant","content":""}`, "chat.completion.chunk"},
		{chatPath, `"messages":[{"role":"user","content":"hi"}]`, false, `"delta":{"role":"assistant","content":""}`, "chat.completion.chunk"},
		{textPath, `"prompt":"hi"`, true, `"text":`, "text_completion"},
		{textPath, `"prompt":"hi"`, false, `"text":`, "text_completion"},
	} {
		body := `{"model":"sim","stream":true,"max_tokens":5,` + c.body
		if c.usage {
			body += `,"stream_options":{"include_usage":true}`
		}
		s := readStream(r.post(t, c.path, body+"}").Body)
		if !s.whole() || !strings.Contains(s.events[0], c.first) {
			t.Fatalf("%s: %v, first %s", c.path, s.err, s.events[0])
		}
		chunks := s.events[:len(s.events)-1]
		if c.usage {
			last := chunks[len(chunks)-1]
			chunks = chunks[:len(chunks)-1]
			if !strings.Contains(last, `"choices":[]`) || !strings.Contains(last, `"completion_tokens":5`) {
				t.Errorf("%s: usage chunk %s", c.path, last)
			}
		}
		ids := map[string]bool{}
		for i, ev := range chunks {
			var chunk openai.Chunk
			if err := json.Unmarshal([]byte(ev), &chunk); err != nil {
				t.Fatal(err)
			}
			ids[chunk.ID] = true
			if chunk.Object != c.object || chunk.Model != "sim" || strings.Contains(ev, `"usage":null`) != c.usage {
				t.Errorf("%s: %s", c.path, ev)
			}
			if done := chunk.Choices[0].FinishReason != nil; done != (i == len(chunks)-1) {
				t.Errorf("%s: chunk %d of %d has finish_reason %v", c.path, i, len(chunks), done)
			}
		}
		if len(ids) != 1 {
			t.Errorf("%s: ids %v", c.path, ids)
		}
	}
}

func TestLogprobs(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	chat := `{"model":"sim","max_tokens":80,"temperature":0,"logprobs":true,"top_logprobs":2,"messages":[{"role":"user","content":"hi"}]`
	got := decode[openai.ChatCompletion](t, r.post(t, chatPath, chat+"}"), 200)
	entries := got.Choices[0].Logprobs.Content
	if len(entries) != 80 || len(entries[0].TopLogprobs) != 2 {
		t.Fatalf("%d entries, the first %+v", len(entries), entries[0])
	}
	var spelled []byte
	for _, e := range entries {
		for _, b := range e.Bytes {
			spelled = append(spelled, byte(b))
		}
	}
	if want := got.Choices[0].Message.Content; string(spelled) != want {
		t.Errorf("tokens spell %q, the answer is %q", spelled, want)
	}
	var streamed []openai.TokenLogprob
	for _, ev := range readStream(r.post(t, chatPath, chat+`,"stream":true}`).Body).events {
		var c struct {
			Choices []struct{ Logprobs *openai.ChatLogprobs }
		}
		if ev != "[DONE]" && json.Unmarshal([]byte(ev), &c) == nil && c.Choices[0].Logprobs != nil {
			streamed = append(streamed, c.Choices[0].Logprobs.Content...)
		}
	}
	if diff := cmp.Diff(entries, streamed); diff != "" {
		t.Errorf("-whole +stream:\n%s", diff)
	}
	text := decode[openai.Completion](t, r.post(t, textPath, `{"model":"sim","max_tokens":40,"logprobs":3,"prompt":"hi"}`), 200).Choices[0]
	l := text.Logprobs
	if len(l.Tokens) != 40 || len(l.TokenLogprobs) != 40 || len(l.TopLogprobs) != 40 || len(l.TextOffset) != 40 || len(l.TopLogprobs[0]) > 3 {
		t.Fatalf("%+v", l)
	}
	runes := []rune(text.Text)
	for i, tok := range l.Tokens {
		if strings.HasPrefix(tok, "bytes:") {
			continue
		}
		if rest := string(runes[l.TextOffset[i]:]); !strings.HasPrefix(rest, tok) {
			t.Errorf("token %d %q at offset %d, where %.20q stands", i, tok, l.TextOffset[i], rest)
		}
	}
}

func TestModels(t *testing.T) {
	r := start(t, sim.Config{Name: "org/tiny", ContextLen: 512}, worker.Config{Aliases: []string{"small", "org/tiny", "small"}})
	list := decode[openai.ModelList](t, r.do(t, http.MethodGet, "/v1/models", ""), 200)
	if list.Object != "list" || len(list.Data) != 2 || list.Data[0].ID != "org/tiny" || list.Data[1].Root != "org/tiny" {
		t.Errorf("%+v", list)
	}
	for _, id := range []string{"org/tiny", "small", "org%2Ftiny"} {
		card := decode[openai.ModelCard](t, r.do(t, http.MethodGet, "/v1/models/"+id, ""), 200)
		if card.Object != "model" || card.MaxModelLen != 512 {
			t.Errorf("%s: %+v", id, card)
		}
	}
	if e := decode[apiError](t, r.do(t, http.MethodGet, "/v1/models/other", ""), 404); e.code() != "model_not_found" {
		t.Errorf("%+v", e)
	}
}

// The same over HTTP/2 without TLS, as Envoy speaks to workers.
func TestHTTP2(t *testing.T) {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	r := start(t, sim.Config{}, worker.Config{})
	r.client = &http.Client{Transport: &http.Transport{Protocols: &p}}
	resp := r.post(t, chatPath, `{"model":"sim","stream":true,"max_tokens":10,"messages":[{"role":"user","content":"hi"}]}`)
	if s := readStream(resp.Body); resp.ProtoMajor != 2 || !s.whole() {
		t.Errorf("HTTP/%d, %v", resp.ProtoMajor, s.err)
	}
}

func TestExpectedWorker(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	body := `{"model":"sim","prompt":"x"}`
	if resp := r.do(t, http.MethodPost, textPath, body, names.ExpectWorker, "w1"); resp.StatusCode != 200 {
		t.Errorf("status %d for the right worker", resp.StatusCode)
	}
	resp := r.do(t, http.MethodPost, textPath, body, names.ExpectWorker, "w2")
	if got := resp.Header.Get(names.Worker); got != "w1" {
		t.Errorf("worker header %q", got)
	}
	if e := decode[apiError](t, resp, http.StatusMisdirectedRequest); e.code() != "wrong_worker" {
		t.Errorf("%+v", e)
	}
}

// firstText is the text of the first n tokens of TestFaults' answer.
func firstText(t *testing.T, e *sim.Engine, n int) string {
	t.Helper()
	req, bad := openai.Parse(openai.Completions, []byte(`{"model":"sim","prompt":"x"}`))
	if bad != nil {
		t.Fatal(bad)
	}
	ids, err := e.Tokenize(req, 0)
	if err != nil {
		t.Fatal(err)
	}
	var text []byte
	for tok, err := range e.Generate(t.Context(), ids, worker.Params{MaxTokens: n, TopLogprobs: -1}) {
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, tok.Bytes...)
	}
	return strings.ToValidUTF8(string(text), "")
}

func mustBody(t *testing.T) func(*http.Response, error) io.Reader {
	return func(resp *http.Response, err error) io.Reader {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		return resp.Body
	}
}

// A client that leaves frees its sequence, also while no token comes.
func TestClientLeaves(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	for _, stream := range []string{"true", "false"} {
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.base+textPath,
			strings.NewReader(`{"model":"sim","prompt":"x","max_tokens":30,"sim":{"stall_at":5},"stream":`+stream+`}`))
		if err != nil {
			t.Fatal(err)
		}
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			if resp, err := r.client.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		}()
		until(t, func() bool { return r.engine.Load().Running == 1 })
		cancel()
		<-gone
		until(t, func() bool { return r.engine.Load().Running == 0 })
	}
	metrics, err := io.ReadAll(r.do(t, http.MethodGet, "/metrics", "").Body)
	if err != nil || !bytes.Contains(metrics, []byte(`vllm:request_success_total{finished_reason="abort",model_name="sim"} 2`)) {
		t.Errorf("%v: no two aborts in the metrics", err)
	}
}
