package h2

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/net/http2"
)

// most1xx bounds the informational answers to one request.
const most1xx = 16

// clientConn is a transport's connection.
type clientConn struct {
	*conn
	t      *Transport
	hasSet chan struct{} // closed when the server's SETTINGS came
	next   uint32        // id of the next stream
	away   bool          // no new streams
	timer  *time.Timer   // looks whether the server is there
	asked  int64         // when it was last pinged, Unix ns
}

func newClientConn(t *Transport, nc net.Conn) *clientConn {
	c := &clientConn{conn: newConn(nc, t.Window, t.Share), t: t, hasSet: make(chan struct{}), next: 1}
	c.role = c
	return c
}

func (c *clientConn) start() {
	c.mu.Lock()
	c.out = append(c.out, http2.ClientPreface...)
	c.mu.Unlock()
	c.hello(http2.Setting{ID: http2.SettingEnablePush, Val: 0})
	go c.serve()
}

// settledLocked implements role.
func (c *clientConn) settledLocked() {
	close(c.hasSet)
	if c.t.PingAfter > 0 {
		c.timer = time.AfterFunc(c.t.PingAfter, c.check)
	}
}

// check pings a server that was silent for long, and ends the connection of one that does
// not answer.
func (c *clientConn) check() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	seen, now := c.seen.Load(), time.Now()
	switch silent := now.Sub(time.Unix(0, seen)); {
	case silent < c.t.PingAfter:
		c.timer.Reset(c.t.PingAfter - silent)
	case c.asked <= seen:
		c.asked = now.UnixNano()
		_ = c.fr.WritePing(false, [8]byte{'a', 'l', 'i', 'v', 'e'})
		c.wakeLocked()
		c.timer.Reset(c.t.PingTimeout)
	default:
		c.failLocked(fmt.Errorf("h2: no answer to a ping within %v", c.t.PingTimeout))
		go func() { _ = c.nc.Close() }() // so that nobody waits in a read or write
	}
}

// pongLocked implements role.
func (c *clientConn) pongLocked() {}

// goAwayLocked implements role: the server looks at no stream after the one it names.
func (c *clientConn) goAwayLocked(f *http2.GoAwayFrame) {
	c.leaveLocked()
	for id, s := range c.streams {
		if id > f.LastStreamID {
			s.endLocked(fmt.Errorf("%w: GOAWAY %v", errUnprocessed, f.ErrCode))
		}
	}
	c.emptyLocked()
}

// leaveLocked has no more requests use the connection.
func (c *clientConn) leaveLocked() {
	if !c.away {
		c.away = true
		go c.t.remove(c) // its lock comes before ours
	}
}

// isAway reports whether no more requests may use the connection.
func (c *clientConn) isAway() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.away
}

// carries reports whether it has requests.
func (c *clientConn) carries() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.streams) > 0
}

// why is the error that ended the connection.
func (c *clientConn) why() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// emptyLocked implements role.
func (c *clientConn) emptyLocked() {
	switch {
	case c.err != nil:
		c.leaveLocked()
		if c.timer != nil {
			c.timer.Stop()
		}
	case c.away && len(c.streams) == 0:
		c.failLocked(ErrClosed)
	}
}

// closeIdle ends a connection that carries nothing.
func (c *clientConn) closeIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.streams) == 0 {
		c.leaveLocked()
		c.emptyLocked()
	}
}

// headers implements role: an answer begins, or ends with trailers.
func (c *clientConn) headers(f *http2.MetaHeadersFrame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[f.StreamID]
	switch {
	case s == nil && c.idleLocked(f.StreamID):
		return http2.ConnectionError(http2.ErrCodeProtocol)
	case s == nil: // reset, which the server did not know yet
		return nil
	case s.answer != nil:
		return c.trailersLocked(s, f)
	}
	a, err := answerOf(f)
	if err == nil && a.status < 200 {
		if s.informed++; !f.StreamEnded() && s.informed <= most1xx {
			return nil
		}
		err = errMessage
	}
	if err != nil {
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeProtocol, Cause: err}
	}
	if s.length = a.length; !hasBody(s.method, a.status) {
		s.length = 0
	}
	s.answer = a
	s.changed.Broadcast()
	if f.StreamEnded() {
		return s.endInLocked()
	}
	return nil
}

// open begins a request. It returns nil when the connection takes none.
func (c *clientConn) open(req *http.Request) *stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.away || c.err != nil || len(c.streams) >= int(min(c.peer.streams, mostWindow)) || len(c.streams) >= c.t.MaxStreams {
		return nil
	}
	if c.next > mostWindow-2 || c.resets >= c.t.MaxResets { // its ids are used up, or the server's patience
		c.leaveLocked()
		c.emptyLocked()
		return nil
	}
	s := c.newStreamLocked(c.next)
	c.last, c.next = c.next, c.next+2
	s.method = cmp.Or(req.Method, http.MethodGet)
	c.field(":method", s.method)
	c.field(":scheme", cmp.Or(req.URL.Scheme, "http"))
	c.field(":authority", cmp.Or(req.Host, req.URL.Host))
	c.field(":path", req.URL.RequestURI())
	body := req.Body != nil && req.Body != http.NoBody
	if body && req.ContentLength > 0 {
		c.field("content-length", strconv.FormatInt(req.ContentLength, 10))
	}
	for name, values := range req.Header {
		if name != "Content-Length" && name != "Host" {
			c.fields(http.Header{name: values})
		}
	}
	c.headersLocked(s.id, !body)
	if !body {
		s.endOutLocked()
	}
	c.wakeLocked()
	return s
}

