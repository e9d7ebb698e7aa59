package worker_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

const secret = "of the relay"

// piece is one chunk of one choice, as the relay reads it.
type piece struct {
	Index    int     `json:"index"`
	TokenIDs []int32 `json:"token_ids"`
	Text     string  `json:"text"`
	Delta    struct {
		Role, Content string
	} `json:"delta"`
	Logprobs     json.RawMessage `json:"logprobs"`
	FinishReason *string         `json:"finish_reason"`
	Mesh         *struct {
		KV                 string
		Restored, Computed int
	} `json:"kvmesh"`
}

// ledger is what the relay keeps of a stream.
type ledger struct {
	ids      [][]int32
	text     []string
	probs    []string
	reasons  []string
	usage    openai.Usage
	whole    bool
	modes    []string
	prefixed int // events of a role
}

// read takes the events of an attempt, at most the first n of them that have choices.
func (l *ledger) read(t testing.TB, s stream, n int) {
	t.Helper()
	for _, ev := range s.events {
		if ev == "[DONE]" {
			l.whole = true
			continue
		}
		var c struct {
			Choices []piece       `json:"choices"`
			Usage   *openai.Usage `json:"usage"`
		}
		if err := json.Unmarshal([]byte(ev), &c); err != nil {
			t.Fatalf("%v in %s", err, ev)
		}
		if c.Usage != nil {
			l.usage = *c.Usage
		}
		for _, p := range c.Choices {
			if n--; n < 0 {
				return
			}
			if p.Delta.Role != "" {
				l.prefixed++
			}
			l.ids[p.Index] = append(l.ids[p.Index], p.TokenIDs...)
			l.text[p.Index] += p.Text + p.Delta.Content
			if string(p.Logprobs) != "null" {
				l.probs[p.Index] += string(p.Logprobs)
			}
			if p.FinishReason != nil {
				l.reasons[p.Index] += *p.FinishReason
			}
			if p.Mesh != nil {
				l.modes = append(l.modes, p.Mesh.KV)
			}
		}
	}
}

func newLedger(choices int) *ledger {
	return &ledger{ids: make([][]int32, choices), text: make([]string, choices), probs: make([]string, choices), reasons: make([]string, choices)}
}

// resume is the field by which the relay continues a stream.
func (l *ledger) resume(attempt int) string {
	r := map[string]any{"stream": "s1", "attempt": attempt}
	var choices []any
	for i := range l.ids {
		choices = append(choices, map[string]any{"index": i, "token_ids": append([]int32{}, l.ids[i]...), "text_bytes": len(l.text[i])})
	}
	r["choices"] = choices
	raw, _ := json.Marshal(map[string]any{"token_ids": true, "resume": r})
	return string(raw)
}

// relayed posts as the relay does.
func (r *running) relayed(t testing.TB, path, body, mesh string) *http.Response {
	t.Helper()
	body = strings.TrimSuffix(body, "}") + `,"kvmesh":` + mesh + `}`
	return r.do(t, http.MethodPost, path, body, names.Relay, secret, names.Stream, "s1", names.Attempt, "1")
}

// TestResumeEverywhere cuts streams after every event and continues them on another
// worker: text, ids, log-probabilities, reasons and usage add up to the undisturbed
// answer.
func TestResumeEverywhere(t *testing.T) {
	one := start(t, sim.Config{}, worker.Config{RelaySecret: secret})
	two := start(t, sim.Config{}, worker.Config{ID: "w2", RelaySecret: secret})
	for name, c := range map[string]struct {
		path, body string
		choices    int
	}{
		"chat":         {chatPath, `{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":24,"messages":[{"role":"user","content":"a"}]}`, 1},
		"text":         {textPath, `{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":24,"prompt":"b"}`, 1},
		"ends itself":  {textPath, `{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":24,"prompt":"b","sim":{"max":9}}`, 1},
		"no seed":      {textPath, `{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":12,"prompt":"b","temperature":1}`, 1},
		"two choices":  {chatPath, `{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":10,"n":2,"messages":[{"role":"user","content":"a"}]}`, 2},
		"logprobs":     {chatPath, `{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":24,"logprobs":true,"top_logprobs":2,"messages":[{"role":"user","content":"é"}]}`, 1},
		"text offsets": {textPath, `{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":24,"logprobs":1,"prompt":"é"}`, 1},
		"echo":         {textPath, `{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":6,"echo":true,"prompt":"so é"}`, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			resumeAfterEveryEvent(t, one, two, c.path, c.body, c.choices)
		})
	}
}

