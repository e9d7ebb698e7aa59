package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// Config says who talks to whom, and how much and how long.
type Config struct {
	// Type is the own type of socket, such as PUB, and Peers those that may be at the other
	// end. Required.
	Type  string
	Peers []string
	// Most is the bytes that one message from the other end may have, with 16 for each of its
	// frames. Required.
	Most int
	// Stall is how long the handshake may take, and one write. Required.
	Stall time.Duration
}

// ErrProtocol is in the error where the other end does not keep to the protocol, or to the
// bounds of Config.
var ErrProtocol = errors.New("zmtp: protocol")

const (
	greetingLen = 64
	mechanism   = "NULL"

	flagMore    = 1
	flagLong    = 2
	flagCommand = 4

	// frameCost is what a frame counts beside its bytes.
	frameCost = 16
	// mostCommand is the bytes of a command: those that are known are much shorter.
	mostCommand = 4 << 10
	// mostPing is the bytes of what a PING has to be answered with.
	mostPing = 16
)

// Conn is one connection after its handshake. Read is for one goroutine at a time; Write and
// Close are safe for concurrent use.
type Conn struct {
	c    net.Conn
	cfg  Config
	r    *bufio.Reader
	peer string

	mu sync.Mutex // held by a write
	w  *bufio.Writer
}

// Handshake greets the other end of a connection and learns what it is. It closes c on an
// error.
func Handshake(c net.Conn, cfg Config) (*Conn, error) {
	z := &Conn{c: c, cfg: cfg, r: bufio.NewReaderSize(c, 16<<10), w: bufio.NewWriterSize(c, 16<<10)}
	err := c.SetDeadline(time.Now().Add(cfg.Stall))
	if err == nil {
		err = z.greet()
	}
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("zmtp: handshake with %s: %w", c.RemoteAddr(), err)
	}
	return z, nil
}

// greet does the handshake: both ends say everything without waiting for each other.
func (z *Conn) greet() error {
	z.w.Write(greeting())
	writeFrame(z.w, flagCommand, command("READY", property("Socket-Type", z.cfg.Type)))
	if err := z.w.Flush(); err != nil {
		return err
	}
	var g [greetingLen]byte
	if _, err := io.ReadFull(z.r, g[:]); err != nil {
		return err
	}
	if err := checkGreeting(g[:]); err != nil {
		return err
	}
	flags, n, err := z.head()
	if err != nil {
		return err
	}
	if flags&flagCommand == 0 {
		return fmt.Errorf("%w: a message before READY", ErrProtocol)
	}
	name, data, err := z.readCommand(n)
	if err != nil {
		return err
	}
	if name != "READY" {
		return fmt.Errorf("%w: %.16q in place of READY", ErrProtocol, name)
	}
	if z.peer, err = socketType(data); err != nil {
		return err
	}
	if !slices.Contains(z.cfg.Peers, z.peer) {
		return fmt.Errorf("%w: the other end is a %.16q", ErrProtocol, z.peer)
	}
	return nil
}

// greeting is the own one.
func greeting() []byte {
	g := make([]byte, greetingLen)
	g[0], g[9], g[10] = 0xff, 0x7f, 3
	copy(g[12:], mechanism)
	return g
}

// checkGreeting looks at another one.
func checkGreeting(g []byte) error {
	switch {
	case g[0] != 0xff || g[9] != 0x7f:
		return fmt.Errorf("%w: no greeting", ErrProtocol)
	case g[10] < 3:
		return fmt.Errorf("%w: version %d, want 3", ErrProtocol, g[10])
	case string(bytes.TrimRight(g[12:32], "\x00")) != mechanism:
		return fmt.Errorf("%w: mechanism %q, want %s", ErrProtocol, bytes.TrimRight(g[12:32], "\x00"), mechanism)
	}
	return nil
}

// socketType finds what READY says of the other end.
func socketType(data []byte) (string, error) {
	for len(data) > 0 {
		n := int(data[0])
		if len(data) < 1+n+4 {
			return "", fmt.Errorf("%w: READY is cut off", ErrProtocol)
		}
		name, size := string(data[1:1+n]), binary.BigEndian.Uint32(data[1+n:])
		data = data[1+n+4:]
		if uint64(size) > uint64(len(data)) {
			return "", fmt.Errorf("%w: READY is cut off", ErrProtocol)
		}
		if strings.EqualFold(name, "Socket-Type") {
			return string(data[:size]), nil
		}
		data = data[size:]
	}
	return "", fmt.Errorf("%w: READY without a type of socket", ErrProtocol)
}

