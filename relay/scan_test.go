package relay

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// readAll splices events and returns what came out, one per line.
func spliceAll(t testing.TB, s *splicer, l *ledger, events ...string) string {
	t.Helper()
	var out []string
	for _, e := range events {
		if _, err := s.scan([]byte(e)); err != nil {
			t.Fatalf("scan %s: %v", e, err)
		}
		got, err := s.splice(l, []byte(e))
		if err != nil {
			return strings.Join(append(out, "error: "+err.Error()), "\n")
		}
		if got.data != nil {
			l.events++
			out = append(out, string(got.data))
		}
	}
	return strings.Join(out, "\n")
}

// What only the relay asked for is removed wherever it stands, and nothing else.
func TestScanStrips(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{`{"choices":[{"token_ids":[1,2],"index":0,"text":"a"}]}`, `{"choices":[{"index":0,"text":"a"}]}`},
		{`{"choices":[{"index":0,"text":"a","token_ids":[1]}]}`, `{"choices":[{"index":0,"text":"a"}]}`},
		{`{"choices":[{"index":0,"token_ids":[ 1 , 2 ], "text":"a"}]}`, `{"choices":[{"index":0, "text":"a"}]}`},
		{`{"choices":[{"kvmesh":{"kv":"exact","restored":1,"computed":2},"token_ids":[1],"index":0,"text":"a"}]}`, `{"choices":[{"index":0,"text":"a"}]}`},
		{`{"choices":[{"index":0,"token_ids":[1],"prompt_token_ids":null,"kvmesh":{},"odd": 1 }], "prompt_token_ids":[7]}`, `{"choices":[{"index":0,"odd": 1 }]}`},
		{`{"prompt_token_ids":[1],"choices":[{"token_ids":[1]}]}`, `{"choices":[{}]}`},
		{`{"choices":[{"index":0,"text":"\"token_ids\":[1]","odd":{"token_ids":[3]}}]}`, `{"choices":[{"index":0,"text":"\"token_ids\":[1]","odd":{"token_ids":[3]}}]}`},
	} {
		if got := spliceAll(t, &splicer{}, &ledger{}, tt.in); got != tt.want {
			t.Errorf("%s\n got %s\nwant %s", tt.in, got, tt.want)
		}
	}
	asked := `{"choices":[{"token_ids":[1],"index":0,"text":"a"}]}`
	if got := spliceAll(t, &splicer{scanner: scanner{keepIDs: true}}, &ledger{}, asked); got != asked {
		t.Errorf("ids that the client wants: %s", got)
	}
}

func TestDecodedLen(t *testing.T) {
	for _, s := range []string{"", "a", "é", "\n\t\"\\", "\u2028", "😀", "a\u0000b"} {
		for _, raw := range [][]byte{must(json.Marshal(s)), []byte(ascii(s))} {
			if got := decodedLen(raw); got != len(s) {
				t.Errorf("%s: %d bytes, want %d", raw, got, len(s))
			}
		}
	}
	for raw, want := range map[string]int{`"\ud83d"`: 3, `"\udc00x"`: 4, `"\ud83d\u0041"`: 4, `null`: 0, `12`: 0, `"\/"`: 1} {
		if got := decodedLen([]byte(raw)); got != want {
			t.Errorf("%s: %d bytes, want %d", raw, got, want)
		}
	}
}

