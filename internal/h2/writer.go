package h2

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/net/http2"
)

// mostBuffered is how much of an answer waits for more of it, in bytes.
const mostBuffered = 4 << 10

// Writer is the http.ResponseWriter of a handler. It also does what an
// http.ResponseController asks for: Flush, and deadlines. Not safe for concurrent use, but
// deadlines may be set by others.
type Writer struct {
	s      *stream
	req    *http.Request
	header http.Header
	status int
	sent   bool // the header
	length int64
	wrote  int64
	buf    []byte
}

// Header implements http.ResponseWriter.
func (w *Writer) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter. The header goes out with what follows, or
// with Flush.
func (w *Writer) WriteHeader(status int) {
	switch {
	case w.status != 0:
	case status < 100 || status > 999:
		panic(fmt.Sprintf("h2: status %d", status))
	case status < 200:
		w.head(status, false)
	default:
		w.status = status
		if n, err := strconv.ParseInt(w.header.Get("Content-Length"), 10, 64); err == nil && n >= 0 {
			w.length = n
		} else {
			w.header.Del("Content-Length")
		}
	}
}

// Write implements http.ResponseWriter.
func (w *Writer) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	if !hasBody(http.MethodGet, w.status) {
		return 0, http.ErrBodyNotAllowed
	}
	if w.wrote += int64(len(p)); w.length >= 0 && w.wrote > w.length {
		return 0, http.ErrContentLength
	}
	if w.req.Method == http.MethodHead {
		return len(p), nil
	}
	w.buf = append(w.buf, p...)
	if len(w.buf) <= mostBuffered {
		return len(p), nil
	}
	if err := w.FlushError(); err != nil {
		return 0, err
	}
	return len(p), nil
}

// FlushError sends what was written, and waits while the client's window is full.
func (w *Writer) FlushError() error {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	if !w.sent {
		w.sniff()
		w.head(w.status, false)
	}
	if len(w.buf) == 0 {
		return w.err()
	}
	err := w.s.write(w.buf, false)
	if w.buf = w.buf[:0]; cap(w.buf) > 2*mostBuffered {
		w.buf = nil
	}
	return err
}

// Flush implements http.Flusher.
func (w *Writer) Flush() { _ = w.FlushError() } // the next write says it, too

func (w *Writer) err() error {
	w.s.c.mu.Lock()
	defer w.s.c.mu.Unlock()
	return w.s.outErr
}

// SetReadDeadline bounds the time that the request's body may take.
func (w *Writer) SetReadDeadline(t time.Time) error { return w.s.setReadBy(t) }

// SetWriteDeadline bounds the time that the client may take to make room. After it the
// stream is reset.
func (w *Writer) SetWriteDeadline(t time.Time) error { return w.s.setWriteBy(t) }

// Room reports whether n bytes can be written without waiting: the header is out, nothing
// waits to be sent, and the client's windows are large enough.
func (w *Writer) Room(n int) bool { return w.sent && len(w.buf) == 0 && w.s.hasRoom(n) }

// WriteNow sends p with the batch, and never waits. Room says whether it should be used.
func (w *Writer) WriteNow(b *Batch, p []byte) error {
	w.wrote += int64(len(p))
	return w.s.writeNow(b, p)
}

// Post sends p, or what the client's windows let pass of it, and keeps the rest, which goes
// as they open. It never waits: Await before it bounds what is kept to one p, and one more
// for each that must not wait.
func (w *Writer) Post(p []byte) error {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	if !w.sent {
		w.head(w.status, false)
	}
	w.wrote += int64(len(p))
	if len(w.buf) > 0 {
		p = append(w.buf, p...)
		w.buf = nil
	}
	return w.s.writeNow(nil, p)
}

// Await waits until nothing is kept of what was posted, or ctx ends, and returns the error
// of the stream, if it has one. It may be called beside the other methods.
func (w *Writer) Await(ctx context.Context) error { return w.s.await(ctx) }

// Full reports whether something is kept of what was posted. It may be called beside the
// other methods.
func (w *Writer) Full() bool {
	w.s.c.mu.Lock()
	defer w.s.c.mu.Unlock()
	return len(w.s.queue) > 0 && w.s.outErr == nil
}

// sniff says what the body is, where the handler does not.
func (w *Writer) sniff() {
	if _, said := w.header["Content-Type"]; !said && len(w.buf) > 0 && w.header.Get("Content-Encoding") == "" {
		w.header.Set("Content-Type", http.DetectContentType(w.buf))
	}
}

// head sends a header block.
func (w *Writer) head(status int, end bool) {
	c := w.s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if status >= 200 {
		w.sent = true
		if _, said := w.header["Date"]; !said {
			w.header.Set("Date", time.Now().UTC().Format(http.TimeFormat))
		}
	}
	if w.s.over {
		return
	}
	c.field(":status", strconv.Itoa(status))
	c.fields(w.header)
	c.headersLocked(w.s.id, end)
	if end {
		w.s.endOutLocked()
	}
	c.wakeLocked()
}

// end ends the answer, with an error where it is not whole, and drops what of the request
// was not read.
func (w *Writer) end(whole bool) {
	if whole {
		whole = w.finish()
	}
	s := w.s
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.readBy.setLocked(s.c, time.Time{}, nil)
	s.writeBy.setLocked(s.c, time.Time{}, nil)
	switch {
	case !whole:
		s.resetLocked(http2.ErrCodeInternal, errEnded)
	case !s.ended:
		s.resetLocked(http2.ErrCodeNo, errEnded)
	}
	s.dropLocked()
}

// finish sends the rest of the answer. It returns false when that is not whole.
func (w *Writer) finish() bool {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	body := hasBody(w.req.Method, w.status)
	if body && w.length >= 0 && w.wrote < w.length {
		return false
	}
	if !w.sent {
		w.sniff()
		if body && w.length < 0 {
			w.header.Set("Content-Length", strconv.Itoa(len(w.buf)))
		}
		w.head(w.status, len(w.buf) == 0)
		if len(w.buf) == 0 {
			return true
		}
	}
	return w.s.write(w.buf, true) == nil
}
