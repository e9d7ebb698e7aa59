package openaiengine

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// TestFieldsThatGoOn holds which fields a continuation reproduces, by server and way.
func TestFieldsThatGoOn(t *testing.T) {
	const byIDs, byText = false, true
	check := func(kind Kind, ep openai.Endpoint, text bool, body string) error {
		var fields map[string]json.RawMessage
		if err := json.Unmarshal([]byte(`{"model":"m",`+body+`}`), &fields); err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		return way{kind: kind, endpoint: ep, byText: text}.check(fields)
	}
	kinds := []Kind{Unknown, VLLM, SGLang, TGI, TRTLLM, Triton, LlamaCP}

	for _, body := range []string{ // everywhere
		`"temperature":0.7,"top_p":0.9,"top_k":40,"min_p":0.1,"seed":7,"logit_bias":{"5":-100}`,
		`"stop":["x"],"max_tokens":9,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":false}`,
		`"user":"u","metadata":{"a":"b"},"n":1,"best_of":1,"echo":false,"suffix":null,"logprobs":false,"top_logprobs":0`,
		`"presence_penalty":0,"frequency_penalty":0.0,"repetition_penalty":1.0,"guided_json":null,"tools":[],"tool_choice":"auto","response_format":{"type":"text"}`,
		`"messages":[{"role":"system","content":[{"type":"text","text":"s"}]},{"role":"assistant","content":null},{"role":"user","content":"u"}]`,
	} {
		for _, kind := range kinds {
			if err := check(kind, openai.Chat, byText, body); err != nil {
				t.Errorf("%s: %s: %v", kind, body, err)
			}
		}
		if err := check(VLLM, openai.Chat, byIDs, body); err != nil {
			t.Errorf("by ids: %s: %v", body, err)
		}
	}

	for name, value := range map[string]string{ // nowhere
		"guided_json": `{}`, "guided_regex": `"a+"`, "guided_choice": `["a"]`, "guided_grammar": `"x"`, "guided_whitespace_pattern": `" "`, "guided_decoding_backend": `"x"`,
		"structured_outputs": `{"json":{}}`, "grammar": `{"type":"regex"}`, "regex": `"a"`, "ebnf": `"x"`, "structural_tag": `"x"`, "json_schema": `{}`,
		"response_format": `{"type":"json_object"}`, "tools": `[{}]`, "tool_choice": `"required"`, "functions": `[{}]`,
		"use_beam_search": `true`, "best_of": `2`, "length_penalty": `2`, "prompt_logprobs": `0`, "logprobs": `true`, "top_logprobs": `1`, "echo": `true`, "suffix": `"x"`,
		"bad_words": `["x"]`, "logits_processors": `["x"]`, "custom_logit_processor": `"x"`, "thinking_token_budget": `5`, "include_reasoning": `false`, "reasoning_effort": `"high"`,
		"documents": `[{"text":"x"}]`, "truncate_prompt_tokens": `5`, "mm_processor_kwargs": `{}`, "prompt_embeds": `"x"`, "kv_transfer_params": `{}`, "modalities": `["text","audio"]`,
		"mirostat": `2`, "dry_multiplier": `0.8`, "samplers": `["top_k"]`, "n_probs": `3`, "n_predict": `5`, "no_repeat_ngram_size": `3`, "no_stop_trim": `true`, "stop_regex": `"x"`,
		"stream_options": `{"continuous_usage_stats":true}`, "extra_body": `1`, "lora": `"x"`, "some_future_field": `false`,
	} {
		for _, kind := range kinds {
			for _, text := range []bool{byIDs, byText} {
				err := check(kind, openai.Completions, text, fmt.Sprintf(`%q:%s`, name, value))
				if name == "lora" && kind == LlamaCP {
					continue
				}
				if err == nil || !strings.Contains(err.Error(), "'"+name+"'") {
					t.Errorf("%s: %s %s: %v", kind, name, value, err)
				}
			}
		}
	}

	for _, c := range []struct {
		kind Kind
		ep   openai.Endpoint
		text bool
		body string
		want bool
	}{
		{VLLM, openai.Completions, byIDs, `"repetition_penalty":1.2`, true}, // counts the prompt, too
		{TGI, openai.Completions, byText, `"repetition_penalty":1.2`, true},
		{SGLang, openai.Completions, byText, `"repetition_penalty":1.2`, false},
		{Unknown, openai.Completions, byText, `"repetition_penalty":1.2`, false},
		{VLLM, openai.Completions, byIDs, `"presence_penalty":1`, false}, // counts the answer alone
		{LlamaCP, openai.Chat, byText, `"presence_penalty":1,"frequency_penalty":1,"repeat_penalty":1.1,"repeat_last_n":64`, true},
		{VLLM, openai.Chat, byIDs, `"chat_template_kwargs":{"enable_thinking":false},"chat_template":"x","add_special_tokens":true,"add_generation_prompt":false,"continue_final_message":true`, true},
		{VLLM, openai.Chat, byText, `"chat_template_kwargs":{"enable_thinking":false}`, false},
		{SGLang, openai.Chat, byText, `"chat_template_kwargs":{"enable_thinking":false}`, true},
		{SGLang, openai.Chat, byText, `"add_generation_prompt":false`, false},
		{SGLang, openai.Chat, byText, `"add_generation_prompt":true,"continue_final_message":false`, true},
		{SGLang, openai.Chat, byText, `"continue_final_message":true`, false},
		{LlamaCP, openai.Chat, byText, `"chat_template":"x"`, false},
		{SGLang, openai.Completions, byText, `"add_special_tokens":false`, true},
		{LlamaCP, openai.Completions, byText, `"xtc_probability":0.5`, true},
		{VLLM, openai.Completions, byIDs, `"xtc_probability":0.5`, false},
	} {
		if err := check(c.kind, c.ep, c.text, c.body); (err == nil) != c.want {
			t.Errorf("%s %s, by text %v: %s: %v", c.kind, c.ep, c.text, c.body, err)
		}
	}

	for _, part := range []string{
		`{"type":"image_url","image_url":{"url":"data:,"}}`, `{"type":"input_audio","input_audio":{}}`, `{"type":"video_url"}`, `{"type":"file","file":{}}`,
		`{"text":"x"}`, `{"type":"text","text":"x","image":"y"}`, `{"type":"text"}`, `7`,
	} {
		body := `"messages":[{"role":"user","content":[{"type":"text","text":"what?"},` + part + `]}]`
		for _, text := range []bool{byIDs, byText} {
			if err := check(VLLM, openai.Chat, text, body); err == nil || !strings.Contains(err.Error(), "more than text") {
				t.Errorf("a part %s: %v", part, err)
			}
		}
	}
	if err := check(VLLM, openai.Chat, byIDs, `"messages":[{"role":"assistant","audio":{"id":"a"}}]`); err == nil {
		t.Error("an answer that was spoken goes on")
	}
}

