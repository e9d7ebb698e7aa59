package llamacpp

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// The templates are in the manner of models that know tools.
const (
	hermesTemplate = `{%- if tools %}<|im_start|>system
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
For each call return <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- if m.tool_calls %}{% for c in m.tool_calls %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}`
	mistralTemplate = `{{ bos_token }}{% if tools is defined %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}`
	llamaTemplate = `{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>
{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}.{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{{ m.content }}<|eot_id|>{% endfor %}`
)

func TestToolFormatOfTemplates(t *testing.T) {
	for source, want := range map[string]worker.ToolFormat{
		"":              worker.NoTools,
		hermesTemplate:  worker.Hermes,
		mistralTemplate: worker.Mistral,
		llamaTemplate:   worker.Llama3,
		"{% for m in messages %}<tool_call>[TOOL_CALLS]{{ m.content }}{% endfor %}":      worker.NoTools, // marks, but no place for tools
		"{{ tools | tojson }} in a form of its own":                                      worker.NoTools,
		mistralTemplate + "{# [ARGS] #}":                                                 worker.NoTools, // the newer form
		"{% if tools %}{{ raise_exception('no tools') }}{% endif %}<tool_call>arguments": worker.NoTools,
	} {
		tm, err := newTemplate(source, "<s>", "</s>")
		if err != nil {
			t.Fatal(err)
		}
		if tm.format != want {
			t.Errorf("%.60q: %q, want %q", source, tm.format, want)
		}
	}
}

