//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// TestPausedIsBitForBit: requests take each other's place on one sequence, so that
// each decode has the shape it would have had without the others: every token is that
// of the undisturbed run, and no token is prefilled twice.
func TestPausedIsBitForBit(t *testing.T) {
	cfg := tinyConfig(t)
	cfg.ContextLen, cfg.Cells, cfg.MaxSeqs = 256, 256, 1
	e := openReal(t, cfg)
	ask := func(i int) ([]int32, worker.Params) {
		p := worker.Params{MaxTokens: 80, TopP: 1, TopLogprobs: -1, IgnoreEOS: true, Seed: uint64(i), Priority: i / 2}
		if i%2 == 1 {
			p.Temperature, p.Presence = 1, 0.3
		}
		return tokenize(t, e, fmt.Sprintf("the letter of number %d to the editor of the paper", i)), p
	}
	var want, got [8][]int32
	prompts := 0
	for i := range want {
		ids, p := ask(i)
		prompts += len(ids)
		want[i] = generated(t, e, ids, p)
	}
	before := e.Load()
	var wg sync.WaitGroup
	for i := range got { // each finds the one before it at work
		ids, p := ask(i)
		begun := make(chan struct{})
		wg.Go(func() {
			for tok, err := range e.Generate(t.Context(), ids, p) {
				if err != nil {
					t.Errorf("request %d: %v", i, err)
				}
				if got[i] = append(got[i], tok.ID); len(got[i]) == 5 {
					close(begun)
				}
			}
		})
		if i%2 == 0 { // the next one has the same priority, and does not begin before this one ends
			<-begun
		}
	}
	wg.Wait()
	for i := range want {
		if !slices.Equal(got[i], want[i]) {
			t.Errorf("request %d: %v\nundisturbed: %v", i, got[i], want[i])
		}
	}
	l := e.Load()
	if n := l.Preempted - before.Preempted; n == 0 || l.Resumed-before.Resumed != n || l.PausedBytes != 0 {
		t.Errorf("%d gave way, %d went on from their KV, %d bytes are kept", n, l.Resumed-before.Resumed, l.PausedBytes)
	}
	if n := l.PromptTokens - before.PromptTokens; n != uint64(prompts) {
		t.Errorf("%d tokens were prefilled, want the %d of the prompts", n, prompts)
	}
}

// generated is the ids of a whole generation.
func generated(t *testing.T, e *Engine, ids []int32, p worker.Params) []int32 {
	t.Helper()
	var out []int32
	for tok, err := range e.Generate(t.Context(), ids, p) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, tok.ID)
	}
	return out
}

// TestOversubscribed asks for three times the KV memory at once, through the worker.
func TestOversubscribed(t *testing.T) {
	cfg := tinyConfig(t)
	cfg.ContextLen, cfg.MaxSeqs = 256, 12
	testOversubscribed(t, cfg, 160, 0.02)
}

// TestRealOversubscribed is the same with the real model, on request.
func TestRealOversubscribed(t *testing.T) {
	if !*longFlag {
		t.Skip("with -args -llama-long")
	}
	cfg := realConfig(t)
	cfg.ContextLen, cfg.MaxSeqs = 256, 12
	testOversubscribed(t, cfg, 90, 0.3)
}

