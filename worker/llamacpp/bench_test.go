package llamacpp

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
)

// BenchmarkGenerate measures tokens per second of n sequences at once on the real
// model, greedy and sampled.
func BenchmarkGenerate(b *testing.B) {
	cfg := realConfig(b)
	cfg.ContextLen, cfg.Cells, cfg.MaxSeqs = 1024, 4096, 4
	e := openReal(b, cfg)
	ids, err := e.tokenize("prompt", "The quick brown fox", true)
	if err != nil {
		b.Fatal(err)
	}
	for _, temperature := range []float64{0, 1} {
		for _, n := range []int{1, 4} {
			b.Run(fmt.Sprintf("temperature=%g/sequences=%d", temperature, n), func(b *testing.B) {
				const tokens = 64
				for b.Loop() {
					var wg sync.WaitGroup
					for i := range n {
						wg.Go(func() {
							p := worker.Params{MaxTokens: tokens, Temperature: temperature, TopP: 1, TopLogprobs: -1, Choice: i, IgnoreEOS: true}
							if _, err := drain(b.Context(), e, ids, p); err != nil {
								b.Error(err)
							}
						})
					}
					wg.Wait()
				}
				b.ReportMetric(float64(b.N*n*tokens)/b.Elapsed().Seconds(), "tokens/s")
			})
		}
	}
}

// BenchmarkPrefill measures prompt tokens per second.
func BenchmarkPrefill(b *testing.B) {
	cfg := realConfig(b)
	cfg.ContextLen, cfg.Cells = 1024, 1024
	e := openReal(b, cfg)
	ids, err := e.tokenize("prompt", strings.Repeat("one two three four ", 125), true)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := drain(b.Context(), e, ids, exactly(1)); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N*len(ids))/b.Elapsed().Seconds(), "tokens/s")
}
