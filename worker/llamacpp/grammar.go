package llamacpp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sampling"
)

var _ worker.Constrainer = (*Engine)(nil)

// errNoGrammar is the answer of a build or a model without grammars.
var errNoGrammar = errors.New("this engine follows no grammars")

// Follow implements worker.Constrainer.
func (e *Engine) Follow(p worker.Params, ids []int32) (bool, error) {
	c, err := e.grammar(context.Background(), p.Grammar) // which Constrain has compiled
	if err != nil {
		return false, err
	}
	defer c.Close()
	err = sampling.New(p).Constrain(e.keep(c, p.GrammarLate), ids)
	if errors.Is(err, sampling.ErrOutside) {
		return false, nil
	}
	return err == nil, err
}

// constrain makes a sequence that is not queued yet keep to its grammar, the
// delivered tokens included. free must be called after the sequence's last step.
func (e *Engine) constrain(ctx context.Context, s *sequence) (free func(), err error) {
	if s.params.Grammar == "" {
		return func() {}, nil
	}
	c, err := e.grammar(ctx, s.params.Grammar)
	if ctx.Err() != nil {
		if err == nil {
			c.Close()
		}
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("compile the grammar: %w", err)
	}
	c = e.keep(c, s.params.GrammarLate)
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

// kept is a grammar over what the client will see. llama.cpp gives control tokens a
// text too, such as "<bos>", which a grammar may allow inside of a string; they have
// none here, so that the answer would not be what the grammar saw. And its classes of
// characters let bytes pass that are no UTF-8, such as 0xF5, for which the client would
// see others; here tokens of bytes only begin or continue characters.
type kept struct {
	sampling.Constraint
	voc  *vocabulary
	mark int32 // control token that is part of the grammar, -1 = none

	part []byte // of a character, with which the newest text ends

	waiting bool   // for the mark, before which anything goes
	begin   string // the mark as text
	tail    []byte // newest text, up to the length of begin

	some    []int32 // kept for their memory
	answers []bool
}

// keep wraps the grammar c; late makes it begin behind the mark of tool calls.
func (e *Engine) keep(c sampling.Constraint, late bool) *kept {
	return &kept{Constraint: c, voc: e.voc, mark: e.model.ToolMark, begin: e.model.Tools.Begin(), waiting: late}
}

// Allow implements sampling.Constraint.
func (k *kept) Allow(ids []int32, ok []bool) {
	if k.waiting {
		for i, id := range ids {
			ok[i] = !k.passes(k.voc.bytes(id))
		}
		return
	}
	asked := ids
	if len(ids) > manyTokens {
		asked = k.likely(ids)
	}
	k.answers = append(k.answers[:0], make([]bool, len(asked))...)
	k.Constraint.Allow(asked, k.answers)
	n := 0
	for i, id := range ids {
		ok[i] = false
		if n < len(asked) && asked[n] == id {
			text := k.voc.bytes(id)
			ok[i] = k.answers[n] && (len(text) > 0 && spells(k.part, text) || k.voc.ends(id) || id == k.mark && k.begin != "")
			n++
		}
	}
}

// manyTokens is how many tokens are asked about one by one; more are sorted out by
// their first bytes first.
const manyTokens = 1024

// likely leaves out the tokens that begin with a byte that cannot come next: if a
// token of that byte alone is not allowed, no longer one is. Where a grammar wants a
// brace, that is nearly the whole vocabulary, and asking is what costs.
func (k *kept) likely(ids []int32) []int32 {
	var (
		alone = k.voc.singles()
		probe []int32
		bytes []byte
	)
	for b, id := range alone {
		if id >= 0 {
			probe, bytes = append(probe, id), append(bytes, byte(b))
		}
	}
	answers := make([]bool, len(probe))
	k.Constraint.Allow(probe, answers)
	var impossible [256]bool
	for i, b := range bytes {
		impossible[b] = !answers[i]
	}
	k.some = k.some[:0]
	for _, id := range ids {
		if text := k.voc.bytes(id); len(text) == 0 || !impossible[text[0]] {
			k.some = append(k.some, id)
		}
	}
	return k.some
}

// passes reports whether a token's text ends the mark and goes on behind it: the
// grammar could not be given a part of it.
func (k *kept) passes(text []byte) bool {
	if len(text) < 2 {
		return false
	}
	i := strings.Index(string(k.tail)+string(text), k.begin)
	return i >= 0 && i+len(k.begin) < len(k.tail)+len(text)
}

// Accept implements sampling.Constraint.
func (k *kept) Accept(id int32) {
	if !k.waiting {
		k.Constraint.Accept(id)
		k.part = append(k.part, k.voc.bytes(id)...)
		k.part = append(k.part[:0], unfinished(k.part)...)
		return
	}
	k.tail = append(k.tail, k.voc.bytes(id)...)
	k.tail = k.tail[max(0, len(k.tail)-len(k.begin)):]
	k.waiting = !(id == k.mark || string(k.tail) == k.begin)
}

// spells reports whether text goes on with a part of a character as UTF-8 does.
func spells(part, text []byte) bool {
	var joined [utf8.UTFMax]byte
	for n := copy(joined[:], part); n > 0 && n < len(joined) && len(text) > 0; {
		joined[n] = text[0]
		n, text = n+1, text[1:]
		if !utf8.FullRune(joined[:n]) {
			continue
		}
		if r, size := utf8.DecodeRune(joined[:n]); r == utf8.RuneError && size <= 1 {
			return false
		}
		n = 0
	}
	rest := unfinished(text)
	return utf8.Valid(text[:len(text)-len(rest)])
}

// unfinished is the part of a character with which text ends, if it does.
func unfinished(text []byte) []byte {
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ {
		if tail := text[len(text)-n:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return nil
			}
			return tail
		}
	}
	return nil
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