// Peer is the type of the socket at the other end.
func (z *Conn) Peer() string { return z.peer }

// Close ends the connection, and whoever reads or writes.
func (z *Conn) Close() error { return z.c.Close() }

// Read returns the next message. It waits as long as there is none: keepalive of the
// connection, or Close, ends it. The frames are the caller's.
func (z *Conn) Read() ([][]byte, error) {
	var frames [][]byte
	for left := z.cfg.Most; ; {
		flags, n, err := z.head()
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if frames != nil || flags&flagMore != 0 {
				return nil, fmt.Errorf("%w: a command within a message", ErrProtocol)
			}
			m, err := z.obey(n)
			if m != nil || err != nil {
				return m, err
			}
			continue
		}
		if left -= frameCost; left < 0 || n > uint64(left) {
			return nil, fmt.Errorf("%w: a message of more than %d bytes", ErrProtocol, z.cfg.Most)
		}
		left -= int(n)
		b := make([]byte, n)
		if _, err := io.ReadFull(z.r, b); err != nil {
			return nil, cut(err)
		}
		if frames = append(frames, b); flags&flagMore == 0 {
			return frames, nil
		}
	}
}

// head reads what is before a frame's bytes.
func (z *Conn) head() (flags byte, n uint64, err error) {
	if flags, err = z.r.ReadByte(); err != nil {
		return 0, 0, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 {
		return 0, 0, fmt.Errorf("%w: flags %#x", ErrProtocol, flags)
	}
	var b [8]byte
	length := b[7:]
	if flags&flagLong != 0 {
		length = b[:]
	}
	if _, err := io.ReadFull(z.r, length); err != nil {
		return 0, 0, cut(err)
	}
	return flags, binary.BigEndian.Uint64(b[:]), nil
}

// cut is the error of what ends within something.
func cut(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// readCommand reads a command of n bytes.
func (z *Conn) readCommand(n uint64) (name string, data []byte, err error) {
	if n < 1 || n > mostCommand {
		return "", nil, fmt.Errorf("%w: a command of %d bytes", ErrProtocol, n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(z.r, b); err != nil {
		return "", nil, cut(err)
	}
	if len(b) < 1+int(b[0]) {
		return "", nil, fmt.Errorf("%w: a command is cut off", ErrProtocol)
	}
	return string(b[1 : 1+b[0]]), b[1+b[0]:], nil
}

// obey reads a command and does what it says. A subscription is returned as a message.
func (z *Conn) obey(n uint64) ([][]byte, error) {
	name, data, err := z.readCommand(n)
	if err != nil {
		return nil, err
	}
	switch name {
	case "PING":
		if len(data) < 2 || len(data) > 2+mostPing {
			return nil, fmt.Errorf("%w: PING with %d bytes", ErrProtocol, len(data))
		}
		return nil, z.send(func() { writeFrame(z.w, flagCommand, command("PONG", data[2:])) })
	case "SUBSCRIBE":
		return [][]byte{append([]byte{1}, data...)}, nil
	case "CANCEL":
		return [][]byte{append([]byte{0}, data...)}, nil
	case "ERROR":
		return nil, fmt.Errorf("%w: the other end says ERROR", ErrProtocol)
	}
	return nil, nil // unknown ones are to be ignored
}

// Write sends one message of one frame or more. After an error the connection is of no use.
func (z *Conn) Write(frames ...[]byte) error {
	return z.send(func() {
		for i, f := range frames {
			flags := byte(flagMore)
			if i == len(frames)-1 {
				flags = 0
			}
			writeFrame(z.w, flags, f)
		}
	})
}

// send has something written and flushed; an error of a write shows at the flush.
func (z *Conn) send(write func()) error {
	z.mu.Lock()
	defer z.mu.Unlock()
	if err := z.c.SetWriteDeadline(time.Now().Add(z.cfg.Stall)); err != nil {
		return err
	}
	write()
	return z.w.Flush()
}

// writeFrame writes a frame. What fails shows at the flush.
func writeFrame(w *bufio.Writer, flags byte, body []byte) {
	if len(body) <= 255 {
		w.Write([]byte{flags, byte(len(body))})
	} else {
		w.Write(binary.BigEndian.AppendUint64([]byte{flags | flagLong}, uint64(len(body))))
	}
	w.Write(body)
}

// command is the body of a command.
func command(name string, data []byte) []byte {
	return append(append([]byte{byte(len(name))}, name...), data...)
}

// property is one of READY's.
func property(name, value string) []byte {
	b := append([]byte{byte(len(name))}, name...)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
}
