//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"flag"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
)

var longFlag = flag.Bool("llama-long", false, "what takes minutes on the real model, too")

// TestRealSharedPrefix branches off a running sequence before, at and behind the width
// of the model's attention window: the logits are those of a cold run, within the noise
// that other batch shapes make.
func TestRealSharedPrefix(t *testing.T) {
	at, length := []int{300, 511, 513}, 560
	if *longFlag {
		at, length = append(at, 2000), 2050
	}
	cfg := realConfig(t)
	cfg.ContextLen, cfg.Cells, cfg.MaxSeqs = 3072, 2*3072, 2
	e := openReal(t, cfg)
	base := tokenize(t, e, strings.Repeat("A caravan of nine camels crossed the desert in eleven days, and on the way its leader counted the stars. ", 110))[:length]
	branch := tokenize(t, e, " However, the youngest driver said that")[1:]
	probe := func(ids []int32) worker.Token {
		p := exactly(1)
		p.TopLogprobs = 3
		for tok, err := range e.Generate(t.Context(), ids, p) {
			if err != nil {
				t.Fatal(err)
			}
			return tok
		}
		return worker.Token{}
	}
	cold := make([]worker.Token, len(at))
	for i, n := range at {
		cold[i] = probe(slices.Concat(base[:n], branch))
		if cold[i].Cached != 0 {
			t.Fatalf("cold run: %d tokens shared", cold[i].Cached)
		}
	}
	for _, err := range e.Generate(t.Context(), base, exactly(1000)) { // it runs on while the others branch
		if err != nil {
			t.Fatal(err)
		}
		for i, n := range at {
			warm := probe(slices.Concat(base[:n], branch))
			if warm.Cached < n {
				t.Errorf("branched at %d: %d tokens shared", n, warm.Cached)
			}
			for _, w := range warm.Top {
				j := slices.IndexFunc(cold[i].Top, func(c worker.Logprob) bool { return c.ID == w.ID })
				if j < 0 {
					continue // a near-tie at the end of the list
				}
				if d := math.Abs(w.Logprob - cold[i].Top[j].Logprob); d > 0.15 {
					t.Errorf("branched at %d: log-probability of %d is %.3f, cold %.3f", n, w.ID, w.Logprob, cold[i].Top[j].Logprob)
				}
			}
			if warm.Top[0].ID != cold[i].Top[0].ID && cold[i].Top[0].Logprob-cold[i].Top[1].Logprob > 0.2 {
				t.Errorf("branched at %d: token %d, cold %d", n, warm.Top[0].ID, cold[i].Top[0].ID)
			}
		}
		break
	}
}