// roundTrip sends the request's body and waits for the answer's head.
func (c *clientConn) roundTrip(s *stream, req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	stop := context.AfterFunc(ctx, func() { s.cancel(context.Cause(ctx)) })
	switch {
	case req.Body == nil, req.Body == http.NoBody:
	case req.GetBody != nil: // it is in memory
		newUpload(s, req).now()
	default:
		go newUpload(s, req).run()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for s.answer == nil && s.inErr == nil {
		s.changed.Wait()
	}
	if s.answer == nil {
		stop()
		return nil, refused(s.inErr)
	}
	a := s.answer
	resp := &http.Response{
		Status: strconv.Itoa(a.status) + " " + http.StatusText(a.status), StatusCode: a.status, Proto: "HTTP/2.0", ProtoMajor: 2,
		Header: a.header, ContentLength: a.length, Request: req,
	}
	if s.ended && s.got == 0 && resp.ContentLength < 0 {
		resp.ContentLength = 0
	}
	resp.Body = &Body{s: s, resp: resp, stop: stop}
	return resp, nil
}

// refused is the error of a stream that had no answer.
func refused(err error) error {
	var reset http2.StreamError
	if errors.As(err, &reset) && reset.Code == http2.ErrCodeRefusedStream && errors.Is(reset.Cause, errReset) {
		return fmt.Errorf("%w: %w", errUnprocessed, err)
	}
	return err
}

// cancel ends a stream at once. What has come is dropped.
func (s *stream) cancel(err error) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.ended && s.over {
		return
	}
	s.resetLocked(http2.ErrCodeCancel, err)
	s.inErr, s.ended = err, false
	s.dropLocked()
}

// upload is a request's body on its way. It belongs to one goroutine at a time.
type upload struct {
	s      *stream
	body   io.ReadCloser
	length int64 // negative where it is not known
	sent   int64
	buf    []byte
}

func newUpload(s *stream, req *http.Request) *upload {
	u := &upload{s: s, body: req.Body, length: req.ContentLength, buf: make([]byte, firstFrame)}
	if u.length == 0 {
		u.length = -1 // as http.Request has it
	}
	return u
}

// now sends as much of a body in memory as there is room for, so that it goes out with the
// header, and the rest later.
func (u *upload) now() {
	for u.s.hasRoom(len(u.buf)) {
		if u.part() {
			return
		}
	}
	go u.run()
}

func (u *upload) run() {
	for !u.part() {
	}
}

// part sends one part. It returns true after the last one.
func (u *upload) part() (last bool) {
	n, err := u.body.Read(u.buf)
	u.sent += int64(n)
	last = errors.Is(err, io.EOF)
	switch {
	case err != nil && !last, u.length >= 0 && (u.sent > u.length || last && u.sent < u.length):
		u.s.cancel(fmt.Errorf("h2: read the request's body: %w", cause(err)))
		last = true
	case n > 0 || last:
		last = u.s.write(u.buf[:n], last) != nil || last // the answer says why, where there is one
	}
	if last {
		_ = u.body.Close() // it was read as far as it is needed
	}
	return last
}

// cause is why a body could not be sent: its own error, or that it has another length than
// was announced.
func cause(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Body is the body of an answer. It ends with io.EOF only where the server said so.
type Body struct {
	s    *stream
	resp *http.Response
	stop func() bool // listening for the request's end
}

// Read implements io.Reader.
func (b *Body) Read(p []byte) (int, error) {
	n, err := b.s.read(p)
	b.ended(err)
	return n, err
}

// ended takes the end of the body.
func (b *Body) ended(err error) {
	if err == nil {
		return
	}
	b.stop()
	if errors.Is(err, io.EOF) {
		b.s.c.mu.Lock()
		defer b.s.c.mu.Unlock()
		b.resp.Trailer = b.s.trailer
	}
}

// Close implements io.Closer. It resets a stream that has not ended.
func (b *Body) Close() error {
	b.stop()
	b.s.c.mu.Lock()
	defer b.s.c.mu.Unlock()
	b.s.resetLocked(http2.ErrCodeCancel, errEnded)
	b.s.dropLocked()
	return nil
}

// Inline has f called by the goroutine that reads the connection, whenever a part of the
// body has come. f must not wait for anything: it takes what ReadNow gives, writes with
// WriteNow to what sends with the batch, and returns true when it has nothing more to do.
// When it returns false, Wait returns, and another goroutine goes on.
func (b *Body) Inline(f func(*Batch) bool) {
	b.s.c.mu.Lock()
	defer b.s.c.mu.Unlock()
	b.s.inline = f
}

// ErrNotYet is what ReadNow returns when nothing is there.
var ErrNotYet = errors.New("h2: nothing to read yet")

// ReadNow is Read without waiting, within a batch or, with nil, without one.
func (b *Body) ReadNow(batch *Batch, p []byte) (int, error) {
	c := b.s.c
	c.mu.Lock()
	n, err := b.s.takeLocked(p)
	if len(c.out) > 0 {
		if batch != nil {
			batch.add(c)
		} else {
			c.wakeLocked()
		}
	}
	c.mu.Unlock()
	if n == 0 && err == nil {
		return 0, ErrNotYet
	}
	b.ended(err)
	return n, err
}

// Wait waits until ReadNow has something to return, or Inline's func has returned false.
func (b *Body) Wait() {
	s := b.s
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	for !s.poked && s.at == len(s.in) && !s.ended && s.inErr == nil {
		s.changed.Wait()
	}
	s.poked = false
}
