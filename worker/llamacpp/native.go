//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"strings"

	"github.com/hybridgroup/yzma/pkg/llama"

	"github.com/kvmesh/kvmesh/worker"
)

// native is a model with one context. Tokenize may be called by anyone; the
// decoder's methods belong to the loop.
type native struct {
	lib     *library
	model   llama.Model
	vocab   llama.Vocab
	size    int // of the vocabulary
	ctx     llama.Context
	mem     llama.Memory   // the KV of ctx
	scratch llama.SeqId    // sequence beside the slots, for ranges of KV on their way in or out
	batch   llama.Batch    // in C memory, for BatchTokens entries of one sequence each
	seq     [1]llama.SeqId // argument of batch.Add, kept to save allocations
	embed   nativeEmbedder
}

var (
	_ decoder   = (*native)(nil)
	_ tokenizer = (*native)(nil)
)

// load opens the libraries, the model and a context, and decodes one token to
// prove that all of it works. It lowers cfg.ContextLen to what the model allows.
func load(ctx context.Context, cfg *Config) (parts, error) {
	st, err := checkModelFile(cfg.ModelPath)
	if err != nil {
		return parts{}, err
	}
	lib, err := openLibrary(cfg.LibDir, cfg.Log)
	if err != nil {
		return parts{}, err
	}
	n := &native{lib: lib}
	if n.model, err = lib.loadModel(ctx, cfg.ModelPath, cfg.Progress); err != nil {
		return parts{}, err
	}
	p, err := n.finish(cfg, st)
	if err != nil {
		n.Close()
		return parts{}, err
	}
	cfg.Progress(100)
	return p, nil
}

// finish makes the context and reads the vocabulary of a loaded model. Everything
// that other goroutines will ask of the model is copied into Go memory here.
func (n *native) finish(cfg *Config, st fs.FileInfo) (parts, error) {
	// Encoders need another first step, diffusion models have no next token.
	if llama.ModelHasEncoder(n.model) || llama.ModelIsDiffusion(n.model) {
		return parts{}, fmt.Errorf("the model %s (%s) does not generate token by token", cfg.ModelPath, llama.ModelDesc(n.model))
	}
	n.vocab = llama.ModelGetVocab(n.model)
	n.size = int(llama.VocabNTokens(n.vocab))
	if most := int(llama.ModelNCtxTrain(n.model)); most > 0 && cfg.ContextLen > most {
		cfg.Log.Warn("context is longer than the model's; using the model's", "asked", cfg.ContextLen, "model", most)
		cfg.ContextLen = most
	}
	if err := n.makeContext(cfg); err != nil {
		return parts{}, err
	}
	voc := n.readVocabulary()
	chat, err := newTemplate(cmp.Or(cfg.ChatTemplate, llama.ModelChatTemplate(n.model, "")), voc.bos, voc.eos)
	if err != nil {
		return parts{}, err
	}
	weights, err := weightsID(cfg.ModelPath, cfg.CacheDir)
	if err != nil {
		return parts{}, fmt.Errorf("identify the model: %w", err)
	}
	m := worker.Model{
		Name: cfg.Name, Created: st.ModTime().Unix(), ContextLen: cfg.ContextLen, Vocab: n.size,
		Fingerprint: fingerprint(weights, n.lib.build, "kv:f16,f16,unified,swa-full"),
		Weights:     weightsName(weights),
	}
	cfg.Log.Info("model loaded", "model", llama.ModelDesc(n.model), "build", n.lib.build,
		"context", cfg.ContextLen, "cells", cfg.Cells, "sequences", cfg.MaxSeqs, "fingerprint", m.Fingerprint)
	n.embed.prepare(n.model, cfg)
	return parts{dec: n, kv: n, voc: voc, text: n, chat: chat, model: m}, nil
}