// TestConstrainedStreamIsRefused: the same through the worker, in both ways, and the field
// is named.
func TestConstrainedStreamIsRefused(t *testing.T) {
	f := newFakeVLLM(t)
	base := startWorker(t, &upstream{Server: f.Server}, Config{})
	for _, choice := range []string{`{"index":0,"token_ids":[123,34],"text_bytes":2}`, `{"index":0,"text":"{\"","text_bytes":2}`} {
		body := `{"model":"alias","prompt":"x","stream":true,"max_tokens":9,"structured_outputs":{"json":{}},"kvmesh":{"resume":{"stream":"s","attempt":2,"choices":[` + choice + `]}}}`
		if resp, got := do(t, "POST", base+"/v1/completions", body, "X-Kvmesh-Relay", "secret"); resp.StatusCode != 400 || !strings.Contains(got, "'structured_outputs'") {
			t.Errorf("%s: %d %s", choice, resp.StatusCode, got)
		}
	}
}

// TestPromptOfTheFirstRequest: what makes the prompt goes to the server's /tokenize, and
// not to the completion that goes on.
func TestPromptOfTheFirstRequest(t *testing.T) {
	u := newUpstream(t)
	e := open(t, u, Config{})
	for ep, body := range map[openai.Endpoint]string{
		openai.Completions: `"prompt":"x","add_special_tokens":false`,
		openai.Chat:        `"messages":[{"role":"user","content":"x"}],"add_special_tokens":true,"chat_template":"t","chat_template_kwargs":{"a":1},"add_generation_prompt":false,"continue_final_message":true`,
	} {
		req, bad := openai.Parse(ep, []byte(`{"model":"m","temperature":0,`+body+`}`))
		if bad != nil {
			t.Fatal(bad)
		}
		_, _ = e.promptIDs(t.Context(), req) // this server has no /tokenize; it notes what it is asked
		_, asked := u.asked()
		var want map[string]any
		_ = json.Unmarshal([]byte(`{"model":"vendor/model",`+body+`}`), &want)
		if got, _ := json.Marshal(asked); string(got) != string(marshal(t, want)) {
			t.Errorf("%s asks %s, want %s", ep, got, marshal(t, want))
		}
		fields := map[string]json.RawMessage{}
		_ = json.Unmarshal([]byte(`{"temperature":0,`+body+`}`), &fields)
		if deleteChat(fields); ep == openai.Chat && len(fields) != 1 {
			t.Errorf("a completion has %s", marshal(t, fields))
		}
	}
}

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// TestContinuationThatIsNone: a server that gives up, tells an error or says more than text
// does not continue a stream; its usage tells no cached tokens, which are the first's alone.
func TestContinuationThatIsNone(t *testing.T) {
	event := func(choice string) string { return `data: {"id":"x","choices":[` + choice + `]}` + "\n\n" }
	a := event(`{"index":0,"delta":{"role":"assistant","content":"a","refusal":null,"tool_calls":[]}}`)
	const done = "data: [DONE]\n\n"
	for said, whole := range map[string]bool{
		a + event(`{"index":0,"text":"","finish_reason":"stop"}`) + done:                        true,
		a + event(`{"index":0,"text":"","finish_reason":"eos_token"}`) + `data: [DONE]`:         true,
		a + event(`{"index":0,"text":"b","finish_reason":""}`) + "event: x\ndata: y\n\n" + done: true,
		a + event(`{"index":0,"text":"","finish_reason":"abort"}`) + done:                       false,
		a + event(`{"index":0,"delta":{"reasoning_content":"b"}}`) + done:                       false,
		a + event(`{"index":0,"delta":{"tool_calls":[{}]}}`) + done:                             false,
		a + "event: error\ndata: {\"message\":\"boom\"}\n\n" + done:                             false,
		a + "data: {\"error\":\"boom\"}\n\n" + done:                                             false,
		a + "data: {\"object\":\"error\",\"message\":\"boom\"}\n\n" + done:                      false,
	} {
		usage := `data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10,"prompt_tokens_details":{"cached_tokens":8}}}` + "\n\n"
		req, bad := openai.Parse(openai.Chat, []byte(`{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true,"stream_options":{"include_usage":true}}`))
		if bad != nil {
			t.Fatal(bad)
		}
		w := httptest.NewRecorder()
		c := continuation{req: req, mode: "replayed", prompt: 3, given: 2, text: []byte{}}
		err := c.relay(w, strings.NewReader(usage+said), "mine")
		got := tell(t, w.Body, 1000)
		if got.done != whole || got.failed == whole || (err == nil) != whole || !strings.HasPrefix(got.text, "a") || strings.Contains(got.reason, "eos") {
			t.Errorf("%s\nis %+v, %v", said, got, err)
		}
		if whole && got.usage != (openai.Usage{PromptTokens: 3, CompletionTokens: 3, TotalTokens: 6}) {
			t.Errorf("usage %+v", got.usage)
		}
	}
}
