package llamacpp

import (
	"context"
	"fmt"
	"iter"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// Engine is a worker.Engine over one llama.cpp model and context. It is safe for
// concurrent use. Close it to free the model.
type Engine struct {
	cfg    Config
	model  worker.Model
	voc    *vocabulary
	chat   *template
	in     *inbox
	g      gauges
	inside atomic.Int64 // places taken by requests whose calls of Generate have not returned
	closes atomic.Bool  // Close was called

	// life is held for reading while the tokenizer is used, and for writing
	// while the model is freed.
	life   sync.RWMutex
	text   tokenizer
	closed bool

	vectors  vectors
	compiler *compiler

	ended chan struct{} // closed when the loop has ended and the model is freed
}

var (
	_ worker.Engine  = (*Engine)(nil)
	_ worker.Resumer = (*Engine)(nil)
	_ worker.Decoder = (*Engine)(nil)
)

// tokenizer turns text into ids; special tokens written in the text count as such.
type tokenizer interface {
	Tokenize(text string, bos bool) ([]int32, error)
}

// parts is a loaded model, as Open or a test puts it together.
type parts struct {
	dec   decoder
	kv    keeper // nil = KV cannot be moved
	voc   *vocabulary
	text  tokenizer
	chat  *template
	model worker.Model
}

// Open loads the libraries and the model of cfg and starts the engine. The end of
// ctx stops the loading; afterwards it has no meaning. Errors say what is missing
// and, where it is a system library, which package has it.
func Open(ctx context.Context, cfg Config) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("llamacpp: %w", err)
	}
	cfg = cfg.withDefaults()
	if cfg.MaxSeqs > mostSlots {
		cfg.Log.Warn("llama.cpp knows 256 sequences and one is for KV on its way in or out; the others run", "asked", cfg.MaxSeqs, "sequences", mostSlots)
		cfg.MaxSeqs = mostSlots
		cfg.MaxQueue++ // as many requests as asked for are let in
	}
	e, err := start(cfg, func(cfg *Config) (parts, error) { return load(ctx, cfg) })
	if err != nil {
		return nil, fmt.Errorf("llamacpp: %w", err)
	}
	return e, nil
}

// start loads and then runs the loop on one goroutine with a thread of its own:
// llama.cpp crashes when a context is freed after the thread that used it ended.
func start(cfg Config, load func(*Config) (parts, error)) (*Engine, error) {
	e := &Engine{in: newInbox(), compiler: newCompiler(), ended: make(chan struct{})}
	loaded := make(chan error, 1)
	go func() {
		defer close(e.ended)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		p, err := load(&cfg)
		if err != nil {
			loaded <- err
			return
		}
		e.cfg, e.model, e.voc, e.chat, e.text = cfg, p.model, p.voc, p.chat, p.text
		e.vectors = newVectors(p.dec)
		e.model.Tools = p.chat.format
		e.model.ToolMark = p.voc.toolMark(p.chat.format, func(s string) ([]int32, error) { return p.text.Tokenize(s, false) })
		loaded <- nil
		l := newLoop(cfg, p.dec, p.voc, &e.g, &e.closes)
		l.kv, l.send = p.kv, e.in.send
		l.run(e.in)
		e.life.Lock()
		defer e.life.Unlock()
		e.closed = true
		p.dec.Close()
	}()
	return e, <-loaded
}

// Model describes what is loaded.
func (e *Engine) Model() worker.Model { return e.model }

// Load returns the load now. It takes no lock, and its numbers are each right for
// some moment during the call, not all for the same.
func (e *Engine) Load() worker.Load {
	return worker.Load{
		Running:      int(e.g.running.Load()),
		Waiting:      int(e.g.waiting.Load()),
		MaxRunning:   e.cfg.MaxSeqs,
		KVUsage:      float64(e.g.cells.Load()) / float64(e.cfg.Cells),
		PromptTokens: e.g.prompt.Load(),
		GenTokens:    e.g.generated.Load(),
		Preempted:    e.g.preempted.Load(),
		Resumed:      e.g.resumed.Load(),
		PausedBytes:  e.g.saved.Load(),
	}
}

// Close ends every generation with ErrClosed and frees the model. It
// aborts the decode that is running, and may be called twice.
func (e *Engine) Close() error {
	e.closes.Store(true)
	e.in.send(func(l *loop) { l.closing = true })
	<-e.ended
	return nil
}

// Generate implements worker.Engine. Each range over what it returns is a generation
// of its own. Up to 32 tokens are generated ahead of a consumer.
func (e *Engine) Generate(ctx context.Context, ids []int32, p worker.Params) iter.Seq2[worker.Token, error] {
	return func(yield func(worker.Token, error) bool) {
		if err := e.generate(ctx, ids, p, yield); err != nil {
			yield(worker.Token{}, err)
		}
	}
}

