package worker

import (
	"context"
	"errors"
	"iter"
	"net/http"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// Engine turns token ids into more token ids. Implementations are safe for
// concurrent use; each owns its batching. The server above them does everything
// that does not need the model: HTTP, UTF-8 and stop-string handling, usage.
type Engine interface {
	// Model describes what is loaded. It does not change.
	Model() Model
	// Tokenize turns a request's prompt (or chat messages, through the model's
	// template) into the ids to be prefilled, including BOS where the model
	// wants it; an empty text may have none. Errors are *openai.Error of the request's
	// fault, or the engine's.
	Tokenize(req *openai.Request, prompt int) ([]int32, error)
	// Generate prefills ids and yields one Token per step until it yields one
	// with Finish set, an error, or the consumer stops. Leaving the loop, or the
	// end of ctx, frees the sequence and its KV before Generate returns. While
	// the request waits for a free sequence Generate blocks without yielding; a
	// full queue yields ErrBusy, at the first choice of a request or at none.
	Generate(ctx context.Context, ids []int32, p Params) iter.Seq2[Token, error]
	// Load is the engine's load now; cheap enough to call every 100 ms.
	Load() Load
	// Close ends all generation and frees the model. It may be called twice.
	Close() error
}

// ErrBusy is yielded by Generate when the queue of waiting requests is full.
var ErrBusy = errors.New("queue of waiting requests is full")

// Faulter is the optional ability of an engine to misbehave on request; only the
// simulator has it.
type Faulter interface {
	// Fault parses the request's fault instructions (body field "sim"), and removes
	// those that are not for this attempt of the relay; 0 = not said.
	Fault(req *openai.Request, attempt int) (Fault, error)
}

// Fault is how the server should misbehave for one request; NoFault is good
// behaviour. Token indices count from 0 in each choice.
type Fault struct {
	Status    int  // answer with this status instead, 0 = no
	CutAt     int  // close the connection before sending token CutAt, -1 = no
	CutInside bool // with half of an event sent, where CutAt cuts a stream
	ErrorAt   int  // send an in-stream error event before token ErrorAt, -1 = no
	Truncate  int  // end the response cleanly, without finish, before this token, -1 = no
	Malformed int  // send an event that is no JSON before this token, -1 = no
	NoDone    bool // end a whole stream without [DONE]
}

// NoFault returns the Fault of a request that is served well.
func NoFault() Fault { return Fault{CutAt: -1, ErrorAt: -1, Truncate: -1, Malformed: -1} }

// Checker is the optional ability of an engine to say that it is broken: for good, or, if
// it is a Proxy, until its server answers again.
type Checker interface {
	// Check returns nil while the engine can generate, else what broke it.
	Check() error
}

// Decoder is the optional ability of an engine to turn ids back into text. The
// server needs it for /detokenize, and to echo a prompt given as token ids.
type Decoder interface {
	// Decode returns the text of ids; ids it does not know add nothing.
	Decode(ids []int32) []byte
}

// Constrainer is the optional ability of an engine to keep an answer to a grammar.
type Constrainer interface {
	// Constrain says why the engine cannot follow a grammar in GBNF; nil if it can. Then
	// it keeps what it made of it, for the choices of a request, until ctx ends, which
	// must happen. The end of ctx also ends the call, with the cause.
	Constrain(ctx context.Context, grammar string) error
	// Follow reports whether ids, with which a choice of p begins, keep to its grammar.
	Follow(p Params, ids []int32) (ok bool, err error)
}

// Embedder is the optional ability of an engine to turn a text into a vector.
type Embedder interface {
	// EmbeddingSize is the number of dimensions of its vectors. It does not change.
	EmbeddingSize() int
	// Embed returns the vector of ids, of Euclidean length 1. The end of ctx ends it.
	Embed(ctx context.Context, ids []int32) ([]float32, error)
}

// Controller is the optional ability of an engine to be steered over HTTP while
// it runs; the server mounts it at /sim. Only the simulator has it.
type Controller interface {
	// Handler serves the control endpoint.
	Handler() http.Handler
}

// Model describes a loaded model.
type Model struct {
	Name        string // the worker's own name for it
	Created     int64  // Unix seconds, for /v1/models
	ContextLen  int    // most tokens of prompt and answer together
	Vocab       int    // vocabulary size
	Fingerprint string // identity of weights, engine build and KV layout
	Weights     string // identity of the weights alone, KIND:HASH; "" = not known

	Tools ToolFormat // how it writes calls of tools
	// ToolMark is the control token without text that stands for Tools.Begin(), -1
	// when calls begin with that text. It means nothing without Tools.
	ToolMark int32
}

// Params are the parameters of one choice's generation.
type Params struct {
	MaxTokens   int     // tokens to generate, at least 1, already clamped to the context
	Temperature float64 // 0 = greedy
	TopP        float64 // (0,1], 1 = off
	TopK        int     // 0 = off
	MinP        float64 // 0 = off
	Presence    float64 // presence penalty, -2..2
	Frequency   float64 // frequency penalty, -2..2
	Repetition  float64 // repetition penalty over prompt and answer; 0 and 1 = off
	LogitBias   map[int32]float64
	Seed        uint64 // key of the counter-based generator, with Choice and offset
	Choice      int    // choice index of the request
	TopLogprobs int    // -1 = no logprobs, else how many alternatives
	IgnoreEOS   bool   // go on after the end-of-sequence token; false with a Grammar, which knows its end
	Grammar     string // GBNF that the answer follows from its first token, "" = none; only for a Constrainer
	// GrammarLate makes the Grammar begin behind the first mark of a tool call,
	// Model.Tools.Begin() or Model.ToolMark. Before it anything goes.
	GrammarLate bool
	// Delivered says how many of the last ids are tokens that this choice has
	// generated already, elsewhere: penalties and the generator go on after them.
	Delivered int
	CatchUp   CatchUp   // how those without stored KV are decoded
	Priority  int       // a higher one goes first and gives way last; 0 = ordinary
	Request   *Request  // shared by the choices of a request, nil = the only one of its own
	KV        KVSession // keeps the KV elsewhere, nil = nobody does
	// Sim holds the raw body field "sim", for the simulator only; nil otherwise.
	Sim []byte
}

// Token is one generated step.
type Token struct {
	ID    int32
	Bytes []byte // text of the token; may be a part of a UTF-8 character or empty; valid until the next step
	// Finish is set on the last step: "stop" when the model ended its answer
	// (then ID is the end token and Bytes is empty), "length" at MaxTokens or at the
	// end of the context (then ID is a generated token like any other).
	Finish  string
	Logprob float64   // natural log, only when asked for
	Top     []Logprob // TopLogprobs alternatives, most probable first
	Cached  int       // prompt tokens that were not prefilled again; set on the first step
	// Restored, set on the first step too, is how many of the ids, delivered tokens
	// included, had their KV restored from outside. Exact says that the others were
	// decoded one at a time, alone, as CatchUpExact wants, in a request that is Single.
	// Lossy says that the KV was restored from a chain that is.
	Restored int
	Exact    bool
	Lossy    bool
}

// Logprob is one alternative token.
type Logprob struct {
	ID      int32
	Bytes   []byte
	Logprob float64
}

// Load is an engine's load at one moment; rates are over the last seconds.
type Load struct {
	Running      int     // sequences being prefilled or decoded
	Waiting      int     // requests that wait for a sequence
	MaxRunning   int     // most sequences at once
	KVUsage      float64 // 0..1
	PromptTokens uint64  // prefilled since start
	GenTokens    uint64  // generated since start

	// Preempted counts the times since start that a sequence gave its place to another
	// one, Resumed those after which it went on from its KV without prefilling it
	// again; PausedBytes is the memory that such KV takes now, outside of the engine's.
	Preempted, Resumed uint64
	PausedBytes        int64
}
