//go:build unix

package kvrpc

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// link is one connection of the data channel, on either side, with its memory: one request
// or answer at a time allocates nothing.
type link struct {
	c     net.Conn
	below *wide // below TLS; nil = there is none
	r     *bufio.Reader
	low   *lowat
	head  [headLen]byte
	body  []byte // the last that came
	out   []byte // the next to be sent, behind room for its head
	vec   [2][]byte
	bufs  net.Buffers
	// offers says what is known of the other side, which may be older than offers are.
	offers knowledge
}

// knowledge is what one side has found out about the other.
type knowledge uint8

const (
	unknown knowledge = iota
	yes
	no
)

// readAhead is how much is read at once, with a head. What is larger than that goes into
// its place without a stop.
const readAhead = 8 << 10

func newLink(c net.Conn) *link {
	l := &link{c: c, r: bufio.NewReaderSize(c, readAhead), low: newLowat(c)}
	if t, ok := c.(*tls.Conn); ok {
		l.below, _ = t.NetConn().(*wide)
	}
	return l
}

// begin begins a message, to whose end its body is appended.
func (l *link) begin() { l.out = append(l.out[:0], make([]byte, headLen)...) }

// send sends the message that was begun, and data behind it.
func (l *link) send(what uint8, data []byte) error {
	putHead(l.out, what, uint64(len(data)))
	return l.push(data)
}

// push sends the message that was begun and has its head, and data behind it.
func (l *link) push(data []byte) error {
	if len(data) == 0 {
		return l.write(l.out)
	}
	if l.below != nil {
		l.below.held = true
		if _, err := l.c.Write(l.out); err != nil {
			return err
		}
		return l.write(data)
	}
	l.vec = [2][]byte{l.out, data}
	l.bufs = l.vec[:]
	_, err := l.bufs.WriteTo(l.c)
	l.vec = [2][]byte{}
	return err
}

// write sends bytes.
func (l *link) write(b []byte) error {
	if l.below == nil {
		_, err := l.c.Write(b)
		return err
	}
	l.below.held = true
	_, err := l.c.Write(b)
	if err == nil {
		err = l.below.flush()
	}
	return err
}

// receive reads the head and the body of a message; the body is valid until the next one.
func (l *link) receive(most uint32) (head, error) {
	if _, err := io.ReadFull(l.r, l.head[:]); err != nil {
		return head{}, err
	}
	h, err := parseHead(l.head[:], most)
	if err != nil {
		return h, err
	}
	if uint32(cap(l.body)) < h.body {
		l.body = make([]byte, h.body)
	}
	l.body = l.body[:h.body]
	if _, err := io.ReadFull(l.r, l.body); err != nil {
		return h, err
	}
	return h, h.check(l.head[:], l.body)
}

// fill reads all of b, behind which more bytes of the same message come.
func (l *link) fill(b []byte, more int) (n int, err error) {
	for n < len(b) && err == nil {
		if l.r.Buffered() == 0 {
			err = l.low.expect(len(b) - n + more)
		}
		if err == nil {
			var k int
			k, err = l.r.Read(b[n:])
			n += k
		}
	}
	switch {
	case n == len(b) && more > 0:
		return n, nil
	case n == len(b):
		return n, l.low.expect(1)
	case err == io.EOF && n > 0:
		return n, io.ErrUnexpectedEOF
	}
	return n, err
}

// trim gives up memory that an unusual message took.
func (l *link) trim() {
	if cap(l.body) > 1<<20 {
		l.body = nil
	}
	if cap(l.out) > 1<<20 {
		l.out = nil
	}
}

// pool keeps the connections of the data channel to one peer.
type pool struct {
	dial  func(context.Context) (net.Conn, error)
	slots chan struct{} // taken by each call

	mu     sync.Mutex
	idle   []*link
	closed bool
}

func newPool(connections int, dial func(context.Context) (net.Conn, error)) *pool {
	return &pool{dial: dial, slots: make(chan struct{}, connections)}
}

// take returns a connection that nobody uses, and whether it was used before: the peer may
// have left it behind. It waits until end, or until ctx ends.
func (p *pool) take(ctx context.Context, end time.Time) (l *link, used bool, err error) {
	select {
	case p.slots <- struct{}{}:
	default:
		if err := p.wait(ctx, end); err != nil {
			return nil, false, err
		}
	}
	p.mu.Lock()
	closed, n := p.closed, len(p.idle)
	if n > 0 {
		l = p.idle[n-1]
		p.idle = p.idle[:n-1]
	}
	p.mu.Unlock()
	switch {
	case closed:
		err = kvcache.ErrClosed
	case l != nil:
		return l, true, nil
	default:
		if l, err = p.open(ctx, end); err == nil {
			return l, false, nil
		}
	}
	<-p.slots
	return nil, false, err
}

// wait waits for a slot.
func (p *pool) wait(ctx context.Context, end time.Time) error {
	ctx, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	select {
	case p.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for a connection: %w", ctx.Err())
	}
}

// open makes a connection.
func (p *pool) open(ctx context.Context, end time.Time) (*link, error) {
	ctx, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	c, err := p.dial(ctx)
	if err != nil {
		return nil, err
	}
	return newLink(c), nil
}

// give ends the use of a connection: it is kept for later if it is well.
func (p *pool) give(l *link, well bool) {
	defer func() { <-p.slots }()
	if well {
		l.trim()
		p.mu.Lock()
		defer p.mu.Unlock()
		if !p.closed {
			p.idle = append(p.idle, l)
			return
		}
	}
	l.c.Close()
}

// close closes what nobody uses; the others are closed by those who do.
func (p *pool) close() {
	p.mu.Lock()
	idle := p.idle
	p.idle, p.closed = nil, true
	p.mu.Unlock()
	for _, l := range idle {
		l.c.Close()
	}
}

// left says whether an error is that of a connection whose other end has gone.
func left(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

// dialer opens connections to one peer.
type dialer struct {
	Config
	host string
}

// raw opens a TCP connection.
func (d *dialer) raw(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.DialTimeout)
	defer cancel()
	return d.Dial(ctx, d.Addr)
}

// data opens one of the data channel.
func (d *dialer) data(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.DialTimeout)
	defer cancel()
	c, err := d.Dial(ctx, d.Addr)
	if err != nil || d.TLS == nil {
		return c, err
	}
	t := tls.Client(newWide(c), withProtos(d.TLS, d.host, protoData))
	if err := t.HandshakeContext(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return t, nil
}

// ended makes what ended a connection the context's error, where it is that.
func ended(ctx context.Context, err error) error {
	switch {
	case err == nil || told(err):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return context.DeadlineExceeded // the connection's clock was a little faster
	}
	return err
}
