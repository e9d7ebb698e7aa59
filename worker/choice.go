package worker

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// choice is one answer of a request while it is generated, by one goroutine.
type choice struct {
	index  int
	prompt int // which prompt of the request
	ids    []int32
	echo   []byte // text of the prompt, when the answer repeats it
	params Params
	emit   emitter

	tools *toolReader            // nil = no tools
	calls []openai.ToolCallDelta // for the sink, valid during its call

	resumed  resumed  // what is left of a continuation's beginning
	tokenIDs bool     // the sink wants ids
	held     []heldID // ids of tokens whose text is still held back
	sent     []int32  // ids for the sink, valid during its call; reused
	skip     int      // bytes of the text to come that the client has

	begun     bool      // the sink has been told
	generated int       // tokens so far
	cached    int       // prompt tokens that were not prefilled again
	pending   []logprob // of tokens whose text is still held back
	offset    int       // characters of text, echo included, before the next pending token
	reported  []logprob // reused between calls of sink.text
}

// logprob is a generated token with its probability and its place in the text.
type logprob struct {
	token  []byte
	own    float64
	top    []Logprob
	start  int // raw bytes before it
	offset int // characters before it
}

// sink takes what choices say. Calls of different choices may overlap in time.
type sink interface {
	// text adds to a choice. The first call comes with its first token and may be
	// empty. text and probs are valid during the call only.
	text(c *choice, text []byte, probs []logprob) error
	// finish ends a choice.
	finish(c *choice, reason string) error
}

// The ends of a choice that a Fault asks for.
var (
	errCut       = errors.New("cut on request")
	errCutInside = errors.New("cut inside of an event on request")
	errTruncated = errors.New("truncated on request")
	errInjected  = errors.New("error on request")
)

// enter makes the request that the choices share.
func (g *generation) enter() {
	live := 0
	g.atOnce = max(1, g.engine.Load().MaxRunning)
	for _, c := range g.choices {
		if !c.over() {
			live++
		}
	}
	g.request = NewRequest(live, g.atOnce)
	for _, c := range g.choices {
		c.params.Request = g.request
		if c.begun {
			g.request.Begin()
		}
	}
}

// run generates all choices, as many at once as the engine runs. Nothing is sent
// before the engine has let the request in.
func (g *generation) run(ctx context.Context, out sink) error {
	defer g.request.End()
	if len(g.choices) == 1 {
		return g.runChoice(ctx, g.choices[0], out)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(g.atOnce)
	var over []*choice
	for _, c := range g.choices {
		if c.over() {
			over = append(over, c)
			continue
		}
		group.Go(func() error { return g.runChoice(ctx, c, out) })
	}
	if len(over) < len(g.choices) {
		select {
		case <-g.request.Entered():
		case <-ctx.Done():
			return group.Wait()
		}
	}
	for _, c := range over {
		group.Go(func() error { return g.runChoice(ctx, c, out) })
	}
	return group.Wait()
}

// runChoice generates one choice. A panic of the engine becomes an error, since
// it must not take the process with it.
func (g *generation) runChoice(ctx context.Context, c *choice, out sink) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic while generating: %v\n%s", p, debug.Stack())
		}
	}()
	if c.over() {
		return c.goOn(out)
	}
	clock := choicePace{of: g.pace}
	for tok, err := range g.engine.Generate(ctx, c.ids, c.params) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return err
		}
		if err := c.goOn(out); err != nil {
			return err
		}
		clock.token(time.Now())
		if err := g.fault.before(c.generated, c.params.Delivered); err != nil {
			return err
		}
		if bad, ok := out.(garbler); ok && g.fault.garbles(c.generated, c.params.Delivered) {
			if err := bad.garble(); err != nil {
				return err
			}
		}
		if done, err := c.step(tok, out); done || err != nil {
			return err
		}
		clock.sent(time.Now())
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errNoFinish
}

// garbles reports whether a malformed event is due before token n, see before.
func (f Fault) garbles(n, delivered int) bool {
	return n == f.Malformed && (delivered == 0 || n > delivered)
}

// garbler is a sink that can say what is no event.
type garbler interface{ garble() error }

// before returns the fault that is due before token n. One that has cut a stream does
// not cut its continuation too.
func (f Fault) before(n, delivered int) error {
	if delivered > 0 && n == delivered {
		return nil
	}
	switch n {
	case f.CutAt:
		if f.CutInside {
			return errCutInside
		}
		return errCut
	case f.ErrorAt:
		return errInjected
	case f.Truncate:
		return errTruncated
	}
	return nil
}

