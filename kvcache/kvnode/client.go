//go:build unix

package kvnode

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvmetrics"
)

const (
	// usualTime bounds a call whose context has no end, and dropPatience a drop: in all tiers,
	// of which some may be away.
	usualTime, dropPatience = 10 * time.Second, 25 * time.Second
	// pause is how long calls fail at once after one that had no answer in its time.
	pause = time.Second
	// mostIdle is how many connections are kept for later.
	mostIdle = 8
)

// Client is a kvcache.Store with Tails: the arena of the node in a directory of this
// host. The node may come, go and come back meanwhile; calls fail while it is away. It is
// safe for concurrent use.
type Client struct {
	dir    string
	reader *arena.Reader
	count  kvmetrics.Counters

	mu     sync.Mutex
	idle   []*conn
	closed bool
	until  time.Time     // calls fail until then, because one had no answer
	last   kvcache.Stats // of the node
}

var (
	_ kvcache.Store   = (*Client)(nil)
	_ kvcache.Tails   = (*Client)(nil)
	_ kvcache.Counted = (*Client)(nil)
	_ kvcache.Labeled = (*Client)(nil)
)

// Open makes a client of the node in dir, which need not be there yet.
func Open(dir string) (*Client, error) {
	r, err := arena.OpenReader(dir)
	if err != nil {
		return nil, err
	}
	return &Client{dir: dir, reader: r}, nil
}

// Close implements kvcache.Store.
func (c *Client) Close() error {
	c.mu.Lock()
	idle := c.idle
	c.idle, c.closed = nil, true
	c.mu.Unlock()
	for _, cn := range idle {
		cn.c.Close()
	}
	return c.reader.Close()
}

// conn is one connection, used by one call at a time. What the node said at its beginning
// is true as long as it lasts: another node is another connection.
type conn struct {
	c     net.Conn
	r     *bufio.Reader
	hello hello
	out   []byte // the request, kept for its memory
	in    []byte // the last answer's body, likewise
	head  [headLen]byte
}

// errDown says that the node gave no answer a moment ago.
var errDown = errors.New("the KV node did not answer a moment ago")

// take returns a connection that nobody uses, and whether it was used before: the node
// may have left it behind.
func (c *Client) take(ctx context.Context) (cn *conn, used bool, err error) {
	if err := ctx.Err(); err != nil {
		return nil, false, err
	}
	c.mu.Lock()
	n := len(c.idle)
	switch {
	case c.closed:
		c.mu.Unlock()
		return nil, false, kvcache.ErrClosed
	case time.Now().Before(c.until):
		c.mu.Unlock()
		return nil, false, errDown
	case n > 0:
		cn := c.idle[n-1]
		c.idle = c.idle[:n-1]
		c.mu.Unlock()
		return cn, true, nil
	}
	c.mu.Unlock()
	cn, err = c.dial(ctx)
	return cn, false, err
}

// dial opens a connection.
func (c *Client) dial(ctx context.Context) (*conn, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", filepath.Join(c.dir, SocketName))
	if err != nil {
		return nil, fmt.Errorf("reach the KV node: %w", err)
	}
	cn := &conn{c: nc, r: bufio.NewReaderSize(nc, 64<<10)}
	cn.begin()
	body, err := c.talk(ctx, cn, opHello, nil)
	if err == nil {
		err = json.Unmarshal(body, &cn.hello)
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	return cn, nil
}

// talk sends the request that was begun on a connection, with data behind it, and reads
// the answer, whose body is valid until the next request. The error is what the node
// says, as an answerError, or the connection's, which is then of no more use.
func (c *Client) talk(ctx context.Context, cn *conn, what op, data []byte) ([]byte, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(usualTime)
		if what == opDrop {
			deadline = time.Now().Add(dropPatience)
		}
	}
	err := cn.c.SetDeadline(deadline)
	if err == nil && ctx.Done() != nil {
		stop := context.AfterFunc(ctx, func() { _ = cn.c.SetDeadline(time.Unix(1, 0)) }) // ends what waits
		defer stop()
	}
	if err == nil {
		err = cn.send(what, data)
	}
	var body []byte
	if err == nil {
		body, err = cn.receive()
	}
	if err == nil || told(err) {
		return body, err
	}
	return nil, fmt.Errorf("ask the KV node: %w", c.late(ctx, what, err))
}

