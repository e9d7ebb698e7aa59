package worker_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// Every bad input is the client's fault, said in OpenAI's shape, with the field
// at fault as param.
func TestBadInput(t *testing.T) {
	r := start(t, sim.Config{ContextLen: 64}, worker.Config{MaxBody: 1 << 16})
	const hi = `"messages":[{"role":"user","content":"hi"}]`
	long := strings.Repeat("Q", 100)
	for _, c := range []struct {
		name, path, body string
		status           int
		param, code      string
	}{
		{"empty body", chatPath, ``, 400, "", ""},
		{"no JSON", chatPath, `hello`, 400, "", ""},
		{"cut JSON", chatPath, `{"model":"sim",` + hi, 400, "", ""},
		{"data after JSON", chatPath, `{"model":"sim",` + hi + `} x`, 400, "", ""},
		{"array", chatPath, `[1]`, 400, "", ""},
		{"twice the same field", chatPath, `{"model":"sim","model":"sim",` + hi + `}`, 400, "", ""},
		{"not UTF-8", chatPath, "{\"model\":\"sim\",\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\"}]}", 400, "", ""},
		{"half a surrogate pair", textPath, `{"model":"sim","prompt":"\ud800"}`, 400, "", ""},
		{"nested too deep", textPath, `{"model":"sim","prompt":` + strings.Repeat("[", 20000) + strings.Repeat("]", 20000) + `}`, 400, "", ""},
		{"no model", chatPath, `{` + hi + `}`, 400, "model", ""},
		{"null model", chatPath, `{"model":null,` + hi + `}`, 400, "model", ""},
		{"model of the wrong type", chatPath, `{"model":7,` + hi + `}`, 400, "model", ""},
		{"unknown model", chatPath, `{"model":"gpt-9",` + hi + `}`, 404, "model", "model_not_found"},
		{"no messages", chatPath, `{"model":"sim"}`, 400, "messages", ""},
		{"empty messages", chatPath, `{"model":"sim","messages":[ ]}`, 400, "messages", ""},
		{"empty messages, spaced", chatPath, `{"model":"sim","messages":[` + strings.Repeat(" ", 99) + `]}`, 400, "messages", ""},
		{"messages of the wrong type", chatPath, `{"model":"sim","messages":"hi"}`, 400, "messages", ""},
		{"message of the wrong type", chatPath, `{"model":"sim","messages":["hi"]}`, 400, "messages[0]", ""},
		{"unknown role", chatPath, `{"model":"sim","messages":[{"role":"king","content":"hi"}]}`, 400, "messages[0].role", ""},
		{"image", chatPath, `{"model":"sim","messages":[{"role":"user","content":[{"type":"image_url"}]}]}`, 400, "messages[0].content[0].type", ""},
		{"content of the wrong type", chatPath, `{"model":"sim","messages":[{"role":"user","content":5}]}`, 400, "messages[0].content", ""},
		{"long chat", chatPath, `{"model":"sim","messages":[{"role":"user","content":"` + long + `"}]}`, 400, "messages", "context_length_exceeded"},
		{"long prompt", textPath, `{"model":"sim","prompt":"` + long + `"}`, 400, "prompt", "context_length_exceeded"},
		{"no prompt", textPath, `{"model":"sim"}`, 400, "prompt", ""},
		{"prompt of the wrong type", textPath, `{"model":"sim","prompt":{}}`, 400, "prompt", ""},
		{"empty list of prompts", textPath, `{"model":"sim","prompt":[]}`, 400, "prompt", ""},
		{"mixed prompts", textPath, `{"model":"sim","prompt":["a",true]}`, 400, "prompt[1]", ""},
		{"negative id", textPath, `{"model":"sim","prompt":[-1]}`, 400, "prompt", ""},
		{"id outside the vocabulary", textPath, `{"model":"sim","prompt":[2147483647]}`, 400, "prompt", ""},
		{"zero max_tokens", chatPath, `{"model":"sim","max_tokens":0,` + hi + `}`, 400, "max_tokens", ""},
		{"negative max_tokens", textPath, `{"model":"sim","max_tokens":-3,"prompt":"x"}`, 400, "max_tokens", ""},
		{"fractional max_tokens", textPath, `{"model":"sim","max_tokens":1.5,"prompt":"x"}`, 400, "max_tokens", ""},
		{"huge max_tokens", textPath, `{"model":"sim","max_tokens":99999999999999999999,"prompt":"x"}`, 400, "max_tokens", ""},
		{"zero max_completion_tokens", chatPath, `{"model":"sim","max_completion_tokens":0,` + hi + `}`, 400, "max_completion_tokens", ""},
		{"temperature as text", chatPath, `{"model":"sim","temperature":"hot",` + hi + `}`, 400, "temperature", ""},
		{"temperature out of range", chatPath, `{"model":"sim","temperature":2.1,` + hi + `}`, 400, "temperature", ""},
		{"infinite temperature", chatPath, `{"model":"sim","temperature":1e999,` + hi + `}`, 400, "temperature", ""},
		{"top_p out of range", chatPath, `{"model":"sim","top_p":-0.1,` + hi + `}`, 400, "top_p", ""},
		{"n out of range", chatPath, `{"model":"sim","n":0,` + hi + `}`, 400, "n", ""},
		{"too many choices", textPath, `{"model":"sim","n":100,"prompt":["a","b"]}`, 400, "n", ""},
		{"best_of", textPath, `{"model":"sim","best_of":3,"prompt":"x"}`, 400, "best_of", ""},
		{"stream as text", chatPath, `{"model":"sim","stream":"yes",` + hi + `}`, 400, "stream", ""},
		{"stream_options without stream", chatPath, `{"model":"sim","stream_options":{"include_usage":true},` + hi + `}`, 400, "stream_options", ""},
		{"include_usage as text", chatPath, `{"model":"sim","stream":true,"stream_options":{"include_usage":"yes"},` + hi + `}`, 400, "stream_options.include_usage", ""},
		{"empty stop", chatPath, `{"model":"sim","stop":"",` + hi + `}`, 400, "stop", ""},
		{"stop of the wrong type", chatPath, `{"model":"sim","stop":[1],` + hi + `}`, 400, "stop", ""},
		{"long stop", textPath, `{"model":"sim","prompt":"x","stop":"` + strings.Repeat("x", 5000) + `"}`, 400, "stop", ""},
		{"top_logprobs alone", chatPath, `{"model":"sim","top_logprobs":2,` + hi + `}`, 400, "top_logprobs", ""},
		{"logprobs out of range", textPath, `{"model":"sim","logprobs":99,"prompt":"x"}`, 400, "logprobs", ""},
		{"logit_bias out of range", chatPath, `{"model":"sim","logit_bias":{"5":101},` + hi + `}`, 400, "logit_bias", ""},
		{"logit_bias for no id", chatPath, `{"model":"sim","logit_bias":{"x":1},` + hi + `}`, 400, "logit_bias", ""},
		{"echo with logprobs", textPath, `{"model":"sim","echo":true,"logprobs":1,"prompt":"x"}`, 400, "echo", ""},
		{"suffix of the wrong type", textPath, `{"model":"sim","suffix":7,"prompt":"x"}`, 400, "suffix", ""},
		{"text part without text", chatPath, `{"model":"sim","messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text"}]}]}`, 400, "messages[0].content[1].text", ""},
		{"text part of null", chatPath, `{"model":"sim","messages":[{"role":"user","content":[{"type":"text","text":null}]}]}`, 400, "messages[0].content[0].text", ""},
		{"text part of a number", chatPath, `{"model":"sim","messages":[{"role":"user","content":[{"type":"text","text":5}]}]}`, 400, "messages[0].content[0].text", ""},
		{"ignored field of the wrong type", chatPath, `{"model":"sim","store":"x",` + hi + `}`, 400, "store", ""},
		{"field of chats of the wrong type", textPath, `{"model":"sim","tools":"x","prompt":"x"}`, 400, "tools", ""},
		{"negative min_tokens", textPath, `{"model":"sim","min_tokens":-1,"prompt":"x"}`, 400, "min_tokens", ""},
		{"answer of a tool to no call", chatPath, `{"model":"sim","messages":[{"role":"tool","content":"x"}]}`, 400, "messages[0].tool_call_id", ""},
		{"five stops", chatPath, `{"model":"sim","stop":["a","b","c","d","e"],` + hi + `}`, 400, "stop", ""},
		{"instruction of the wrong type", textPath, `{"model":"sim","sim":{"ttft_ms":"x"},"prompt":"x"}`, 400, "sim.ttft_ms", ""},
		{"unknown instruction", textPath, `{"model":"sim","sim":{"explode":1},"prompt":"x"}`, 400, "sim.explode", ""},
		{"body too large", textPath, `{"model":"sim","prompt":"` + strings.Repeat("x", 1<<16) + `"}`, 413, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := decode[apiError](t, r.post(t, c.path, c.body), c.status)
			if strings.Contains(e.Error.Message, "unmarshal") || strings.Contains(e.Error.Message, "Go ") {
				t.Errorf("the message speaks of our insides: %s", e.Error.Message)
			}
			if e.param() != c.param || e.code() != c.code || e.Error.Type != "invalid_request_error" || e.Error.Message == "" {
				t.Errorf("param %q code %q, want %q %q: %+v", e.param(), e.code(), c.param, c.code, e.Error)
			}
		})
	}
	if got := r.engine.Load(); got.GenTokens != 0 {
		t.Errorf("bad requests generated %d tokens", got.GenTokens)
	}
}

