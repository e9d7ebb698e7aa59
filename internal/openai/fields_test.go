package openai

import (
	"strings"
	"testing"
)

// Every wrong field is refused with its name as param.
func TestWrongFields(t *testing.T) {
	for _, c := range []struct{ field, param string }{
		{`"stream":1`, "stream"},
		{`"stream":"true"`, "stream"},
		{`"echo":[]`, "echo"},
		{`"ignore_eos":"x"`, "ignore_eos"},
		{`"user":5`, "user"},
		{`"max_tokens":"5"`, "max_tokens"},
		{`"max_tokens":1.0`, "max_tokens"},
		{`"max_tokens":0`, "max_tokens"},
		{`"max_tokens":-1`, "max_tokens"},
		{`"max_tokens":2147483648`, "max_tokens"},
		{`"max_completion_tokens":0`, "max_completion_tokens"},
		{`"n":129`, "n"},
		{`"n":0`, "n"},
		{`"best_of":2`, "best_of"},
		{`"temperature":-0.1`, "temperature"},
		{`"temperature":"1"`, "temperature"},
		{`"temperature":1e400`, "temperature"},
		{`"top_p":1.1`, "top_p"},
		{`"top_k":-2`, "top_k"},
		{`"min_p":2`, "min_p"},
		{`"presence_penalty":2.5`, "presence_penalty"},
		{`"frequency_penalty":-3`, "frequency_penalty"},
		{`"seed":1.5`, "seed"},
		{`"seed":"x"`, "seed"},
		{`"seed":9223372036854775808`, "seed"},
		{`"stop":""`, "stop"},
		{`"stop":[""]`, "stop"},
		{`"stop":[null]`, "stop"},
		{`"stop":5`, "stop"},
		{`"stop":{}`, "stop"},
		{`"stop":["a",1]`, "stop"},
		{`"stop":[` + strings.Repeat(`"a",`, 16) + `"a"]`, "stop"},
		{`"stop":"` + strings.Repeat("a", longestStop+1) + `"`, "stop"},
		{`"logit_bias":[]`, "logit_bias"},
		{`"logit_bias":{"a":1}`, "logit_bias"},
		{`"logit_bias":{"-1":1}`, "logit_bias"},
		{`"logit_bias":{"1":101}`, "logit_bias"},
		{`"logit_bias":{"1":"x"}`, "logit_bias"},
		{`"stream_options":{}`, "stream_options"},
		{`"stream":true,"stream_options":5`, "stream_options"},
		{`"stream":true,"stream_options":{"include_usage":5}`, "stream_options.include_usage"},
	} {
		_, err := Parse(Chat, []byte(`{"model":"m",`+hi+`,`+c.field+`}`))
		if err == nil || err.Status != 400 || err.Param != c.param || err.Type != "invalid_request_error" {
			t.Errorf("%.60s: %v, want param %s", c.field, err, c.param)
		}
	}
}

func TestLogprobsFields(t *testing.T) {
	for _, c := range []struct {
		ep           Endpoint
		field, param string
	}{
		{Chat, `"logprobs":3`, "logprobs"},
		{Chat, `"top_logprobs":3`, "top_logprobs"},
		{Chat, `"logprobs":true,"top_logprobs":21`, "top_logprobs"},
		{Chat, `"logprobs":false,"top_logprobs":1`, "top_logprobs"},
		{Completions, `"logprobs":true`, "logprobs"},
		{Completions, `"logprobs":-1`, "logprobs"},
		{Completions, `"logprobs":21`, "logprobs"},
	} {
		_, err := Parse(c.ep, []byte(`{"model":"m","prompt":"x",`+hi+`,`+c.field+`}`))
		if err == nil || err.Param != c.param {
			t.Errorf("%s %s: %v", c.ep, c.field, err)
		}
	}
}

func TestMalformedBodies(t *testing.T) {
	for _, body := range []string{
		"", " ", "null", "[]", "7", `"x"`, "{", `{"model"`, `{"model":`, `{"model":"m"`, `{"model":"m",}`, `{"model":"m"}{}`,
		`{"model":"m","model":"m"}`, `{model:"m"}`, "{\"model\":\"\xff\"}", `{"model":"\ud800"}`, "\xef\xbb\xbf{}", `{"a":{"b":1,"b":2}}`,
	} {
		_, err := Parse(Completions, []byte(body))
		if err == nil || err.Status != 400 || err.Param != "" || err.Message == "" {
			t.Errorf("%q: %v", body, err)
		}
	}
}

// The message names the bound that was passed.
func TestBoundIsNamed(t *testing.T) {
	for value, want := range map[string]string{"2147483648": "at most 1073741824", "0": "at least 1"} {
		_, err := Parse(Completions, []byte(`{"model":"m","prompt":"x","max_tokens":`+value+`}`))
		if err == nil || !strings.Contains(err.Message, want) {
			t.Errorf("max_tokens %s: %v, want one with %q", value, err, want)
		}
	}
}
