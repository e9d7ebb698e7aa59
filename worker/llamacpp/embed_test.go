package llamacpp

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
)

// embeddingContext gives token id the state {1, id, pos}.
type embeddingContext struct {
	*fakeContext
	by    pooling
	next  int // position expected
	calls int
	err   error
}

func (f *embeddingContext) Vectors() (int, pooling) { return 3, f.by }

func (f *embeddingContext) Embed(ids []int32, pos int) ([][]float32, error) {
	f.calls++
	if f.err != nil {
		return nil, f.err
	}
	if pos != 0 && pos != f.next || len(ids) > embedChunk {
		f.tb.Errorf("%d tokens at %d, want at %d", len(ids), pos, f.next)
	}
	f.next = pos + len(ids)
	var out [][]float32
	for i, id := range ids {
		out = append(out, []float32{1, float32(id), float32(pos + i)})
	}
	return out, nil
}

func TestEmbedPools(t *testing.T) {
	ids := make([]int32, 70)
	var mean [3]float64
	for i := range ids {
		ids[i] = int32(i % 7)
		mean[0], mean[1], mean[2] = mean[0]+1, mean[1]+float64(i%7), mean[2]+float64(i)
	}
	for by, want := range map[pooling][3]float64{poolMean: mean, poolFirst: {1, 0, 0}, poolLast: {1, 69 % 7, 69}} {
		f := &embeddingContext{fakeContext: newFakeContext(t, 256), by: by}
		e := startFake(t, fakeConfig(), f)
		got, err := e.Embed(t.Context(), ids)
		if err != nil {
			t.Fatal(err)
		}
		length := math.Sqrt(want[0]*want[0] + want[1]*want[1] + want[2]*want[2])
		for i := range got {
			if math.Abs(float64(got[i])-want[i]/length) > 1e-6 {
				t.Errorf("pooling %d: %v, want the direction of %v", by, got, want)
				break
			}
		}
		if f.calls != 3 {
			t.Errorf("70 tokens took %d calls, want 3", f.calls)
		}
		if n := e.Load().PromptTokens; n != 70 {
			t.Errorf("%d prompt tokens counted", n)
		}
		e.Close()
		if _, err := e.Embed(t.Context(), ids); !errors.Is(err, ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
}

func TestEmbedFails(t *testing.T) {
	f := &embeddingContext{fakeContext: newFakeContext(t, 256)}
	e := startFake(t, fakeConfig(), f)
	defer e.Close()
	if _, err := e.Embed(t.Context(), []int32{fakeVocab}); err == nil {
		t.Error("an id outside the vocabulary passed")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := e.Embed(ctx, []int32{1}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	f.err = errors.New("broken")
	if _, err := e.Embed(t.Context(), []int32{1}); !errors.Is(err, f.err) {
		t.Errorf("decoder's error: %v", err)
	}
	f.err = nil
	if _, err := e.Embed(t.Context(), []int32{1}); err != nil {
		t.Errorf("after an error: %v", err)
	}
	for name, dec := range map[string]decoder{
		"without states": newFakeContext(t, 256), "ranking": &embeddingContext{fakeContext: newFakeContext(t, 256), by: poolRank},
	} {
		e := startFake(t, fakeConfig(), dec)
		if _, err := e.Embed(t.Context(), []int32{1}); err == nil {
			t.Errorf("a model %s gave a vector", name)
		}
		e.Close()
	}
}

var _ worker.Embedder = (*Engine)(nil)
