package h2

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Limits of a connection, in bytes.
const (
	mostPending = 64 << 10  // DATA waits while that much is unsent
	mostControl = 512 << 10 // unsent, of a peer that makes us answer and does not read
	mostHeader  = 1 << 20   // of a header block, unpacked
	readSize    = 64 << 10  // of one read
	hpackTable  = 4 << 10
	lastSend    = time.Second // for what is unsent when a connection ends
)

// Defaults of the protocol, until the peer's SETTINGS say otherwise.
const (
	firstWindow = 65535
	firstFrame  = 16 << 10
	mostWindow  = 1<<31 - 1

	firstStreams = 1000 // there is no limit before that, but no need for more either
)

// ErrClosed is the end of a connection that this side closed.
var ErrClosed = errors.New("h2: connection closed")

// errPeer is the end of a connection that the peer closed.
var errPeer = errors.New("h2: the peer closed the connection")

// role is what a server's connection does otherwise than a client's. All but headers are
// called with the connection's lock held.
type role interface {
	headers(f *http2.MetaHeadersFrame) error
	settledLocked()
	goAwayLocked(f *http2.GoAwayFrame)
	pongLocked()
	emptyLocked() // no stream is left, or the connection is over
}

// conn is what a server's connection and a client's have in common. One goroutine reads.
// Whoever has something to write adds it to out; it goes out as one write with what the
// others that can run have added in the meantime, or at the end of a batch of frames.
type conn struct {
	nc     net.Conn
	fr     *http2.Framer // read by the read loop, written under mu
	role   role
	batch  Batch        // of the read loop
	seen   atomic.Int64 // when something was read last, Unix ns
	window int32        // that a stream's peer gets
	share  int64        // that all streams get together

	now now // of the read loop, and of whoever has set sending

	mu      sync.Mutex
	err     error // why it is over, nil while it is not
	done    chan struct{}
	out     []byte        // unsent
	spare   []byte        // an empty buffer to take its place
	sending bool          // somebody writes to nc
	ending  bool          // nc is closed when nothing is unsent
	flushed chan struct{} // closed when that is so

	enc   *hpack.Encoder
	block bytes.Buffer

	settled    bool   // the peer's SETTINGS came
	last       uint32 // the largest id that the client has used
	streams    map[uint32]*stream
	resets     int       // RST_STREAM frames of ours
	ready      []*stream // with data that their windows let pass, each once
	sendWindow int64     // left of the peer's
	recvWindow int64     // left of ours
	taken      int64     // of ours, and not yet given back
	peer       limits
}

// limits are what the peer's SETTINGS say.
type limits struct {
	window  int64 // of a new stream
	frame   int
	streams uint32
}

// source reads from the connection, once all that was written meanwhile is on its way.
type source struct{ c *conn }

func (s source) Read(p []byte) (int, error) {
	s.c.batch.flush()
	n, err := s.c.now.read(p)
	s.c.seen.Store(time.Now().UnixNano())
	return n, err
}

// sink takes what the Framer writes; mu is held.
type sink struct{ c *conn }

func (s sink) Write(p []byte) (int, error) {
	s.c.out = append(s.c.out, p...)
	return len(p), nil
}

func newConn(nc net.Conn, window int32, share int64) *conn {
	c := &conn{
		nc: nc, window: window, share: share, done: make(chan struct{}), flushed: make(chan struct{}), streams: map[uint32]*stream{},
		sendWindow: firstWindow, recvWindow: share, peer: limits{firstWindow, firstFrame, firstStreams},
	}
	c.now.init(nc)
	c.seen.Store(time.Now().UnixNano())
	c.fr = http2.NewFramer(sink{c}, bufio.NewReaderSize(source{c}, readSize))
	c.fr.SetReuseFrames()
	c.fr.SetMaxReadFrameSize(firstFrame)
	c.fr.MaxHeaderListSize = mostHeader
	c.fr.ReadMetaHeaders = hpack.NewDecoder(hpackTable, nil)
	c.enc = hpack.NewEncoder(&c.block)
	c.enc.SetMaxDynamicTableSizeLimit(hpackTable)
	return c
}

// hello sends the SETTINGS that begin a connection, and its own window.
func (c *conn) hello(more ...http2.Setting) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.fr.WriteSettings(append(more, // a write into memory does not fail, nor do those below
		http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(c.window)},
		http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: mostHeader})...)
	_ = c.fr.WriteWindowUpdate(0, uint32(c.share-firstWindow))
	c.wakeLocked()
}

// read takes frames until the connection is over, and says why.
func (c *conn) read() error {
	for {
		f, err := c.fr.ReadFrame()
		if err == nil {
			err = c.frame(f)
		}
		var bad http2.StreamError
		if errors.As(err, &bad) {
			err = c.reset(bad)
		}
		if err != nil {
			return err
		}
	}
}

// reset ends a stream over which the peer made a mistake.
func (c *conn) reset(bad http2.StreamError) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[bad.StreamID]
	if s == nil {
		c.last = max(c.last, bad.StreamID)
		c.resets++
		return c.controlLocked(c.fr.WriteRSTStream(bad.StreamID, bad.Code))
	}
	s.resetLocked(bad.Code, bad)
	return c.controlLocked(nil)
}

