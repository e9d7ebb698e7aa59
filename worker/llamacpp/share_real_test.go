//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"flag"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

var longFlag = flag.Bool("llama-long", false, "what takes minutes on the real model, too")

// tap is a decoder that keeps the logits behind one token wherever they are asked for.
type tap struct {
	decoder
	id    int32 // of that token
	batch []entry
	seen  map[int][]float32 // by position
}

// Decode implements decoder.
func (d *tap) Decode(batch []entry, stop func() bool) error {
	d.batch = slices.Clone(batch)
	return d.decoder.Decode(batch, stop)
}

// Logits implements decoder.
func (d *tap) Logits(i int) ([]float32, error) {
	logits, err := d.decoder.Logits(i)
	if e := d.batch[i]; err == nil && e.id == d.id {
		d.seen[e.pos] = slices.Clone(logits)
	}
	return logits, err
}

// openTapped is openReal with a tap.
func openTapped(t *testing.T, cfg Config) (*Engine, *tap) {
	t.Helper()
	d := &tap{seen: make(map[int][]float32)}
	e, err := start(cfg.withDefaults(), func(cfg *Config) (parts, error) {
		p, err := load(t.Context(), cfg)
		d.decoder = p.dec
		p.dec = d
		return p, err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e, d
}

// distance is the root of the mean square of the difference of two lists of logits,
// each about its own mean, which no probability depends on.
func distance(a, b []float32) float64 {
	mean, sum := 0.0, 0.0
	for i := range a {
		mean += float64(a[i]-b[i]) / float64(len(a))
	}
	for i := range a {
		d := float64(a[i]-b[i]) - mean
		sum += d * d / float64(len(a))
	}
	return math.Sqrt(sum)
}

// TestRealSharedPrefix branches off a running sequence before, at and behind the width
// of the model's attention window: the logits of the whole vocabulary are those of a
// cold run, within the noise between two cold runs whose batches have other shapes.
func TestRealSharedPrefix(t *testing.T) {
	at, length := []int{300, 511, 513}, 560
	if *longFlag {
		at, length = append(at, 2000), 2050
	}
	cfg := realConfig(t)
	cfg.ContextLen, cfg.Cells, cfg.MaxSeqs = 3072, 2*3072, 2
	e, logits := openTapped(t, cfg)
	cfg.BatchTokens, cfg.PrefillTokens = 200, 200
	other, otherLogits := openTapped(t, cfg)
	var text strings.Builder
	for i := range 90 { // it does not repeat itself
		fmt.Fprintf(&text, "On day %d the caravan counted %d bags of salt, %d of pepper, and rested beside well number %d. ", i, i*i%997, i*7%61, i%13)
	}
	base := tokenize(t, e, text.String())[:length]
	branch := tokenize(t, e, " However, the youngest driver said that")[1:]
	// probe is what the model says after the first n tokens and the branch, and how many
	// tokens were not computed.
	probe := func(e *Engine, d *tap, n int) ([]float32, int) {
		t.Helper()
		ids := slices.Concat(base[:n], branch)
		for tok, err := range e.Generate(t.Context(), ids, exactly(1)) {
			if err != nil {
				t.Fatal(err)
			}
			got := d.seen[len(ids)-1]
			if len(got) != e.Model().Vocab {
				t.Fatalf("%d logits for a vocabulary of %d", len(got), e.Model().Vocab)
			}
			return got, tok.Cached
		}
		t.Fatal("nothing was generated")
		return nil, 0
	}
	logits.id, otherLogits.id = branch[len(branch)-1], branch[len(branch)-1]
	cold, noise := make([][]float32, len(at)), 0.0
	for i, n := range at {
		var cached int
		if cold[i], cached = probe(e, logits, n); cached != 0 {
			t.Fatalf("cold run: %d tokens shared", cached)
		}
		again, _ := probe(other, otherLogits, n)
		noise = max(noise, distance(cold[i], again))
	}
	if noise == 0 {
		t.Fatal("batches of another shape make no noise, so the bound of this test is none")
	}
	other.Close()
	for _, err := range e.Generate(t.Context(), base, exactly(1000)) { // it runs on while the others branch
		if err != nil {
			t.Fatal(err)
		}
		for i, n := range at {
			warm, cached := probe(e, logits, n)
			if cached < n {
				t.Errorf("branched at %d: %d tokens shared", n, cached)
			}
			d := distance(warm, cold[i])
			t.Logf("branched at %d: %.4f from the cold run, noise %.4f; the neighbours are %.4f away", n, d, noise, distance(cold[i], cold[(i+1)%len(cold)]))
			if d > 2*noise { // a shared token too few or too many is ten times that
				t.Errorf("branched at %d: logits are %.4f from those of a cold run, where two cold runs are %.4f apart", n, d, noise)
			}
		}
		break
	}
}
