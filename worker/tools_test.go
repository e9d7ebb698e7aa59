package worker_test

import (
	"context"
	"encoding/json"
	"iter"
	"strings"
	"sync"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// scripted is an engine whose answer is a fixed text, a few bytes per token, so that
// a token's id tells its place. It "follows" every grammar, and continues.
type scripted struct {
	*sim.Engine
	script string
	piece  int

	mu   sync.Mutex
	seen worker.Params
}

func (s *scripted) Model() worker.Model {
	m := s.Engine.Model()
	m.Tools, m.ToolMark = worker.Hermes, -1
	return m
}

func (s *scripted) Constrain(context.Context, string) error { return nil }

func (s *scripted) Follow(worker.Params, []int32) (bool, error) { return true, nil }

func (s *scripted) TokenBytes(id int32) []byte {
	at := int(id) * s.piece
	return []byte(s.script[min(at, len(s.script)):min(at+s.piece, len(s.script))])
}

func (s *scripted) EndsAnswer(id int32) bool { return int(id)*s.piece >= len(s.script) }

func (s *scripted) Generate(_ context.Context, _ []int32, p worker.Params) iter.Seq2[worker.Token, error] {
	s.mu.Lock()
	s.seen = p
	s.mu.Unlock()
	return func(yield func(worker.Token, error) bool) {
		for n := range p.MaxTokens {
			id := int32(p.Delivered + n)
			tok := worker.Token{ID: id, Bytes: s.TokenBytes(id)}
			switch {
			case s.EndsAnswer(id):
				tok.Finish = "stop"
			case n+1 == p.MaxTokens:
				tok.Finish = "length"
			}
			if !yield(tok, nil) || tok.Finish != "" {
				return
			}
		}
	}
}

const (
	weather = `"tools":[{"type":"function","function":{"name":"get_weather","description":"d","parameters":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}},` +
		`{"type":"function","function":{"name":"now"}}]`
	script = "I'll look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich \\\"x\\\"\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>"
	askSim = `{"model":"sim","messages":[{"role":"user","content":"hi"}],`
)

// startScripted runs a worker over a script.
func startScripted(t *testing.T, piece int) (*running, *scripted) {
	t.Helper()
	e := &scripted{Engine: newSim(t, sim.Config{}), script: script, piece: piece}
	r := &running{engine: e.Engine}
	r.run(t, worker.Config{Open: opener(e), RelaySecret: "secret"})
	<-r.Changed()
	return r, e
}

// called is an answer with calls, from a whole answer or a stream.
type called struct {
	content, reason string
	names, ids      []string
	arguments       []string
}

func (c called) check(t *testing.T, content, reason string) {
	t.Helper()
	if c.content != content || c.reason != reason || strings.Join(c.names, " ") != "get_weather now" ||
		len(c.ids) != 2 || c.ids[0] == c.ids[1] || c.arguments[0] != `{"city": "Zürich \"x\""}` || c.arguments[1] != "{}" {
		t.Errorf("answer is %+v", c)
	}
}

// streamCalls puts a stream together by OpenAI's own client.
func streamCalls(t *testing.T, r *running, body string) called {
	t.Helper()
	s := readStream(r.post(t, "/v1/chat/completions", body).Body)
	if !s.whole() {
		t.Fatalf("stream is broken: %v %v", s.err, s.events)
	}
	var acc openai.ChatCompletionAccumulator
	for _, ev := range s.events[:len(s.events)-1] {
		var chunk openai.ChatCompletionChunk
		if err := json.Unmarshal([]byte(ev), &chunk); err != nil {
			t.Fatal(err)
		}
		if !acc.AddChunk(chunk) {
			t.Fatalf("the client refuses %s", ev)
		}
	}
	return fromSDK(acc.Choices[0])
}

func fromSDK(c openai.ChatCompletionChoice) called {
	out := called{content: c.Message.Content, reason: c.FinishReason}
	for _, call := range c.Message.ToolCalls {
		out.names, out.ids = append(out.names, call.Function.Name), append(out.ids, call.ID)
		out.arguments = append(out.arguments, call.Function.Arguments)
	}
	return out
}

func TestToolCallsForOpenAIsClient(t *testing.T) {
	for _, piece := range []int{1, 3, 7, 1000} {
		r, e := startScripted(t, piece)
		got := streamCalls(t, r, askSim+weather+`,"stream":true}`)
		got.check(t, "I'll look.\n", "tool_calls")
		if !e.seen.GrammarLate || !strings.Contains(e.seen.Grammar, "get_weather") {
			t.Errorf("the engine was asked for %+v", e.seen)
		}
		client := openai.NewClient(option.WithBaseURL(r.base+"/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0))
		whole, err := client.Chat.Completions.New(t.Context(), openai.ChatCompletionNewParams{
			Model: "sim", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hi")},
			ToolChoice: openai.ChatCompletionToolChoiceOptionUnionParam{OfAuto: openai.String("required")},
			Tools: []openai.ChatCompletionToolUnionParam{
				openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{Name: "get_weather"}),
				openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{Name: "now"}),
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		fromSDK(whole.Choices[0]).check(t, "I'll look.\n", "tool_calls")
		if e.seen.GrammarLate || !strings.Contains(e.seen.Grammar, "<tool_call>") {
			t.Errorf("required: the engine was asked for %+v", e.seen)
		}
	}
}

func TestToolAnswerWithoutContentIsNull(t *testing.T) {
	r, e := startScripted(t, 5)
	e.script = `<tool_call>{"name": "now", "arguments": {}}</tool_call>`
	var body struct {
		Choices []struct{ Message map[string]any }
	}
	raw := decode[json.RawMessage](t, r.post(t, "/v1/chat/completions", askSim+weather+`}`), 200)
	if err := json.Unmarshal(raw, &body); err != nil {
		t.Fatal(err)
	}
	if content, ok := body.Choices[0].Message["content"]; !ok || content != nil {
		t.Errorf("content is %v in %s", content, raw)
	}
	named := `,"tool_choice":{"type":"function","function":{"name":"now"}}}`
	if got := decode[openai.ChatCompletion](t, r.post(t, "/v1/chat/completions", askSim+weather+named), 200); got.Choices[0].FinishReason != "stop" {
		t.Errorf("a named function ends with %q", got.Choices[0].FinishReason)
	}
	if strings.Contains(e.seen.Grammar, "get_weather") {
		t.Error("another function than the named one is allowed")
	}
	off := decode[openai.ChatCompletion](t, r.post(t, "/v1/chat/completions", askSim+weather+`,"tool_choice":"none"}`), 200)
	if off.Choices[0].Message.Content != e.script || len(off.Choices[0].Message.ToolCalls) != 0 || e.seen.Grammar != "" {
		t.Errorf("with none: %+v", off.Choices[0].Message)
	}
}

// TestToolCallsSurviveACut: cut behind each token, the continuation's deltas complete
// those that came before: one id and one name for each call.
func TestToolCallsSurviveACut(t *testing.T) {
	r, _ := startScripted(t, 4)
	header := []string{"X-Kvmesh-Relay", "secret", "X-Kvmesh-Stream", "s1"}
	ask := func(mesh string) []string {
		t.Helper()
		s := readStream(r.do(t, "POST", "/v1/chat/completions", askSim+weather+`,"stream":true,"kvmesh":{"token_ids":true`+mesh+`}}`, header...).Body)
		if !s.whole() {
			t.Fatalf("stream is broken: %v", s.events)
		}
		return s.events[:len(s.events)-1]
	}
	whole := ask("")
	type delta struct {
		Choices []struct {
			TokenIDs []int32 `json:"token_ids"`
			Delta    struct {
				Content string `json:"content"`
			} `json:"delta"`
		}
	}
	for cut := 1; cut < len(whole); cut++ {
		ids, text := []int32{}, 0
		for _, ev := range whole[:cut] {
			var d delta
			if err := json.Unmarshal([]byte(ev), &d); err != nil {
				t.Fatal(err)
			}
			ids, text = append(ids, d.Choices[0].TokenIDs...), text+len(d.Choices[0].Delta.Content)
		}
		raw, _ := json.Marshal(map[string]any{"stream": "s1", "attempt": 2, "choices": []any{map[string]any{"index": 0, "token_ids": ids, "text_bytes": text}}})
		rest := ask(`,"resume":` + string(raw))
		var acc openai.ChatCompletionAccumulator
		for i, ev := range append(append([]string(nil), whole[:cut]...), rest...) {
			var chunk openai.ChatCompletionChunk
			if err := json.Unmarshal([]byte(ev), &chunk); err != nil {
				t.Fatal(err)
			}
			chunk.ID = "same" // the relay's work
			if !acc.AddChunk(chunk) {
				t.Fatalf("cut at %d: the client refuses event %d: %s", cut, i, ev)
			}
		}
		got := fromSDK(acc.Choices[0])
		got.check(t, "I'll look.\n", "tool_calls")
	}
}

func TestToolsRefused(t *testing.T) {
	r, _ := startScripted(t, 3)
	for rest, param := range map[string]string{
		`"tools":7`:                                               "tools",
		`"tools":[{"type":"retrieval"}]`:                          "tools[0].type",
		`"tools":[{"type":"function"}]`:                           "tools[0].function",
		`"tools":[{"type":"function","function":{"name":"a b"}}]`: "tools[0].function.name",
		`"tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"f"}}]`:                  "tools[1].function.name",
		`"tools":[{"type":"function","function":{"name":"f","parameters":[]}}]`:                                              "tools[0].function.parameters",
		`"tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":{"type":"object","properties":{}}}}]`: "tools[0].function.parameters.additionalProperties",
		`"tool_choice":"auto"`:                  "tool_choice",
		`"functions":[]`:                        "functions",
		weather + `,"tool_choice":"sometimes"`:  "tool_choice",
		weather + `,"tool_choice":{"type":"x"}`: "tool_choice",
		weather + `,"tool_choice":{"type":"function","function":{"name":"g"}}`: "tool_choice.function.name",
		weather + `,"parallel_tool_calls":"no"`:                                "parallel_tool_calls",
		weather + `,"response_format":{"type":"json_object"}`:                  "response_format",
	} {
		if e := decode[apiError](t, r.post(t, "/v1/chat/completions", askSim+rest+`}`), 400); e.param() != param {
			t.Errorf("%s: param %q, want %q", rest, e.param(), param)
		}
	}
	plain := start(t, sim.Config{}, worker.Config{})
	e := decode[apiError](t, plain.post(t, "/v1/chat/completions", askSim+weather+`}`), 400)
	if e.param() != "tools" || !strings.Contains(e.Error.Message, "does not support") {
		t.Errorf("model without tools: %+v", e)
	}
	if resp := plain.post(t, "/v1/chat/completions", askSim+weather+`,"tool_choice":"none","max_tokens":2}`); resp.StatusCode != 200 {
		t.Errorf("tools that are not to be called: %d", resp.StatusCode)
	}
}
