//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/worker"
)

// BenchmarkEightStreams compares the engine with a bare loop over llama_decode on the
// same library, eight streams each, turn by turn in the same run: what is lost is what
// batching, sampling and handing out cost. The bare loop takes the first token of the
// logits' largest, as the engine does at temperature 0.
func BenchmarkEightStreams(b *testing.B) {
	const streams, tokens, rounds = 8, 24, 4
	cfg := realConfig(b)
	cfg.ContextLen, cfg.Cells, cfg.MaxSeqs = 256, 8*256, streams
	e := openReal(b, cfg)
	ids, err := e.tokenize("prompt", "The quick brown fox", true)
	if err != nil {
		b.Fatal(err)
	}
	bare := newBare(b, cfg)
	var engine, loop []float64
	for b.Loop() {
		for range rounds {
			begin := time.Now()
			bare.run(b, ids, streams, tokens)
			loop = append(loop, float64(streams*tokens)/time.Since(begin).Seconds())
			begin = time.Now()
			var wg sync.WaitGroup
			for i := range streams {
				wg.Go(func() {
					p := worker.Params{MaxTokens: tokens, TopP: 1, TopLogprobs: -1, Choice: i, IgnoreEOS: true}
					if _, err := drain(b.Context(), e, ids, p); err != nil {
						b.Error(err)
					}
				})
			}
			wg.Wait()
			engine = append(engine, float64(streams*tokens)/time.Since(begin).Seconds())
		}
	}
	b.ReportMetric(best(engine), "engine-tokens/s")
	b.ReportMetric(best(loop), "bare-tokens/s")
	b.ReportMetric(100*best(engine)/best(loop), "%ofbare")
}

// best is the largest: noise of the machine only slows down.
func best(v []float64) float64 {
	m := 0.0
	for _, x := range v {
		m = max(m, x)
	}
	return m
}

// bareLoop is a context without the engine around it.
type bareLoop struct{ dec decoder }

// newBare opens a second context, for the goroutine that calls it.
func newBare(b *testing.B, cfg Config) *bareLoop {
	b.Helper()
	runtime.LockOSThread() // a context belongs to a thread
	b.Cleanup(runtime.UnlockOSThread)
	cfg = cfg.withDefaults()
	p, err := load(b.Context(), &cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(p.dec.Close)
	return &bareLoop{p.dec}
}

// run prefills and decodes as the engine would, in lockstep.
func (l *bareLoop) run(b *testing.B, ids []int32, streams, tokens int) {
	next := make([]int32, streams)
	at := make([]int, streams)
	var batch []entry
	for s := range streams {
		for pos, id := range ids {
			batch = append(batch, entry{slot: s, pos: pos, id: id, logits: pos == len(ids)-1})
		}
		at[s] = len(batch) - 1
	}
	for n := range tokens {
		if err := l.dec.Decode(batch, func() bool { return false }); err != nil {
			b.Fatal(err)
		}
		for s := range streams {
			logits, err := l.dec.Logits(at[s])
			if err != nil {
				b.Fatal(err)
			}
			best := 0
			for i, v := range logits {
				if v > logits[best] {
					best = i
				}
			}
			next[s] = int32(best)
		}
		batch = batch[:0]
		for s := range streams {
			batch = append(batch, entry{slot: s, pos: len(ids) + n, id: next[s], logits: true})
			at[s] = s
		}
	}
	for s := range streams {
		if err := l.dec.Keep(s, 0); err != nil {
			b.Fatal(err)
		}
	}
}
