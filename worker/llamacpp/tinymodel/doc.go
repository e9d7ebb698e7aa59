// Package tinymodel writes a Llama model of random weights as a GGUF file of about
// 3 MB, so that tests run the real engine in milliseconds and without a download. It
// generates nonsense, always the same for a seed: what matters is that llama.cpp runs it
// through the same code as any other model.
//
// Its tokenizer is byte-level BPE: every byte is a token, and some frequent pairs are
// merged, so any text can be encoded and decoded. Characters of several bytes are
// several tokens, which tests of cut characters want. Beside these it has control
// tokens and tokens of markup, see the constants.
package tinymodel
