package openai

import (
	"encoding/json"
	"testing"
)

// FuzzParse: no body makes Parse panic or answer anything but a 400, and what it
// accepts keeps its promises: fields in range and decoders that do not panic.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		`{"model":"m","messages":[{"role":"user","content":"hi"}]}`,
		`{"model":"m","prompt":["a",[1,2]],"max_tokens":5,"n":2,"stop":["x"],"stream":true,"stream_options":{"include_usage":true}}`,
		`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"é"}]}],"max_completion_tokens":null,"seed":-1}`,
		` {"logprobs":true,"top_logprobs":3,"logit_bias":{"1":2},"model":"\u00e9","messages":[{}],"max_tokens":1}`,
		`{"model":"m","prompt":"x","metadata":{"a":1},"modalities":["text",2],"tools":[{}],"tool_choice":"auto","min_tokens":-1}`,
		`{"model":"m","model":"m"}`, "{\"model\":\"\xff\"}", `{"model":1e999}`, `[`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, ep := range []Endpoint{Chat, Completions} {
			r, err := Parse(ep, body)
			if err != nil {
				checkError(t, err)
				continue
			}
			if r.Model == "" || r.N < 1 || r.MaxTokens < 0 || r.TopP < 0 || r.TopP > 1 || r.TopLogprobs < -1 || len(r.Stop) > 16 {
				t.Fatalf("accepted %+v", r)
			}
			if err := r.CheckRest(); err != nil {
				checkError(t, err)
			}
			if ep == Chat {
				if _, err := r.DecodeMessages(); err != nil {
					checkError(t, err)
				}
			} else if _, err := r.DecodePrompts(); err != nil {
				checkError(t, err)
			}
		}
	})
}

func checkError(t *testing.T, err *Error) {
	if err.Status != 400 || err.Message == "" || !json.Valid(err.Body()) {
		t.Fatalf("refused with %+v", err)
	}
}
