package llamacpp

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// pooling is how the states of a text's tokens become one vector.
type pooling int

const (
	poolMean pooling = iota // what a model that does not say gets
	poolFirst
	poolLast
	poolRank // a score, no vector
)

// embedChunk is how many tokens are embedded between two decodes of the loop: a
// longer chunk would hold up the streams that generate.
const embedChunk = 32

// embedder is the ability of a decoder to give the states of tokens.
type embedder interface {
	// Embed runs the next tokens, at most embedChunk, of the one text that is being
	// embedded; pos is the place of the first, 0 begins a new text. It returns the
	// state of each, valid until the next call. It belongs to the loop.
	Embed(ids []int32, pos int) ([][]float32, error)
	// Vectors says how many dimensions states have and how they are pooled.
	Vectors() (size int, by pooling)
}

// vectors is the engine's part in embedding: whose turn it is. The embedding
// context holds one text.
type vectors struct {
	by      pooling
	size    int // 0 = the decoder makes none
	turn    chan struct{}
	waiting *atomic.Int64
}

func newVectors(dec decoder) vectors {
	v := vectors{turn: make(chan struct{}, 1), waiting: new(atomic.Int64)}
	if em, ok := dec.(embedder); ok {
		v.size, v.by = em.Vectors()
	}
	return v
}

// EmbeddingSize implements worker.Embedder.
func (e *Engine) EmbeddingSize() int { return e.vectors.size }

// Embed implements worker.Embedder. Texts are embedded one after the other, in
// pieces between the decodes of the streams that generate.
func (e *Engine) Embed(ctx context.Context, ids []int32) ([]float32, error) {
	switch {
	case e.vectors.size == 0:
		return nil, openai.Invalid("model", "This model makes no embeddings.")
	case e.vectors.by == poolRank:
		return nil, openai.Invalid("model", "This model ranks texts; it makes no embeddings.")
	}
	if err := e.check(ids); err != nil {
		return nil, err
	}
	defer e.vectors.waiting.Add(-1)
	if e.vectors.waiting.Add(1) > int64(e.cfg.MaxQueue)+1 {
		return nil, worker.ErrBusy
	}
	select {
	case e.vectors.turn <- struct{}{}:
		defer func() { <-e.vectors.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	sum := make([]float64, e.vectors.size)
	for pos := 0; pos < len(ids); pos += embedChunk {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err := e.embedPart(ids, pos, sum); err != nil {
			return nil, err
		}
	}
	e.g.prompt.Add(uint64(len(ids)))
	return unit(sum)
}

// embedPart runs one chunk on the loop's goroutine and adds its states to sum.
func (e *Engine) embedPart(ids []int32, pos int, sum []float64) (err error) {
	end := min(pos+embedChunk, len(ids))
	ran := e.in.call(func(l *loop) {
		var states [][]float32
		if states, err = l.dec.(embedder).Embed(ids[pos:end], pos); err != nil {
			return
		}
		for i, state := range states {
			at := pos + i
			if e.vectors.by == poolFirst && at != 0 || e.vectors.by == poolLast && at != len(ids)-1 {
				continue
			}
			for k, v := range state {
				sum[k] += float64(v)
			}
		}
	})
	if !ran {
		return ErrClosed
	}
	if err != nil {
		return fmt.Errorf("embed: %w", err)
	}
	return nil
}

// unit scales a sum of states to length 1. Whether it was a sum or a mean makes no
// difference to that.
func unit(sum []float64) ([]float32, error) {
	squares := 0.0
	for _, v := range sum {
		squares += v * v
	}
	length := math.Sqrt(squares)
	if length == 0 || math.IsNaN(length) || math.IsInf(length, 0) {
		return nil, fmt.Errorf("embed: the model's states have no direction (length %g)", length)
	}
	out := make([]float32, len(sum))
	for i, v := range sum {
		out[i] = float32(v / length)
	}
	return out, nil
}
