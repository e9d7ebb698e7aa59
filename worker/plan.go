package worker

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"maps"
	mathrand "math/rand/v2"
	"net/http"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
)

const (
	// mostChoices bounds prompts times n of one request.
	mostChoices = 128
	// completionTokens is OpenAI's default max_tokens of the completions endpoint;
	// chat answers may fill the context.
	completionTokens = 16
)

// generation is one request, validated and tokenized. It keeps nothing of the
// body, which may be large.
type generation struct {
	engine    Engine
	answer    openai.Answer
	stream    bool
	withUsage bool // send usage at the end of the stream
	prompts   int  // prompts of the request
	ptokens   int  // tokens of all prompts
	choices   []*choice
	request   *Request // of the choices, at the engine's door
	atOnce    int      // most choices that are generated at a time
	fault     Fault
	started   time.Time // when the request arrived
	pace      *pace     // nil = nobody asks for it
}

// readBody reads a whole request body within the limits.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request) ([]byte, *openai.Error) {
	tooLarge := openai.Errorf(http.StatusRequestEntityTooLarge, "The request body is larger than the limit of %d bytes.", s.cfg.MaxBody)
	if r.ContentLength > s.cfg.MaxBody {
		return nil, tooLarge
	}
	rc := http.NewResponseController(w)
	// Servers without deadlines (tests over other transports) read without one.
	limited := rc.SetReadDeadline(time.Now().Add(s.cfg.BodyTimeout)) == nil
	raw := http.MaxBytesReader(unwrap(w), r.Body, s.cfg.MaxBody)
	var buf bytes.Buffer
	if r.ContentLength > 0 {
		buf.Grow(int(min(r.ContentLength, 1<<20)) + bytes.MinRead) // grows further only as bytes arrive
	}
	_, err := io.Copy(&buf, raw)
	if limited {
		_ = rc.SetReadDeadline(time.Time{}) // it worked a moment ago
	}
	if _, big := errors.AsType[*http.MaxBytesError](err); big {
		return nil, tooLarge
	}
	if isTimeout(err) {
		return nil, openai.Errorf(http.StatusRequestTimeout, "The request body did not arrive within %v.", s.cfg.BodyTimeout)
	}
	if err != nil {
		return nil, openai.Errorf(http.StatusBadRequest, "The request body could not be read to its end.")
	}
	return buf.Bytes(), nil
}

// unreadTimes is up to how many times MaxBody the body of a refused request is read.
const unreadTimes = 4

// turnDown answers with an error after reading what is left of the body: a client that
// sends all of it before it listens would see a reset connection instead. What is read
// goes nowhere; a body that is too long or too slow is refused at once.
func (s *Server) turnDown(w http.ResponseWriter, r *http.Request, err *openai.Error) {
	most := unreadTimes * s.cfg.MaxBody
	// A client that asks first has sent nothing, and is told to keep it; one that was
	// waited for already is not waited for again.
	if r.ContentLength != 0 && r.ContentLength <= most && r.Header.Get("Expect") == "" && err.Status != http.StatusRequestTimeout {
		rc := http.NewResponseController(w)
		limited := rc.SetReadDeadline(time.Now().Add(s.cfg.BodyTimeout)) == nil
		_, rest := io.CopyN(io.Discard, r.Body, most) // its end comes before, or the answer at once
		if limited && !isTimeout(rest) {
			_ = rc.SetReadDeadline(time.Time{}) // it worked a moment ago
		}
	}
	err.Write(w)
}

// unwrap gives MaxBytesReader the server's own writer, which it asks to close the
// connection.
func unwrap(w http.ResponseWriter) http.ResponseWriter {
	if t, ok := w.(*tracker); ok {
		return t.ResponseWriter
	}
	return w
}

// isTimeout recognizes a passed read deadline, in whatever it is wrapped.
func isTimeout(err error) bool {
	t, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	return ok && t.Timeout()
}

// plan parses a body into a generation.
func (s *Server) plan(ctx context.Context, e Engine, ep openai.Endpoint, body []byte, from caller) (*generation, error) {
	req, bad := openai.Parse(ep, body)
	if bad != nil {
		return nil, bad
	}
	if !slices.Contains(s.served(), req.Model) {
		return nil, openai.NotFoundModel(req.Model)
	}
	if bad := req.CheckRest(); bad != nil {
		return nil, bad
	}
	g := &generation{
		engine: e, stream: req.Stream, withUsage: req.IncludeUsage, fault: NoFault(), prompts: 1,
		answer: openai.Answer{
			// The model that answers, not the alias that was asked for: the gateway
			// replaces aliases, so the answer would else depend on its being up.
			Endpoint: ep, ID: "chatcmpl-" + rand.Text(), Model: s.modelName(),
			Fingerprint: e.Model().Fingerprint, Created: time.Now().Unix(),
		},
	}
	if f, ok := e.(Faulter); ok {
		var err error
		if from.sim != "" && s.cfg.SimHeader {
			req.Sim = []byte(from.sim)
		}
		if g.fault, err = f.Fault(req, from.attempt); err != nil {
			return nil, err
		}
	}
	var prompts []openai.Prompt
	if ep == openai.Completions {
		g.answer.ID = "cmpl-" + rand.Text()
		if prompts, bad = req.DecodePrompts(); bad != nil {
			return nil, bad
		}
		g.prompts = len(prompts)
	}
	if n := g.prompts * req.N; n > mostChoices {
		return nil, openai.Invalid("n", "Invalid value for 'n': %d prompts with %d choices each are %d choices, at most %d are allowed.",
			g.prompts, req.N, n, mostChoices)
	}
	if bad := beyond(req, e.Model()); bad != nil {
		return nil, bad
	}
	for i := range g.prompts {
		if err := g.addPrompt(req, prompts, i); err != nil {
			return nil, err
		}
	}
	if err := g.constrain(ctx, req); err != nil {
		return nil, err
	}
	if err := s.join(g, req, from); err != nil {
		return nil, err
	}
	g.enter()
	return g, nil
}