// A body whose length is not announced is cut at the limit all the same.
func TestUnannouncedBodyTooLarge(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{MaxBody: 1 << 16})
	body := io.MultiReader(strings.NewReader(`{"model":"sim","prompt":"`), strings.NewReader(strings.Repeat("x", 1<<17)))
	resp, err := r.client.Post(r.base+textPath, "application/json", body)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	decode[apiError](t, resp, 413)
}

// Large bodies within the limit pass: 0.9, 4 and 20 MB of prompt.
func TestLargeBodies(t *testing.T) {
	r := start(t, sim.Config{ContextLen: 1 << 26}, worker.Config{})
	for _, size := range []int{900 << 10, 4 << 20, 20 << 20} {
		text := strings.Repeat(" river", size/6)
		got := wholeAnswer(t, r.post(t, textPath, `{"model":"sim","max_tokens":3,"prompt":"`+text+`"}`))
		if want := size/6 + 1; got.Usage.PromptTokens != want {
			t.Errorf("%d bytes: %d prompt tokens, want %d", size, got.Usage.PromptTokens, want)
		}
	}
}

func TestMethodsAndPaths(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	for _, c := range []struct {
		method, path string
		status       int
		allow        string
	}{
		{http.MethodGet, chatPath, 405, "POST"},
		{http.MethodDelete, textPath, 405, "POST"},
		{http.MethodPost, "/v1/models", 405, "GET, HEAD"},
		{http.MethodPut, "/v1/models/sim", 405, "GET, HEAD"},
		{http.MethodPost, "/health", 405, "GET, HEAD"},
		{http.MethodPost, "/v1/responses", 404, ""},
		{http.MethodGet, "/", 404, ""},
		{http.MethodGet, "/v1/models/", 404, ""},
		{http.MethodGet, "//v1/models", 404, ""},
		{http.MethodGet, "/v1/../v1/models", 404, ""},
	} {
		resp := r.do(t, c.method, c.path, "")
		e := decode[apiError](t, resp, c.status)
		if resp.Header.Get("Allow") != c.allow || e.Error.Type != "invalid_request_error" || resp.Header.Get(names.Worker) != "w1" {
			t.Errorf("%s %s: allow %q, %+v", c.method, c.path, resp.Header.Get("Allow"), e)
		}
	}
	if resp := r.do(t, http.MethodHead, "/health", ""); resp.StatusCode != 200 {
		t.Errorf("HEAD /health: %d", resp.StatusCode)
	}
}

