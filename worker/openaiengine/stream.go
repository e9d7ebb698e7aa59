package openaiengine

import (
	"errors"
	"net/http"
	"slices"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// stream is the client's side of a continuation.
type stream struct {
	w      http.ResponseWriter
	c      *continuation
	model  string
	chunks *openai.Chunks // nil before the first event
	usage  openai.Usage

	text    *worker.Text
	has     int // bytes that the client has of what text will still give
	stopped bool
	begun   bool // some of the answer was written
	said    int  // tokens that the server has said so far
}

// newStream begins the client's side of c.
func newStream(w http.ResponseWriter, c *continuation, model string) *stream {
	return &stream{w: w, c: c, model: model, text: c.stops(), has: c.delivered.TextBytes}
}

// count counts the tokens of an event, one where the server gives no ids.
func (s *stream) count(got *chunk) {
	if len(got.Choices) == 0 {
		return
	}
	if ch := got.Choices[0]; len(ch.TokenIDs) > 0 {
		s.said += len(ch.TokenIDs)
	} else if ch.Text != "" {
		s.said++
	}
}

// repeats takes the tokens that the client has out of an event, and keeps their text.
// It returns false when they are others; nothing was written by then.
func (s *stream) repeats(got *chunk) bool {
	c := s.c
	if len(c.again) == 0 || len(got.Choices) == 0 {
		return true
	}
	ch := &got.Choices[0]
	n := min(len(c.again), len(ch.TokenIDs))
	if !slices.Equal(ch.TokenIDs[:n], c.again[:n]) || ch.FinishReason != nil && n < len(c.again) {
		return false
	}
	c.again, ch.TokenIDs = c.again[n:], ch.TokenIDs[n:]
	if len(c.again) > 0 {
		c.text = append(c.text, ch.Text...)
	}
	return true
}

// add writes one event of the server.
func (s *stream) add(got chunk) error {
	if s.chunks == nil {
		s.chunks = openai.NewChunks(openai.Answer{
			Endpoint: s.c.req.Endpoint, ID: got.ID, Model: s.model, Created: got.Created,
		}, s.c.req.IncludeUsage)
		s.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		s.w.WriteHeader(http.StatusOK)
	}
	if got.Usage != nil {
		s.usage = *got.Usage
	}
	if len(got.Choices) == 0 {
		return nil
	}
	return s.write(s.event(got.Choices[0], false))
}

// event is what the client is told of a choice, with all text that was held back if it is
// the last.
func (s *stream) event(ch chunkChoice, last bool) []byte {
	text := s.release(&ch, last)
	var buf []byte
	if len(text) > 0 || len(ch.TokenIDs) > 0 {
		first := !s.begun
		s.begun = true
		buf = s.chunks.AppendText(buf, 0, text, nil)
		if len(ch.TokenIDs) > 0 {
			buf = s.chunks.InsertTokens(buf, 0, ch.TokenIDs)
		}
		if first {
			buf = s.chunks.InsertKV(buf, 0, s.c.mode, 0, s.c.prompt+s.c.given)
		}
	}
	if ch.FinishReason != nil {
		buf = s.chunks.AppendFinish(buf, 0, *ch.FinishReason)
	}
	return buf
}

// release is the text that may be written with an event, and the end of the answer in
// the event if a stop string ends it here.
func (s *stream) release(ch *chunkChoice, last bool) []byte {
	all := append(s.c.text, ch.Text...)
	s.c.text = nil
	text, stopped := s.text.Push(all)
	switch {
	case stopped:
		s.stopped, ch.FinishReason = true, new("stop")
		s.usage = openai.Usage{CompletionTokens: s.said}
		if includesStop(s.c.req) {
			text = append(slices.Clip(text), s.text.Stop()...)
		}
	case ch.FinishReason != nil || last:
		text = append(slices.Clone(text), s.text.Flush()...)
	}
	n := min(s.has, len(text))
	s.has -= n
	return text[n:]
}

// end writes what is still held back, as servers may end without a finish_reason, the
// usage, and the last event. How much of the prompt came out of a cache only the first
// server knows; what this one reused is the answer's beginning too, and is not told.
func (s *stream) end() error {
	if s.chunks == nil {
		return s.broken(errors.New("the server's stream was empty"))
	}
	var buf []byte
	if !s.stopped {
		buf = s.event(chunkChoice{}, true)
	}
	if s.c.req.IncludeUsage {
		u := s.usage
		u.PromptTokens, u.PromptTokensDetails = s.c.prompt, nil
		u.CompletionTokens += s.c.given
		u.TotalTokens = u.PromptTokens + u.CompletionTokens
		buf = s.chunks.AppendUsage(buf, u)
	}
	_ = s.write(append(buf, openai.Done...)) // the client may be gone
	return nil
}

// broken ends a stream that the server did not end.
func (s *stream) broken(cause error) error {
	e := openai.Errorf(http.StatusBadGateway, "The server behind this worker broke off the answer.")
	if s.chunks == nil {
		e.Write(s.w)
		return cause
	}
	_ = s.write(e.Event()) // the client may be gone
	return cause
}

// write sends b at once.
func (s *stream) write(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	if _, err := s.w.Write(b); err != nil {
		return err
	}
	return http.NewResponseController(s.w).Flush()
}
