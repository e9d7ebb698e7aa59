package relay

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// listener is one connection of a client to a stream that is kept. The goroutine of the
// handler runs it.
type listener struct {
	s     *keptStream
	w     http.ResponseWriter
	rc    *http.ResponseController
	stall time.Duration // that one write may take
	wake  chan struct{}

	headed bool // status and headers went out; of the goroutine

	// Guarded by s.all.mu.
	next     int   // the first event that the client was not sent
	unsent   int64 // bytes from there on
	begun    bool  // status and headers were taken to be sent
	replaced bool  // another connection has the stream
	over     bool  // the handler is about to return, w must not be used
}

func newListener(s *keptStream, w http.ResponseWriter, stall time.Duration) *listener {
	return &listener{s: s, w: w, rc: http.NewResponseController(w), stall: stall, wake: make(chan struct{}, 1)}
}

// poke has the listener, if there is one, look for what is new. It never waits.
func (l *listener) poke() {
	if l == nil {
		return
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// replaceLocked ends it for the sake of another connection. One that does not read is
// not waited for.
func (l *listener) replaceLocked() {
	l.replaced = true
	l.poke()
	if !l.over {
		_ = l.rc.SetWriteDeadline(time.Now().Add(lastWords)) // where it cannot be set, Envoy's time-outs hold
	}
}

// portion is what there is to send.
type portion struct {
	status int // with head when they are to go out first
	head   http.Header
	events [][]byte
	other  []byte        // a comment, or the body of what is no stream
	failed *openai.Error // in place of the rest
	last   bool          // nothing comes after it
}

// mostAtOnce bounds the events between two looks at the stream.
const mostAtOnce = 64

// serveOrAbort is serve, but a connection that ends before the answer is cut: to return
// would end it as if the answer were whole.
func (l *listener) serveOrAbort(ctx context.Context) {
	if !l.serve(ctx) {
		panic(http.ErrAbortHandler)
	}
}

// serve sends what there is and what comes, until the end of the answer or ctx's. It
// returns false when the client got neither the end nor an error.
func (l *listener) serve(ctx context.Context) (ended bool) {
	slow := time.AfterFunc(never, func() {
		l.s.all.mu.Lock()
		defer l.s.all.mu.Unlock()
		if !l.over {
			_ = l.rc.SetWriteDeadline(time.Unix(1, 0)) // wakes the blocked write
		}
	})
	defer slow.Stop()
	defer l.s.all.detach(l)
	for {
		p, any := l.look()
		if any {
			slow.Reset(l.stall)
			err := l.send(p)
			slow.Stop()
			if err != nil || p.last {
				return err == nil || errors.Is(err, errClosed)
			}
			continue
		}
		select {
		case <-l.wake:
		case <-ctx.Done():
			return false
		}
	}
}

// look returns what is new, if anything is.
func (l *listener) look() (p portion, any bool) {
	s := l.s
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	if s.head != nil && !l.begun {
		p.status, p.head, any = s.status, s.head, true
		l.begun = true
	}
	switch {
	case l.replaced:
		p.failed = takenOver()
	case s.gone && s.failed != nil:
		p.failed = s.failed
	case s.gone, s.over && s.head == nil:
		p.failed = broke()
	case l.next < s.first+len(s.events):
		n := s.all.shared.heldLocked(s) - l.next
		if n <= 0 || s.given != nil {
			return p, any
		}
		rest := s.events[l.next-s.first:][:n]
		p.events = slices.Clone(rest[:min(len(rest), mostAtOnce)]) // the stream may drop its own
	case s.comment != nil:
		p.other, s.comment = s.comment, nil
	case s.over:
		p.other, p.last = s.plain, true
	default:
		return p, any
	}
	return p, true
}

// takenOver is what a connection is told when another one has its stream.
func takenOver() *openai.Error {
	e := openai.Errorf(http.StatusConflict, "Another connection goes on with this stream.")
	e.Code = "stream_taken_over"
	return e
}

// send writes to the client and takes note of it.
func (l *listener) send(p portion) error {
	if p.failed != nil {
		l.fail(p.failed)
		return errClosed
	}
	if p.head != nil {
		maps.Copy(l.w.Header(), p.head)
		if isEvents(p.head) {
			l.w.Header().Set(names.Stream, l.s.id)
		}
		l.headed = true
		l.w.WriteHeader(p.status)
	}
	for _, e := range p.events {
		if _, err := l.w.Write(e); err != nil {
			return err
		}
	}
	if _, err := l.w.Write(p.other); err != nil {
		return err
	}
	if err := l.rc.Flush(); err != nil {
		return err
	}
	l.sent(p)
	return nil
}

// sent notes the events that went out.
func (l *listener) sent(p portion) {
	s := l.s
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	if s.gone || s.at != l {
		return
	}
	for _, e := range p.events {
		l.next++
		l.unsent -= cost(e)
		if l.next > s.sent {
			s.sent = l.next
			s.isSent += cost(e)
		}
	}
	s.poke()
}

// fail ends the connection, and not the stream, with an error.
func (l *listener) fail(e *openai.Error) {
	if l.headed {
		_, _ = l.w.Write(e.Event()) // the client may be gone
		return
	}
	e.Write(l.w)
}

// discardBody reads what a client that comes back says once more, so that one which
// writes all of its request before it listens hears the answer.
func (r *Relay) discardBody(w http.ResponseWriter, in *http.Request) {
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Now().Add(r.cfg.BodyTimeout)) // where it cannot be set, Envoy's time-outs hold
	defer func() { _ = rc.SetReadDeadline(time.Time{}) }()
	_, _ = io.Copy(io.Discard, io.LimitReader(in.Body, int64(r.cfg.Policy.Mesh.MaxBody))) // nothing in it counts
}