// testOversubscribed has twelve requests of three priorities, each for tokens tokens,
// with a third of the memory that all of them need: each ends right, in the order of
// the priorities. Batches have other shapes than in an undisturbed run, so a token may
// differ where the best ones were nearly equal there, by less than tie.
func testOversubscribed(t *testing.T, cfg Config, tokens int, tie float64) {
	const requests = 12
	cfg.Cells = 3 * 512 // for the undisturbed runs
	const prompt = "the story of the old house in the hills, part %d: in the end"
	type answer struct {
		ids  []int32
		tops [][]worker.Logprob
	}
	var want [requests]answer
	var lengths [requests]int
	all := 0
	func() {
		e := openReal(t, cfg)
		defer e.Close()
		for i := range want {
			ids := tokenize(t, e, fmt.Sprintf(prompt, i))
			lengths[i] = len(ids)
			all += len(ids) + tokens
			for tok, err := range e.Generate(t.Context(), ids, worker.Params{MaxTokens: tokens, TopP: 1, TopLogprobs: 5, IgnoreEOS: true}) {
				if err != nil {
					t.Fatal(err)
				}
				want[i].ids, want[i].tops = append(want[i].ids, tok.ID), append(want[i].tops, tok.Top)
			}
		}
	}()
	cfg.Cells = max(all/3, cfg.ContextLen)
	e := openReal(t, cfg)
	base := serve(t, e)
	gate := make(chan struct{})
	e.in.send(func(*loop) { <-gate }) // until all are there
	before := e.Load()
	var (
		mu    sync.Mutex
		wg    sync.WaitGroup
		order []int // in which they end
		exact int
	)
	for i := range requests {
		wg.Go(func() {
			body := fmt.Sprintf(`{"model":"m","prompt":%q,"max_tokens":%d,"temperature":0,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true},"kvmesh":{"token_ids":true}}`,
				fmt.Sprintf(prompt, i), tokens)
			got := read(t, base, body, i%3-1)
			mu.Lock()
			defer mu.Unlock()
			order = append(order, i)
			if got.reason != "length" || got.usage.PromptTokens != lengths[i] || got.usage.CompletionTokens != tokens || len(got.ids) != tokens {
				t.Errorf("request %d: %d tokens, %q, %+v", i, len(got.ids), got.reason, got.usage)
				return
			}
			for k, id := range got.ids {
				if id == want[i].ids[k] {
					continue
				}
				top := want[i].tops[k]
				j := slices.IndexFunc(top, func(l worker.Logprob) bool { return l.ID == id })
				if j < 0 || top[0].Logprob-top[j].Logprob > tie {
					t.Errorf("request %d, token %d: %d, undisturbed %+v", i, k, id, top)
				}
				return
			}
			exact++
		})
	}
	for e.Load().Waiting < requests {
		select {
		case <-t.Context().Done():
			t.Fatal("the requests did not arrive")
		default:
		}
	}
	close(gate)
	wg.Wait()
	l := e.Load()
	t.Logf("%d cells for %d tokens: %d gave way, %d went on from their KV, %d of %d answers equal to the last token; order %v",
		cfg.Cells, all, l.Preempted-before.Preempted, l.Resumed-before.Resumed, exact, requests, order)
	if exact == 0 {
		t.Error("no answer equals its undisturbed run")
	}
	if !slices.IsSortedFunc(order, func(a, b int) int { return b%3 - a%3 }) {
		t.Errorf("ended in the order %v, of the priorities i%%3-1", order)
	}
	if n := l.Preempted - before.Preempted; n == 0 || l.Resumed-before.Resumed != n {
		t.Errorf("%d gave way, %d went on from their KV", n, l.Resumed-before.Resumed)
	}
	if l.Running != 0 || l.Waiting != 0 || l.KVUsage != 0 || l.PausedBytes != 0 {
		t.Errorf("load is %+v", l)
	}
}

// streamed is what came of a stream.
type streamed struct {
	ids    []int32
	text   string
	reason string
	usage  openai.Usage
}

// read asks as the relay does, and reads the stream of one choice to its end.
func read(t *testing.T, base, body string, priority int) (out streamed) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, base+string(openai.Completions), strings.NewReader(body))
	if err != nil {
		t.Error(err)
		return out
	}
	req.Header.Set("X-Kvmesh-Relay", "secret")
	req.Header.Set("X-Kvmesh-Priority", fmt.Sprint(priority))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Error(err)
		return out
	}
	defer resp.Body.Close()
	events := openai.NewEventReader(resp.Body, 1<<20)
	for {
		ev, err := events.Next()
		if err != nil {
			t.Errorf("%d: the stream ends with %v", resp.StatusCode, err)
			return out
		}
		if ev.Done() {
			return out
		}
		if len(ev.Data) == 0 {
			continue // a sign of life
		}
		var chunk struct {
			Choices []struct {
				Text         string  `json:"text"`
				TokenIDs     []int32 `json:"token_ids"`
				FinishReason *string `json:"finish_reason"`
			} `json:"choices"`
			Usage *openai.Usage `json:"usage"`
		}
		if err := json.Unmarshal(ev.Data, &chunk); err != nil {
			t.Errorf("%v in %s", err, ev.Data)
			return out
		}
		if chunk.Usage != nil {
			out.usage = *chunk.Usage
		}
		for _, c := range chunk.Choices {
			out.ids, out.text = append(out.ids, c.TokenIDs...), out.text+c.Text
			if c.FinishReason != nil {
				out.reason = *c.FinishReason
			}
		}
	}
}
