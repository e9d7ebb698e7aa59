package openai

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func TestAppendString(t *testing.T) {
	for in, want := range map[string]string{
		"":                     `""`,
		"plain é 🙂":            `"plain é 🙂"`,
		"q\" b\\ n\n r\r t\t":  `"q\" b\\ n\n r\r t\t"`,
		"\x00\x1f":             `"\u0000\u001f"`,
		"a\u0085b\u2028\u2029": `"a\u0085b\u2028\u2029"`,
		"bad\xff":              "\"bad\uFFFD\"",
		"</script>":            `"</script>"`,
		"â\u0080Â":             "\"â\u0080Â\"",
	} {
		if got := string(AppendString([]byte("x"), []byte(in))); got != "x"+want {
			t.Errorf("%q: %s, want %s", in, got[1:], want)
		}
	}
}

func FuzzAppendString(f *testing.F) {
	f.Add("a\u2028\"\\\xe2\x80")
	f.Fuzz(func(t *testing.T, in string) {
		quoted := string(AppendString(nil, []byte(in)))
		var back string
		if err := json.Unmarshal([]byte(quoted), &back); err != nil {
			t.Fatalf("%q became %s: %v", in, quoted, err)
		}
		if want := strings.ToValidUTF8(in, "\uFFFD"); back != want || !utf8.ValidString(quoted) {
			t.Fatalf("%q came back as %q", in, back)
		}
		if strings.ContainsAny(quoted, "\n\r\u0085\u2028\u2029") {
			t.Fatalf("%q holds a line break", quoted)
		}
	})
}

// chunksOf decodes the events of one buffer.
func chunksOf(t *testing.T, events []byte) []Chunk {
	t.Helper()
	var out []Chunk
	for ev := range strings.SplitSeq(strings.TrimSuffix(string(events), "\n\n"), "\n\n") {
		var c Chunk
		if err := json.Unmarshal([]byte(strings.TrimPrefix(ev, "data: ")), &c); err != nil {
			t.Fatalf("event %q: %v", ev, err)
		}
		out = append(out, c)
	}
	return out
}

func TestChunks(t *testing.T) {
	for _, ep := range []Endpoint{Chat, Completions} {
		c := NewChunks(Answer{Endpoint: ep, ID: "id", Model: `m"1`, Fingerprint: "fp", Created: 5}, true)
		b := c.AppendRole(nil, 1)
		b = c.AppendText(b, 1, []byte("hé\n"), nil)
		b = c.AppendText(b, 1, []byte("x"), []byte(`{"content":[]}`))
		b = c.AppendFinish(b, 1, "stop")
		b = c.AppendUsage(b, Usage{1, 2, 3, &PromptTokensDetails{1}})
		got := chunksOf(t, b)
		text, reason := "", ""
		for _, chunk := range got[:len(got)-1] {
			if chunk.ID != "id" || chunk.Model != `m"1` || chunk.SystemFingerprint != "fp" || chunk.Created != 5 || chunk.Usage != nil {
				t.Errorf("%s: %+v", ep, chunk)
			}
			ch := chunk.Choices[0]
			text += ch.Added()
			if ch.FinishReason != nil {
				reason = *ch.FinishReason
			}
			if (ch.Delta != nil) != (ep == Chat) || ch.Index != 1 {
				t.Errorf("%s: %+v", ep, ch)
			}
		}
		if text != "hé\nx" || reason != "stop" {
			t.Errorf("%s: text %q, finish_reason %q", ep, text, reason)
		}
		last := got[len(got)-1]
		if diff := cmp.Diff(&Usage{1, 2, 3, &PromptTokensDetails{1}}, last.Usage); diff != "" || len(last.Choices) != 0 {
			t.Errorf("%s: usage chunk %s", ep, diff)
		}
		if n := strings.Count(string(b), `"usage":null`); n != len(got)-1 {
			t.Errorf("%s: %d of %d chunks say usage:null", ep, n, len(got)-1)
		}
		if plain := NewChunks(Answer{Endpoint: ep}, false).AppendFinish(nil, 0, "stop"); strings.Contains(string(plain), "usage") {
			t.Errorf("%s: a chunk speaks of usage unasked", ep)
		}
	}
}
