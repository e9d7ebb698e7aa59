package llamacpp

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sampling"
)

// grammars is the ability of a tokenizer to make a constraint of a grammar, at the
// beginning of an answer. It may be called by anyone.
type grammars interface {
	Grammar(text string) (sampling.Constraint, error)
}

var _ worker.Constrainer = (*Engine)(nil)

// errNoGrammar is the answer of a build or a model without grammars.
var errNoGrammar = errors.New("this engine follows no grammars")

// Constrain implements worker.Constrainer: it compiles the grammar.
func (e *Engine) Constrain(grammar string) error {
	c, err := e.grammar(grammar)
	if err != nil {
		return err
	}
	c.Close()
	return nil
}

// grammar compiles a grammar, which refers to the model's vocabulary.
func (e *Engine) grammar(text string) (sampling.Constraint, error) {
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

// constrain makes a sequence that is not queued yet keep to its grammar, the
// delivered tokens included. free must be called after the sequence's last step.
func (e *Engine) constrain(s *sequence) (free func(), err error) {
	if s.params.Grammar == "" {
		return func() {}, nil
	}
	c, err := e.grammar(s.params.Grammar)
	if err != nil {
		return nil, fmt.Errorf("compile the grammar: %w", err)
	}
	if err := s.sampler.Constrain(c, s.tokens[s.prompt:]); err != nil {
		c.Close()
		return nil, err
	}
	return func() {
		if !s.over() { // the consumer left in a way that the loop was not told of, or is about to see
			e.abandon(s)
		}
		c.Close()
	}, nil
}

// over reports whether the loop has let go of s. What s has sent and nobody took is
// lost.
func (s *sequence) over() bool {
	for {
		select {
		case _, more := <-s.out:
			if !more {
				return true
			}
		default:
			return false
		}
	}
}
