package relay

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/internal/h2"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// client is the client's side of one request. The response begins with the first
// event, the whole answer, an error, or the first keep-alive of a silent stream;
// until then its status and headers are open. Safe for concurrent use.
type client struct {
	w         http.ResponseWriter
	posts     poster // w, where that takes events without waiting, else nil
	rc        *http.ResponseController
	keepAlive time.Duration // 0: this answer is no stream
	stall     time.Duration
	stalled   func()        // called when the client leaves an event untaken
	worker    func() string // id of the one that is at work, "" = nobody is asked yet

	// writing is since when a write is under way in Unix ns, 0 while none is. It is
	// read without mu, which the writer holds.
	writing atomic.Int64

	mu     sync.Mutex
	begun  bool
	closed bool
	err    error       // of the connection; nothing is written after it
	wrote  time.Time   // the last event or comment
	timer  *time.Timer // nil without stream
}

func newClient(w http.ResponseWriter, keepAlive, stall time.Duration, stalled func(), worker func() string) *client {
	posts, _ := w.(poster)
	return &client{w: w, posts: posts, rc: http.NewResponseController(w), keepAlive: keepAlive, stall: stall, stalled: stalled, worker: worker}
}

// poster is a connection that takes events without waiting. One that waited with the pen in
// its hand would keep the answer at its worker for as long as the client does not read.
type poster interface {
	// Post takes an event, whether there is room for it or not.
	Post(event []byte) error
	// Await waits until there is room, or ctx or the connection is over.
	Await(ctx context.Context) error
	// Full reports whether there is none.
	Full() bool
}

// full reports whether the client has to read before it should be sent more.
func (c *client) full() bool { return c.posts != nil && c.posts.Full() }

// await waits until it has, or ctx ends; what ends the connection is for the next write.
func (c *client) await(ctx context.Context) { _ = c.posts.Await(ctx) }

// keepOpen makes it a stream that is kept alive.
func (c *client) keepOpen() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wrote = time.Now()
	// tick sets the timer itself, so the timer must be known before it can fire.
	c.timer = time.AfterFunc(never, c.tick)
	c.timer.Reset(min(c.keepAlive, c.stall))
}

// never is about 146 years.
const never = time.Duration(1 << 62)

// tick writes a comment when the stream was silent for long, cuts a client that
// does not read, and sets itself again.
func (c *client) tick() {
	if !c.mu.TryLock() { // a write is under way, or just over
		if at := c.writing.Load(); at != 0 && time.Since(time.Unix(0, at)) >= c.stall {
			c.stalled()
			_ = c.rc.SetWriteDeadline(time.Unix(1, 0)) // wakes the blocked write
			return
		}
		c.timer.Reset(min(c.keepAlive, c.stall) / 4)
		return
	}
	defer c.mu.Unlock()
	if c.closed || c.err != nil {
		return
	}
	if c.full() {
		left := c.stall - time.Since(c.wrote)
		if left <= 0 {
			c.stalled()
			_ = c.rc.SetWriteDeadline(time.Unix(1, 0)) // nobody waits for it any more
			return
		}
		c.timer.Reset(min(c.keepAlive, left))
		return
	}
	silent := time.Since(c.wrote)
	if silent >= c.keepAlive {
		c.timer.Reset(c.stall) // should this very write block
		c.beginLocked(http.StatusOK, streamHeader(c.worker()))
		_ = c.writeLocked([]byte(openai.Comment)) // kept in c.err
		silent = 0
	}
	c.timer.Reset(min(c.keepAlive-silent, c.stall))
}

// streamHeader is the header of a stream that began before any worker answered: it
// names the one that is at work.
func streamHeader(worker string) http.Header {
	h := http.Header{"Content-Type": {"text/event-stream"}, "Cache-Control": {"no-cache"}}
	if worker != "" {
		h.Set(names.Worker, worker)
	}
	return h
}

// started reports whether status and headers went out.
func (c *client) started() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.begun
}

// begin sends status and headers unless they went out.
func (c *client) begin(status int, h http.Header) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.beginLocked(status, h)
}

// beginLocked is begin; mu is held.
func (c *client) beginLocked(status int, h http.Header) {
	if c.begun || c.closed {
		return
	}
	c.begun = true
	maps.Copy(c.w.Header(), h)
	c.w.WriteHeader(status)
}

// event sends one whole event of a stream that has begun.
func (c *client) event(raw []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.writeLocked(raw)
}

// writeLocked writes and flushes one event; mu is held. Events are flushed one by
// one because a token is worth more now than with the next one. Where the connection is
// no poster it blocks while the client's window is full; else hold waits for room before it
// takes the pen. Either is the back-pressure on the worker.
func (c *client) writeLocked(raw []byte) error {
	if c.err != nil {
		return c.err
	}
	if c.closed {
		return errClosed
	}
	c.wrote = time.Now()
	if c.posts != nil {
		c.err = c.posts.Post(raw)
		return c.err
	}
	c.writing.Store(c.wrote.UnixNano())
	defer c.writing.Store(0)
	if _, c.err = c.w.Write(raw); c.err == nil {
		c.err = c.rc.Flush()
	}
	return c.err
}

// enter begins to write events without waiting, for the goroutine that reads answers. It
// returns nil where that is not possible: the client's connection is no HTTP/2, somebody
// writes, or the answer has not begun or is over. Otherwise leave follows.
func (c *client) enter() *h2.Writer {
	w, ok := c.w.(*h2.Writer)
	if !ok || !c.mu.TryLock() {
		return nil
	}
	if !c.begun || c.closed || c.err != nil {
		c.mu.Unlock()
		return nil
	}
	return w
}

// leave ends what enter began.
func (c *client) leave() { c.mu.Unlock() }

// eventNow sends one whole event with the batch, between enter and leave.
func (c *client) eventNow(b *h2.Batch, w *h2.Writer, raw []byte) error {
	c.wrote = time.Now()
	c.err = w.WriteNow(b, raw)
	return c.err
}

// errClosed is the end of all writes after the answer's last byte.
var errClosed = errors.New("the answer is complete")

// whole sends a complete answer. A stream that has begun takes an error instead.
func (c *client) whole(status int, h http.Header, body []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.begun {
		return errClosed
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	_ = c.rc.SetWriteDeadline(time.Now().Add(c.stall)) // where it cannot be set, Envoy's time-outs hold
	c.beginLocked(status, h)
	c.closed = true
	_, c.err = c.w.Write(body)
	return c.err
}

// fail ends the answer with an error: a whole response, or one event where the
// stream has begun.
func (c *client) fail(e *openai.Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	if c.begun {
		_ = c.writeLocked(e.Event()) // the client may be gone
	} else {
		c.begun = true
		e.Write(c.w)
	}
	c.closed = true
}

// last ends a stream that has begun with one more event.
func (c *client) last(data []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		_ = c.writeLocked(slices.Concat([]byte("data: "), data, []byte("\n\n"))) // the client may be gone
	}
	c.closed = true
}

// close ends the answer; nothing is written after it.
func (c *client) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	if c.full() {
		_ = c.rc.SetWriteDeadline(time.Now().Add(c.stall)) // where it cannot be set, Envoy's time-outs hold
	}
	if c.timer != nil {
		c.timer.Stop()
	}
}
