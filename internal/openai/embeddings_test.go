package openai

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseEmbedding(t *testing.T) {
	for body, want := range map[string]*EmbeddingRequest{
		`{"model":"m","input":"hi"}`:                                 {Model: "m", Inputs: []Prompt{{Text: "hi"}}},
		`{"model":"m","input":["a","b"],"encoding_format":"base64"}`: {Model: "m", Inputs: []Prompt{{Text: "a"}, {Text: "b"}}, Base64: true},
		`{"model":"m","input":[1,2],"encoding_format":"float"}`:      {Model: "m", Inputs: []Prompt{{IDs: []int32{1, 2}}}},
		`{"model":"m","input":[[1],[2,3]],"dimensions":8}`:           {Model: "m", Inputs: []Prompt{{IDs: []int32{1}}, {IDs: []int32{2, 3}}}, Dimensions: 8},
	} {
		got, err := ParseEmbedding([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", body, err)
			continue
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", body, d)
		}
		prompts, err := got.Generation().DecodePrompts()
		if err != nil || !cmp.Equal(prompts, want.Inputs) {
			t.Errorf("%s: as prompts %v, %v", body, prompts, err)
		}
	}
	for body, param := range map[string]string{
		`{"input":"x"}`:                                     "model",
		`{"model":"m"}`:                                     "input",
		`{"model":"m","input":null}`:                        "input",
		`{"model":"m","input":[]}`:                          "input",
		`{"model":"m","input":7}`:                           "input",
		`{"model":"m","input":[1,"a"]}`:                     "input",
		`{"model":"m","input":["a",{}]}`:                    "input[1]",
		`{"model":"m","input":["a",[]]}`:                    "input[1]",
		`{"model":"m","input":"x","encoding_format":"hex"}`: "encoding_format",
		`{"model":"m","input":"x","encoding_format":1}`:     "encoding_format",
		`{"model":"m","input":"x","dimensions":0}`:          "dimensions",
		`[1]`: "",
	} {
		if _, err := ParseEmbedding([]byte(body)); err == nil || err.Status != 400 || err.Param != param {
			t.Errorf("%s: %v with param %q, want a 400 with param %q", body, err, err.Param, param)
		}
	}
}

func TestVectorForms(t *testing.T) {
	values := []float32{0, -1.5, 0.25}
	for _, v := range []Vector{{Values: values}, {Values: values, Base64: true}} {
		raw, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		var back Vector
		if err := json.Unmarshal(raw, &back); err != nil || !cmp.Equal(v, back) {
			t.Errorf("%s came back as %+v, %v", raw, back, err)
		}
	}
	if raw, _ := json.Marshal(Vector{Values: []float32{1}, Base64: true}); string(raw) != `"AACAPw=="` {
		t.Errorf("1 as base64 is %s", raw)
	}
}

func TestParseTokenize(t *testing.T) {
	get := func(body string) *TokenizeRequest {
		t.Helper()
		r, err := ParseTokenize([]byte(body))
		if err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		return r
	}
	r := get(`{"prompt":"hi","add_special_tokens":false,"return_token_strs":true}`)
	if p, err := r.DecodePrompts(); err != nil || len(p) != 1 || p[0].Text != "hi" || r.Endpoint != Completions || !r.NoSpecial || !r.Strings {
		t.Errorf("prompt: %+v, %v, %v", r, p, err)
	}
	r = get(`{"model":"m","messages":[{"role":"user","content":"a"}],"add_generation_prompt":false}`)
	if m, err := r.DecodeMessages(); err != nil || len(m) != 1 || r.Endpoint != Chat || !r.NoGenerationPrompt || r.NoSpecial || r.Model != "m" {
		t.Errorf("messages: %+v, %v, %v", r, m, err)
	}
	for body, param := range map[string]string{
		`{}`:                                    "prompt",
		`{"prompt":[1]}`:                        "prompt",
		`{"messages":"x"}`:                      "messages",
		`{"messages":[]}`:                       "messages",
		`{"prompt":"x","add_special_tokens":1}`: "add_special_tokens",
		`{"messages":[{"role":"user","content":"a"}],"add_generation_prompt":"no","model":1}`: "model",
	} {
		if _, err := ParseTokenize([]byte(body)); err == nil || err.Param != param {
			t.Errorf("%s: %v, want param %q", body, err, param)
		}
	}
}

func TestParseDetokenize(t *testing.T) {
	for body, want := range map[string][]int32{`{"tokens":[1,2]}`: {1, 2}, `{"tokens":[ ]}`: nil} {
		if r, err := ParseDetokenize([]byte(body)); err != nil || !cmp.Equal(r.Tokens, want) {
			t.Errorf("%s: %v, %v", body, r, err)
		}
	}
	for _, body := range []string{`{}`, `{"tokens":"a"}`, `{"tokens":[-1]}`, `{"tokens":[1.5]}`, `{"tokens":[4294967296]}`} {
		if _, err := ParseDetokenize([]byte(body)); err == nil || err.Param != "tokens" {
			t.Errorf("%s: %v, want param tokens", body, err)
		}
	}
}

// FuzzPlainRequests: no body panics, and each error is a client's.
func FuzzPlainRequests(f *testing.F) {
	for _, s := range []string{`{"model":"m","input":["a",[1]]}`, `{"prompt":"x"}`, `{"tokens":[1,2]}`, `{"messages":[{}],"tools":[{}]}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		e, err1 := ParseEmbedding(body)
		_, err2 := ParseTokenize(body)
		_, err3 := ParseDetokenize(body)
		for _, err := range []*Error{err1, err2, err3} {
			if err != nil && err.Status/100 != 4 {
				t.Errorf("status %d for %q", err.Status, body)
			}
		}
		if err1 == nil && len(e.Inputs) == 0 {
			t.Errorf("no inputs in %q", body)
		}
	})
}