// step takes one token and reports whether it was the last.
func (c *choice) step(tok Token, out sink) (done bool, err error) {
	if c.generated == c.params.Delivered {
		c.cached = tok.Cached
		c.resumed.report(c, tok)
	}
	if c.generated == 0 {
		c.offset = utf8.RuneCount(c.echo)
	}
	c.generated++
	if c.tokenIDs {
		c.held = append(c.held, heldID{tok.ID, c.emit.received, len(tok.Bytes)})
	}
	if c.params.TopLogprobs >= 0 && len(tok.Bytes) > 0 {
		c.note(tok)
	}
	text, stopped := c.emit.push(tok.Bytes)
	text = c.readTools(tok.ID, text, stopped)
	if err := c.send(out, text, false); err != nil {
		return false, err
	}
	if stopped {
		return true, c.end(out, "stop")
	}
	if tok.Finish == "" {
		return false, nil
	}
	if err := c.send(out, c.readTools(-1, c.emit.flush(), true), true); err != nil {
		return false, err
	}
	return true, c.end(out, tok.Finish)
}

// end tells the sink that the choice is over, with the ids it has not seen.
func (c *choice) end(out sink, reason string) error {
	c.takeIDs(true)
	return out.finish(c, c.tools.reason(reason))
}

// readTools takes the calls of tools out of the text, which came with token id.
func (c *choice) readTools(id int32, text []byte, last bool) []byte {
	if c.tools == nil {
		return text
	}
	c.tools.marked(id)
	text, c.calls = c.tools.push(text, last)
	return text
}

// send passes text on, with the probabilities of the tokens it comes from.
func (c *choice) send(out sink, text []byte, last bool) error {
	c.reported = c.reported[:0]
	for len(c.pending) > 0 && (last || c.pending[0].start < c.emit.released) {
		c.reported = append(c.reported, c.pending[0])
		c.pending = c.pending[1:]
	}
	c.takeIDs(last || c.emit.stopped)
	n := min(c.skip, len(text))
	c.skip, text = c.skip-n, text[n:]
	if c.begun && len(text) == 0 && len(c.reported) == 0 && len(c.sent) == 0 && len(c.calls) == 0 {
		return nil
	}
	err := out.text(c, text, c.reported)
	c.begun, c.calls = true, nil
	return err
}

// note keeps a token's probability until its text is sent.
func (c *choice) note(tok Token) {
	l := logprob{token: append([]byte(nil), tok.Bytes...), own: tok.Logprob, start: c.emit.received, offset: c.offset}
	for _, t := range tok.Top {
		t.Bytes = append([]byte(nil), t.Bytes...)
		l.top = append(l.top, t)
	}
	c.offset += runeStarts(tok.Bytes)
	c.pending = append(c.pending, l)
}

// chatLogprobs words probabilities for the chat endpoint.
func chatLogprobs(probs []logprob) *openai.ChatLogprobs {
	out := &openai.ChatLogprobs{Content: make([]openai.TokenLogprob, 0, len(probs))}
	for _, p := range probs {
		t := openai.TokenLogprob{
			Token: tokenName(p.token), Logprob: finite(p.own), Bytes: byteInts(p.token), TopLogprobs: []openai.TopLogprob{},
		}
		for _, alt := range p.top {
			t.TopLogprobs = append(t.TopLogprobs, openai.TopLogprob{
				Token: tokenName(alt.Bytes), Logprob: finite(alt.Logprob), Bytes: byteInts(alt.Bytes),
			})
		}
		out.Content = append(out.Content, t)
	}
	return out
}

// textLogprobs words probabilities for the completions endpoint.
func textLogprobs(probs []logprob) *openai.TextLogprobs {
	out := &openai.TextLogprobs{
		Tokens: []string{}, TokenLogprobs: []float64{}, TopLogprobs: []map[string]float64{}, TextOffset: []int{},
	}
	for _, p := range probs {
		out.Tokens = append(out.Tokens, tokenName(p.token))
		out.TokenLogprobs = append(out.TokenLogprobs, finite(p.own))
		out.TextOffset = append(out.TextOffset, p.offset)
		// The token itself is always there, as one more when it is no alternative.
		top := make(map[string]float64, len(p.top)+1)
		top[tokenName(p.token)] = finite(p.own)
		for _, alt := range p.top {
			top[tokenName(alt.Bytes)] = finite(alt.Logprob)
		}
		out.TopLogprobs = append(out.TopLogprobs, top)
	}
	return out
}

// tokenName is a token's text, or OpenAI's spelling of bytes that are no text.
func tokenName(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	var name strings.Builder
	name.WriteString("bytes:")
	for _, c := range b {
		name.WriteString(fmt.Sprintf(`\x%02x`, c))
	}
	return name.String()
}

// byteInts are bytes as the API writes them: a list of numbers, not base64.
func byteInts(b []byte) []int {
	out := make([]int, len(b))
	for i, c := range b {
		out[i] = int(c)
	}
	return out
}

// finite replaces what JSON cannot say by vLLM's stand-in for minus infinity.
func finite(p float64) float64 {
	if p >= -9999 && p <= 0 {
		return p
	}
	if p > 0 {
		return 0
	}
	return -9999
}
