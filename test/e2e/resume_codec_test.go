package e2e

import (
	"slices"
	"strings"
	"testing"
)

// TestResumeQuantized cuts a stream on a worker that stores its KV quantized and continues
// it on another one with the same codec: nothing is lost or repeated, and the answer says
// that it is not exact. A worker that stores raw KV in the same directory never restores
// what was quantized.
func TestResumeQuantized(t *testing.T) {
	codecs := []string{"int8"}
	if *fullResume {
		codecs = append(codecs, "int4")
	}
	for _, codec := range codecs {
		t.Run(codec, func(t *testing.T) {
			kv := []string{"--kv-dir", kvDir(t)}
			raw := startProcess(t, "raw", kv...)
			kv = append(kv, "--kv-codec", codec)
			one, two := startProcess(t, "one", kv...), startProcess(t, "two", kv...)
			q := questions(t, one, 1)[0]
			const at, stream = 41, "quantized"
			delivered, s := cut(t, one, q.body, map[string]any{"token_ids": true, "salt": "s"}, stream, cutting{at: at, kill: true})
			s.close()
			for _, c := range []struct {
				on   *process
				mode string
			}{{two, "quantized"}, {raw, "replayed"}} {
				got := goOn(t, c.on, q.body, delivered, stream, "s")
				if got.mode != c.mode || (got.restored >= 64) != (c.on == two) {
					t.Errorf("%s went on as %q with %d tokens restored, want %s", c.on.id, got.mode, got.restored, c.mode)
				}
				k := len(delivered.ids)
				if len(got.ids) != answerTokens || !slices.Equal(got.ids[:k], delivered.ids) || !strings.HasPrefix(got.text, delivered.text) ||
					got.tokens != answerTokens || got.finish != "length" {
					t.Errorf("%d tokens after %d, usage %d, finish %q", len(got.ids), k, got.tokens, got.finish)
				}
				same := k
				for same < answerTokens && got.ids[same] == q.want.ids[same] {
					same++
				}
				t.Logf("%s: %d tokens restored, %d of %d equal to the undisturbed run", c.on.id, got.restored, same, answerTokens)
			}
		})
	}
}