// controlLocked sends what answers a frame of the peer, unless it lets too much pile up. It
// is for the read loop.
func (c *conn) controlLocked(err error) error {
	if err == nil && len(c.out) > mostControl {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	c.batch.add(c)
	return err
}

// serve reads until the connection is over, and ends it: when it returns, all that was said
// is the peer's, unless that did not take it in time. A socket that is closed before the
// peer has read all may lose it: a peer that writes meanwhile gets an error, and looks no
// further.
func (c *conn) serve() {
	c.ended(c.read())
	<-c.flushed
	_, _ = io.Copy(io.Discard, c.nc) // until the peer closes it, or lastSend is over
	_ = c.nc.Close()                 // nothing is lost with it
}

// ended takes the end of reading.
func (c *conn) ended(err error) {
	c.batch.flush() // what went to other connections before a mistake of this one
	c.mu.Lock()
	defer c.mu.Unlock()
	var wrong http2.ConnectionError
	switch {
	case errors.As(err, &wrong):
		_ = c.fr.WriteGoAway(c.last, http2.ErrCode(wrong), nil)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		err = errPeer
	case errors.Is(err, http2.ErrFrameTooLarge):
		_ = c.fr.WriteGoAway(c.last, http2.ErrCodeFrameSize, nil)
	}
	c.failLocked(fmt.Errorf("h2: connection lost: %w", err))
}

// failLocked ends the connection and all its streams. What is unsent has a moment to go
// out.
func (c *conn) failLocked(err error) {
	if c.err != nil {
		return
	}
	c.err = err
	close(c.done)
	for _, s := range c.streams {
		s.endLocked(err)
	}
	c.ready = nil
	c.endLocked()
	c.role.emptyLocked()
}

// endLocked closes the socket as soon as nothing is unsent.
func (c *conn) endLocked() {
	if c.ending {
		return
	}
	c.ending = true
	_ = c.nc.SetDeadline(time.Now().Add(lastSend)) // one that cannot be set is closed already
	if c.wakeLocked(); !c.sending {
		c.flushedLocked()
	}
}

// flushedLocked says that nothing more comes, once all was sent. serve does the rest.
func (c *conn) flushedLocked() {
	select {
	case <-c.flushed:
		return
	default:
	}
	close(c.flushed)
	if half, ok := c.nc.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite() // it may be closed already
		return
	}
	_ = c.nc.Close() // it has no half to keep
}

// fail ends the connection at once.
func (c *conn) fail(err error) {
	c.mu.Lock()
	c.failLocked(err)
	c.mu.Unlock()
	_ = c.nc.Close() // so that nobody waits in a read or write
}

// wakeLocked has what is unsent sent.
func (c *conn) wakeLocked() {
	if len(c.out) > 0 && !c.sending {
		c.sending = true
		go c.send(nil)
	}
}

// send writes first, and then what is unsent until there is nothing more.
func (c *conn) send(first []byte) {
	out := first
	if out == nil {
		runtime.Gosched() // others that can run may have something to add
		out = c.swap()
	}
	for out != nil {
		_, err := c.nc.Write(out)
		runtime.Gosched()
		c.mu.Lock()
		c.sentLocked(out, err)
		c.mu.Unlock()
		out = c.swap()
	}
}

// swap takes what is unsent. Where there is nothing, it returns nil and whoever comes next
// has to send.
func (c *conn) swap() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.swapLocked()
}

func (c *conn) swapLocked() []byte {
	c.moveLocked()
	if len(c.out) == 0 {
		c.sending = false
		if c.ending {
			c.flushedLocked()
		}
		return nil
	}
	out := c.out
	c.out, c.spare = c.spare[:0], nil
	c.moveLocked()
	return out
}

// sentLocked takes the buffer back.
func (c *conn) sentLocked(out []byte, err error) {
	if cap(out) <= 4*mostPending {
		c.spare = out
	}
	if err != nil {
		c.out = c.out[:0]
		c.failLocked(fmt.Errorf("h2: connection lost: %w", err))
	}
}

// flushNow writes what is unsent without waiting; what the socket does not take at once
// goes out as ever.
func (c *conn) flushNow() {
	c.mu.Lock()
	if c.sending || !c.now.can() {
		c.wakeLocked()
		c.mu.Unlock()
		return
	}
	c.sending = true
	out := c.swapLocked()
	c.mu.Unlock()
	for out != nil {
		n, err := c.now.write(out)
		if err == nil && n < len(out) {
			go c.send(out[n:])
			return
		}
		c.mu.Lock()
		c.sentLocked(out, err)
		out = c.swapLocked()
		c.mu.Unlock()
	}
}

// Batch is the connections that have to send something when a read loop has handled all
// frames that it has. It belongs to that loop.
type Batch struct{ conns []*conn }

func (b *Batch) add(c *conn) {
	if slices.Contains(b.conns, c) {
		return
	}
	b.conns = append(b.conns, c)
}

func (b *Batch) flush() {
	for i, c := range b.conns {
		c.flushNow()
		b.conns[i] = nil
	}
	b.conns = b.conns[:0]
}
