package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// ledger is what the client has of a whole stream, of all its choices.
type ledger struct {
	Choices    []told
	Completion int // tokens of usage
	Prompt     int // likewise
}

// told is what the client has of one choice.
type told struct {
	IDs    []int32
	Text   string
	Calls  []toldCall
	Probs  []string // of each token: itself, its probability, its alternatives
	Finish string
}

// toldCall is a call of a tool, put together from its deltas.
type toldCall struct{ IDs, Names, Arguments string }

// way is how a choice went on.
type way struct {
	KV                 string
	Restored, Computed int
}

// event is one event with choices.
type event struct {
	Choices []struct {
		Index        int
		Text         string
		TokenIDs     []int32 `json:"token_ids"`
		FinishReason string  `json:"finish_reason"`
		Delta        struct {
			Content   string
			ToolCalls []struct {
				Index    int
				ID       string
				Function struct{ Name, Arguments string }
			} `json:"tool_calls"`
		}
		Logprobs struct {
			Content       []json.RawMessage // of chat
			Tokens        []string          // of completions, as all below
			TokenLogprobs []float64         `json:"token_logprobs"`
			TextOffset    []int             `json:"text_offset"`
			TopLogprobs   []json.RawMessage `json:"top_logprobs"`
		}
		Mesh way `json:"kvmesh"`
	}
	Usage *struct {
		CompletionTokens int `json:"completion_tokens"`
		PromptTokens     int `json:"prompt_tokens"`
	}
	Error json.RawMessage
}

// add takes an event, as a relay splices it: a second finish of a choice is dropped.
func (a *ledger) add(ev event) {
	if ev.Usage != nil {
		a.Completion, a.Prompt = ev.Usage.CompletionTokens, ev.Usage.PromptTokens
	}
	for _, c := range ev.Choices {
		for c.Index >= len(a.Choices) {
			a.Choices = append(a.Choices, told{})
		}
		t := &a.Choices[c.Index]
		t.IDs = append(t.IDs, c.TokenIDs...)
		t.Text += c.Text + c.Delta.Content
		for _, d := range c.Delta.ToolCalls {
			for d.Index >= len(t.Calls) {
				t.Calls = append(t.Calls, toldCall{})
			}
			call := &t.Calls[d.Index]
			call.IDs, call.Names, call.Arguments = call.IDs+d.ID, call.Names+d.Function.Name, call.Arguments+d.Function.Arguments
		}
		for _, p := range c.Logprobs.Content {
			t.Probs = append(t.Probs, string(p))
		}
		for i, tok := range c.Logprobs.Tokens {
			t.Probs = append(t.Probs, fmt.Sprintf("%q %v at %d of %s", tok, c.Logprobs.TokenLogprobs[i], c.Logprobs.TextOffset[i], c.Logprobs.TopLogprobs[i]))
		}
		if t.Finish == "" {
			t.Finish = c.FinishReason
		}
	}
}

// clone is a copy that a continuation may add to.
func (a *ledger) clone() *ledger {
	out := &ledger{Completion: a.Completion, Prompt: a.Prompt}
	for _, c := range a.Choices {
		c.IDs, c.Calls, c.Probs = slices.Clone(c.IDs), slices.Clone(c.Calls), slices.Clone(c.Probs)
		out.Choices = append(out.Choices, c)
	}
	return out
}

// resume is the field by which the relay continues the stream.
func (a *ledger) resume(stream string) map[string]any {
	var choices []any
	for i, c := range a.Choices {
		choices = append(choices, map[string]any{"index": i, "token_ids": append([]int32{}, c.IDs...), "text_bytes": len(c.Text)})
	}
	return map[string]any{"stream": stream, "attempt": 2, "choices": choices}
}

// event reads the next event; io.EOF after [DONE].
func (r *reading) event() (event, error) {
	var ev event
	raw, err := r.data()
	if err != nil {
		return ev, err
	}
	if err := json.Unmarshal(raw, &ev); err != nil {
		return ev, fmt.Errorf("event %s: %w", raw, err)
	}
	if ev.Error != nil {
		return ev, fmt.Errorf("error event %s", raw)
	}
	return ev, nil
}

// events reads a stream to its end, into a, and returns its events.
func (a *ledger) events(t testing.TB, s *reading) (out []event) {
	t.Helper()
	defer s.close()
	for {
		ev, err := s.event()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("worker %s, after %d events: %v", s.p.id, len(out), err)
		}
		a.add(ev)
		out = append(out, ev)
	}
}

