//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/worker"
)

// stateOf generates a few tokens and returns the KV of the first n.
func stateOf(t *testing.T, e *Engine, n int) []byte {
	t.Helper()
	book := &notebook{every: n}
	p := worker.Params{MaxTokens: 3, TopP: 1, TopLogprobs: -1, IgnoreEOS: true, KV: book}
	generated(t, e, tokenize(t, e, "the other day there was an old house in the hills, and in it")[:n+2], p)
	if book.fail != nil || len(book.taken) == 0 {
		t.Fatalf("%d ranges, %v", len(book.taken), book.fail)
	}
	return book.taken[0].Data
}

// TestStateParts cuts the KV of a real context by layers: the parts are all of it, in a
// frame each can be had and verified alone, and damage to one is none to the others.
func TestStateParts(t *testing.T) {
	const n, layers = 8, 4
	data := stateOf(t, openReal(t, tinyConfig(t)), n)
	parts := StateParts(data, n)
	if len(parts) != 1+2*layers {
		t.Fatalf("%d parts, want a description, keys and values of %d layers", len(parts), layers)
	}
	size := parts[1].Size
	for i, p := range parts[1:] {
		if p.Size != size || p.Layers != 1 || int(p.Layer) != i%layers || (p.Plane == kvcache.PlaneKeys) != (i < layers) {
			t.Errorf("part %d is %+v", 1+i, p)
		}
	}
	space := kvcache.NewSpace("tiny", nil)
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: make([]int32, n)}, parts, data)
	if err != nil {
		t.Fatal(err)
	}
	if all, err := f.Payload(); err != nil || !bytes.Equal(all, data) {
		t.Errorf("the payload is not what the engine wrote: %v", err)
	}
	last := f.PartsOf(layers-1, layers)
	if !slices.Equal(last, []int{0, layers, 2 * layers}) {
		t.Errorf("the last layer is in parts %v", last)
	}
	f.Bytes()[f.Parts[1].Offset+20] ^= 1 // keys of the first layer
	for i := range f.Parts {
		_, err := f.Part(i)
		if refused := (*kvcache.Refusal)(nil); (i == 1) != errors.As(err, &refused) {
			t.Errorf("part %d after damage to part 1: %v", i, err)
		}
	}
	for cut := range len(data) {
		if StateParts(data[:cut], n) != nil {
			t.Fatalf("a state cut at %d of %d passed", cut, len(data))
		}
	}
	if StateParts(data, n+1) != nil || StateParts(append(slices.Clone(data), 0), n) != nil {
		t.Error("a state of another length passed")
	}
}

// testRealStateParts: the real model's windowed layers are a group of their own.
func testRealStateParts(t *testing.T, e *Engine) {
	groups := make(map[uint16]int)
	for _, p := range StateParts(stateOf(t, e, 8), 8) {
		groups[p.Group] += int(p.Layers)
	}
	if len(groups) != 2 || groups[0] != 2*3 || groups[1] != 2*15 {
		t.Errorf("layers by group, keys and values: %v; want 3 global and 15 windowed ones", groups)
	}
}

// FuzzStateParts: whatever the bytes are, parts are all of them or there are none.
func FuzzStateParts(f *testing.F) {
	one := []byte{
		0xd8, 0x3c, 0x14, 0xaf, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, // magic, sequence, streams, cells
		7, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, // a cell, transposed, layers
		1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 5, 6, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 7, 8,
	}
	if len(StateParts(one, 1)) != 3 {
		f.Fatal("the smallest state is not taken")
	}
	f.Add(one, 1)
	f.Fuzz(func(t *testing.T, data []byte, tokens int) {
		var sum int64
		parts := StateParts(data, tokens)
		for _, p := range parts {
			sum += p.Size
		}
		if parts != nil && sum != int64(len(data)) {
			t.Errorf("parts of %d bytes for %d", sum, len(data))
		}
	})
}

// BenchmarkStateParts seals a block of 64 tokens of the real model as one part, and cut
// by layers.
func BenchmarkStateParts(b *testing.B) {
	const n = 64
	e := openReal(b, realConfig(b))
	book := &notebook{every: n}
	p := worker.Params{MaxTokens: n, TopP: 1, TopLogprobs: -1, IgnoreEOS: true, KV: book}
	if _, err := drain(b.Context(), e, tokenize(b, e, "the other day"), p); err != nil || len(book.taken) == 0 {
		b.Fatal(err, book.fail)
	}
	data := book.taken[0].Data
	space := kvcache.NewSpace("model", nil)
	meta := kvcache.Meta{Space: space, Parent: space.Root, IDs: make([]int32, n)}
	for name, cut := range map[string]func() []kvcache.Part{
		"one part":  func() []kvcache.Part { return []kvcache.Part{{Size: int64(len(data))}} },
		"by layers": func() []kvcache.Part { return StateParts(data, n) },
	} {
		parts := cut()
		buf := make([]byte, kvcache.HeaderLen(n, len(parts))+len(data))
		copy(buf[len(buf)-len(data):], data)
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := kvcache.Seal(buf, meta, cut()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(len(parts)), "parts")
			b.ReportMetric(float64(len(buf)-len(data)), "header-bytes")
		})
	}
}
