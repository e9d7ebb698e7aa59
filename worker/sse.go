package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// sse is the sink of a streamed answer. It writes each event as it comes, from
// any goroutine, and a comment whenever the stream has been silent for long. The
// response begins with the first event or comment, so that a failure before it is
// still an ordinary HTTP error.
type sse struct {
	w         http.ResponseWriter
	rc        *http.ResponseController
	chunks    *openai.Chunks
	chat      bool
	withUsage bool // the last chunk carries the usage
	keepAlive time.Duration
	first     func()      // called once, at the first token
	begins    func() bool // called before comments: false = nothing may be sent
	noDone    bool        // a Fault: the stream ends without its last event

	mu      sync.Mutex
	begun   bool
	started bool // first was called
	closed  bool
	err     error     // of the connection; nothing is written after it
	last    time.Time // of the last write
	armed   time.Time // when the write deadline was last moved, zero = none is set
	timer   *time.Timer
	buf     []byte // of the event being written, reused
	reasons []string
}

// errGone is the end of a stream whose client cannot be written to.
var errGone = errors.New("the client is gone")

// newSSE prepares a stream; the clock of its silence starts now.
func newSSE(w http.ResponseWriter, a openai.Answer, usage bool, keepAlive time.Duration) *sse {
	s := &sse{
		w: w, rc: http.NewResponseController(w), chunks: openai.NewChunks(a, usage), chat: a.Endpoint == openai.Chat, withUsage: usage,
		keepAlive: keepAlive, last: time.Now(), first: func() {}, begins: func() bool { return true },
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timer = time.AfterFunc(keepAlive, s.tick)
	return s
}

// tick writes a comment if nothing was written for keepAlive, and sets itself
// again. Moving the timer here, not at each token, keeps tokens cheap.
func (s *sse) tick() {
	if !s.mu.TryLock() { // a write is going on: the stream is not silent
		time.AfterFunc(s.keepAlive, s.tick)
		return
	}
	defer s.mu.Unlock()
	if s.closed || s.err != nil {
		return
	}
	silent := time.Since(s.last)
	if silent >= s.keepAlive && s.begins() {
		s.buf = append(s.buf[:0], openai.Comment...)
		_ = s.writeLocked() // kept in s.err
		silent = 0
	}
	s.timer.Reset(s.keepAlive - silent)
}

// text implements sink.
func (s *sse) text(c *choice, text []byte, probs []logprob) error {
	var raw []byte
	if len(probs) > 0 {
		raw = s.logprobs(probs)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.started {
		s.started = true
		s.first()
	}
	s.buf = s.buf[:0]
	if !c.begun {
		s.buf = s.chunks.AppendRole(s.buf, c.index)
		if len(c.echo) > 0 {
			s.buf = s.chunks.AppendText(s.buf, c.index, c.echo, nil)
		}
	}
	if len(text) > 0 || raw != nil || len(c.sent) > 0 || len(c.calls) > 0 {
		at := len(s.buf)
		if len(c.calls) > 0 {
			s.buf = s.chunks.AppendCalls(s.buf, c.index, text, c.calls, raw)
		} else {
			s.buf = s.chunks.AppendText(s.buf, c.index, text, raw)
		}
		s.buf = s.extend(s.buf, at, c)
	}
	return s.writeLocked()
}

// finish implements sink.
func (s *sse) finish(c *choice, reason string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reasons = append(s.reasons, reason)
	s.buf = s.extend(s.chunks.AppendFinish(s.buf[:0], c.index, reason), 0, c)
	return s.writeLocked()
}

// extend adds what the relay wants to know to an event of c that begins at the index
// at of buf.
func (s *sse) extend(buf []byte, at int, c *choice) []byte {
	if len(c.sent) > 0 {
		buf = s.chunks.InsertTokens(buf, at, c.sent)
	}
	if r := c.resumed; r.mode != "" {
		buf = s.chunks.InsertKV(buf, at, r.mode, r.restored, r.computed)
		c.resumed.mode = ""
	}
	return buf
}

// logprobs words probabilities in the form of the endpoint. It is the only part of
// an event that goes through encoding/json, because few clients ask for it.
func (s *sse) logprobs(probs []logprob) []byte {
	var v any = textLogprobs(probs)
	if s.chat {
		v = chatLogprobs(probs)
	}
	raw, err := json.Marshal(v)
	if err != nil { // finite numbers and valid strings always marshal
		return nil
	}
	return raw
}

// begin sends the response header if it has not been sent.
func (s *sse) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buf = s.buf[:0]
	_ = s.writeLocked() // kept in s.err
}

// complete ends a whole answer.
func (s *sse) complete(u openai.Usage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buf = s.buf[:0]
	if s.withUsage {
		s.buf = s.chunks.AppendUsage(s.buf, u)
	}
	if !s.noDone {
		s.buf = append(s.buf, openai.Done...)
	}
	_ = s.writeLocked() // kept in s.err
}

// half sends half of an event, on a Fault's request.
func (s *sse) half() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buf = s.chunks.AppendText(s.buf[:0], 0, []byte("never to be read"), nil)
	s.buf = s.buf[:len(s.buf)/2]
	_ = s.writeLocked() // kept in s.err
}

// garble implements garbler: an event that looks like a chunk and is none.
func (s *sse) garble() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buf = append(s.buf[:0], "data: {\"choices\":[{\"index\":0,\"text\"\n\n"...)
	return s.writeLocked()
}

// fail ends a broken answer: with an HTTP error if nothing was sent yet, else
// with an error event and no [DONE].
func (s *sse) fail(e *openai.Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.begun {
		s.begun, s.closed = true, true
		e.Write(s.w)
		return
	}
	s.buf = append(s.buf[:0], e.Event()...)
	_ = s.writeLocked() // kept in s.err
}

// close stops the comments. It must be called before the handler returns.
func (s *sse) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.timer.Stop()
	if !s.armed.IsZero() { // the connection serves other requests after this one
		_ = s.rc.SetWriteDeadline(time.Time{})
	}
}

// stuckAfter is how many silent periods a client may take to read what was
// written; then it is taken for gone, so that it does not hold its sequence.
const stuckAfter = 4

// armLocked moves the write deadline ahead, now and then rather than at every
// token. The comments keep it ahead in silence too, where HTTP/2 would act on it.
func (s *sse) armLocked(now time.Time) {
	if s.armed.IsZero() || now.Sub(s.armed) >= s.keepAlive/2 {
		_ = s.rc.SetWriteDeadline(now.Add(stuckAfter * s.keepAlive)) // not all transports have deadlines
		s.armed = now
	}
}

// writeLocked sends s.buf, after the header at the first time.
func (s *sse) writeLocked() error {
	if s.err != nil {
		return s.err
	}
	if !s.begun {
		s.begun = true
		h := s.w.Header()
		h.Set("Content-Type", "text/event-stream; charset=utf-8")
		h.Set("Cache-Control", "no-cache")
		h.Set("X-Accel-Buffering", "no") // nginx in front must not buffer
		s.w.WriteHeader(http.StatusOK)
	}
	s.last = time.Now()
	s.armLocked(s.last)
	var err error
	if len(s.buf) > 0 {
		_, err = s.w.Write(s.buf)
	}
	if err == nil {
		err = s.rc.Flush()
	}
	if err != nil {
		s.err = fmt.Errorf("%w: %w", errGone, err)
	}
	return s.err
}
