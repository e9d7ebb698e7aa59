package sim

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// Config describes a simulated model. The zero value of a field is its default.
type Config struct {
	Name            string        // model name, default "sim"
	ContextLen      int           // most tokens of prompt and answer, default 8192
	MaxSeqs         int           // most sequences at once, default 64
	MaxQueue        int           // most waiting requests, default 1024, negative = none may wait
	AnswerLen       int           // tokens after which an answer ends by itself, default 128, negative = only max_tokens ends it
	TTFT            time.Duration // time to the first token, default 0
	PrefillPerToken time.Duration // more of it for each token of the prompt, default 0
	ITL             time.Duration // time between two tokens, default 0
	KVBytes         int           // size of a token's KV where it is kept, a multiple of 8, default 128
	Weights         string        // what the weights are called; KV of one name is never another's, default none
}

// setDefaults fills in what was left open. Negative limits mean none from here on.
func (c *Config) setDefaults() {
	if c.Name == "" {
		c.Name = "sim"
	}
	for _, d := range []struct {
		field *int
		value int
	}{{&c.ContextLen, 8192}, {&c.MaxSeqs, 64}, {&c.MaxQueue, 1024}, {&c.AnswerLen, 128}, {&c.KVBytes, 128}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	c.MaxQueue = max(c.MaxQueue, 0)
	c.AnswerLen = max(c.AnswerLen, 0)
}

// Validate reports the first field that makes no sense.
func (c Config) Validate() error {
	switch {
	case c.ContextLen < 0:
		return fmt.Errorf("sim: context length %d is negative", c.ContextLen)
	case c.MaxSeqs < 0:
		return fmt.Errorf("sim: %d sequences is negative", c.MaxSeqs)
	case c.KVBytes < 0 || c.KVBytes%8 != 0:
		return fmt.Errorf("sim: %d bytes of KV per token are no multiple of 8", c.KVBytes)
	case c.TTFT < 0 || c.PrefillPerToken < 0 || c.ITL < 0:
		return errors.New("sim: a negative time")
	}
	return nil
}

// Engine is the simulated model. It implements worker.Engine and its optional
// abilities Faulter, Decoder, Embedder, Resumer and Controller, and is safe for
// concurrent use.
type Engine struct {
	cfg   Config
	model worker.Model
	tok   *tokenizer
	key   uint64        // of the model's name
	slots chan struct{} // holds one element per running sequence

	closeOnce sync.Once
	closed    chan struct{}
	inside    atomic.Int64 // places taken by requests
	waiting   atomic.Int64
	held      atomic.Int64 // tokens of the running sequences
	prompts   atomic.Uint64
	generated atomic.Uint64

	mu   sync.Mutex
	over overrides
}

// New makes an engine; nothing runs until Generate is called.
func New(cfg Config) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.setDefaults()
	h := fnv.New64a()
	h.Write([]byte(cfg.Name))
	m := worker.Model{
		Name: cfg.Name, Created: time.Now().Unix(), ContextLen: cfg.ContextLen, Vocab: int(vocab),
		Fingerprint: fmt.Sprintf("sim1-%08x", uint32(h.Sum64())),
	}
	if cfg.Weights != "" {
		m.Fingerprint, m.Weights = m.Fingerprint+" "+cfg.Weights, "sim:"+cfg.Weights
	}
	return &Engine{
		cfg: cfg, tok: newTokenizer(), key: h.Sum64(),
		slots: make(chan struct{}, cfg.MaxSeqs), closed: make(chan struct{}),
		model: m,
	}, nil
}

// Model implements worker.Engine.
func (e *Engine) Model() worker.Model { return e.model }

// Tokenize implements worker.Engine. Chat messages become role, text and end of
// turn, one after the other, with the assistant's role last.
func (e *Engine) Tokenize(req *openai.Request, prompt int) ([]int32, error) {
	if req.Endpoint == openai.Chat {
		return e.tokenizeChat(req)
	}
	prompts, bad := req.DecodePrompts()
	if bad != nil {
		return nil, bad
	}
	if prompt < 0 || prompt >= len(prompts) {
		return nil, fmt.Errorf("sim: prompt %d of %d", prompt, len(prompts))
	}
	p := prompts[prompt]
	ids := append([]int32(nil), p.IDs...)
	if p.IDs == nil {
		if !req.NoSpecial {
			ids = append(ids, idBOS)
		}
		ids = e.tok.encode(ids, p.Text)
	}
	return e.fits(ids, "prompt")
}

