package worker_test

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// TestResumeByText: a stream whose tokens nobody knows goes on from its text, in front
// of a model whose tokens of that text are the ones it had generated.
func TestResumeByText(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{RelaySecret: secret})
	const body = `{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":30,"prompt":"by text"}`
	first := readStream(r.relayed(t, textPath, body, `{"token_ids":true}`).Body)
	want := newLedger(1)
	want.read(t, first, 1<<30)
	compared := 0
	for n := 1; n < len(first.events)-2; n++ {
		l := newLedger(1)
		l.read(t, first, n)
		text, ids := l.text[0], l.ids[0]
		if text == "" {
			continue
		}
		raw, _ := json.Marshal(map[string]any{"token_ids": true, "resume": map[string]any{
			"stream": "s1", "attempt": 2, "choices": []any{map[string]any{"index": 0, "text": text, "text_bytes": len(text)}},
		}})
		l = newLedger(1)
		l.read(t, readStream(r.relayed(t, textPath, body, string(raw)).Body), 1<<30)
		if !l.whole || l.reasons[0] != "length" || len(l.modes) != 1 || l.modes[0] != "text" {
			t.Fatalf("after %q: %+v", text, l)
		}
		if string(r.engine.Decode(ids)) != text {
			continue // the tokens of a character were delivered without it
		}
		compared++
		if text+l.text[0] != want.text[0] || l.usage.CompletionTokens != want.usage.CompletionTokens {
			t.Errorf("after %q: %q, want %q; usage %+v", text, text+l.text[0], want.text[0], l.usage)
		}
	}
	if compared < 5 {
		t.Errorf("only %d cuts could be compared", compared)
	}
}

func TestResumeByTextRefused(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{RelaySecret: secret})
	for name, c := range map[string]struct{ more, choice string }{
		"ids too":     {"", `{"index":0,"text":"ab","text_bytes":2,"token_ids":[600]}`},
		"other bytes": {"", `{"index":0,"text":"ab","text_bytes":1}`},
		"logprobs":    {`,"logprobs":1`, `{"index":0,"text":"ab","text_bytes":2}`},
		"echo":        {`,"echo":true`, `{"index":0,"text":"ab","text_bytes":2}`},
	} {
		resp := r.relayed(t, textPath, `{"model":"sim","prompt":"x","max_tokens":3`+c.more+`}`, `{"resume":{"stream":"s","attempt":2,"choices":[`+c.choice+`]}}`)
		if e := decode[apiError](t, resp, http.StatusBadRequest); e.param() != "kvmesh.resume" {
			t.Errorf("%s: %+v", name, e)
		}
	}
}
