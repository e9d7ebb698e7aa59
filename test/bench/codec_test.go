//go:build linux

package bench

import (
	"context"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/codec"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/llamacpp"
)

var (
	codecTexts     = flag.Int("kv-codec-texts", 0, "prompts of TestCodecError, at most 10; 0 = it is skipped")
	codecPositions = flag.Int("kv-codec-positions", 16, "positions of each prompt's continuation")
)

// shelf is a session that hands out what it has and keeps the first blocks it is shown.
type shelf struct {
	ranges []worker.KVRange
	want   int // tokens to keep, a multiple of the block
	err    error
}

const shelfBlock = 64

// Restore implements worker.KVSession.
func (s *shelf) Restore(context.Context, []int32, time.Duration) worker.KVChain {
	return worker.KVChain{Ranges: slices.Clone(s.ranges)}
}

// Step implements worker.KVSession.
func (s *shelf) Step(_ []int32, held int, _ bool, take worker.KVCopy) {
	for from := len(s.ranges) * shelfBlock; s.err == nil && from < s.want && from+shelfBlock <= held; from += shelfBlock {
		var data []byte
		if data, s.err = take(nil, from, from+shelfBlock); s.err == nil {
			s.ranges = append(s.ranges, worker.KVRange{From: from, To: from + shelfBlock, Data: data})
		}
	}
}

// through returns the KV as it comes back from a codec, and how much smaller it was.
func through(t *testing.T, c kvcache.Codec, ranges []worker.KVRange) (out []worker.KVRange, ratio float64) {
	raw, packed := 0, 0
	for _, r := range ranges {
		parts := llamacpp.StateParts(r.Data, r.To-r.From)
		if parts == nil {
			t.Fatal("the state has an unknown form")
		}
		b, parts := codec.Pack(nil, c, parts, r.Data, llamacpp.StateShape)
		raw, packed = raw+len(r.Data), packed+len(b)
		r.Data = nil
		for _, p := range parts {
			var err error
			if r.Data, err = codec.AppendDecoded(r.Data, p.Codec, b[:p.Size]); err != nil {
				t.Fatal(err)
			}
			b = b[p.Size:]
		}
		out = append(out, r)
	}
	return out, float64(raw) / float64(packed)
}

// divergence is the KL divergence of the tokens that p names, and all others as one.
func divergence(p, q []worker.Logprob) float64 {
	least, other := 0.0, map[int32]float64{}
	for _, x := range q {
		other[x.ID], least = x.Logprob, min(least, x.Logprob)
	}
	kl, restP, restQ := 0.0, 1.0, 1.0
	for _, x := range p {
		l, ok := other[x.ID]
		if !ok {
			l = least // it is less probable than all that are named
		}
		kl += math.Exp(x.Logprob) * (x.Logprob - l)
		restP, restQ = restP-math.Exp(x.Logprob), restQ-math.Exp(l)
	}
	if restP > 1e-6 && restQ > 1e-6 {
		kl += restP * math.Log(restP/restQ)
	}
	return max(kl, 0)
}

// next is the distribution of the token after ids with the KV of their beginning.
func next(t *testing.T, e worker.Engine, ids []int32, kv []worker.KVRange) worker.Token {
	p := greedy(1)
	p.TopLogprobs, p.KV = 20, &shelf{ranges: kv}
	_, first, _, _ := generate(t, e, ids, p)
	if first.Restored != len(kv)*shelfBlock {
		t.Fatalf("%d tokens were restored of %d", first.Restored, len(kv)*shelfBlock)
	}
	first.Top = slices.Clone(first.Top)
	return first
}

// texts returns the first tokens of each text in testdata/texts.txt: prose, code, speech,
// a table, and more, all of which break off.
func texts(t *testing.T, e *llamacpp.Engine, tokens int) (all [][]int32) {
	t.Helper()
	file, err := os.ReadFile(filepath.Join("testdata", "texts.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for text := range strings.SplitSeq(strings.TrimSpace(string(file)), "\n%%\n") {
		req, bad := openai.Parse(openai.Completions, fmt.Appendf(nil, `{"model":"m","prompt":%q}`, text))
		if bad != nil {
			t.Fatal(bad)
		}
		ids, err := e.Tokenize(req, 0)
		if err != nil || len(ids) < tokens {
			t.Fatalf("text %d has %d tokens, want %d: %v", len(all)+1, len(ids), tokens, err)
		}
		all = append(all, ids[:tokens])
	}
	return all
}

// TestCodecError measures what the codecs do to a real model: the next token's
// distribution with quantized KV of the prompt against that with raw KV, both restored,
// at each position of greedy continuations. The table is in docs/worker-kv.md.
func TestCodecError(t *testing.T) {
	if *codecTexts == 0 {
		t.Skip("takes minutes: -kv-codec-texts N")
	}
	const tokens = 128
	positions := *codecPositions
	e := openModel(t, 1024, 1)
	prompts := texts(t, e, tokens)
	kl, same := map[kvcache.Codec][]float64{}, map[kvcache.Codec]int{}
	ratios := map[kvcache.Codec]float64{}
	for i, ids := range prompts[:min(*codecTexts, len(prompts))] {
		p, keep := greedy(positions+1), &shelf{want: tokens}
		p.KV = keep
		want, _, _, _ := generate(t, e, ids, p)
		if keep.err != nil || len(keep.ranges) != tokens/shelfBlock {
			t.Fatalf("%d blocks were kept, %v", len(keep.ranges), keep.err)
		}
		exact := make([]worker.Token, positions)
		for at := range positions {
			exact[at] = next(t, e, slices.Concat(ids, want[:at+1]), keep.ranges)
		}
		for _, c := range []kvcache.Codec{kvcache.CodecInt8, kvcache.CodecInt4} {
			lossy, ratio := through(t, c, keep.ranges)
			ratios[c] = ratio
			for at, a := range exact {
				b := next(t, e, slices.Concat(ids, want[:at+1]), lossy)
				kl[c] = append(kl[c], divergence(a.Top, b.Top))
				if a.ID == b.ID {
					same[c]++
				}
			}
		}
		t.Logf("text %d of %d", i+1, *codecTexts)
	}
	for c, v := range kl {
		slices.Sort(v)
		sum := 0.0
		for _, x := range v {
			sum += x
		}
		mean := sum / float64(len(v))
		t.Logf("| %v | %.2f | %.4f | %.4f | %.1f %% of %d |", c, ratios[c], mean, v[len(v)*99/100], 100*float64(same[c])/float64(len(v)), len(v))
		if most := map[kvcache.Codec]float64{kvcache.CodecInt8: 0.01, kvcache.CodecInt4: 0.02}[c]; mean > most {
			t.Errorf("%v: mean divergence %.4f, want at most %v", c, mean, most)
		}
	}
}
