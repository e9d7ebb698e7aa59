//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"errors"
	"math"
	"runtime"
	"unsafe"

	"github.com/hybridgroup/yzma/pkg/llama"

	"github.com/kvmesh/kvmesh/worker/sampling"
)

// nativeGrammar is llama.cpp's sampler of a grammar. llama.cpp ends the process when
// it is made to accept a token that the grammar does not allow; the sampler never
// does.
type nativeGrammar struct {
	sampler llama.Sampler
	tokens  []llama.TokenData
	array   *llama.TokenDataArray // on the heap: its address crosses to C
}

var _ prototype = (*nativeGrammar)(nil)

// Grammar implements grammars.
func (n *native) Grammar(text string) (prototype, error) {
	n.lib.lines.forget()
	s := llama.SamplerInitGrammar(n.vocab, text, "root")
	if s == 0 {
		return nil, n.lib.because(errors.New("llama.cpp refuses the grammar"))
	}
	return &nativeGrammar{sampler: s, array: new(llama.TokenDataArray)}, nil
}

// Clone implements prototype: llama.cpp only reads what it copies.
func (g *nativeGrammar) Clone() (sampling.Constraint, error) {
	s := llama.SamplerClone(g.sampler)
	runtime.KeepAlive(g)
	if s == 0 {
		return nil, errors.New("llama.cpp does not copy the grammar")
	}
	return &nativeGrammar{sampler: s, array: new(llama.TokenDataArray)}, nil
}

// Allow implements sampling.Constraint. The time is that of decoding and matching
// each token's text: some 100 ns each.
func (g *nativeGrammar) Allow(ids []int32, ok []bool) {
	if len(ids) == 0 {
		return
	}
	g.tokens = g.tokens[:0]
	for _, id := range ids {
		g.tokens = append(g.tokens, llama.TokenData{Id: llama.Token(id)})
	}
	*g.array = llama.TokenDataArray{Data: unsafe.SliceData(g.tokens), Size: uint64(len(ids)), Selected: -1}
	llama.SamplerApply(g.sampler, g.array)
	runtime.KeepAlive(g)
	no := float32(math.Inf(-1))
	for i := range ok {
		ok[i] = g.tokens[i].Logit != no
	}
}

// Accept implements sampling.Constraint.
func (g *nativeGrammar) Accept(id int32) { llama.SamplerAccept(g.sampler, llama.Token(id)) }

// Close implements sampling.Constraint.
func (g *nativeGrammar) Close() {
	llama.SamplerFree(g.sampler)
	g.sampler = 0
}