// beyond refuses what Parse lets pass for other servers, and this one cannot do: as
// vLLM does, text behind the answer and a bias of tokens that the model does not have.
func beyond(req *openai.Request, m Model) *openai.Error {
	if req.Endpoint == openai.Completions && len(req.Raw("suffix")) > len(`""`) {
		return openai.Invalid("suffix", "'suffix' is not supported: the model writes behind a prompt only.")
	}
	for _, id := range slices.Sorted(maps.Keys(req.LogitBias)) {
		if int(id) >= m.Vocab {
			return openai.Invalid("logit_bias", "Invalid 'logit_bias': token id %d is outside the vocabulary of %d.", id, m.Vocab)
		}
	}
	return nil
}

// addPrompt tokenizes prompt i and adds its choices.
func (g *generation) addPrompt(req *openai.Request, prompts []openai.Prompt, i int) error {
	ids, err := g.engine.Tokenize(req, i)
	if err != nil {
		return err
	}
	param := "messages"
	if req.Endpoint == openai.Completions {
		param = "prompt"
	}
	limit := g.engine.Model().ContextLen
	if len(ids) >= limit {
		return openai.ContextTooLong(param, len(ids), limit)
	}
	if len(ids) == 0 {
		return openai.Invalid(param, "Invalid '%s': it holds no token.", param)
	}
	var echo []byte
	if req.Echo && req.Endpoint == openai.Completions {
		if echo, err = g.echo(req, prompts[i]); err != nil {
			return err
		}
	}
	g.ptokens += len(ids)
	for range req.N {
		c := newChoice(len(g.choices), ids, req)
		c.prompt, c.echo = i, echo
		c.params.MaxTokens = maxTokens(req, limit-len(ids))
		g.choices = append(g.choices, c)
	}
	return nil
}

// echo is the text of a prompt that the answer repeats.
func (g *generation) echo(req *openai.Request, p openai.Prompt) ([]byte, error) {
	if req.TopLogprobs >= 0 {
		return nil, openai.Invalid("echo", "'echo' with 'logprobs' is not supported: prompts have no log probabilities here.")
	}
	if p.IDs == nil {
		return []byte(p.Text), nil
	}
	d, ok := g.engine.(Decoder)
	if !ok {
		return nil, openai.Invalid("echo", "'echo' of a prompt given as token ids is not supported by this engine.")
	}
	return d.Decode(p.IDs), nil
}

// maxTokens is the limit of one choice: what was asked for or the endpoint's
// default, cut to what is left of the context.
func maxTokens(req *openai.Request, room int) int {
	want := req.MaxTokens
	if want == 0 && req.Endpoint == openai.Completions {
		want = completionTokens
	}
	if want == 0 || want > room {
		return room
	}
	return want
}

// newChoice takes what the choice needs of the request, and no reference to its
// body. Without a seed it draws one, so that every choice has a replayable key.
func newChoice(index int, ids []int32, req *openai.Request) *choice {
	seed := mathrand.Uint64()
	if req.Seed != nil {
		seed = uint64(*req.Seed)
	}
	return &choice{
		index: index, ids: ids, emit: newEmitter(req.Stop),
		params: Params{
			Temperature: req.Temperature, TopP: req.TopP, TopK: req.TopK, MinP: req.MinP,
			Presence: req.Presence, Frequency: req.Frequency, Repetition: req.Repetition, LogitBias: req.LogitBias,
			Seed: seed, Choice: index, TopLogprobs: req.TopLogprobs, IgnoreEOS: req.IgnoreEOS,
			Sim: bytes.Clone(req.Sim),
		},
	}
}

// usage sums up what was generated.
func (g *generation) usage() openai.Usage {
	u := openai.Usage{PromptTokens: g.ptokens}
	cached := make([]int, g.prompts)
	for _, c := range g.choices {
		u.CompletionTokens += c.generated
		// The choices of a prompt share its prefill; the least reuse among them is
		// what the cache gave the request.
		if c.index == 0 || g.choices[c.index-1].prompt != c.prompt {
			cached[c.prompt] = c.cached
		}
		cached[c.prompt] = min(cached[c.prompt], c.cached)
	}
	details := new(openai.PromptTokensDetails)
	for _, n := range cached {
		details.CachedTokens += n
	}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	u.PromptTokensDetails = details
	return u
}

// asError words any error of an engine for the client. Details of faults that are
// not the client's stay in the log.
func asError(err error) *openai.Error {
	if e, ok := errors.AsType[*openai.Error](err); ok {
		return e
	}
	switch {
	case errors.Is(err, ErrBusy):
		e := openai.Errorf(http.StatusTooManyRequests, "This worker's queue is full. Please try again shortly.")
		e.Code, e.RetryAfter = "rate_limit_exceeded", time.Second
		return e
	case errors.Is(err, errShutdown):
		return openai.Unavailable(time.Second, "This worker is shutting down.")
	}
	return openai.Errorf(http.StatusInternalServerError, "The engine could not generate the answer.")
}

var errNoFinish = errors.New("the engine ended without a finish reason")