// late makes what ended a connection the context's error, where it is that, and has the
// next calls fail at once if the time was over; but for a fetch and a drop, which wait
// for tiers.
func (c *Client) late(ctx context.Context, what op, err error) error {
	if ctx.Err() != nil {
		err = ctx.Err()
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		err = context.DeadlineExceeded // the connection's clock was a little faster
	}
	if errors.Is(err, context.DeadlineExceeded) && what != opFetch && what != opResume && what != opDrop {
		c.mu.Lock()
		c.until = time.Now().Add(pause)
		c.mu.Unlock()
	}
	return err
}

// answerError is an error that the node tells: the connection is well.
type answerError struct{ error }

// Unwrap lets errors.Is see what it is.
func (e answerError) Unwrap() error { return e.error }

// told says whether an error is one that the node tells.
func told(err error) bool {
	_, ok := errors.AsType[answerError](err)
	return ok
}

// left says whether an error is that of a connection whose other end has gone.
func left(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

// begin starts a request, to whose end its body is appended.
func (cn *conn) begin() { cn.out = append(cn.out[:0], make([]byte, headLen)...) }

// send sends the request that was begun.
func (cn *conn) send(what op, data []byte) error {
	body := len(cn.out) - headLen
	if body > mostBody || len(data) > mostData {
		return fmt.Errorf("a request of %d and %d bytes is too large", body, len(data))
	}
	head{uint8(what), uint32(body), uint32(len(data))}.put(cn.out)
	_, err := cn.c.Write(cn.out)
	if err == nil && len(data) > 0 {
		_, err = cn.c.Write(data)
	}
	return err
}

// receive reads an answer.
func (cn *conn) receive() ([]byte, error) {
	if _, err := io.ReadFull(cn.r, cn.head[:]); err != nil {
		return nil, err
	}
	h, err := parseHead(cn.head[:], mostAnswer)
	if err != nil {
		return nil, err
	}
	if cn.in, err = readBody(cn.r, h.body, cn.in); err != nil {
		return nil, err
	}
	if h.what != uint8(statusDone) {
		return nil, answerError{errorOf(status(h.what), cn.in)}
	}
	return cn.in, nil
}

// give ends the use of a connection: it is kept for later if it is well.
func (c *Client) give(cn *conn, err error) {
	if err == nil || told(err) {
		if cap(cn.in) > 4<<20 {
			cn.in = nil
		}
		c.mu.Lock()
		if !c.closed && len(c.idle) < mostIdle {
			c.idle = append(c.idle, cn)
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
	}
	cn.c.Close()
}

// ask does one operation. Fill appends the body, and use looks at the answer's, which is
// valid until it returns; both may be nil. A connection that was left behind by a node
// that has gone is not the next node's fault: then another one is tried.
func (c *Client) ask(ctx context.Context, what op, fill func([]byte) []byte, use func(*conn, cursor) error) error {
	for {
		used, err := c.askOnce(ctx, what, fill, use)
		if err == nil || !used || !left(err) {
			return c.counted(err)
		}
	}
}

// askOnce does it on one connection, and says whether that was used before.
func (c *Client) askOnce(ctx context.Context, what op, fill func([]byte) []byte, use func(*conn, cursor) error) (used bool, err error) {
	cn, used, err := c.take(ctx)
	if err != nil {
		return false, err
	}
	cn.begin()
	if fill != nil {
		cn.out = fill(cn.out)
	}
	body, err := c.talk(ctx, cn, what, nil)
	if err == nil && use != nil {
		err = use(cn, cursorOf(body))
	}
	c.give(cn, err)
	return used, err
}
