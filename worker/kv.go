package worker

import (
	"context"
	"time"
)

// CatchUp says how delivered tokens whose KV was not restored are decoded.
type CatchUp int

// The ways to catch up. Batch shapes change float sums, and a near-tie of two
// tokens can then fall the other way.
const (
	// CatchUpExact decodes them one at a time, as the worker that was lost did, so
	// that the KV and every token to come are bit for bit those of the undisturbed
	// run. It applies when the restored KV covers the prompt and at most a few
	// blocks are missing; else the tokens are prefilled, as in CatchUpFast.
	CatchUpExact CatchUp = iota
	// CatchUpFast feeds them as one batch.
	CatchUpFast
)

// KVRange is the KV of the tokens at positions From up to To of one sequence, as the
// engine that took it wrote it. Data belongs to whoever made the range.
type KVRange struct {
	From, To int
	Data     []byte
}

// KVChain is stored KV for the beginning of a generation.
type KVChain struct {
	// Ranges are in order of position, the first from 0, each beginning where the
	// one before it ends. The last may end behind the tokens that are wanted.
	Ranges []KVRange
	// Done is called once, when the engine no longer reads the ranges: tokens is
	// how many were restored, took the time it cost, and err why a range was
	// refused, after which the engine prefills. nil = nobody wants to know.
	Done func(tokens int, took time.Duration, err error)
}

// KVCopy appends the KV of positions from up to to of a sequence to dst.
type KVCopy func(dst []byte, from, to int) ([]byte, error)

// KVSession keeps the KV of one generation outside of the engine, so that another
// process can go on from it. An engine without the ability ignores it.
type KVSession interface {
	// Restore looks up stored KV for a prefix of ids. prefill is the engine's
	// estimate of the time that the ids would take without it, the bound of what a
	// look-up may cost. It is called once, before the generation is queued, on
	// Generate's goroutine.
	Restore(ctx context.Context, ids []int32, prefill time.Duration) KVChain
	// Step is called by the engine's own goroutine when the KV of the sequence has
	// grown to the first held of tokens, which it may keep no reference to. It
	// decides what to copy and calls take for it, during the call only. It must
	// return within the time of a copy: every stream of the engine waits for it.
	// last is set at the end of the generation, however it ends.
	Step(tokens []int32, held int, last bool, take KVCopy)
}

// Resumer is the optional ability of an engine to go on from tokens that another
// worker of the same model generated.
type Resumer interface {
	// TokenBytes is the text that Token.Bytes had for id, valid until the engine is
	// closed; ids outside of the vocabulary have none.
	TokenBytes(id int32) []byte
	// EndsAnswer reports whether the model ends its answer with id.
	EndsAnswer(id int32) bool
}
