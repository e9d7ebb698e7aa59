package worker

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// said is what a reader made of a text.
type said struct {
	Content string
	Calls   []openai.ToolCall
}

func testReader(format ToolFormat, guarded bool) *toolReader {
	r := newToolReader(format, []openai.Tool{{Name: "f"}, {Name: "get_weather"}}, func() []byte { return []byte("key") })
	r.guarded = guarded
	return r
}

// readIn tells a reader the pieces of a text. Each call must have its id and name in
// one delta, the first of its index.
func readIn(t testing.TB, r *toolReader, pieces []string) said {
	t.Helper()
	var s said
	take := func(content []byte, deltas []openai.ToolCallDelta) {
		s.Content += string(content)
		for _, d := range deltas {
			first := d.Index == len(s.Calls)
			if first != (d.ID != "") || first != (d.Function.Name != "") || first != (d.Type == "function") || d.Index > len(s.Calls) || d.Index < len(s.Calls)-1 {
				t.Fatalf("delta %+v after %d calls", d, len(s.Calls))
			}
			s.Calls = appendCalls(s.Calls, []openai.ToolCallDelta{d})
		}
	}
	for _, p := range pieces {
		content, calls := r.push([]byte(p), false)
		take(slices.Clone(content), calls)
	}
	content, calls := r.push(nil, true)
	take(content, calls)
	return s
}

// TestToolReader: a text gives the same content and calls, whole, byte by byte and in
// odd pieces, whether arguments are streamed or not.
func TestToolReader(t *testing.T) {
	call := func(n int, name, args string) openai.ToolCall {
		return openai.ToolCall{ID: callID([]byte("key"), n), Type: "function", Function: openai.FunctionCall{Name: name, Arguments: args}}
	}
	one := []openai.ToolCall{call(0, "f", `{"a":1}`)}
	for name, c := range map[string]struct {
		format ToolFormat
		text   string
		want   said
		guided bool // well formed: the same while guarded
	}{
		"no call":         {Hermes, "Hello <b>tool</b> {\"name\":1} <tool", said{"Hello <b>tool</b> {\"name\":1} <tool", nil}, true},
		"one":             {Hermes, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>", said{"", one}, true},
		"text before":     {Hermes, "Let me see.\n<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1}}</tool_call>\n", said{"Let me see.\n", one}, true},
		"two":             {Hermes, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"c\": \"}\\\"{\", \"d\": [{}]}}\n</tool_call>", said{"", append(slices.Clone(one), call(1, "get_weather", `{"c": "}\"{", "d": [{}]}`))}, true},
		"text after":      {Hermes, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1}}</tool_call>\nDone. <tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>", said{"Done. ", append(slices.Clone(one), call(1, "f", "{}"))}, true},
		"arguments first": {Hermes, "<tool_call>{\"arguments\":{\"a\":1},\"name\":\"f\"}</tool_call>", said{"", one}, true},
		"quoted":          {Hermes, `<tool_call>{"name":"f","arguments":"{\"a\":1}"}</tool_call>`, said{"", one}, true},
		"none":            {Hermes, `<tool_call>{"name":"f"}</tool_call>`, said{"", []openai.ToolCall{call(0, "f", "{}")}}, true},
		"more members":    {Hermes, `<tool_call>{"name":"f","arguments":{"a":1},"id":"x"}</tool_call>`, said{"", one}, true},
		"no end":          {Hermes, `<tool_call>{"name":"f","arguments":{"a":1}}`, said{"", one}, true},
		"unknown name":    {Hermes, `<tool_call>{"name":"g","arguments":{"a":1}}</tool_call>x`, said{`<tool_call>{"name":"g","arguments":{"a":1}}</tool_call>x`, nil}, false},
		"no object":       {Hermes, `a<tool_call>nothing</tool_call>`, said{`a<tool_call>nothing</tool_call>`, nil}, false},
		"bad JSON":        {Hermes, `<tool_call>{"name":"f","arguments":{a:1}}</tool_call>`, said{`<tool_call>{"name":"f","arguments":{a:1}}</tool_call>`, nil}, false},
		"cut in the name": {Hermes, `<tool_call>{"name":"f`, said{`<tool_call>{"name":"f`, nil}, false},
		"llama":           {Llama3, `{"name": "f", "parameters": {"a":1}}`, said{"", one}, true},
		"llama two":       {Llama3, "\n{\"name\": \"f\", \"parameters\": {\"a\":1}}; {\"name\": \"f\", \"parameters\": {}}\n", said{"", append(slices.Clone(one), call(1, "f", "{}"))}, true},
		"llama text":      {Llama3, `Hi {"name": "f", "parameters": {"a":1}}`, said{`Hi {"name": "f", "parameters": {"a":1}}`, nil}, true},
		"llama JSON":      {Llama3, ` {"answer": {"a":1}} and more {`, said{`{"answer": {"a":1}} and more {`, nil}, false},
		"mistral":         {Mistral, `[TOOL_CALLS] [{"name": "f", "arguments": {"a":1}}]`, said{"", one}, true},
		"mistral two":     {Mistral, `ok[TOOL_CALLS][{"name": "f", "arguments": {"a":1}}, {"name":"get_weather","arguments":{}}] `, said{"ok ", append(slices.Clone(one), call(1, "get_weather", "{}"))}, true},
	} {
		for _, guarded := range []bool{false, true} {
			if guarded && !c.guided {
				continue
			}
			bytewise := strings.Split(c.text, "")
			var odd []string
			for i := 0; i < len(c.text); i += 3 {
				odd = append(odd, c.text[i:min(i+3, len(c.text))])
			}
			for how, pieces := range map[string][]string{"whole": {c.text}, "bytewise": bytewise, "odd": odd} {
				if got := readIn(t, testReader(c.format, guarded), pieces); !reflect.DeepEqual(got, c.want) {
					t.Errorf("%s %s, guarded %v:\n got %+v\nwant %+v", name, how, guarded, got, c.want)
				}
			}
		}
	}
}