func resumeAfterEveryEvent(t *testing.T, one, two *running, path, body string, choices int) *ledger {
	t.Helper()
	first := readStream(one.relayed(t, path, body, `{"token_ids":true}`).Body)
	want := newLedger(choices)
	want.read(t, first, 1<<30)
	if !want.whole || want.usage.CompletionTokens == 0 {
		t.Fatalf("undisturbed: %+v", first)
	}
	for n := 1; n < len(first.events); n++ {
		l := newLedger(choices)
		l.read(t, first, n)
		l.usage, l.whole = openai.Usage{}, false
		had := l.prefixed
		finished := slices.Clone(l.reasons)
		resp := two.relayed(t, path, body, l.resume(2))
		if resp.StatusCode != 200 {
			t.Fatalf("after %d events: %v", n, decode[apiError](t, resp, 200))
		}
		l.reasons = make([]string, choices)
		l.read(t, readStream(resp.Body), 1<<30)
		for i := range choices {
			if l.text[i] != want.text[i] || !slices.Equal(l.ids[i], want.ids[i]) || l.reasons[i] != want.reasons[i] {
				t.Errorf("cut after %d events, choice %d: %q %v %s (finished before: %q)\nwant %q %v %s",
					n, i, l.text[i], l.ids[i], l.reasons[i], finished[i], want.text[i], want.ids[i], want.reasons[i])
			}
			if l.probs[i] != want.probs[i] {
				t.Errorf("cut after %d events: logprobs\n%s\nwant\n%s", n, l.probs[i], want.probs[i])
			}
		}
		if l.usage.CompletionTokens != want.usage.CompletionTokens || l.usage.PromptTokens != want.usage.PromptTokens || !l.whole {
			t.Errorf("cut after %d events: usage %+v, want %+v; whole %v", n, l.usage, want.usage, l.whole)
		}
		if path == chatPath && (l.prefixed < had || l.prefixed > had+choices) {
			t.Errorf("cut after %d events: %d roles", n, l.prefixed)
		}
	}
	return want
}

// TestResumeStopStrings: a stop string that begins before the cut and ends after it
// is found, and never leaks.
func TestResumeStopStrings(t *testing.T) {
	one := start(t, sim.Config{}, worker.Config{RelaySecret: secret})
	two := start(t, sim.Config{}, worker.Config{ID: "w2", RelaySecret: secret})
	const plain = `{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":40,"prompt":"stop"%s}`
	free := newLedger(1)
	free.read(t, readStream(one.relayed(t, textPath, fmt.Sprintf(plain, ""), `{"token_ids":true}`).Body), 1<<30)
	text := free.text[0]
	for at := 8; at+12 < len(text); at += 7 {
		stop := strings.ToValidUTF8(text[at:at+12], "")
		if stop == "" {
			continue
		}
		raw, _ := json.Marshal(stop)
		got := resumeAfterEveryEvent(t, one, two, textPath, fmt.Sprintf(plain, `,"stop":[`+string(raw)+`]`), 1)
		if strings.Contains(got.text[0], stop) || !strings.HasPrefix(text, got.text[0]) || got.reasons[0] != "stop" {
			t.Errorf("stop %q: %q", stop, got.text[0])
		}
	}
}