// ascii writes a JSON string with escapes only.
func ascii(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		if r > 0xffff {
			r -= 0x10000
			fmt.Fprintf(&b, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
			continue
		}
		fmt.Fprintf(&b, `\u%04x`, r)
	}
	b.WriteByte('"')
	return b.String()
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// FuzzScan holds the scan against encoding/json, and what it leaves against the whole.
func FuzzScan(f *testing.F) {
	for _, s := range []string{
		`{"id":"a","created":1,"model":"m","choices":[{"token_ids":[1,2],"index":1,"text":"h\u00e9","finish_reason":"stop"}],"usage":null}`,
		`{"choices":[{"index":0,"delta":{"role":"assistant","content":"x","tool_calls":[{"index":0}]},"kvmesh":{"kv":"exact","restored":3}}]}`,
		`{"error":{"message":"m"}}`, `{"choices":[],"usage":{"completion_tokens":3}}`, `[]`, `{"choices":[{}, {"index":2}]}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var s splicer
		v, err := s.scan(data)
		if err != nil {
			return
		}
		var want struct {
			Choices []struct {
				Text  string
				Delta struct{ Content string }
			}
		}
		plain := json.Unmarshal(data, &want) == nil && !bytes.ContainsRune(data, '\uFFFD') && len(want.Choices) == len(v.choices)
		exact := bytes.Count(data, []byte(`"text"`))+bytes.Count(data, []byte(`"content"`)) <= 1 // else the last of two would count
		for i, c := range v.choices {
			if n := len(want.Choices); plain && exact && i < n && c.text != len(want.Choices[i].Text)+len(want.Choices[i].Delta.Content) && !strings.Contains(strings.ToLower(string(data)), `\ud`) {
				t.Errorf("choice %d: %d bytes of text in %s", i, c.text, data)
			}
		}
		// What is remembered of the event before must change nothing.
		before := fmt.Sprintf("%+v %+v", *v, s.edits)
		for _, first := range []string{string(data), `{"id":"a","choices":[{"index":0,"text":"x"}]}`, `{"choices":[]}`} {
			var warm splicer
			if _, err := warm.scan([]byte(first)); err != nil {
				t.Fatal(err)
			}
			if again, err := warm.scan(data); err != nil || places(again) != places(v) || fmt.Sprint(warm.edits) != fmt.Sprint(s.edits) {
				t.Errorf("after %s: %+v %+v, %v; want %s", first, again, warm.edits, err, before)
			}
		}
		l := &ledger{}
		got, err := s.splice(l, data)
		if err != nil {
			t.Fatalf("a first attempt's event is refused: %v", err)
		}
		if json.Valid(data) && got.data != nil && !json.Valid(got.data) {
			t.Errorf("%s became %s", data, got.data)
		}
		var again splicer
		v, err = again.scan(bytes.Clone(got.data))
		if got.data != nil && err != nil {
			t.Fatalf("%s became %s: %v", data, got.data, err)
		}
		for _, c := range v.choices {
			if c.told || c.kv != "" {
				t.Errorf("something is left of the relay's own in %s", got.data)
			}
		}
		// The same once more, whatever else it says, ends no choice.
		if _, err := s.scan(data); err != nil {
			t.Fatal(err)
		}
		if got, err = s.splice(l, data); err != nil || got.data == nil {
			return
		}
		if v, err = again.scan(bytes.Clone(got.data)); err != nil || l.repeated(v) {
			t.Errorf("%s, once more, became %s: %v", data, got.data, err)
		}
	})
}

// places is what a view says, but for the array of choices, whose place nobody needs
// where nothing is removed from it.
func places(v *chunkView) string {
	c := *v
	c.choicesAt = span{}
	return fmt.Sprintf("%+v", c)
}

// A later attempt's events become those of the answer that was begun.
func TestSpliceContinues(t *testing.T) {
	l := &ledger{stream: "s"}
	first := splicer{}
	spliceAll(t, &first, l,
		`{"id":"one","object":"text_completion","created":1,"model":"m","system_fingerprint":"f","choices":[{"token_ids":[5],"index":0,"text":"a"}]}`,
		`{"id":"one","object":"text_completion","created":1,"model":"m","system_fingerprint":"f","choices":[{"token_ids":[6],"index":0,"text":"é"}]}`)
	if diff := cmp.Diff(`{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":[5,6],"text_bytes":3}]}`, string(l.appendResume(nil, 2))); diff != "" {
		t.Error(diff)
	}
	second := splicer{later: true, resumed: true}
	got := spliceAll(t, &second, l,
		`{"id":"two","object":"text_completion","created":2,"model":"m","choices":[{"kvmesh":{"kv":"exact","restored":7,"computed":1},"token_ids":[7],"index":0,"text":"b"}]}`,
		`{"id":"two","object":"text_completion","created":2,"model":"m","system_fingerprint":"f","choices":[{"index":0,"text":"","finish_reason":"stop"}]}`,
		`{"id":"two","object":"text_completion","created":2,"model":"m","system_fingerprint":"f","choices":[{"index":0,"text":"","finish_reason":"stop"}]}`,
		`{"id":"two","object":"text_completion","created":2,"model":"m","system_fingerprint":"f","choices":[],"usage":{"completion_tokens":3}}`,
		`{"id":"two","object":"text_completion","created":2,"model":"m","system_fingerprint":"f","choices":[],"usage":{"completion_tokens":3}}`)
	want := `{"system_fingerprint":"f","id":"one","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"b"}]}
{"id":"one","object":"text_completion","created":1,"model":"m","system_fingerprint":"f","choices":[{"index":0,"text":"","finish_reason":"stop"}]}
{"id":"one","object":"text_completion","created":1,"model":"m","system_fingerprint":"f","choices":[],"usage":{"completion_tokens":3}}`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if !l.complete(1) || !l.usage || l.tokens != 3 {
		t.Errorf("ledger %+v", l)
	}
}

// Roles that were told and choices that were finished do not come again.
func TestSpliceRepeatsNothing(t *testing.T) {
	begin := func() *ledger {
		l := &ledger{}
		spliceAll(t, &splicer{}, l,
			`{"id":"one","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}`,
			`{"id":"one","choices":[{"index":1,"delta":{"role":"assistant","content":""}}]}`,
			`{"id":"one","choices":[{"token_ids":[1],"index":1,"delta":{"content":"x"}}]}`,
			`{"id":"one","choices":[{"index":1,"delta":{},"finish_reason":"stop"}]}`)
		return l
	}
	for _, tt := range []struct{ in, want string }{
		{`{"id":"two","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}`, ``},
		{`{"id":"two","choices":[{"index":0,"delta":{"role":"assistant","content":"a"}}]}`, `{"id":"one","choices":[{"index":0,"delta":{"content":"a"}}]}`},
		{`{"id":"two","choices":[{"index":0,"delta":{"content":"a","role":"assistant"}}]}`, `{"id":"one","choices":[{"index":0,"delta":{"content":"a"}}]}`},
		{`{"id":"two","choices":[{"index":1,"delta":{"content":"y"}}]}`, ``},
		{`{"id":"two","choices":[{"token_ids":[9],"index":1,"delta":{"content":"y"}},{"index":0,"delta":{"content":"a"}}]}`, `{"id":"one","choices":[{"index":0,"delta":{"content":"a"}}]}`},
		{`{"id":"two","choices":[{"index":0,"delta":{"content":"a"}},{"token_ids":[9],"index":1,"delta":{"content":"y"}}]}`, `{"id":"one","choices":[{"index":0,"delta":{"content":"a"}}]}`},
		{`{"id":"two","choices":[{"index":2,"delta":{"role":"assistant","content":""}}]}`, `{"id":"one","choices":[{"index":2,"delta":{"role":"assistant","content":""}}]}`},
	} {
		if got := spliceAll(t, &splicer{later: true}, begin(), tt.in); got != tt.want {
			t.Errorf("%s\n got %s\nwant %s", tt.in, got, tt.want)
		}
	}
	for _, tt := range []struct{ in, want string }{ // the first attempt's own, of a server that says it twice
		{`{"id":"one","choices":[{"index":1,"delta":{},"finish_reason":"stop"}]}`, ``},
		{`{"id":"one","choices":[{"index":1,"delta":{"content":"y"}}]}`, `{"id":"one","choices":[{"index":1,"delta":{"content":"y"}}]}`},
		{`{"id":"one","choices":[{"index":1,"delta":{"content":"y"},"finish_reason":"stop"}]}`, `{"id":"one","choices":[{"index":1,"delta":{"content":"y"},"finish_reason":null}]}`},
		{`{"id":"one","choices":[{"odd":[1],"finish_reason" : "length","token_ids":[4],"index":1,"text":"y"}]}`, `{"id":"one","choices":[{"odd":[1],"finish_reason" : null,"index":1,"text":"y"}]}`},
		{`{"id":"one","choices":[{"index":1,"delta":{},"finish_reason":""}]}`, `{"id":"one","choices":[{"index":1,"delta":{},"finish_reason":""}]}`},
		{`{"id":"one","choices":[{"index":0,"text":"a","finish_reason":"stop"},{"index":0,"text":"b","finish_reason":"stop"},{"index":0,"finish_reason":"stop"}]}`, `{"id":"one","choices":[{"index":0,"text":"a","finish_reason":"stop"},{"index":0,"text":"b","finish_reason":null}]}`},
		{`{"id":"one","choices":[{"index":0,"delta":{},"finish_reason":"stop"},{"index":1,"text":"y","finish_reason":"length"}]}`, `{"id":"one","choices":[{"index":0,"delta":{},"finish_reason":"stop"},{"index":1,"text":"y","finish_reason":null}]}`},
		{`{"id":"one","choices":[{"index":1,"delta":{},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}`, `{"id":"one","choices":[{"index":1,"delta":{},"finish_reason":null}],"usage":{"completion_tokens":1}}`},
		{`{"id":"one","choices":[{"index":1,"delta":{},"finish_reason":"stop"},{"index":0,"delta":{"role":"assistant","content":"a"}}]}`, `{"id":"one","choices":[{"index":0,"delta":{"role":"assistant","content":"a"}}]}`},
		{`{"id":"one","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}`, `{"id":"one","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}`},
	} {
		if got := spliceAll(t, &splicer{}, begin(), tt.in); got != tt.want {
			t.Errorf("%s\n got %s\nwant %s", tt.in, got, tt.want)
		}
	}
}

// A worker that does not do what it was asked for is never spliced.
func TestSpliceRefuses(t *testing.T) {
	for name, event := range map[string]string{
		"from the start": `{"id":"two","choices":[{"token_ids":[1],"index":0,"text":"x"}]}`,
		"other weights":  `{"id":"two","system_fingerprint":"g","choices":[{"kvmesh":{"kv":"exact"},"token_ids":[2],"index":0,"text":"y"}]}`,
	} {
		l := &ledger{}
		spliceAll(t, &splicer{}, l, `{"id":"one","system_fingerprint":"f","choices":[{"token_ids":[1],"index":0,"text":"x"}]}`)
		before := fmt.Sprint(*l)
		if got := spliceAll(t, &splicer{later: true, resumed: true}, l, event); !strings.HasPrefix(got, "error: the worker does not continue") {
			t.Errorf("%s: %s", name, got)
		}
		if after := fmt.Sprint(*l); after != before {
			t.Errorf("%s: the ledger changed from %s to %s", name, before, after)
		}
	}
}

// FuzzSplice gives a later attempt's splicer whatever a worker might say. What comes out
// is JSON, belongs to the answer that was begun, and repeats nothing.
func FuzzSplice(f *testing.F) {
	for _, s := range []string{
		`{"id":"two","created":2,"model":"x","choices":[{"kvmesh":{"kv":"exact"},"token_ids":[3],"index":0,"text":"b"},{"index":1,"text":"y"}]}`,
		`{"choices":[{"index":1,"text":"y","finish_reason":"stop"},{"index":0,"delta":{"role":"assistant","content":"z"}}],"usage":{"completion_tokens":1}}`,
		`{ "choices" : [ {"index":1} , {"index":1} , {"index":0,"kvmesh":{"kv":"text"}} ] , "id" : null }`,
		`{"choices":[{"index":0,"delta":{ "content":"a" , "role":"assistant" }}]}`, `{ }`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		l := &ledger{stream: "s", plain: true}
		spliceAll(t, &splicer{}, l,
			`{"id":"one","created":1,"model":"m","choices":[{"token_ids":[1],"index":0,"delta":{"role":"assistant","content":"a"}},{"index":1,"text":"b"}]}`,
			`{"id":"one","created":1,"model":"m","choices":[{"token_ids":[2],"index":1,"text":"c","finish_reason":"stop"}]}`)
		s := &splicer{later: true, resumed: true}
		if _, err := s.scan(data); err != nil {
			return
		}
		ids := len(l.choices[0].ids)
		got, err := s.splice(l, data)
		if err != nil {
			if len(l.choices[0].ids) != ids {
				t.Error("a refused event is in the ledger")
			}
			return
		}
		if got.data == nil || !json.Valid(data) {
			return
		}
		if !json.Valid(got.data) {
			t.Fatalf("%s became %s", data, got.data)
		}
		var again scanner
		v, err := again.scan(bytes.Clone(got.data))
		if err != nil {
			t.Fatalf("%s became %s: %v", data, got.data, err)
		}
		for i := range v.choices {
			if c := &v.choices[i]; c.index == 1 || c.index == 0 && c.role.to > 0 {
				t.Errorf("%s is repeated in %s", data, got.data)
			}
		}
		if id := v.id.of(got.data); string(id) != `"one"` && bytes.Count(data, []byte(`"id"`)) < 2 {
			t.Errorf("%s belongs to the answer %s", got.data, id)
		}
	})
}

// Wherever the bytes of a stream are cut, what was delivered of it and what goes on after
// it are the whole.
func TestSpliceAtEveryByte(t *testing.T) {
	var events []string
	var whole strings.Builder
	for i, text := range []string{"a", "é", "", "😀", " b", "\\n", "end"} {
		events = append(events, fmt.Sprintf(`{"id":"x","choices":[{"token_ids":[%d],"index":0,"text":"%s"}]}`, i, text))
		whole.WriteString(text)
	}
	raw := "data: " + strings.Join(events, "\n\ndata: ") + "\n\n"
	for cut := range len(raw) + 1 {
		l := &ledger{}
		said := ""
		r := openai.NewEventReader(strings.NewReader(raw[:cut]), 1<<20)
		first := &splicer{}
		take := func(s *splicer, data []byte) {
			if _, err := s.scan(data); err != nil {
				t.Fatalf("cut at %d: %v", cut, err)
			}
			got, err := s.splice(l, data)
			if err != nil {
				t.Fatalf("cut at %d: %v", cut, err)
			}
			_, text, _ := strings.Cut(string(got.data), `"text":"`)
			said += strings.TrimSuffix(text, `"}]}`)
			l.events++
		}
		for {
			ev, err := r.Next()
			if err != nil {
				break // the partial event is dropped
			}
			take(first, ev.Data)
		}
		second := &splicer{later: l.events > 0, resumed: l.begun()}
		for i := int(l.events); i < len(events); i++ {
			data := events[i]
			if second.resumed {
				data = strings.Replace(data, "[{", `[{"kvmesh":{"kv":"exact"},`, 1)
			}
			take(second, []byte(data))
		}
		if said != whole.String() || len(l.choices[0].ids) != len(events) {
			t.Errorf("cut at %d: %q, want %q; ids %v", cut, said, whole.String(), l.choices[0].ids)
		}
	}
}