// makeContext creates the context and runs one token through it.
func (n *native) makeContext(cfg *Config) error {
	cp := llama.ContextDefaultParams()
	cp.NCtx = uint32(cfg.Cells)
	cp.NBatch, cp.NUbatch = uint32(cfg.BatchTokens), uint32(min(cfg.BatchTokens, 512))
	n.scratch = llama.SeqId(cfg.MaxSeqs)
	cp.NSeqMax, cp.NOutputsMax = uint32(cfg.MaxSeqs+1), uint32(cfg.MaxSeqs+1) // fewer outputs than sequences are refused
	cp.NThreads, cp.NThreadsBatch = int32(cfg.Threads), int32(cfg.Threads)
	cp.TypeK, cp.TypeV = llama.GGMLTypeF16, llama.GGMLTypeF16
	cp.KVUnified, cp.SwaFull, cp.NoPerf = 1, 1, 1
	// KVUnified: one pool of cells, so that a sequence can take what others leave,
	// and ranges can be copied between sequences by tagging. SwaFull: cells behind
	// the attention window stay, so that any prefix can be kept. One output each:
	// the default reserves a row of the vocabulary's size for every token.
	var err error
	if n.ctx, err = llama.InitFromModel(n.model, cp); err != nil {
		return n.lib.because(fmt.Errorf("create a context of %d cells: %w", cfg.Cells, err))
	}
	if n.mem, err = llama.GetMemory(n.ctx); err != nil {
		return fmt.Errorf("create a context: %w", err)
	}
	n.batch = llama.BatchInit(int32(cfg.BatchTokens), 0, 1)
	id := int32(max(llama.VocabBOS(n.vocab), 0))
	if err := n.Decode([]entry{{id: id, logits: true}}, nil); err != nil {
		return n.lib.because(fmt.Errorf("decode a first token: %w", err))
	}
	if _, err := n.Logits(0); err != nil {
		return err
	}
	return n.Keep(0, 0)
}

// longBatch is the size from which a decode can be aborted: llama.cpp asks before
// each node of its graph, which is felt in short ones.
const longBatch = 32

// Decode implements decoder.
func (n *native) Decode(batch []entry, stop func() bool) error {
	if err := n.batch.Clear(); err != nil {
		return err
	}
	for _, e := range batch {
		n.seq[0] = llama.SeqId(e.slot)
		if err := n.batch.Add(llama.Token(e.id), llama.Pos(e.pos), n.seq[:], e.logits); err != nil {
			return fmt.Errorf("fill a batch of %d: %w", len(batch), err)
		}
	}
	n.lib.lines.forget()
	if len(batch) > longBatch {
		defer n.lib.abortable(n.ctx, stop)()
	}
	rc, err := llama.Decode(n.ctx, n.batch)
	switch { // llama.h names these codes
	case err != nil:
		return err
	case rc == 1:
		return errNoCells
	case rc == 2:
		return errAborted
	case rc != 0:
		return n.lib.because(fmt.Errorf("llama_decode returned %d", rc))
	}
	return nil
}

// Logits implements decoder.
func (n *native) Logits(i int) ([]float32, error) {
	logits, err := llama.GetLogitsIth(n.ctx, int32(i), n.size)
	if err == nil && logits == nil {
		err = fmt.Errorf("no logits for entry %d of the batch", i)
	}
	return logits, err
}

// Keep implements decoder.
func (n *native) Keep(slot, from int) error {
	ok, err := llama.MemorySeqRm(n.mem, llama.SeqId(slot), llama.Pos(from), -1)
	if err == nil && !ok {
		err = fmt.Errorf("this model cannot drop a part of a sequence (from token %d)", from)
	}
	return err
}

// Close implements decoder. It also frees what a failed load has made so far.
func (n *native) Close() {
	n.embed.close()
	if n.batch.Token != nil {
		_ = llama.BatchFree(n.batch)
	}
	if n.ctx != 0 {
		_ = llama.Free(n.ctx)
	}
	if n.model != 0 {
		_ = llama.ModelFree(n.model)
	}
	*n = native{}
}

// Tokenize implements tokenizer.
func (n *native) Tokenize(text string, bos bool) ([]int32, error) {
	return n.lib.tokenize(n.vocab, text, bos)
}

// readVocabulary copies the tokens' texts out of the model. Control tokens get none.
func (n *native) readVocabulary() *vocabulary {
	v := &vocabulary{start: make([]uint32, 1, n.size+1), end: make(map[int32]bool)}
	buf := make([]byte, 256)
	for id := range llama.Token(n.size) {
		k := llama.TokenToPiece(n.vocab, id, buf, 0, false)
		if k < 0 { // the buffer is too small by this measure
			buf = make([]byte, -k)
			k = max(llama.TokenToPiece(n.vocab, id, buf, 0, false), 0)
		}
		if isMark(buf[:k]) && llama.VocabGetAttr(n.vocab, id)&llama.TokenAttrUserDef != 0 {
			k = 0
		}
		v.text = append(v.text, buf[:k]...)
		v.start = append(v.start, uint32(len(v.text)))
		v.longest = max(v.longest, int(k))
		if llama.VocabIsEOG(n.vocab, id) {
			v.end[int32(id)] = true
		}
	}
	for _, id := range llama.VocabGetSuppressTokens(n.vocab) {
		v.never = append(v.never, int32(id))
	}
	v.addBOS = llama.VocabGetAddBOS(n.vocab)
	v.bos = strings.Clone(llama.VocabGetText(n.vocab, llama.VocabBOS(n.vocab)))
	v.eos = strings.Clone(llama.VocabGetText(n.vocab, llama.VocabEOS(n.vocab)))
	return v
}
