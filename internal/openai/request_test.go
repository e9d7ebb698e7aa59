package openai

import (
	"encoding/json"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const hi = `"messages":[{"role":"user","content":"hi"}]`

func mustParse(t testing.TB, ep Endpoint, body string) *Request {
	t.Helper()
	r, err := Parse(ep, []byte(body))
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return r
}

func TestEndpointOf(t *testing.T) {
	for path, want := range map[string]bool{
		"/v1/chat/completions": true, "/v1/completions": true, "/v1/completions/": false, "/v1/responses": false, "": false,
	} {
		if ep, ok := EndpointOf(path); ok != want || (ok && string(ep) != path) {
			t.Errorf("%q: %q, %v", path, ep, ok)
		}
	}
}

func TestParse(t *testing.T) {
	base := func(change func(*Request)) *Request {
		r := &Request{Endpoint: Chat, Model: "m", N: 1, Temperature: 1, TopP: 1, Repetition: 1, TopLogprobs: -1}
		change(r)
		return r
	}
	for _, c := range []struct {
		fields string
		want   *Request
	}{
		{``, base(func(*Request) {})},
		{`"unknown":{"deep":[1,2]},"tools":[]`, base(func(*Request) {})},
		{`"temperature":null,"stop":null,"n":null,"seed":null,"logit_bias":null,"stream_options":null`, base(func(*Request) {})},
		{`"stream":true,"stream_options":{"include_usage":true}`, base(func(r *Request) { r.Stream, r.IncludeUsage = true, true })},
		{`"stream":true,"stream_options":{}`, base(func(r *Request) { r.Stream = true })},
		{`"max_tokens":5`, base(func(r *Request) { r.MaxTokens = 5 })},
		{`"max_tokens":5,"max_completion_tokens":3`, base(func(r *Request) { r.MaxTokens = 3 })},
		{`"temperature":0,"top_p":0.5,"top_k":-1,"min_p":0.1`, base(func(r *Request) { r.Temperature, r.TopP, r.MinP = 0, .5, .1 })},
		{`"presence_penalty":-2,"frequency_penalty":2`, base(func(r *Request) { r.Presence, r.Frequency = -2, 2 })},
		{`"repetition_penalty":1.1`, base(func(r *Request) { r.Repetition = 1.1 })},
		{`"seed":-9223372036854775808`, base(func(r *Request) { r.Seed = new(int64(-1 << 63)) })},
		{`"stop":"a\u00e9"`, base(func(r *Request) { r.Stop = []string{"aé"} })},
		{`"stop":["a","b"]`, base(func(r *Request) { r.Stop = []string{"a", "b"} })},
		{`"stop":[]`, base(func(r *Request) { r.Stop = []string{} })},
		{`"n":128,"user":"u","ignore_eos":true`, base(func(r *Request) { r.N, r.User, r.IgnoreEOS = 128, "u", true })},
		{`"logprobs":true`, base(func(r *Request) { r.TopLogprobs = 0 })},
		{`"logprobs":true,"top_logprobs":4`, base(func(r *Request) { r.TopLogprobs = 4 })},
		{`"logprobs":false`, base(func(*Request) {})},
		{`"logit_bias":{"5":-100,"7":1.5}`, base(func(r *Request) { r.LogitBias = map[int32]float64{5: -100, 7: 1.5} })},
		{`"sim":{"a":1}`, base(func(r *Request) { r.Sim = []byte(`{"a":1}`) })},
	} {
		body := `{"model":"m",` + hi
		if c.fields != "" {
			body += "," + c.fields
		}
		got := mustParse(t, Chat, body+"}")
		if diff := cmp.Diff(c.want, got, cmpopts.IgnoreUnexported(Request{})); diff != "" {
			t.Errorf("%s:\n%s", c.fields, diff)
		}
	}
	if r := mustParse(t, Completions, `{"model":"m","prompt":"x","logprobs":0,"echo":true}`); r.TopLogprobs != 0 || !r.Echo {
		t.Errorf("%+v", r)
	}
}

func TestRaw(t *testing.T) {
	r := mustParse(t, Chat, ` { "model" : "m" , `+hi+` , "x" : [ 1 , 2 ] , "y":null } `)
	if got := string(r.Raw("x")); got != "[ 1 , 2 ]" {
		t.Errorf("x is %q", got)
	}
	if r.Raw("y") != nil || r.Raw("z") != nil {
		t.Error("null and absent fields have no raw form")
	}
}

func TestDecodePrompts(t *testing.T) {
	for in, want := range map[string][]Prompt{
		`"one é"`:     {{Text: "one é"}},
		`""`:          {{}},
		`["a","b"]`:   {{Text: "a"}, {Text: "b"}},
		`[1,2,3]`:     {{IDs: []int32{1, 2, 3}}},
		`[[1],[2,3]]`: {{IDs: []int32{1}}, {IDs: []int32{2, 3}}},
		`["a",[1]]`:   {{Text: "a"}, {IDs: []int32{1}}},
	} {
		got, err := mustParse(t, Completions, `{"model":"m","prompt":`+in+`}`).DecodePrompts()
		if err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", in, diff)
		}
	}
	for in, param := range map[string]string{
		`[1,"a"]`: "prompt", `["a",1]`: "prompt[1]", `["a",null]`: "prompt[1]", `[[]]`: "prompt[0]", `["a",[-1]]`: "prompt[1]",
		`[1.5]`: "prompt", `[5,null,7]`: "prompt[1]", `[[5],[6,null]]`: "prompt[1][1]", `[null,5]`: "prompt[0]", `[4294967296]`: "prompt", `[true]`: "prompt[0]", `[` + strings.Repeat(" ", 99) + `]`: "prompt",
		`[` + strings.Repeat(`"a",`, 128) + `"a"]`: "prompt",
	} {
		_, err := mustParse(t, Completions, `{"model":"m","prompt":`+in+`}`).DecodePrompts()
		if err == nil || err.Status != 400 || err.Param != param {
			t.Errorf("%.40s: %v, param wanted %q", in, err, param)
		}
	}
}

