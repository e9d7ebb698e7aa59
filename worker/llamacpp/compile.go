package llamacpp

import (
	"context"
	"errors"
	"strings"
	"sync"

	"github.com/kvmesh/kvmesh/worker/sampling"
)

// prototype is a compiled grammar that has accepted nothing. Clone may be called by
// several goroutines at once.
type prototype interface {
	sampling.Constraint
	// Clone makes a constraint of its own, much faster than compiling.
	Clone() (sampling.Constraint, error)
}

// grammars is the ability of a tokenizer to compile a grammar. It may be called by
// anyone.
type grammars interface {
	Grammar(text string) (prototype, error)
}

// compilesAtOnce bounds the grammars that are compiled at a time: each takes a core.
const compilesAtOnce = 2

// compiler compiles each grammar once for all that use it at a time, such as the choices
// of a request. A compilation cannot be stopped; those that wait for it can. It is safe
// for concurrent use.
type compiler struct {
	turns chan struct{}

	mu  sync.Mutex
	use map[string]*compiled // by text
}

// compiled is a grammar that somebody uses or waits for.
type compiled struct {
	text  string
	users int           // guarded by the compiler's mu
	gone  chan struct{} // closed when the last of them has left
	ready chan struct{} // closed when proto and err are set
	proto prototype
	err   error
}

func newCompiler() *compiler {
	return &compiler{turns: make(chan struct{}, compilesAtOnce), use: make(map[string]*compiled)}
}

// hold returns a compiled grammar, which the caller gives back by release. The end of ctx
// ends the waiting for it.
func (c *compiler) hold(ctx context.Context, text string, compile func(string) (prototype, error)) (*compiled, error) {
	c.mu.Lock()
	g, ok := c.use[text]
	if !ok {
		g = &compiled{text: text, gone: make(chan struct{}), ready: make(chan struct{})}
		c.use[text] = g
		go c.run(g, compile)
	}
	g.users++
	c.mu.Unlock()
	select {
	case <-g.ready:
	case <-ctx.Done():
		c.release(g)
		return nil, context.Cause(ctx)
	}
	if g.err != nil {
		c.release(g)
		return nil, g.err
	}
	return g, nil
}

// run compiles a grammar when its turn comes, unless nobody wants it any more.
func (c *compiler) run(g *compiled, compile func(string) (prototype, error)) {
	select {
	case <-g.gone:
		return
	case c.turns <- struct{}{}:
	}
	defer func() { <-c.turns }()
	select {
	case <-g.gone: // by now
		return
	default:
	}
	proto, err := compile(g.text)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && g.users == 0 {
		proto.Close()
		return
	}
	g.proto, g.err = proto, err
	close(g.ready)
}

// release gives a grammar back; the last one frees it.
func (c *compiler) release(g *compiled) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if g.users--; g.users > 0 {
		return
	}
	close(g.gone)
	delete(c.use, g.text)
	if g.proto != nil {
		g.proto.Close()
	}
}

// Constrain implements worker.Constrainer: it compiles the grammar, and keeps it for
// those that follow it until ctx ends.
func (e *Engine) Constrain(ctx context.Context, grammar string) error {
	g, err := e.compiler.hold(ctx, grammar, e.compile)
	if err == nil {
		context.AfterFunc(ctx, func() { e.compiler.release(g) })
	}
	return err
}

// grammar returns a grammar at the beginning of an answer.
func (e *Engine) grammar(ctx context.Context, text string) (sampling.Constraint, error) {
	g, err := e.compiler.hold(ctx, text, e.compile)
	if err != nil {
		return nil, err
	}
	defer e.compiler.release(g)
	return g.proto.Clone()
}

// compile compiles a grammar, which refers to the model's vocabulary.
func (e *Engine) compile(text string) (prototype, error) {
	g, ok := e.text.(grammars)
	if !ok {
		return nil, errNoGrammar
	}
	if strings.ContainsRune(text, 0) {
		return nil, errors.New("the grammar has a NUL byte")
	}
	e.life.RLock()
	defer e.life.RUnlock()
	if e.closed {
		return nil, ErrClosed
	}
	return g.Grammar(text)
}
