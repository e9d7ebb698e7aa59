//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
)

// TestRealResume takes the KV of a running answer in ranges and goes on from it in
// another engine: the tokens are those of the undisturbed run.
func TestRealResume(t *testing.T) { testResume(t, realConfig(t), []int{19, 39}) }

// TestTinyResume does the same at every token.
func TestTinyResume(t *testing.T) {
	cuts := make([]int, 39)
	for i := range cuts {
		cuts[i] = i + 1
	}
	testResume(t, tinyConfig(t), cuts)
}

func testResume(t *testing.T, cfg Config, cuts []int) {
	cfg.ContextLen, cfg.Cells, cfg.MaxSeqs = 1024, 1024, 2
	one, two := openReal(t, cfg), openReal(t, cfg)
	ids := tokenize(t, one, "The lighthouse keeper climbed the stairs every evening, and on the last night of the year he")
	for _, temperature := range []float64{0, 0.8} {
		p := worker.Params{MaxTokens: 40, TopP: 0.95, TopLogprobs: -1, IgnoreEOS: true, Temperature: temperature, Seed: 3, Presence: 0.2}
		want := generated(t, one, ids, p)
		book := &notebook{every: 7}
		whole := p
		whole.KV = book
		if got := generated(t, one, ids, whole); !slices.Equal(got, want) {
			t.Fatalf("copying KV changed the answer: %v, want %v", got, want)
		}
		if book.fail != nil {
			t.Fatal(book.fail)
		}
		for _, cut := range cuts {
			next := &notebook{stored: book.upTo(len(ids) + cut)}
			before := two.Load().PromptTokens
			got := generated(t, two, slices.Concat(ids, want[:cut]), resumed(p, cut, next))
			if !slices.Equal(got, want[cut:]) {
				t.Errorf("temperature %g, cut at %d: %v, want %v", temperature, cut, got, want[cut:])
			}
			if next.refused != nil || next.restored == 0 {
				t.Errorf("cut at %d: restored %d, %v", cut, next.restored, next.refused)
			}
			if n := two.Load().PromptTokens - before; n > 7 {
				t.Errorf("cut at %d: %d tokens were computed again", cut, n)
			}
		}
	}
}
