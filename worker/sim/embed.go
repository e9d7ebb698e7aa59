package sim

import (
	"context"
	"math"
)

// embeddingSize is the number of dimensions of the simulated vectors.
const embeddingSize = 64

// EmbeddingSize implements worker.Embedder.
func (e *Engine) EmbeddingSize() int { return embeddingSize }

// Embed implements worker.Embedder: the mean of one fixed vector per token, so
// that texts that share words are close.
func (e *Engine) Embed(ctx context.Context, ids []int32) ([]float32, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	sums := make([]float64, embeddingSize)
	for _, id := range ids {
		h := e.key ^ uint64(id)
		for i := range sums {
			h = mix(h)
			sums[i] += float64(int64(h)) / (1 << 63)
		}
	}
	length := 0.0
	for _, s := range sums {
		length += s * s
	}
	out := make([]float32, embeddingSize)
	for i, s := range sums {
		out[i] = float32(s / math.Sqrt(length))
	}
	e.prompts.Add(uint64(len(ids)))
	return out, nil
}
