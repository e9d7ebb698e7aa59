// Package sim is a deterministic stand-in for a language model: an Engine with a
// reversible tokenizer, readable answers, settable speeds and, on request, faults
// (see Instructions). It needs neither a model nor a GPU and serves tests, load
// tests and demonstrations.
//
// The next token is a pure function of the model's name, the tokens so far, the
// choice and, when the temperature is above 0, the seed.
package sim
