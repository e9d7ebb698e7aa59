package relay

import (
	"bytes"
	"container/list"
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// keptStream is one answer whose client may come back. The job writes to it as to a
// client's connection; a listener reads from it. What is not explained otherwise is
// guarded by all.mu.
type keptStream struct {
	all    *retained
	id     string
	mark   []byte // how its events with an id begin
	owner  owner
	time   time.Duration // that it is kept without client
	size   int64         // most bytes of its events
	ctx    context.Context
	cancel context.CancelFunc // ends the job
	job    *job               // nil for an answer that ended at another gateway
	was    *recordHead        // not nil for one that began there
	steps  stepper            // of the job
	share  *sharing           // nil where nothing is shared
	done   chan struct{}      // closed when the job is over
	given  chan struct{}      // not nil once it is handed over, and then closed
	packed *passedOn          // of the job's goroutine, then of who hands it over
	failed *openai.Error      // what its client is told when it is let go of
	header http.Header        // as the job makes it, until head is taken of it

	head     http.Header // nil until the answer begins
	status   int
	plain    []byte // the body of an answer that is no stream
	events   [][]byte
	first    int // events that were dropped before those
	numbered int // events with an id so far: all but those that end the answer
	sent     int // events that some client was sent
	comment  []byte
	bytes    int64
	isSent   int64 // bytes of events that are kept and were sent
	over     bool  // nothing more comes
	gone     bool  // it was let go of

	at    *listener     // nil while nobody is connected
	away  *list.Element // while nobody is
	timer *time.Timer   // while nobody is
	until time.Time     // while nobody is
	room  chan struct{} // tells the job to look again whether it may write
}

// errNotKept is the end of all writes to a stream that nobody can ask for any more.
var errNotKept = errors.New("the stream is kept no more")

// mostUnsent is how many bytes the job may be ahead of a connected client, which is the
// back-pressure on the worker.
const mostUnsent = 64 << 10

// cost is what an event takes of the budget, with its share of the bookkeeping.
func cost(event []byte) int64 { return int64(len(event)) + 48 }

// Header implements http.ResponseWriter.
func (s *keptStream) Header() http.Header { return s.header }

// WriteHeader implements http.ResponseWriter.
func (s *keptStream) WriteHeader(status int) {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	if s.head == nil {
		s.head, s.status = s.header.Clone(), status
		s.at.poke()
	}
}

// FlushError and SetWriteDeadline make it do what http.ResponseController asks for. There
// is nothing to do: the listener flushes, and has a limit of its own.
func (s *keptStream) FlushError() error                { return nil }
func (s *keptStream) SetWriteDeadline(time.Time) error { return nil }

// Post implements poster.
func (s *keptStream) Post(event []byte) error {
	_, err := s.Write(event)
	return err
}

// Await implements poster.
func (s *keptStream) Await(ctx context.Context) error {
	for s.Full() {
		select {
		case <-s.room:
		case <-s.ctx.Done():
			return nil // the next write says it
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// Full reports whether a connected client is too far behind.
func (s *keptStream) Full() bool {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	return s.at != nil && s.at.unsent >= mostUnsent && !s.gone && s.given == nil
}

// Write takes one whole event, or the body of an answer that is no stream. It does not
// wait.
func (s *keptStream) Write(p []byte) (int, error) {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	switch {
	case s.gone, s.given != nil && !bytes.HasPrefix(p, s.mark):
		return 0, errNotKept // an event with an id is in the ledger already, which is handed over
	case !s.streams():
		s.plain = append(s.plain, p...)
		s.count(int64(len(p)))
		return len(p), nil
	case bytes.HasPrefix(p, s.mark):
		s.numbered++
	case !bytes.HasPrefix(p, []byte("data:")): // a comment, for whoever is there
		if s.at != nil {
			s.comment = bytes.Clone(p)
			s.at.poke()
		}
		return len(p), nil
	}
	s.events = append(s.events, bytes.Clone(p))
	s.count(cost(p))
	s.all.shared.noteLocked(s, !bytes.HasPrefix(p, s.mark))
	if s.at != nil {
		s.at.unsent += cost(p)
		s.at.poke()
	}
	s.all.fitLocked(s)
	return len(p), nil
}

// streams reports whether the answer is a stream that has begun.
func (s *keptStream) streams() bool { return s.head != nil && isEvents(s.head) }

func (s *keptStream) count(n int64) {
	s.bytes += n
	s.all.take(n)
}

// shedLocked drops the oldest event if a client was sent it and it need not be kept. It
// reports whether it did.
func (s *keptStream) shedLocked() bool {
	sent := s.sent
	if s.at != nil {
		sent = min(sent, s.at.next)
	} else if s.isSent <= s.size/2 {
		return false
	}
	if sent <= s.first || len(s.events) == 0 {
		return false
	}
	s.count(-cost(s.events[0]))
	s.isSent -= cost(s.events[0])
	s.events[0] = nil
	s.events = s.events[1:]
	s.first++
	return true
}

// ended notes that the job is over.
func (s *keptStream) ended() {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	s.over = s.given == nil || s.first+len(s.events) > s.numbered
	if w := s.all.shared; w != nil && !w.down {
		w.againLocked(s) // its last event may have come while the store was away
	}
	s.cancel()
	s.at.poke()
}

// poke wakes the job. It never waits.
func (s *keptStream) poke() {
	select {
	case s.room <- struct{}{}:
	default:
	}
}
