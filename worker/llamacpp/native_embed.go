//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"errors"
	"fmt"

	"github.com/hybridgroup/yzma/pkg/llama"
)

// nativeEmbedder is a second context of the model, which gives states beside
// logits: the one that generates would have to keep room for those of every token.
// It is made at the first use and holds one text.
type nativeEmbedder struct {
	model  llama.Model
	size   int
	by     pooling
	cells  int
	thread int32

	ctx    llama.Context // 0 = not made yet
	mem    llama.Memory
	batch  llama.Batch
	states [][]float32
}

var _ embedder = (*native)(nil)

// prepare reads what the model says about its vectors.
func (m *nativeEmbedder) prepare(model llama.Model, cfg *Config) {
	m.model, m.size = model, int(llama.ModelNEmbdOut(model))
	m.cells, m.thread = cfg.ContextLen, int32(cfg.Threads)
	arch, _ := llama.ModelMetaValStr(model, "general.architecture")
	by, _ := llama.ModelMetaValStr(model, arch+".pooling_type")
	switch by { // the numbers of llama_pooling_type
	case "2":
		m.by = poolFirst
	case "3":
		m.by = poolLast
	case "4":
		m.by = poolRank
	}
}

// open makes the context.
func (m *nativeEmbedder) open(n *native) error {
	cp := llama.ContextDefaultParams()
	cp.NCtx, cp.NSeqMax = uint32(m.cells), 1
	cp.NBatch, cp.NUbatch, cp.NOutputsMax = embedChunk, embedChunk, embedChunk
	cp.NThreads, cp.NThreadsBatch = m.thread, m.thread
	cp.Embeddings, cp.PoolingType, cp.NoPerf = 1, llama.PoolingTypeNone, 1
	cp.SwaFull = 0 // a text is read once, front to back
	ctx, err := llama.InitFromModel(m.model, cp)
	if err != nil {
		return n.lib.because(fmt.Errorf("create a context for embeddings: %w", err))
	}
	if m.mem, err = llama.GetMemory(ctx); err != nil {
		_ = llama.Free(ctx)
		return fmt.Errorf("create a context for embeddings: %w", err)
	}
	m.ctx, m.batch = ctx, llama.BatchInit(embedChunk, 0, 1)
	return nil
}

// close frees the context.
func (m *nativeEmbedder) close() {
	if m.ctx == 0 {
		return
	}
	_ = llama.BatchFree(m.batch)
	_ = llama.Free(m.ctx)
	m.ctx = 0
}

// Vectors implements embedder.
func (n *native) Vectors() (int, pooling) { return n.embed.size, n.embed.by }

// Embed implements embedder.
func (n *native) Embed(ids []int32, pos int) ([][]float32, error) {
	m := &n.embed
	if m.ctx == 0 {
		if err := m.open(n); err != nil {
			return nil, err
		}
	}
	if pos == 0 {
		if err := llama.MemoryClear(m.mem, false); err != nil {
			return nil, err
		}
	}
	if err := m.batch.Clear(); err != nil {
		return nil, err
	}
	for i, id := range ids {
		if err := m.batch.Add(llama.Token(id), llama.Pos(pos+i), []llama.SeqId{0}, true); err != nil {
			return nil, err
		}
	}
	n.lib.lines.forget()
	if rc, err := llama.Decode(m.ctx, m.batch); err != nil || rc != 0 {
		return nil, n.lib.because(fmt.Errorf("llama_decode returned %d: %w", rc, orFailed(err)))
	}
	m.states = m.states[:0]
	for i := range ids {
		state, err := llama.GetEmbeddingsIth(m.ctx, int32(i), int32(m.size))
		if err != nil || state == nil {
			return nil, fmt.Errorf("no state of token %d of the batch: %w", i, orFailed(err))
		}
		m.states = append(m.states, state)
	}
	return m.states, nil
}

// orFailed is err, or a word for llama.cpp's silence.
func orFailed(err error) error {
	if err == nil {
		return errSilent
	}
	return err
}

var errSilent = errors.New("llama.cpp gave no reason")