func TestTemplateShowsToolsAndCalls(t *testing.T) {
	tm, err := newTemplate(hermesTemplate, "", "")
	if err != nil {
		t.Fatal(err)
	}
	got, err := tm.render(conversation{
		tools: []openai.Tool{{Name: "f", Raw: []byte(`{"type":"function","function":{"name":"f"}}`)}},
		messages: []openai.Message{
			{Role: "user", Content: "hi"},
			{Role: "assistant", ToolCalls: []openai.ToolCall{{ID: "c1", Function: openai.FunctionCall{Name: "f", Arguments: `{"a":1}`}}}},
			{Role: "tool", Content: "42", ToolCallID: "c1"},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{
		"<tools>\n{\"function\":{\"name\":\"f\"},\"type\":\"function\"}\n</tools>",
		"<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call><|im_end|>",
		"<|im_start|>tool\n42<|im_end|>",
	} {
		if !strings.Contains(got, part) {
			t.Errorf("no %q in\n%s", part, got)
		}
	}
}

// TestLateGrammarWaitsForTheMark: before the mark anything but a token that runs over
// it, behind it the grammar.
func TestLateGrammarWaitsForTheMark(t *testing.T) {
	voc := &vocabulary{start: []uint32{0}, end: map[int32]bool{}}
	for _, text := range []string{"a", "b", "<tool", "_call>", "_call>x", ">", ""} {
		voc.text = append(voc.text, text...)
		voc.start = append(voc.start, uint32(len(voc.text)))
	}
	inner := &fixed{allowed: 1}
	k := &kept{Constraint: inner, voc: voc, mark: -1, waiting: true, begin: worker.Hermes.Begin()}
	allowed := func() (out []int32) {
		ids := []int32{0, 1, 2, 3, 4, 5, 6}
		ok := make([]bool, len(ids))
		k.Allow(ids, ok)
		for i, yes := range ok {
			if yes {
				out = append(out, ids[i])
			}
		}
		return out
	}
	k.Accept(0)
	if got := allowed(); len(got) != 7 {
		t.Errorf("at first %v", got)
	}
	k.Accept(2)
	if got := allowed(); !slices.Equal(got, []int32{0, 1, 2, 3, 5, 6}) {
		t.Errorf("behind a part of the mark %v, want all but the token that runs over it", got)
	}
	k.Accept(3)
	if got := allowed(); !slices.Equal(got, []int32{1}) || len(inner.accepted) != 0 {
		t.Errorf("behind the mark %v, the grammar has %v", got, inner.accepted)
	}
	k.Accept(1)
	inner.allowed = 6
	if got := allowed(); len(got) != 0 || !slices.Equal(inner.accepted, []int32{1}) {
		t.Errorf("a token without text %v, the grammar has %v", got, inner.accepted)
	}
	k.mark = 6
	if got := allowed(); !slices.Equal(got, []int32{6}) {
		t.Errorf("the mark itself: %v", got)
	}
	late := &kept{Constraint: inner, voc: voc, mark: 6, waiting: true, begin: "[TOOL_CALLS]"}
	if late.Accept(6); late.waiting {
		t.Error("the control token did not count as the mark")
	}
}

// fixed allows one token.
type fixed struct {
	allowed  int32
	accepted []int32
}

func (f *fixed) Allow(ids []int32, ok []bool) {
	for i, id := range ids {
		ok[i] = id == f.allowed
	}
}
func (f *fixed) Accept(id int32) { f.accepted = append(f.accepted, id) }
func (f *fixed) Close()          {}

// TestRealToolCalls forces calls out of a model that knows nothing of tools, through
// the whole worker: only the grammar can make them right.
func TestRealToolCalls(t *testing.T) {
	cfg := realConfig(t)
	cfg.ContextLen, cfg.Cells = 768, 1024
	e := openReal(t, cfg)
	chat, err := newTemplate(hermesTemplate, e.voc.bos, e.voc.eos)
	if err != nil {
		t.Fatal(err)
	}
	e.chat, e.model.Tools, e.model.ToolMark = chat, chat.format, -1
	base := serve(t, e)
	const tools = `"tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string","maxLength":10},"days":{"type":"integer","minimum":1,"maximum":9}},"required":["city","days"],"additionalProperties":false},"strict":true}},{"type":"function","function":{"name":"now"}}]`
	for _, choice := range []string{`"required"`, `{"type":"function","function":{"name":"get_weather"}}`} {
		body := `{"model":"m","messages":[{"role":"user","content":"Weather in Bern?"}],"temperature":1,"seed":4,"max_tokens":120,"parallel_tool_calls":false,"tool_choice":` + choice + `,` + tools + `}`
		resp, err := http.Post(base+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		raw, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%d, %v: %s", resp.StatusCode, err, raw)
		}
		var got openai.ChatCompletion
		if err := json.Unmarshal(raw, &got); err != nil {
			t.Fatal(err)
		}
		calls := got.Choices[0].Message.ToolCalls
		if len(calls) != 1 {
			t.Fatalf("%s: %s", choice, raw)
		}
		if calls[0].Function.Name == "get_weather" {
			wantValid(t, `{"type":"object","properties":{"city":{"type":"string","maxLength":10},"days":{"type":"integer","minimum":1,"maximum":9}},"required":["city","days"],"additionalProperties":false}`, calls[0].Function.Arguments)
		} else if choice != `"required"` || calls[0].Function.Arguments != "{}" {
			t.Errorf("%s: %s", choice, raw)
		}
	}
}

// TestRealSchemaSurvivesACut: a stream that follows a schema, cut behind some of its
// tokens and continued as the relay does it, still is one answer to the schema.
func TestRealSchemaSurvivesACut(t *testing.T) {
	cfg := realConfig(t)
	e := openReal(t, cfg)
	base := serve(t, e)
	schema := realSchemas["recursive"]
	ask := `{"model":"m","prompt":"JSON:","stream":true,"max_tokens":60,"temperature":0.8,"seed":2,"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":` + schema + `}},"kvmesh":{"token_ids":true`
	type event struct {
		Choices []struct {
			Text         string  `json:"text"`
			TokenIDs     []int32 `json:"token_ids"`
			FinishReason *string `json:"finish_reason"`
		} `json:"choices"`
	}
	stream := func(mesh string) (texts []string, ids [][]int32, reason string) {
		req, err := http.NewRequestWithContext(t.Context(), "POST", base+"/v1/completions", strings.NewReader(ask+mesh+`}}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Kvmesh-Relay", "secret")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		events := openai.NewEventReader(resp.Body, 1<<20)
		for {
			ev, err := events.Next()
			if err != nil {
				t.Fatalf("%d: the stream ends with %v", resp.StatusCode, err)
			}
			if ev.Done() {
				return texts, ids, reason
			}
			var got event
			if err := json.Unmarshal(ev.Data, &got); err != nil || len(got.Choices) != 1 {
				t.Fatalf("%v in %s", err, ev.Data)
			}
			c := got.Choices[0]
			texts, ids = append(texts, c.Text), append(ids, c.TokenIDs)
			if c.FinishReason != nil {
				reason = *c.FinishReason
			}
		}
	}
	texts, ids, reason := stream("")
	if reason != "stop" {
		t.Fatalf("the answer %q ended with %q", strings.Join(texts, ""), reason)
	}
	whole := strings.Join(texts, "")
	wantValid(t, schema, whole)
	for cut := 1; cut < len(texts); cut += 1 + len(texts)/4 {
		delivered := strings.Join(texts[:cut], "")
		raw, _ := json.Marshal(slices.Concat(ids[:cut]...))
		rest, _, reason := stream(fmt.Sprintf(`,"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":%s,"text_bytes":%d}]}`, raw, len(delivered)))
		joined := delivered + strings.Join(rest, "")
		if reason == "stop" {
			wantValid(t, schema, joined)
		}
		if joined != whole { // the KV was prefilled, so a near tie may have fallen otherwise
			t.Logf("cut at %d: %q, undisturbed %q", cut, joined, whole)
		}
	}
}

// serve runs a worker over the engine until the test ends and returns its URL.
func serve(t *testing.T, e *Engine) string {
	t.Helper()
	return serveKV(t, e, nil, nil)
}

// serveKV is serve with a keeper of KV and a registry of metrics, nil = none.
func serveKV(t *testing.T, e *Engine, kv worker.KVKeeper, reg *prometheus.Registry) string {
	t.Helper()
	s, err := worker.New(worker.Config{
		ID: "w", Pool: "p", Model: "m", EngineName: "llamacpp", Listen: "127.0.0.1:0", RelaySecret: "secret",
		KV: kv, Registry: reg, SelfCheck: -1,
		Open: func(context.Context, func(float64)) (worker.Engine, error) { return e, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		<-ended
	})
	base := "http://" + s.Addr()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		resp, err := http.Get(base + "/ready")
		if err == nil {
			ready := resp.StatusCode == 200
			_, _ = io.Copy(new(bytes.Buffer), resp.Body)
			resp.Body.Close()
			if ready {
				return base
			}
		}
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("the worker did not get ready")
		}
	}
}
