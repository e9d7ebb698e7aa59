package llamacpp

import (
	"math"
	"sync"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sampling"
)

// vocabulary is what the engine knows of the model's tokens, read once: later
// look-ups cross no library boundary and are safe for concurrent use.
type vocabulary struct {
	text    []byte         // the tokens' bytes, one after another
	start   []uint32       // of token i in text; one more at the end
	longest int            // bytes of the longest token
	end     map[int32]bool // end-of-generation tokens
	never   []int32        // tokens the model says must not be generated
	bos     string         // text of the BOS token
	eos     string         // text of the EOS token
	addBOS  bool           // whether Tokenize puts BOS first

	once  sync.Once
	alone [256]int32 // see singles
}

// singles are, for each byte, a token whose text is that byte alone, -1 where there
// is none.
func (v *vocabulary) singles() *[256]int32 {
	v.once.Do(func() {
		for b := range v.alone {
			v.alone[b] = -1
		}
		for id := range int32(v.size()) {
			if text := v.bytes(id); len(text) == 1 && v.alone[text[0]] < 0 && !v.ends(id) {
				v.alone[text[0]] = id
			}
		}
	})
	return &v.alone
}

// isMark reports whether text is that of a token that stands for an image or a sound
// in a prompt. Tokenizers call these special; some conversions to GGUF store them as
// the user's own tokens, as they do with markup that is text.
func isMark(text []byte) bool {
	switch string(text) {
	case "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<start_of_audio>", "<end_of_audio>", "<audio_soft_token>",
		"<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
		"<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<|image|>", "<|audio|>", "<image>", "[multimodal]", "[IMG]", "[IMG_BREAK]", "[IMG_END]":
		return true
	}
	return false
}

// size is the number of tokens.
func (v *vocabulary) size() int { return len(v.start) - 1 }

// has reports whether id is a token.
func (v *vocabulary) has(id int32) bool { return id >= 0 && int(id) < v.size() }

// bytes is the text of a token. Control tokens have none: they belong to the model,
// not to the answer. It must not be changed.
func (v *vocabulary) bytes(id int32) []byte {
	if !v.has(id) {
		return nil
	}
	return v.text[v.start[id]:v.start[id+1]:v.start[id+1]]
}

// ends reports whether id ends the answer.
func (v *vocabulary) ends(id int32) bool { return v.end[id] }

// suppress makes the tokens that must not be generated impossible.
func (v *vocabulary) suppress(logits []float32) {
	for _, id := range v.never {
		if id >= 0 && int(id) < len(logits) {
			logits[id] = float32(math.Inf(-1))
		}
	}
}

// token is a worker's token for a pick; alternatives < 0 leaves log-probabilities out.
func (v *vocabulary) token(p sampling.Pick, alternatives int) worker.Token {
	t := worker.Token{ID: p.ID, Bytes: v.bytes(p.ID)}
	if alternatives < 0 {
		return t
	}
	t.Logprob = p.Logprob
	t.Top = make([]worker.Logprob, len(p.Top))
	for i, a := range p.Top {
		t.Top[i] = worker.Logprob{ID: a.ID, Bytes: v.bytes(a.ID), Logprob: a.Logprob}
	}
	return t
}