// tokenizeChat is the chat template: a begin of text, then role, content and end of
// turn for each message.
func (e *Engine) tokenizeChat(req *openai.Request) ([]int32, error) {
	messages, bad := req.DecodeMessages()
	if bad != nil {
		return nil, bad
	}
	ids := []int32{idBOS}
	for _, m := range messages {
		ids = append(e.tok.encode(append(ids, roleID(m.Role)), m.Content), idTurn)
	}
	if !req.NoGenerationPrompt {
		ids = append(ids, roleID("assistant"))
	}
	return e.fits(ids, "messages")
}

// fits refuses what cannot be prefilled; param is the field that is to blame.
func (e *Engine) fits(ids []int32, param string) ([]int32, error) {
	if len(ids) >= e.cfg.ContextLen {
		return nil, openai.ContextTooLong(param, len(ids), e.cfg.ContextLen)
	}
	for _, id := range ids {
		if id < 0 || id >= vocab {
			return nil, openai.Invalid(param, "Invalid '%s': token id %d is outside the vocabulary of %d.", param, id, vocab)
		}
	}
	return ids, nil
}

// Decode implements worker.Decoder.
func (e *Engine) Decode(ids []int32) []byte {
	var text []byte
	for _, id := range ids {
		text = e.tok.decode(text, id)
	}
	return text
}

// TokenBytes implements worker.Resumer.
func (e *Engine) TokenBytes(id int32) []byte { return e.tok.decode(nil, id) }

// EndsAnswer implements worker.Resumer.
func (e *Engine) EndsAnswer(id int32) bool { return id == idEnd }

// Load implements worker.Engine. KV use is the running sequences' tokens as a
// share of MaxSeqs full contexts.
func (e *Engine) Load() worker.Load {
	l := worker.Load{
		Running: len(e.slots), Waiting: int(e.waiting.Load()), MaxRunning: e.cfg.MaxSeqs,
		KVUsage:      float64(e.held.Load()) / (float64(e.cfg.ContextLen) * float64(e.cfg.MaxSeqs)),
		PromptTokens: e.prompts.Load(), GenTokens: e.generated.Load(),
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if n := e.over.running; n != nil {
		l.Running = int(*n)
	}
	if n := e.over.waiting; n != nil {
		l.Waiting = int(*n)
	}
	if n := e.over.kvUsage; n != nil {
		l.KVUsage = *n
	}
	return l
}

// SetLoad overrides the reported load, nil = report the real one. It does what
// the control endpoint does, for tests in the same process.
func (e *Engine) SetLoad(running, waiting *int) {
	float := func(n *int) *float64 {
		if n == nil {
			return nil
		}
		return new(float64(*n))
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.over.running, e.over.waiting = float(running), float(waiting)
}

// Close implements worker.Engine.
func (e *Engine) Close() error {
	e.closeOnce.Do(func() { close(e.closed) })
	return nil
}

// take takes n places for a request.
func (e *Engine) take(n int) error {
	if e.inside.Add(int64(n)) > int64(e.cfg.MaxSeqs+e.cfg.MaxQueue) {
		e.give(n)
		return worker.ErrBusy
	}
	return nil
}

// give gives n places back.
func (e *Engine) give(n int) { e.inside.Add(-int64(n)) }

// enter waits for a free sequence, in order of arrival.
func (e *Engine) enter(ctx context.Context) error {
	select {
	case <-e.closed:
		return errClosed
	default:
	}
	select {
	case e.slots <- struct{}{}:
		return nil
	default:
	}
	e.waiting.Add(1)
	defer e.waiting.Add(-1)
	select {
	case e.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-e.closed:
		return errClosed
	}
}

var errClosed = errors.New("sim: the engine is closed")
