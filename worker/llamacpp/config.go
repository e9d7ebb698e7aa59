package llamacpp

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"

	"github.com/kvmesh/kvmesh/internal/policy"
)

// Config says what to load and how much to run at once. Zero fields take the
// defaults named beside them.
type Config struct {
	LibDir    string // folder with libllama.so, libggml.so, libggml-base.so; required
	ModelPath string // GGUF file; required
	Name      string // worker's own name of the model; default: the file's name without .gguf
	// ChatTemplate is the Jinja source of the chat template; default: the model's own,
	// ChatML where it has none.
	ChatTemplate string
	// CacheDir keeps the model's SHA-256 between starts. Empty: the fingerprint
	// uses the size and samples of the file instead, which reads 16 MiB.
	CacheDir string

	ContextLen int // most tokens of one sequence; default 8192, at most what the model was trained for
	Cells      int // KV cells of all sequences together; default ContextLen
	MaxSeqs    int // sequences at once; default 4, at most 256, of which 255 run and the last waits
	MaxQueue   int // requests that may wait beside them; default 256, negative = none
	// PauseBytes bounds the copies of KV of sequences that gave way; default 512 MiB,
	// negative = none are made.
	PauseBytes int64
	// BatchTokens bounds the tokens of one decode; default 512.
	BatchTokens int
	// PrefillTokens bounds the prompt tokens of a decode that also generates;
	// default 64. Smaller: steadier streams, slower first tokens.
	PrefillTokens int
	Threads       int // CPU threads; default 1

	// Progress is called while the model loads, with 0..100 and never less than
	// before, by another goroutine while Open waits.
	Progress func(percent float64)
	Log      *slog.Logger // default: discard
}

// LeastContext is the shortest context in tokens: room for a self-check, whose prompt is
// a digit and what a tokenizer puts around it, and its answer. A worker with less would
// never be ready.
const LeastContext = policy.LeastContext

// mostSlots is how many sequences can run: llama.cpp knows 256, and one is that through
// which ranges of KV pass.
const mostSlots = 255

// withDefaults returns c with every zero field set.
func (c Config) withDefaults() Config {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.ContextLen, 8192)
	def(&c.Cells, c.ContextLen)
	def(&c.MaxSeqs, 4)
	def(&c.MaxQueue, 256)
	c.MaxQueue = max(c.MaxQueue, 0)
	if c.PauseBytes == 0 {
		c.PauseBytes = 512 << 20
	}
	def(&c.BatchTokens, 512)
	def(&c.PrefillTokens, min(64, c.BatchTokens))
	def(&c.Threads, 1)
	if c.Name == "" {
		c.Name = strings.TrimSuffix(filepath.Base(c.ModelPath), ".gguf")
	}
	if c.Progress == nil {
		c.Progress = func(float64) {}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports every field that cannot work, defaults already applied or not.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.LibDir != "", "LibDir is empty")
	check(c.ModelPath != "", "ModelPath is empty")
	check(c.ContextLen >= LeastContext, "ContextLen %d: at least %d", c.ContextLen, LeastContext)
	check(c.Cells >= c.ContextLen, "Cells %d: at least ContextLen %d, or one sequence could not end", c.Cells, c.ContextLen)
	check(c.MaxSeqs >= 1 && c.MaxSeqs <= mostSlots+1, "MaxSeqs %d: 1 to %d", c.MaxSeqs, mostSlots+1)
	check(c.BatchTokens >= c.MaxSeqs, "BatchTokens %d: at least MaxSeqs %d", c.BatchTokens, c.MaxSeqs)
	check(c.PrefillTokens >= 1, "PrefillTokens %d: at least 1", c.PrefillTokens)
	check(c.Threads >= 1 && c.Threads <= 512, "Threads %d: 1 to 512", c.Threads)
	return errors.Join(errs...)
}