func TestDecodeMessages(t *testing.T) {
	r := mustParse(t, Chat, `{"model":"m","messages":[{"role":"system","content":"a"},
		{"role":"user","name":"bob","content":[{"type":"text","text":"b"},{"type":"text","text":"é"}]},
		{"role":"assistant","content":null,"tool_calls":[{"id":"i","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"i","content":""}]}`)
	got, err := r.DecodeMessages()
	if err != nil {
		t.Fatal(err)
	}
	want := []Message{{Role: "system", Content: "a"}, {Role: "user", Name: "bob", Content: "bé"}, {
		Role: "assistant", ToolCalls: []ToolCall{{ID: "i", Type: "function", Function: FunctionCall{Name: "f", Arguments: "{}"}}},
	}, {Role: "tool", ToolCallID: "i"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for in, param := range map[string]string{
		`[7]`: "messages[0]", `[{"role":7}]`: "messages[0].role", `[{}]`: "messages[0].role",
		`[{"role":"user"}]`: "messages[0].content", `[{"role":"user","content":null}]`: "messages[0].content",
		`[{"role":"assistant","content":null,"tool_calls":[]}]`: "messages[0].content", `[{"role":"tool","tool_call_id":"i"}]`: "messages[0].content",
		`[{"role":"tool","content":"x"}]`: "messages[0].tool_call_id", `[{"role":"tool","tool_call_id":5,"content":"x"}]`: "messages[0].tool_call_id",
		`[{"role":5,"content":"x"}]`: "messages[0].role", `[{"role":"user","name":[],"content":"x"}]`: "messages[0].name",
		`[{"role":"assistant","tool_calls":[5]}]`: "messages[0].tool_calls",
		`[{"role":"user","content":{}}]`:          "messages[0].content", `[{"role":"user","content":[1]}]`: "messages[0].content",
		`[{"role":"user","content":"a"},{"role":"user","content":[{"type":"input_audio"}]}]`: "messages[1].content[0].type",
	} {
		_, err := mustParse(t, Chat, `{"model":"m","messages":`+in+`}`).DecodeMessages()
		if err == nil || err.Status != 400 || err.Param != param {
			t.Errorf("%s: %v, param wanted %q", in, err, param)
		}
	}
}

// What is wrong with a body is told in words, without the names of what we are
// built from.
func TestMalformedMessages(t *testing.T) {
	for body, want := range map[string]string{
		`{"model":"m",]`:            "after byte 12.",
		`{"model":"m" "a":1}`:       "after byte",
		"{\"model\":\"a\x01\"}":     "after byte",
		"{\"model\":\"\xff\"}":      "UTF-8",
		`{"a":1,"model":"m","a":2}`: `the field "a" twice`,
		`{"a":{"b":1,"b":2}}`:       `the field "b" twice`,
		`{"model":01}`:              "after byte",
		`nul`:                       "ends too early",
	} {
		_, err := Parse(Completions, []byte(body))
		if err == nil || err.Status != 400 || !strings.Contains(err.Message, want) {
			t.Errorf("%q: %v, want %q", body, err, want)
			continue
		}
		for _, leak := range []string{"jsontext", "json:", "Go ", "%!"} {
			if strings.Contains(err.Message, leak) {
				t.Errorf("%q: %q tells of %q", body, err.Message, leak)
			}
		}
	}
}

func TestErrors(t *testing.T) {
	for _, c := range []struct {
		err  *Error
		want string
	}{
		{Invalid("n", "bad %d", 1), `{"error":{"message":"bad 1","type":"invalid_request_error","param":"n","code":null}}`},
		{Unavailable(1, "away"), `{"error":{"message":"away","type":"overloaded_error","param":null,"code":"service_unavailable"}}`},
		{NotFoundModel("x"), `{"error":{"message":"The model \"x\" does not exist or you do not have access to it.",` +
			`"type":"invalid_request_error","param":"model","code":"model_not_found"}}`},
	} {
		if diff := cmp.Diff(c.want, string(c.err.Body())); diff != "" {
			t.Error(diff)
		}
		if got := string(c.err.Event()); got != "data: "+c.want+"\n\n" {
			t.Errorf("event %q", got)
		}
	}
	if got := Unavailable(1500e6, "x").RetryAfterSeconds(); got != "2" {
		t.Errorf("Retry-After %q", got)
	}
	for status, want := range map[int]string{
		400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "invalid_request_error",
		429: "rate_limit_error", 500: "api_error", 502: "api_error", 503: "overloaded_error",
	} {
		if got := TypeForStatus(status); got != want {
			t.Errorf("%d: %s, want %s", status, got, want)
		}
	}
	long := NotFoundModel(strings.Repeat("é", 200)).Message
	if len(long) > 300 || strings.Contains(long, `\x`) || !json.Valid(NotFoundModel("\xff\xfe").Body()) {
		t.Errorf("a long name gives %q", long)
	}
}

func TestErrorAsAResponse(t *testing.T) {
	for _, c := range []struct {
		err        *Error
		status     int
		retry, has string
	}{
		{MethodNotAllowed("GET", "/v1/x", "POST"), 405, "", "Use POST."},
		{ContextTooLong("prompt", 12, 10), 400, "", `"code":"context_length_exceeded"`},
		{Unavailable(200*time.Millisecond, "later"), 503, "1", `"type":"overloaded_error"`},
	} {
		w := httptest.NewRecorder()
		c.err.Write(w)
		h := w.Header()
		if w.Code != c.status || h.Get("Retry-After") != c.retry || h.Get("Content-Type") != "application/json" ||
			h.Get("Content-Length") != strconv.Itoa(w.Body.Len()) || !strings.Contains(w.Body.String(), c.has) {
			t.Errorf("%v: %d %v %s", c.err, w.Code, h, w.Body)
		}
	}
}

func TestMissingInput(t *testing.T) {
	for _, c := range []struct {
		ep            Endpoint
		fields, param string
	}{
		{Chat, ``, "messages"},
		{Chat, `,"messages":null`, "messages"},
		{Chat, `,"messages":[]`, "messages"},
		{Chat, `,"messages":{}`, "messages"},
		{Completions, ``, "prompt"},
		{Completions, `,"prompt":[ ]`, "prompt"},
		{Completions, `,"prompt":7`, "prompt"},
		{Completions, `,"prompt":{}`, "prompt"},
	} {
		_, err := Parse(c.ep, []byte(`{"model":"m"`+c.fields+`}`))
		if err == nil || err.Param != c.param {
			t.Errorf("%s %s: %v", c.ep, c.fields, err)
		}
	}
	r := mustParse(t, Chat, `{"model":"m","messages":[`+strings.Repeat(" ", 99)+`]}`)
	if _, err := r.DecodeMessages(); err == nil || err.Param != "messages" {
		t.Errorf("an empty list behind many spaces: %v", err)
	}
}