// TestToolReaderStreams: behind a grammar arguments come as they are written, else
// when they are whole.
func TestToolReaderStreams(t *testing.T) {
	for _, guarded := range []bool{true, false} {
		r := testReader(Hermes, guarded)
		_, calls := r.push([]byte(`<tool_call>{"name":"f","arguments":{"a":"xy`), false)
		if guarded && (len(calls) != 2 || calls[1].Function.Arguments != `{"a":"xy`) || !guarded && len(calls) != 0 {
			t.Errorf("guarded %v: %+v", guarded, calls)
		}
		if _, calls = r.push(nil, true); r.reason("length") != "length" || r.reason("stop") != "tool_calls" {
			t.Errorf("guarded %v, cut: %+v, reason %s", guarded, calls, r.reason("stop"))
		}
	}
	r := testReader(Mistral, true)
	r.mark = 7
	r.marked(7)
	if _, calls := r.push([]byte(`[{"name":"f","arguments":{}}]`), true); len(calls) != 2 {
		t.Errorf("behind a control token: %+v", calls)
	}
	r.named = true
	if r.reason("stop") != "stop" || (*toolReader)(nil).reason("stop") != "stop" {
		t.Error("a named function, or no tools, must end with stop")
	}
}

// FuzzToolReader: how a text is cut makes no difference, and every call has
// arguments that are a JSON object.
func FuzzToolReader(f *testing.F) {
	f.Add("a<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1}}</tool_call>\n<tool_call>", uint8(3))
	f.Add(`{"name": "f", "parameters": {"a":1}}; {`, uint8(1))
	f.Add(`[TOOL_CALLS][{"name": "f", "arguments": "{}"}, {"name":"f"}]x`, uint8(2))
	f.Fuzz(func(t *testing.T, text string, n uint8) {
		if strings.Contains(text, "<tool_call") && len(text) > 1000 {
			return
		}
		for _, format := range []ToolFormat{Hermes, Llama3, Mistral} {
			whole := readIn(t, testReader(format, false), []string{text})
			var pieces []string
			for at := 0; at < len(text); at += int(n%5) + 1 {
				pieces = append(pieces, text[at:min(at+int(n%5)+1, len(text))])
			}
			if cut := readIn(t, testReader(format, false), pieces); !reflect.DeepEqual(whole, cut) {
				t.Fatalf("%s: whole %+v, in pieces %+v", format, whole, cut)
			}
			for i, c := range whole.Calls {
				var o map[string]any
				cutShort := i == len(whole.Calls)-1
				if err := json.Unmarshal([]byte(c.Function.Arguments), &o); err != nil && !cutShort {
					t.Fatalf("%s: arguments %q: %v", format, c.Function.Arguments, err)
				}
			}
		}
	})
}