// TestForeignLedger: another engine's ids may split text otherwise; the worker sends
// what the client lacks, from its byte on.
func TestForeignLedger(t *testing.T) {
	one := start(t, sim.Config{}, worker.Config{RelaySecret: secret})
	const body = `{"model":"sim","stream":true,"max_tokens":30,"prompt":"split"}`
	want := newLedger(1)
	want.read(t, readStream(one.relayed(t, textPath, body, `{"token_ids":true}`).Body), 1<<30)
	for k := 1; k <= len(want.ids[0]); k++ {
		for _, back := range []int{0, 1, 5} {
			l := newLedger(1)
			l.ids[0] = want.ids[0][:k]
			said := one.engine.Decode(l.ids[0])
			l.text[0] = want.text[0][:max(len(said)-back, 0)]
			if l.text[0] != strings.ToValidUTF8(l.text[0], "") { // no relay delivers half a character
				continue
			}
			resp := one.relayed(t, textPath, body, l.resume(2))
			if resp.StatusCode == 400 { // more text than the tokens could release yet
				continue
			}
			l.read(t, readStream(resp.Body), 1<<30)
			if l.text[0] != want.text[0] || !slices.Equal(l.ids[0], want.ids[0]) || l.reasons[0] != want.reasons[0] {
				t.Errorf("cut at %d, %d bytes behind: %q %v %s\nwant %q %v %s", k, back,
					l.text[0], l.ids[0], l.reasons[0], want.text[0], want.ids[0], want.reasons[0])
			}
		}
	}
}

// TestOnlyTheRelayResumes: the field of anybody else is refused, not ignored, since
// what it asked for would not be done.
func TestOnlyTheRelayResumes(t *testing.T) {
	with := start(t, sim.Config{}, worker.Config{RelaySecret: secret})
	without := start(t, sim.Config{}, worker.Config{ID: "w2"})
	body := `{"model":"sim","prompt":"x","kvmesh":{"token_ids":true}}`
	for name, c := range map[string]struct {
		r      *running
		header []string
	}{
		"no secret sent":     {with, nil},
		"another secret":     {with, []string{names.Relay, secret + "x"}},
		"empty secret":       {with, []string{names.Relay, ""}},
		"worker has none":    {without, []string{names.Relay, ""}},
		"worker has none, 2": {without, []string{names.Relay, secret}},
	} {
		resp := c.r.do(t, http.MethodPost, textPath, body, c.header...)
		if e := decode[apiError](t, resp, http.StatusForbidden); !strings.Contains(e.Error.Message, "relay") || e.param() != "kvmesh" {
			t.Errorf("%s: %+v", name, e)
		}
	}
}

func TestBadResume(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{RelaySecret: secret})
	for name, mesh := range map[string]string{
		"no stream":         `{"resume":{"attempt":2}}`,
		"no attempt":        `{"resume":{"stream":"s"}}`,
		"a list":            `[]`,
		"no such choice":    `{"resume":{"stream":"s","attempt":2,"choices":[{"index":1}]}}`,
		"negative choice":   `{"resume":{"stream":"s","attempt":2,"choices":[{"index":-1}]}}`,
		"choice twice":      `{"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":[600]},{"index":0,"token_ids":[600]}]}}`,
		"too many tokens":   `{"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":[600,600,600,600]}]}}`,
		"unknown token":     `{"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":[-1]}]}}`,
		"more text than is": `{"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":[600],"text_bytes":99}]}}`,
		"no token":          `{"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":[600,null]}]}}`,
		"negative text":     `{"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":[600],"text_bytes":-1}]}}`,
	} {
		resp := r.relayed(t, textPath, `{"model":"sim","prompt":"x","max_tokens":3}`, mesh)
		e := decode[apiError](t, resp, http.StatusBadRequest)
		if !strings.HasPrefix(e.param(), "kvmesh") {
			t.Errorf("%s: %+v", name, e)
		}
	}
}
