package h2

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/http2"
)

// errReset says that a stream's error is the peer's word, not ours.
var errReset = errors.New("reset by the peer")

// errEnded is the end of all writes after a body's last.
var errEnded = errors.New("h2: the stream has ended")

// stream is one request and its answer. All is guarded by the connection's lock.
type stream struct {
	c       *conn
	id      uint32
	changed sync.Cond
	over    bool   // no frame is expected or to be sent any more
	gone    func() // called once when it ends before its time; must not wait

	// What comes.
	in      []byte // unread from at on
	at      int
	room    int64 // left of the window that the peer has
	taken   int64 // read, and not yet given back
	length  int64 // that was announced, negative when none was
	got     int64
	ended   bool // the peer has said all
	inErr   error
	trailer http.Header // nil until the end

	// A client's.
	method   string
	answer   *answer // nil until it is there
	informed int     // answers before it

	inline func(*Batch) bool // see Body.Inline
	poked  bool              // it has left something to Body.Wait

	// What goes.
	window int64 // left of the peer's
	queue  []byte
	last   bool // nothing comes after the queue
	sent   bool // the last frame is on its way
	listed bool // in c.ready
	outErr error

	readBy, writeBy deadline
}

func (c *conn) newStreamLocked(id uint32) *stream {
	s := &stream{c: c, id: id, room: int64(c.window), window: c.peer.window, length: -1}
	s.changed.L = &c.mu
	c.streams[id] = s
	return s
}

// receiveLocked takes a frame of the body, of size bytes with its padding.
func (s *stream) receiveLocked(data []byte, size int64, end bool) error {
	if s.ended {
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeStreamClosed}
	}
	s.got += int64(len(data))
	switch {
	case s.method != "" && s.answer == nil: // a body before its head
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeProtocol}
	case size > s.room:
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeFlowControl}
	case s.length >= 0 && (s.got > s.length || end && s.got < s.length):
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeProtocol}
	}
	s.room -= size
	if s.at > 0 && len(s.in)+len(data) > cap(s.in) {
		s.in = slices.Delete(s.in, 0, s.at)
		s.at = 0
	}
	s.in = append(s.in, data...)
	s.giveLocked(size - int64(len(data)))
	if end {
		return s.endInLocked()
	}
	return nil
}

// endInLocked takes the peer's word that it has said all.
func (s *stream) endInLocked() error {
	if s.length >= 0 && s.got != s.length {
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeProtocol}
	}
	s.ended = true
	s.changed.Broadcast()
	s.doneLocked()
	return nil
}

// giveLocked gives n bytes of the windows back to the peer.
func (s *stream) giveLocked(n int64) {
	s.c.giveLocked(n)
	if s.taken += n; s.taken >= int64(s.c.window)/2 && !s.ended && !s.over {
		_ = s.c.fr.WriteWindowUpdate(s.id, uint32(s.taken))
		s.room += s.taken
		s.taken = 0
	}
}

// Buffers of a stream that grow larger are dropped when they are empty.
const keptBuffer = 4 << 10

// takeLocked is a read that does not wait; n is 0 and err nil where it would have to.
func (s *stream) takeLocked(p []byte) (n int, err error) {
	if s.at < len(s.in) {
		n = copy(p, s.in[s.at:])
		if s.at += n; s.at == len(s.in) {
			s.in, s.at = s.in[:0], 0
			if cap(s.in) > keptBuffer {
				s.in = nil
			}
		}
		s.giveLocked(int64(n))
		return n, nil
	}
	switch {
	case s.ended:
		return 0, io.EOF
	case s.inErr != nil:
		return 0, s.inErr
	}
	return 0, nil
}

// read waits for a part of the body.
func (s *stream) read(p []byte) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	for {
		if n, err = s.takeLocked(p); n > 0 || err != nil {
			s.c.wakeLocked()
			return n, err
		}
		s.changed.Wait()
	}
}

// frameLocked makes a frame of what there is to send.
func (s *stream) frameLocked() {
	n := int(min(int64(len(s.queue)), s.window, s.c.sendWindow, int64(s.c.peer.frame)))
	n = max(n, 0)
	end := s.last && n == len(s.queue)
	if n == 0 && !end {
		return
	}
	_ = s.c.fr.WriteData(s.id, end, s.queue[:n]) // a write into memory
	s.window -= int64(n)
	s.c.sendWindow -= int64(n)
	if s.queue = s.queue[n:]; len(s.queue) == 0 {
		s.queue = nil
		s.changed.Broadcast()
	}
	if end {
		s.endOutLocked()
	}
}

