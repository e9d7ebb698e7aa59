// Package enginetest holds the conformance suite of worker.Engine. Every engine's
// own tests run it; a new engine that passes can stand behind the worker's server.
package enginetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// patience bounds every wait of the suite; only a hang reaches it.
const patience = 2 * time.Minute

// Run checks an engine. newEngine returns a fresh one, which the suite closes; it
// should hold at least two sequences at once, a queue of at most 64, and a context
// of 64 to 8192 tokens, and generate for at least 48 tokens when IgnoreEOS is set.
func Run(t *testing.T, newEngine func(t testing.TB) worker.Engine) {
	run(t, newEngine, false)
}

// RunShared is Run with one engine for all cases but those that close it, for engines
// that take long to load. A case that leaves something behind fails a later one.
func RunShared(t *testing.T, newEngine func(t testing.TB) worker.Engine) {
	run(t, newEngine, true)
}

func run(t *testing.T, newEngine func(t testing.TB) worker.Engine, shared bool) {
	begin := func(t *testing.T) worker.Engine {
		e := newEngine(t)
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
		return e
	}
	var one worker.Engine
	if shared {
		one = begin(t)
	}
	for _, c := range cases() {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			s := &suite{T: t, e: one, ctx: ctx}
			if !shared || c.closes {
				s.e = begin(t)
			}
			c.run(s)
		})
	}
}

// suiteCase is one of the cases.
type suiteCase struct {
	name   string
	run    func(*suite)
	closes bool // the engine
}

func cases() []suiteCase {
	open := func(name string, run func(*suite)) suiteCase { return suiteCase{name, run, false} }
	return []suiteCase{
		open("Model", (*suite).describes),
		open("TokenizePrompts", (*suite).tokenizesPrompts),
		open("TokenizeChat", (*suite).tokenizesChat),
		open("RefusesForeignIDs", (*suite).refusesForeignIDs),
		open("RefusesLongPrompts", (*suite).refusesLongPrompts),
		open("MaxTokens", (*suite).maxTokens),
		open("ContextEnd", (*suite).contextEnd),
		open("Deterministic", (*suite).deterministic),
		open("SampledByKey", (*suite).sampledByKey),
		open("Logprobs", (*suite).logprobs),
		open("BreakFrees", (*suite).breakFrees),
		open("CancelFrees", (*suite).cancelFrees),
		open("CancelWhileWaiting", (*suite).cancelWhileWaiting),
		open("Concurrent", (*suite).concurrent),
		open("SlowConsumer", (*suite).slowConsumer),
		open("QueueFull", (*suite).queueFull),
		open("LaterChoices", (*suite).laterChoices),
		open("PlacesComeBack", (*suite).placesComeBack),
		open("Resume", (*suite).resumes),
		open("Restore", (*suite).restores),
		open("CorruptKV", (*suite).corruptKV),
		{"CloseTwice", (*suite).closeTwice, true},
	}
}

// suite is one case's engine and test.
type suite struct {
	*testing.T
	e   worker.Engine
	ctx context.Context
}

// prompt tokenizes a text.
func (s *suite) prompt(text string) []int32 {
	s.Helper()
	got, err := s.e.Tokenize(s.request(openai.Completions, fmt.Sprintf(`{"model":"m","prompt":%q}`, text)), 0)
	if err != nil {
		s.Fatalf("Tokenize(%q): %v", text, err)
	}
	return got
}

func (s *suite) request(ep openai.Endpoint, body string) *openai.Request {
	s.Helper()
	req, err := openai.Parse(ep, []byte(body))
	if err != nil {
		s.Fatalf("Parse(%s): %v", body, err)
	}
	return req
}

// greedy asks for exactly n tokens, the most probable each time.
func greedy(n int) worker.Params {
	return worker.Params{MaxTokens: n, TopP: 1, TopLogprobs: -1, IgnoreEOS: true}
}

// sampled asks for exactly n tokens at a high temperature.
func sampled(n int, seed uint64, choice int) worker.Params {
	p := greedy(n)
	p.Temperature, p.Seed, p.Choice = 1.5, seed, choice
	return p
}

// collect runs a generation to its end. Token.Bytes is copied.
func (s *suite) collect(ids []int32, p worker.Params) ([]worker.Token, error) {
	return collect(s.ctx, s.e, ids, p)
}

func collect(ctx context.Context, e worker.Engine, ids []int32, p worker.Params) ([]worker.Token, error) {
	var out []worker.Token
	for tok, err := range e.Generate(ctx, ids, p) {
		if err != nil {
			return out, err
		}
		tok.Bytes = slices.Clone(tok.Bytes)
		out = append(out, tok)
	}
	return out, nil
}

// generate is collect for generations that must succeed.
func (s *suite) generate(ids []int32, p worker.Params) []worker.Token {
	s.Helper()
	out, err := s.collect(ids, p)
	if err != nil {
		s.Fatalf("Generate: %v after %d tokens", err, len(out))
	}
	if len(out) == 0 {
		s.Fatal("Generate yielded nothing")
	}
	return out
}

// idle checks that the engine holds nothing, now: freeing is not deferred.
func (s *suite) idle(after string) {
	s.Helper()
	if l := s.e.Load(); l.Running != 0 || l.Waiting != 0 || l.KVUsage != 0 {
		s.Errorf("after %s: running %d, waiting %d, KV usage %g, want an idle engine", after, l.Running, l.Waiting, l.KVUsage)
	}
}

// await polls until ok; for states that another goroutine's call brings about.
func (s *suite) await(what string, ok func(worker.Load) bool) {
	s.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok(s.e.Load()) {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			s.Fatalf("waiting for %s: load is still %+v", what, s.e.Load())
		}
	}
}

func ids(toks []worker.Token) []int32 {
	out := make([]int32, len(toks))
	for i, t := range toks {
		out[i] = t.ID
	}
	return out
}

// wantParam checks that err is a client's error about one of the fields.
func (s *suite) wantParam(err error, params ...string) *openai.Error {
	s.Helper()
	var oe *openai.Error
	if !errors.As(err, &oe) {
		s.Errorf("error is %v, want an *openai.Error", err)
		return nil
	}
	if oe.Status != 400 || !slices.Contains(params, oe.Param) {
		s.Errorf("error is %v with param %q, want a 400 with param in %q", oe, oe.Param, params)
	}
	return oe
}
