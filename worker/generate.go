package worker

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// generate serves one of the two generation endpoints.
func (s *Server) generate(ep openai.Endpoint) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		engine, refused := s.life.begin()
		if refused != nil {
			s.turnDown(w, r, refused)
			return
		}
		defer s.life.end()
		defer s.metrics.finished.Add(1)
		started := time.Now()
		g, err := s.prepare(w, r, engine, ep)
		if err == nil && g.fault.Status != 0 {
			err = simulated(g.fault.Status)
		}
		if err != nil && clientLeft(r) && errors.Is(err, context.Cause(r.Context())) {
			s.abandon()
		}
		if err != nil {
			s.report(err)
			s.turnDown(w, r, asError(err))
			return
		}
		g.started, g.pace = started, s.metrics.pace
		if g.stream {
			s.serveStream(w, r, g)
		} else {
			s.serveWhole(w, r, g)
		}
	}
}

// simulated is the error of a Fault's status.
func simulated(status int) *openai.Error {
	e := openai.Errorf(status, "Simulated fault.")
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		e.RetryAfter = time.Second
	}
	return e
}

// prepare does all that can fail for reasons of the request.
func (s *Server) prepare(w http.ResponseWriter, r *http.Request, e Engine, ep openai.Endpoint) (*generation, error) {
	body, bad := s.readBody(w, r)
	if bad != nil {
		return nil, bad
	}
	return s.plan(r.Context(), e, ep, body, s.caller(r))
}

// report counts a request that failed, and logs it when the fault is ours.
func (s *Server) report(err error) {
	e := asError(err)
	if e.Status < 500 {
		return
	}
	s.metrics.failed.Add(1)
	s.cfg.Log.Error("request failed", "status", e.Status, "err", err)
}

// abandon counts a request whose client left, and ends it. It does not return: to return
// would end the answer as if it were whole, and a client that has only closed its sending
// side, which looks the same from here, would read that.
func (s *Server) abandon() {
	s.metrics.success.WithLabelValues(s.modelName(), "abort").Inc()
	panic(http.ErrAbortHandler)
}

// done counts a request that was answered in full.
func (s *Server) done(g *generation, reasons []string) {
	for _, reason := range reasons {
		s.metrics.success.WithLabelValues(s.modelName(), reason).Inc()
	}
	took := time.Since(g.started).Seconds()
	s.metrics.e2e.WithLabelValues(s.modelName()).Observe(took)
	s.metrics.pace.latency.add(took)
}

// firstToken notes the time to the first token of a request, of whichever choice.
func (s *Server) firstToken(g *generation) {
	s.metrics.ttft.WithLabelValues(s.modelName()).Observe(time.Since(g.started).Seconds())
}

// serveStream answers with server-sent events.
func (s *Server) serveStream(w http.ResponseWriter, r *http.Request, g *generation) {
	st := newSSE(w, g.answer, g.withUsage, s.cfg.KeepAlive)
	st.first, st.begins, st.noDone = func() { s.firstToken(g) }, g.request.Begin, g.fault.NoDone
	defer st.close()
	err := g.run(r.Context(), st)
	switch {
	case err == nil:
		st.complete(g.usage())
		s.done(g, st.reasons)
	case errors.Is(err, errTruncated):
		st.begin()
	case errors.Is(err, errCut), errors.Is(err, errCutInside):
		if errors.Is(err, errCutInside) {
			st.half()
		}
		st.close()
		panic(http.ErrAbortHandler)
	case errors.Is(err, errGone), clientLeft(r):
		s.abandon()
	default:
		s.report(err)
		st.fail(asError(err))
	}
}

// clientLeft tells a lost client from the worker's own end, which also ends the
// request's context.
func clientLeft(r *http.Request) bool {
	cause := context.Cause(r.Context())
	return cause != nil && !errors.Is(cause, errShutdown)
}

// serveWhole answers with one JSON object.
func (s *Server) serveWhole(w http.ResponseWriter, r *http.Request, g *generation) {
	out := &whole{texts: make([]text, len(g.choices)), first: func() { s.firstToken(g) }}
	err := g.run(r.Context(), out)
	switch {
	case err == nil:
		writeJSON(w, http.StatusOK, out.answer(g))
		s.done(g, out.reasons())
	case errors.Is(err, errTruncated):
		writeJSON(w, http.StatusOK, out.answer(g))
	case errors.Is(err, errCut), errors.Is(err, errCutInside):
		panic(http.ErrAbortHandler)
	case clientLeft(r):
		s.abandon()
	default:
		s.report(err)
		asError(err).Write(w)
	}
}

// whole is the sink of an answer without streaming. Each choice has its own text,
// so that no lock is needed.
type whole struct {
	texts []text
	first func()
	once  sync.Once
}

type text struct {
	body   bytes.Buffer
	probs  []logprob
	calls  []openai.ToolCall
	reason *string
}

// text implements sink.
func (o *whole) text(c *choice, b []byte, probs []logprob) error {
	o.once.Do(o.first)
	t := &o.texts[c.index]
	if !c.begun {
		t.body.Write(c.echo)
	}
	t.body.Write(b)
	t.probs = append(t.probs, probs...)
	t.calls = appendCalls(t.calls, c.calls)
	return nil
}

// finish implements sink.
func (o *whole) finish(c *choice, reason string) error {
	o.texts[c.index].reason = &reason
	return nil
}

// reasons are the finish reasons of the choices that have one.
func (o *whole) reasons() []string {
	var out []string
	for _, t := range o.texts {
		if t.reason != nil {
			out = append(out, *t.reason)
		}
	}
	return out
}

// answer words the response of the request's endpoint.
func (o *whole) answer(g *generation) any {
	usage, a := g.usage(), g.answer
	if a.Endpoint == openai.Chat {
		out := openai.ChatCompletion{
			ID: a.ID, Object: "chat.completion", Created: a.Created, Model: a.Model, SystemFingerprint: a.Fingerprint, Usage: &usage,
		}
		for i := range o.texts {
			t := &o.texts[i]
			choice := openai.ChatChoice{
				Index: i, Message: openai.ChatMessage{Role: "assistant", Content: t.body.String(), ToolCalls: t.calls}, FinishReason: t.reason,
			}
			if g.choices[i].params.TopLogprobs >= 0 {
				choice.Logprobs = chatLogprobs(t.probs)
			}
			out.Choices = append(out.Choices, choice)
		}
		return out
	}
	out := openai.Completion{
		ID: a.ID, Object: "text_completion", Created: a.Created, Model: a.Model, SystemFingerprint: a.Fingerprint, Usage: &usage,
	}
	for i := range o.texts {
		t := &o.texts[i]
		choice := openai.TextChoice{Index: i, Text: t.body.String(), FinishReason: t.reason}
		if g.choices[i].params.TopLogprobs >= 0 {
			choice.Logprobs = textLogprobs(t.probs)
		}
		out.Choices = append(out.Choices, choice)
	}
	return out
}
