//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/worker/llamacpp/tinymodel"
)

// TestControlTokensHaveNoText: a control token in an answer is counted, and gives no
// text; one that ends the answer ends it; markup that is text stays.
func TestControlTokensHaveNoText(t *testing.T) {
	cfg := tinyConfig(t)
	e := openReal(t, cfg)
	base := serve(t, e)
	for _, c := range []struct {
		id           int32
		text, reason string
		n            int
	}{
		{tinymodel.Control, "", "length", 3},
		{tinymodel.Image, "", "length", 3},
		{tinymodel.BOS, "", "length", 3},
		{tinymodel.Heading, "<h1><h1><h1>", "length", 3},
		{tinymodel.EOS, "", "stop", 1},
	} {
		body := fmt.Sprintf(`{"model":"m","prompt":"the","max_tokens":3,"temperature":0,"logit_bias":{"%d":100},"stream":true,"stream_options":{"include_usage":true},"kvmesh":{"token_ids":true}}`, c.id)
		got := read(t, base, body, 0)
		if got.text != c.text || got.reason != c.reason || got.usage.CompletionTokens != c.n || len(got.ids) != c.n || got.ids[0] != c.id {
			t.Errorf("token %d: %+v, want text %q, %d tokens and %q", c.id, got, c.text, c.n, c.reason)
		}
	}
	if text := string(e.Decode(tokenize(t, e, "a<|mark|>b<start_of_image><h1>"))); text != "ab<h1>" {
		t.Errorf("decoded to %q", text)
	}
}

// testRealControlTokens: of the real vocabulary, whatever looks like a control token
// has no text, but for markup of HTML.
func testRealControlTokens(t *testing.T, e *Engine) {
	for _, s := range []string{"<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<unused7>", "[multimodal]"} {
		ids, err := e.text.Tokenize(s, false)
		if err != nil || len(ids) != 1 {
			t.Errorf("%s is %v, %v: want one token", s, ids, err)
			continue
		}
		if text := e.voc.bytes(ids[0]); len(text) > 0 {
			t.Errorf("%s has the text %q", s, text)
		}
	}
	var b strings.Builder
	for _, id := range tokenize(t, e, "<table><h1>x</h1>") {
		b.Write(e.voc.bytes(id))
	}
	if b.String() != "<table><h1>x</h1>" {
		t.Errorf("markup became %q", b.String())
	}
}