// kind is something that a stream carries beside the tokens of one plain choice.
type kind struct {
	name string
	body map[string]any
	// adjust changes the body by what an undisturbed answer to it was; nil = no.
	adjust func(t *testing.T, evs []event, body map[string]any)
	// where says after how many events a cut is interesting; nil = anywhere.
	where func(evs []event) []int
	check func(t *testing.T, whole told) // of every choice, nil = nothing more
	// fresh says that a run of plain tokens after prompt and delivered tokens is what a
	// continuation without KV must be: greedy, and without rules of its own.
	fresh bool
	loose bool // several choices in one batch: near-ties may fall the other way
	full  bool // only with -resume-full
}

// TestResumeKinds cuts streams that carry more than plain tokens and continues them in
// another process, with the KV of the first and without. Without -resume-full each is
// cut once.
func TestResumeKinds(t *testing.T) {
	dir := kvDir(t)
	template := filepath.Join(t.TempDir(), "hermes.jinja")
	if err := os.WriteFile(template, []byte(toolTemplate), 0o600); err != nil {
		t.Fatal(err)
	}
	kv := []string{"--chat-template", template, "--kv-dir", dir, "--kv-limit", "2147483648"}
	alone := startProcess(t, "alone", "--chat-template", template)
	b := &bench{dir: dir, alone: alone, one: startProcess(t, "one", kv...), two: startProcess(t, "two", kv...), rnd: rand.New(rand.NewPCG(3, 4))}
	cuts := 1
	if *fullResume {
		cuts = 8
	}
	for _, k := range kinds() {
		if k.full && !*fullResume {
			continue
		}
		t.Run(k.name, func(t *testing.T) { b.run(t, k, cuts) })
	}
}

// bench is the processes of the test.
type bench struct {
	dir             string
	alone, one, two *process
	rnd             *rand.Rand
	streams         int
}

// run tries one kind.
func (b *bench) run(t *testing.T, k kind, cuts int) {
	ask := func(salt string) (*ledger, []event) {
		want := new(ledger)
		return want, want.events(t, b.alone.post(k.body, map[string]any{"token_ids": true, "salt": salt}, "undisturbed"))
	}
	want, evs := ask(k.name)
	if k.adjust != nil {
		k.adjust(t, evs, k.body)
		want, evs = ask(k.name + ", adjusted")
	}
	for i, c := range want.Choices {
		t.Logf("undisturbed choice %d: %d tokens, %q, %+v, %s", i, len(c.IDs), c.Text, c.Calls, c.Finish)
		if k.check != nil {
			k.check(t, c)
		}
	}
	places := make([]int, 0, len(evs))
	if k.where != nil {
		places = k.where(evs)
	} else {
		for n := 1; n < len(evs)-2; n++ { // behind are the finish and the usage
			places = append(places, n)
		}
	}
	if len(places) == 0 {
		t.Fatalf("none of %d events is a place to cut at", len(evs))
	}
	b.rnd.Shuffle(len(places), func(i, j int) { places[i], places[j] = places[j], places[i] })
	for _, at := range places[:min(cuts, len(places))] {
		b.restored(t, k, want, at)
		b.removed(t, k, want, at)
	}
}

// cut runs a stream on the first worker, stops that after so many events, and returns
// what was delivered.
func (b *bench) cut(t *testing.T, k kind, at int) (delivered *ledger, stream string) {
	t.Helper()
	b.streams++
	stream = fmt.Sprint("stream ", b.streams)
	s := b.one.post(k.body, map[string]any{"token_ids": true, "salt": stream}, stream)
	delivered = new(ledger)
	for range at {
		ev, err := s.event()
		if err != nil {
			t.Fatal(err)
		}
		delivered.add(ev)
	}
	b.one.signal(syscall.SIGSTOP)
	t.Cleanup(func() {
		b.one.signal(syscall.SIGCONT)
		s.close()
		b.one.idle()
	})
	return delivered, stream
}

// goOn continues a stream on the second worker.
func (b *bench) goOn(t *testing.T, k kind, delivered *ledger, stream string) (whole *ledger, ways []way) {
	t.Helper()
	whole = delivered.clone()
	mesh := map[string]any{"token_ids": true, "salt": stream, "resume": delivered.resume(stream)}
	for _, ev := range whole.events(t, b.two.post(k.body, mesh, stream)) {
		for _, c := range ev.Choices {
			if c.Mesh.KV != "" {
				ways = append(ways, c.Mesh)
			}
		}
	}
	return whole, ways
}