// endOutLocked notes that all was said.
func (s *stream) endOutLocked() {
	s.sent, s.last = true, true
	s.changed.Broadcast()
	s.doneLocked()
}

// write waits until all of p is on its way; last says that it is the body's end.
func (s *stream) write(p []byte, last bool) error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	for len(s.queue) > 0 && s.outErr == nil { // what writeNow has left
		s.changed.Wait()
	}
	switch {
	case s.outErr != nil:
		return s.outErr
	case s.last:
		return errEnded
	}
	s.queue, s.last = p, last
	s.moveLocked()
	s.c.wakeLocked()
	for (len(s.queue) > 0 || s.last && !s.sent) && s.outErr == nil {
		s.changed.Wait()
	}
	return s.outErr
}

func (s *stream) moveLocked() {
	s.c.listLocked(s)
	s.c.moveLocked()
}

// hasRoom says that n bytes can be sent at once.
func (s *stream) hasRoom(n int) bool {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	return s.outErr == nil && !s.last && len(s.queue) == 0 && min(s.window, s.c.sendWindow) >= int64(n) && len(s.c.out) < mostPending
}

// await waits until the queue is empty, or ctx ends.
func (s *stream) await(ctx context.Context) error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if len(s.queue) == 0 || s.outErr != nil {
		return s.outErr
	}
	defer context.AfterFunc(ctx, func() {
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		s.changed.Broadcast()
	})()
	for len(s.queue) > 0 && s.outErr == nil && ctx.Err() == nil {
		s.changed.Wait()
	}
	return s.outErr
}

// writeNow is write without waiting. What the windows do not let pass is kept. It goes with
// the batch, or, with nil, by itself.
func (s *stream) writeNow(b *Batch, p []byte) error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	switch {
	case s.outErr != nil:
		return s.outErr
	case s.last:
		return errEnded
	case len(s.queue) > 0:
		s.queue = slices.Concat(s.queue, p)
		return nil
	}
	s.queue = p
	s.moveLocked()
	s.queue = bytes.Clone(s.queue) // p is the caller's
	if b == nil {
		s.c.wakeLocked()
	} else {
		b.add(s.c)
	}
	return nil
}

// resetLocked tells the peer that the stream is over.
func (s *stream) resetLocked(code http2.ErrCode, err error) {
	if s.over {
		return
	}
	s.c.resets++
	_ = s.c.fr.WriteRSTStream(s.id, code)
	s.c.wakeLocked()
	s.endLocked(err)
}

// endLocked ends the stream before its time. What has come can still be read.
func (s *stream) endLocked(err error) {
	if s.over {
		return
	}
	s.over = true
	if !s.ended && s.inErr == nil {
		s.inErr = err
	}
	if s.outErr == nil {
		s.outErr = err
	}
	s.queue = nil
	s.leaveLocked()
	if s.gone != nil {
		s.gone()
	}
}

// doneLocked ends a stream of which both sides have said all.
func (s *stream) doneLocked() {
	if s.ended && s.sent && !s.over {
		s.over = true
		s.leaveLocked()
	}
}

// leaveLocked takes the stream out of its connection.
func (s *stream) leaveLocked() {
	if s.listed {
		s.listed = false
		s.c.ready = slices.DeleteFunc(s.c.ready, func(o *stream) bool { return o == s })
	}
	s.changed.Broadcast()
	if delete(s.c.streams, s.id); len(s.c.streams) == 0 {
		s.c.role.emptyLocked()
	}
}

// dropLocked gives back what nobody reads any more.
func (s *stream) dropLocked() {
	n := len(s.in) - s.at
	s.in, s.at, s.inline = nil, 0, nil
	s.giveLocked(int64(n))
	s.c.wakeLocked()
}

// deadline is when one side of a stream has to be ready.
type deadline struct{ timer *time.Timer }

// setLocked replaces the deadline; the zero time is none.
func (d *deadline) setLocked(c *conn, t time.Time, expired func()) {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if t.IsZero() {
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(time.Until(t), func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if d.timer == timer { // it was not replaced meanwhile
			expired()
		}
	})
	d.timer = timer
}

// setReadBy bounds the time that the body may take to come.
func (s *stream) setReadBy(t time.Time) error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.readBy.setLocked(s.c, t, func() {
		if s.inErr == nil && !s.ended {
			s.inErr = os.ErrDeadlineExceeded
			s.changed.Broadcast()
		}
	})
	return nil
}

// setWriteBy bounds the time that the peer may take to make room; after it the stream is
// reset.
func (s *stream) setWriteBy(t time.Time) error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.writeBy.setLocked(s.c, t, func() { s.resetLocked(http2.ErrCodeInternal, os.ErrDeadlineExceeded) })
	return nil
}