func TestHeaderFlood(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	var many []string
	for i := range 300 {
		many = append(many, fmt.Sprintf("X-Flood-%d", i), "x")
	}
	for name, header := range map[string][]string{
		"many":     many,
		"one long": {"X-Flood", strings.Repeat("x", 100<<10)},
	} {
		e := decode[apiError](t, r.do(t, http.MethodPost, textPath, `{"model":"sim","prompt":"x"}`, header...), 431)
		if e.Error.Type != "invalid_request_error" {
			t.Errorf("%s: %+v", name, e)
		}
	}
}

func TestQueueFull(t *testing.T) {
	r := start(t, sim.Config{MaxSeqs: 1, MaxQueue: -1}, worker.Config{})
	first := r.post(t, textPath, `{"model":"sim","prompt":"x","stream":true,"sim":{"stall_at":3}}`)
	defer first.Body.Close()
	resp := r.post(t, textPath, `{"model":"sim","prompt":"x"}`)
	if e := decode[apiError](t, resp, 429); resp.Header.Get("Retry-After") == "" || e.Error.Type != "rate_limit_error" {
		t.Errorf("Retry-After %q, %+v", resp.Header.Get("Retry-After"), e)
	}
}

// A refusal comes after the body was read, so a client that only sends gets it, and its
// connection serves on.
func TestRefusedBodiesAreRead(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	big := strings.Repeat("x", 5<<20)
	for _, c := range []struct {
		method, path string
		status       int
	}{
		{http.MethodPost, "/v1/responses", 404},
		{http.MethodPost, "/v1/models", 405},
		{http.MethodPut, textPath, 405},
	} {
		body := &counted{Reader: strings.NewReader(big)}
		req, err := http.NewRequestWithContext(t.Context(), c.method, r.base+c.path, body)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := r.client.Do(req)
		if err != nil {
			t.Errorf("%s %s: %v", c.method, c.path, err)
			continue
		}
		decode[apiError](t, resp, c.status)
		if n := body.n.Load(); n != int64(len(big)) || resp.Close {
			t.Errorf("%s %s: %d of %d bytes read, connection closed: %v", c.method, c.path, n, len(big), resp.Close)
		}
	}
}

// counted counts what is read of it.
type counted struct {
	io.Reader
	n atomic.Int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.n.Add(int64(n))
	return n, err
}