// restored cuts a stream and continues it from the KV of the first worker.
func (b *bench) restored(t *testing.T, k kind, want *ledger, at int) {
	t.Run(fmt.Sprintf("restored at %d", at), func(t *testing.T) {
		delivered, stream := b.cut(t, k, at)
		got, ways := b.goOn(t, k, delivered, stream)
		diff := cmp.Diff(want, got)
		if k.loose && diff != "" {
			t.Logf("another answer than the undisturbed one, as neighbours in a batch may cause: %s", diff)
			sameShape(t, want, got)
		} else if diff != "" {
			t.Errorf("after %+v (-want +got):\n%s", delivered, diff)
		}
		if len(ways) == 0 {
			t.Error("no choice says how it went on")
		}
		over := len(got.Choices) == 1 && len(got.Choices[0].IDs) == len(delivered.Choices[0].IDs) // with a stop string: nothing had to be restored
		for _, w := range ways {
			if over && w == (way{KV: "replayed"}) {
				continue
			}
			if want := map[bool]string{false: "exact", true: "restored"}[k.loose]; w.KV != want || w.Restored < 64 || w.Computed >= 64 {
				t.Errorf("went on as %+v, want exact with a block at least restored, and less than one computed", w)
			}
		}
		b.judge(t, k, delivered, got)
	})
}

// removed cuts a stream, takes the stored KV away and continues it.
func (b *bench) removed(t *testing.T, k kind, want *ledger, at int) {
	t.Run(fmt.Sprintf("removed at %d", at), func(t *testing.T) {
		delivered, stream := b.cut(t, k, at)
		for _, path := range blockFiles(t, b.dir) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
		got, ways := b.goOn(t, k, delivered, stream)
		for _, w := range ways {
			if w.KV != "replayed" || w.Restored != 0 {
				t.Errorf("went on as %+v, want replayed", w)
			}
		}
		sameShape(t, want, got)
		b.judge(t, k, delivered, got)
		if k.fresh {
			b.asFresh(t, k, delivered, got)
		}
	})
}

// judge checks what holds for every continuation: what was delivered stands at its
// beginning, tokens and text belong together, usage counts each token once, and the
// kind's own rules are kept.
func (b *bench) judge(t *testing.T, k kind, delivered, got *ledger) {
	t.Helper()
	total := 0
	for i, c := range got.Choices {
		var before told
		if i < len(delivered.Choices) {
			before = delivered.Choices[i]
		}
		total += len(c.IDs)
		if !slices.Equal(c.IDs[:len(before.IDs)], before.IDs) || !strings.HasPrefix(c.Text, before.Text) {
			t.Errorf("choice %d does not begin with what was delivered", i)
		}
		if all := b.two.text(c.IDs); !strings.HasPrefix(all, c.Text) {
			t.Errorf("choice %d says %q, its tokens say %q", i, c.Text, all)
		}
		if k.check != nil {
			k.check(t, c)
		}
	}
	if got.Completion != total {
		t.Errorf("usage counts %d tokens, there are %d", got.Completion, total)
	}
}

// sameShape compares what does not depend on which of two equally probable tokens was
// taken.
func sameShape(t *testing.T, want, got *ledger) {
	t.Helper()
	if len(want.Choices) != len(got.Choices) || want.Prompt != got.Prompt {
		t.Errorf("%d choices after %d tokens, want %d after %d", len(got.Choices), got.Prompt, len(want.Choices), want.Prompt)
	}
	for i, c := range got.Choices {
		if c.Finish == "length" && want.Choices[i].Finish == "length" && len(c.IDs) != len(want.Choices[i].IDs) {
			t.Errorf("choice %d has %d tokens, want %d", i, len(c.IDs), len(want.Choices[i].IDs))
		}
		if c.Finish == "" || len(c.Probs) > 0 && len(c.Probs) != len(c.IDs) {
			t.Errorf("choice %d ends with %q, %d probabilities of %d tokens", i, c.Finish, len(c.Probs), len(c.IDs))
		}
	}
}

// asFresh compares a continuation with a run of plain tokens after the prompt and what
// was delivered.
func (b *bench) asFresh(t *testing.T, k kind, delivered, got *ledger) {
	t.Helper()
	c, before := got.Choices[0], delivered.Choices[0].IDs
	most := k.body["max_tokens"].(int) - len(before)
	body := map[string]any{"prompt": slices.Concat(b.two.prompt(k.body), before), "max_tokens": most, "temperature": 0, "ignore_eos": k.body["ignore_eos"] == true}
	var want ledger
	want.events(t, b.two.post(body, map[string]any{"token_ids": true, "salt": t.Name()}, "fresh"))
	rest := want.Choices[0].IDs
	// Behind a stop string the fresh run, which does not know it, goes on.
	if n := len(c.IDs) - len(before); n > len(rest) || !slices.Equal(c.IDs[len(before):], rest[:n]) {
		t.Errorf("went on with %v, a fresh run with %v", c.IDs[len(before):], rest)
	}
}