// generate feeds yield until the end. The error it returns has not been yielded;
// it is nil when the consumer has left.
func (e *Engine) generate(ctx context.Context, ids []int32, p worker.Params, yield func(worker.Token, error) bool) error {
	if err := e.check(ids); err != nil {
		return err
	}
	if p.Delivered < 0 || p.Delivered >= len(ids) {
		return fmt.Errorf("%d of %d tokens are said to be delivered", p.Delivered, len(ids))
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s := newSequence(ids, p)
	leave, err := s.params.Request.Enter(func(n int) error { return e.take(n, p.Priority) }, func(n int) { e.inside.Add(-int64(n)) })
	if err != nil {
		return err
	}
	defer leave()
	free, err := e.constrain(ctx, s)
	if err != nil {
		return err
	}
	defer free()
	if p.KV != nil {
		s.stored = p.KV.Restore(ctx, ids, e.g.prefillTime(len(ids)))
		defer s.forget()      // what the loop has not: it is done with s by then
		defer s.errand.Wait() // before
	}
	e.g.waiting.Add(1)
	if !e.in.send(func(l *loop) { l.enqueue(s) }) {
		e.g.waiting.Add(-1)
		return ErrClosed
	}
	for {
		select {
		case tok, ok := <-s.out:
			if !ok {
				return s.err
			}
			e.in.poke() // the sequence may have rested
			if more := yield(tok, nil); tok.Finish != "" {
				return nil
			} else if !more {
				e.abandon(s)
				return nil
			}
		case <-ctx.Done():
			e.abandon(s)
			return context.Cause(ctx)
		}
	}
}

// take takes n places for a request. They are bounded, not the length of the queue: a
// sequence that gives way joins the queue without asking.
func (e *Engine) take(n, priority int) error {
	for most := int64(e.cfg.MaxSeqs + e.cfg.MaxQueue); ; {
		now := e.inside.Load()
		if over := now + int64(n) - most; over > 0 {
			if e.displace(priority, n, min(int(over), n)) {
				return nil
			}
			return worker.ErrBusy
		}
		if e.inside.CompareAndSwap(now, now+int64(n)) {
			return nil
		}
	}
}

// displace takes n places in a queue where so many are missing, which waiting requests of
// lower priorities lose. Those give them back in their own time: before, theirs are taken.
func (e *Engine) displace(priority, n, missing int) (ok bool) {
	if last := e.g.last.Load(); last >= int64(priority) { // nobody is larger than all
		return false
	}
	e.in.call(func(l *loop) {
		refused := l.displaceable(priority, missing)
		if ok = len(refused) > 0; ok {
			e.inside.Add(int64(n))
		}
		for _, r := range refused {
			l.refuse(r)
		}
	})
	return ok
}

// prefillTime estimates how long n tokens take to prefill, from what was measured.
func (g *gauges) prefillTime(n int) time.Duration {
	per := g.perToken.Load()
	if per == 0 {
		per = int64(firstPerToken)
	}
	return time.Duration(int64(n) * per)
}

// firstPerToken is the estimate of prefill per token before anything was measured.
const firstPerToken = 4 * time.Millisecond

// TokenBytes implements worker.Resumer.
func (e *Engine) TokenBytes(id int32) []byte { return e.voc.bytes(id) }

// EndsAnswer implements worker.Resumer.
func (e *Engine) EndsAnswer(id int32) bool { return e.voc.ends(id) }

// Decode implements worker.Decoder.
func (e *Engine) Decode(ids []int32) []byte {
	var text []byte
	for _, id := range ids {
		text = append(text, e.voc.bytes(id)...)
	}
	return text
}

// abandon frees a sequence that has not ended and waits until that is done. A
// decode in which nobody else takes part is aborted.
func (e *Engine) abandon(s *sequence) {
	s.gone.Store(true)
	if !e.in.call(func(l *loop) { l.drop(s) }) {
		<-e.ended // the loop frees everything as it ends
	}
}

// check refuses ids that the model cannot take.
func (e *Engine) check(ids []int32) error {
	if len(ids) == 0 {
		return openai.Invalid("prompt", "The prompt has no tokens.")
	}
	if len(ids) >= e.cfg.ContextLen {
		return openai.ContextTooLong("prompt", len(ids), e.cfg.ContextLen)
	}
	for _, id := range ids {
		if !e.voc.has(id) {
			return openai.Invalid("prompt", "Token id %d is not in the model's vocabulary of %d.", id, e.voc.size())
		}
	}
	return nil
}
