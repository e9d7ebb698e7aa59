package worker_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// TestMalformedFields: a 400 names the field at fault in the request's own words.
func TestMalformedFields(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{RelaySecret: secret})
	const ask = `{"model":"sim","prompt":"x","max_tokens":1`
	for _, c := range []struct{ path, body, param string }{
		{textPath, ask + `,"kvmesh":{"token_ids":"yes"}}`, "kvmesh.token_ids"},
		{textPath, ask + `,"kvmesh":{"salt":7}}`, "kvmesh.salt"},
		{textPath, ask + `,"kvmesh":[]}`, "kvmesh"},
		{textPath, ask + `,"kvmesh":{"resume":{"stream":"s","attempt":1e99}}}`, "kvmesh.resume.attempt"},
		{textPath, ask + `,"kvmesh":{"resume":{"choices":[{"token_ids":["a"]}]}}}`, "kvmesh.resume.choices.token_ids"},
		{textPath, ask + `,"sim":{"cut_at":"a"}}`, "sim.cut_at"},
		{textPath, ask + `,"sim":{"no_such_thing":1}}`, "sim.no_such_thing"},
		{textPath, ask + `,"stop":[1]}`, "stop"},
		{textPath, ask + `,"stream":true,"stream_options":{"include_usage":"x"}}`, "stream_options.include_usage"},
		{textPath, ask + `,"logit_bias":{"5":"x"}}`, "logit_bias"},
		{textPath, ask + `,"logit_bias":{"99999999":1}}`, "logit_bias"},
		{textPath, ask + `,"suffix":"x"}`, "suffix"},
		{textPath, ask + `,"suffix":7}`, "suffix"},
		{textPath, `{"model":"sim","prompt":[1.5]}`, "prompt"},
		{chatPath, `{"model":"sim","messages":[{"role":"user","content":"x","name":7}]}`, "messages[0].name"},
		{"/v1/embeddings", `{"model":"sim","input":[[true]]}`, "input[0]"},
		{"/detokenize", `{"tokens":["a"]}`, "tokens"},
		{"/sim", `{"running":"x"}`, "running"},
		{"/sim", `{"walking":1}`, "walking"},
		{"/sim", `[]`, ""},
	} {
		e := decode[apiError](t, r.do(t, http.MethodPost, c.path, c.body, names.Relay, secret), http.StatusBadRequest)
		if e.param() != c.param {
			t.Errorf("%s: param %q, want %q (%s)", c.body, e.param(), c.param, e.Error.Message)
		}
		for _, word := range []string{"Go ", "json:", "unmarshal", "meshField", "int32", "struct", "settings", "Instructions"} {
			if strings.Contains(e.Error.Message, word) {
				t.Errorf("%s: %q speaks of our own types", c.body, e.Error.Message)
			}
		}
	}
	if e := decode[apiError](t, r.post(t, "/v1/embeddings", `{"model":"sim","input":[[5],""]}`), http.StatusOK); e.param() != "" {
		t.Errorf("an empty text with a mark of the beginning: %+v", e)
	}
	for _, fine := range []string{`,"suffix":""}`, `,"suffix":null}`, `,"logit_bias":{"5":1}}`} {
		if resp := r.post(t, textPath, ask+fine); resp.StatusCode != http.StatusOK {
			t.Errorf("%s: status %d", fine, resp.StatusCode)
		}
	}
}

// TestEmptyTexts: no tokens are a list for who asks for them, and an error for who
// needs some.
func TestEmptyTexts(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	for body, want := range map[string]string{
		`{"prompt":"","add_special_tokens":false}`:                          `"count":0,"max_model_len":8192,"tokens":[],"token_strs":null`,
		`{"prompt":"","add_special_tokens":false,"return_token_strs":true}`: `"count":0,"max_model_len":8192,"tokens":[],"token_strs":[]`,
		`{"prompt":""}`: `"count":1,`,
	} {
		resp := r.post(t, "/tokenize", body)
		if got, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(got), want) {
			t.Errorf("%s: %d %s, want %s", body, resp.StatusCode, got, want)
		}
	}
}
