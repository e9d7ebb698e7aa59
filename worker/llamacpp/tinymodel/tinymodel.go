package tinymodel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
)

// The ids of tokens that are not text, and of one that looks so and is.
const (
	Unknown = iota
	BOS
	EOS
	Control // text <|mark|>, a control token that does not end an answer
	Image   // text <start_of_image>, marked as the user's as in conversions of Gemma
	Heading // text <h1>, the user's own token, which is text
	special // number of these
)

// ContextLen is the context that the model says it was trained for.
const ContextLen = 4096

// The shape. Head width times heads is the width of the model.
const (
	width   = 128
	layers  = 4
	heads   = 4
	kvHeads = 2
	hidden  = 256
)

// Name is the file's base name and the model's own.
const Name = "tiny"

// Write writes the model of a seed into dir, as Name.gguf, and returns its path. Equal
// seeds give equal files.
func Write(dir string, seed uint64) (string, error) {
	g := new(file)
	words, merges := vocabulary()
	g.describe(words, merges)
	g.weights(len(words), seed)
	path := filepath.Join(dir, Name+".gguf")
	if err := os.WriteFile(path, g.bytes(), 0o644); err != nil {
		return "", fmt.Errorf("write the tiny model: %w", err)
	}
	return path, nil
}

// letters are the characters by which GPT-2's vocabulary writes the 256 bytes.
func letters() [256]string {
	var out [256]string
	next := rune(256)
	for b := range out {
		switch {
		case b >= '!' && b <= '~', b >= 0xA1 && b <= 0xAC, b >= 0xAE:
			out[b] = string(rune(b))
		default:
			out[b] = string(next)
			next++
		}
	}
	return out
}

// vocabulary is the list of tokens and that of merges.
func vocabulary() (words, merges []string) {
	words = []string{"<unk>", "<s>", "</s>", "<|mark|>", "<start_of_image>", "<h1>"}
	bytes := letters()
	words = append(words, bytes[:]...)
	for _, pair := range []string{
		"th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is", "it", "al", "ar", "st", "to", "nt",
		" t", " a", " s", " o", " w", " c", " b", " p", " h", " f", " m", " i", " d", ", ", ". ",
	} {
		a, b := bytes[pair[0]], bytes[pair[1]]
		words, merges = append(words, a+b), append(merges, a+" "+b)
	}
	return words, merges
}

// The types of tokens in a GGUF file.
const (
	normalToken  = 1
	unknownToken = 2
	controlToken = 3
	userToken    = 4
)

// describe adds what llama.cpp wants to know before the weights.
func (g *file) describe(words, merges []string) {
	types := slices.Repeat([]int32{normalToken}, len(words))
	copy(types, []int32{unknownToken, controlToken, controlToken, controlToken, userToken, userToken})
	g.text("general.architecture", "llama")
	g.text("general.name", Name)
	for _, f := range []struct {
		key   string
		value uint32
	}{
		{"general.file_type", 0},
		{"llama.context_length", ContextLen},
		{"llama.embedding_length", width},
		{"llama.block_count", layers},
		{"llama.feed_forward_length", hidden},
		{"llama.attention.head_count", heads},
		{"llama.attention.head_count_kv", kvHeads},
		{"llama.rope.dimension_count", width / heads},
		{"llama.vocab_size", uint32(len(words))},
		{"tokenizer.ggml.bos_token_id", BOS},
		{"tokenizer.ggml.eos_token_id", EOS},
		{"tokenizer.ggml.unknown_token_id", Unknown},
	} {
		g.number(f.key, f.value)
	}
	g.float("llama.attention.layer_norm_rms_epsilon", 1e-5)
	g.float("llama.rope.freq_base", 10000)
	g.text("tokenizer.ggml.model", "gpt2")
	g.text("tokenizer.ggml.pre", "gpt-2")
	g.texts("tokenizer.ggml.tokens", words)
	g.ints("tokenizer.ggml.token_type", types)
	g.texts("tokenizer.ggml.merges", merges)
	g.flag("tokenizer.ggml.add_bos_token", true)
}

// weights adds all tensors, in single precision.
func (g *file) weights(vocab int, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 0))
	random := func(name string, scale float64, in, out int) {
		w := make([]float32, in*out)
		for i := range w {
			w[i] = float32(rnd.NormFloat64() * 0.2 * scale * math.Sqrt(64/float64(in)))
		}
		g.tensor(name+".weight", w, in, out)
	}
	ones := slices.Repeat([]float32{1}, width)
	random("token_embd", 3, width, vocab)
	for i := range layers {
		at := fmt.Sprintf("blk.%d.", i)
		g.tensor(at+"attn_norm.weight", ones, width)
		g.tensor(at+"ffn_norm.weight", ones, width)
		random(at+"attn_q", 1, width, width)
		random(at+"attn_k", 1, width, width/heads*kvHeads)
		random(at+"attn_v", 1, width, width/heads*kvHeads)
		random(at+"attn_output", 1, width, width)
		random(at+"ffn_gate", 1, width, hidden)
		random(at+"ffn_up", 1, width, hidden)
		random(at+"ffn_down", 1, hidden, width)
	}
	g.tensor("output_norm.weight", ones, width)
	random("output", 1, width, vocab)
}
