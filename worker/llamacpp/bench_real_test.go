//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/worker"
)

// leastOfBare is what share of a bare loop's tokens per second the engine must reach.
const leastOfBare = 95

// BenchmarkEightStreams compares the engine with a bare loop over llama_decode on the
// same library, eight streams each, in many short rounds of both, the order turned
// around each time: what is lost is what batching, sampling and handing out cost. The
// bare loop takes the first token of the logits' largest, as the engine does at
// temperature 0. Only the time in which all eight decode counts: the loop has its
// prompts at once, the engine one after the other. It fails when the median of the
// rounds' ratios is below leastOfBare, or when twice its standard error is so large that the
// run says nothing.
func BenchmarkEightStreams(b *testing.B) {
	const streams, tokens, rounds = 8, 24, 10
	cfg := realConfig(b)
	cfg.ContextLen, cfg.Cells, cfg.MaxSeqs = 256, 8*256, streams
	e := openReal(b, cfg)
	ids, err := e.tokenize("prompt", "The quick brown fox", true)
	if err != nil {
		b.Fatal(err)
	}
	bare := newBare(b, cfg)
	ways := [2]func() float64{
		func() float64 { return bare.run(b, ids, streams, tokens) },
		func() float64 {
			var wg sync.WaitGroup
			times := make([][]time.Time, streams)
			for i := range streams {
				wg.Go(func() {
					p := worker.Params{MaxTokens: tokens, TopP: 1, TopLogprobs: -1, Choice: i, IgnoreEOS: true}
					for _, err := range e.Generate(b.Context(), ids, p) {
						if err != nil {
							b.Error(err)
						}
						times[i] = append(times[i], time.Now())
					}
				})
			}
			wg.Wait()
			return together(times)
		},
	}
	var speed [2][]float64 // bare, engine
	var share []float64
	for b.Loop() {
		for round := range rounds {
			var now [2]float64
			for i := range ways {
				way := (i + round) % 2
				now[way] = ways[way]()
				speed[way] = append(speed[way], now[way])
			}
			share = append(share, 100*now[1]/now[0])
		}
	}
	slices.Sort(share)
	median := share[len(share)/2]
	// Of a median, with the deviation from the middle half.
	twice := 2 * 1.2533 * (share[3*len(share)/4] - share[len(share)/4]) / 1.349 / math.Sqrt(float64(len(share)))
	b.ReportMetric(best(speed[1]), "engine-tokens/s")
	b.ReportMetric(best(speed[0]), "bare-tokens/s")
	b.ReportMetric(median, "%ofbare")
	b.ReportMetric(twice, "±%ofbare")
	b.Logf("%.1f ± %.1f %% of a bare loop, %d rounds; at best %.1f and %.1f tokens/s", median, twice, len(share), best(speed[1]), best(speed[0]))
	switch {
	case median < leastOfBare:
		b.Errorf("the engine has %.1f ± %.1f %% of the tokens/s of a bare loop, want %d", median, twice, leastOfBare)
	case twice > 100-leastOfBare:
		b.Errorf("%.1f ± %.1f %% says nothing about a bound of %d: this machine is too busy, or there are too few rounds", median, twice, leastOfBare)
	}
}

// together is the tokens per second of streams while all of them decode, from the times
// of their tokens.
func together(times [][]time.Time) float64 {
	from, to := times[0][0], times[0][len(times[0])-1]
	for _, t := range times {
		if t[0].After(from) {
			from = t[0]
		}
		if last := t[len(t)-1]; last.Before(to) {
			to = last
		}
	}
	n := 0
	for _, t := range times {
		for _, at := range t {
			if at.After(from) && !at.After(to) {
				n++
			}
		}
	}
	return float64(n) / to.Sub(from).Seconds()
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

// run prefills and decodes as the engine would, in lockstep, and returns the tokens per
// second behind the first ones.
func (l *bareLoop) run(b *testing.B, ids []int32, streams, tokens int) float64 {
	var begin time.Time
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
		if n == 0 {
			begin = time.Now()
		}
		batch = batch[:0]
		for s := range streams {
			batch = append(batch, entry{slot: s, pos: len(ids) + n, id: next[s], logits: true})
			at[s] = s
		}
	}
	took := time.Since(begin)
	for s := range streams {
		if err := l.dec.Keep(s, 0); err != nil {
			b.Fatal(err)
		}
	}
	return float64(streams*(tokens-1)) / took.Seconds()
}
