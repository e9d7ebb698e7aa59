package zmtp

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// config is one that all tests may use.
func config(kind string, peers ...string) Config {
	return Config{Type: kind, Peers: peers, Most: 4096, Stall: time.Minute}
}

// recorded are the bytes that sockets of libzmq sent, by kind (scripts/zmtp-golden.py).
func recorded(t testing.TB) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile("testdata/libzmq.txt")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]byte{}
	for line := range strings.Lines(string(text)) {
		name, data, _ := strings.Cut(strings.TrimSpace(line), " ")
		if all[name], err = hex.DecodeString(data); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// fed is a connection from which some bytes come, and whose writes are kept.
type fed struct {
	net.Conn // nil: nothing else is called
	in       io.Reader
	out      bytes.Buffer
}

func (f *fed) Read(b []byte) (int, error)       { return f.in.Read(b) }
func (f *fed) Write(b []byte) (int, error)      { return f.out.Write(b) }
func (f *fed) Close() error                     { return nil }
func (f *fed) RemoteAddr() net.Addr             { return &net.UnixAddr{Name: "fed"} }
func (f *fed) SetDeadline(time.Time) error      { return nil }
func (f *fed) SetWriteDeadline(time.Time) error { return nil }

// TestLibzmq: what sockets of libzmq send is understood.
func TestLibzmq(t *testing.T) {
	seq := func(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
	for kind, want := range map[string][][]byte{
		"SUB": {[]byte("\x01kv@")},
		"REQ": {{}, seq(7)},
		"PUB": {[]byte("kv@"), seq(9), bytes.Repeat([]byte("x"), 300)},
	} {
		t.Run(kind, func(t *testing.T) {
			z, err := Handshake(&fed{in: bytes.NewReader(recorded(t)[kind])}, config("X", kind))
			if err != nil {
				t.Fatal(err)
			}
			if z.Peer() != kind {
				t.Errorf("a %q", z.Peer())
			}
			got, err := z.Read()
			if diff := cmp.Diff(want, got); err != nil || diff != "" {
				t.Errorf("%v, -want +got:\n%s", err, diff)
			}
			if _, err := z.Read(); !errors.Is(err, io.EOF) {
				t.Errorf("at the end: %v", err)
			}
		})
	}
}

// pair are two ends of a connection.
func pair(t *testing.T, a, b Config) (*Conn, *Conn) {
	t.Helper()
	ca, cb := net.Pipe()
	t.Cleanup(func() { ca.Close(); cb.Close() })
	type result struct {
		z   *Conn
		err error
	}
	other := make(chan result, 1)
	// A pipe has no room, so that both ends may not write first.
	go func() { z, err := Handshake(buffered(cb), b); other <- result{z, err} }()
	za, err := Handshake(buffered(ca), a)
	zb := <-other
	if err != nil || zb.err != nil {
		t.Fatal(err, zb.err)
	}
	return za, zb.z
}

// loose is a connection whose writes wait for nobody.
type loose struct {
	net.Conn
	out chan []byte
}

func buffered(c net.Conn) net.Conn {
	l := loose{c, make(chan []byte, 64)}
	go func() {
		for b := range l.out {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}()
	return l
}

func (l loose) Write(b []byte) (int, error) { l.out <- bytes.Clone(b); return len(b), nil }

func TestMessages(t *testing.T) {
	a, b := pair(t, config("PUB", "SUB"), config("SUB", "PUB"))
	for _, want := range [][][]byte{
		{{}}, {[]byte("one")}, {{}, []byte("two"), {}}, {bytes.Repeat([]byte{1}, 255), bytes.Repeat([]byte{2}, 256)},
	} {
		if err := a.Write(want...); err != nil {
			t.Fatal(err)
		}
		if got, err := b.Read(); err != nil || !cmp.Equal(want, got) {
			t.Errorf("%v, %q", err, got)
		}
	}
}

// raw is a connection after its handshake from which some bytes come.
func raw(t testing.TB, data ...byte) (*Conn, *fed) {
	t.Helper()
	var hello bytes.Buffer
	hello.Write(greeting())
	hello.Write([]byte{flagCommand, 25})
	hello.Write(command("READY", property("Socket-Type", "SUB")))
	f := &fed{in: io.MultiReader(&hello, bytes.NewReader(data))}
	z, err := Handshake(f, config("PUB", "SUB"))
	if err != nil {
		t.Fatal(err)
	}
	f.out.Reset()
	return z, f
}

func TestCommands(t *testing.T) {
	z, f := raw(t, append([]byte("\x04\x0a\x04PING\x00\x01abc\x04\x0c\x09SUBSCRIBEkv"), "\x04\x07\x06CANCEL\x04\x05\x04WHAT\x00\x01!"...)...)
	for _, want := range []string{"\x01kv", "\x00", "!"} {
		if m, err := z.Read(); err != nil || len(m) != 1 || string(m[0]) != want {
			t.Errorf("%q, %v, want %q", m, err, want)
		}
	}
	if got := f.out.String(); got != "\x04\x08\x04PONGabc" {
		t.Errorf("PING is answered with %q", got)
	}
}

// TestBounds: what is too much or makes no sense is refused before there is room for it.
func TestBounds(t *testing.T) {
	for name, data := range map[string]string{
		"too long":           "\x02\x00\x00\x00\x00\x00\x00\x10\x01",
		"far too long":       "\x02\xff\xff\xff\xff\xff\xff\xff\xff",
		"too many frames":    strings.Repeat("\x01\x00", 300),
		"flags":              "\x08\x00",
		"command in message": "\x01\x00\x04\x05\x04PING",
		"long command":       "\x06\x00\x00\x00\x00\x10\x00\x00\x00",
		"empty command":      "\x04\x00",
		"cut command":        "\x04\x02\x09P",
		"long ping":          "\x04\x18\x04PING\x00\x01" + strings.Repeat("c", 17),
		"error":              "\x04\x07\x05ERROR\x00",
	} {
		z, _ := raw(t, []byte(data)...)
		if m, err := z.Read(); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %q, %v", name, m, err)
		}
	}
	z, _ := raw(t, []byte("\x00\x05abc")...)
	if _, err := z.Read(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut off: %v", err)
	}
}

func TestHandshakeRefused(t *testing.T) {
	good := recorded(t)["SUB"]
	change := func(at int, b byte) []byte {
		c := bytes.Clone(good)
		c[at] = b
		return c
	}
	for name, data := range map[string][]byte{
		"signature": change(0, 0), "version": change(10, 2), "mechanism": change(12, 'X'), "message": change(64, 0), "no READY": change(67, 'X'),
		"property": change(72, 200), "size": change(85, 200), "nothing": nil, "cut": good[:70], "HTTP": []byte("GET / HTTP/1.1\r\n\r\n" + strings.Repeat(" ", 64)),
	} {
		if _, err := Handshake(&fed{in: bytes.NewReader(data)}, config("PUB", "SUB")); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := Handshake(&fed{in: bytes.NewReader(good)}, config("ROUTER", "REQ")); !errors.Is(err, ErrProtocol) {
		t.Errorf("another kind of socket: %v", err)
	}
}

// FuzzRead: nothing that comes makes it fail otherwise than by an error, or take more room
// than it may.
func FuzzRead(f *testing.F) {
	for _, data := range recorded(f) {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		z, err := Handshake(&fed{in: bytes.NewReader(data)}, config("X", "SUB", "REQ", "PUB"))
		for err == nil {
			var m [][]byte
			m, err = z.Read()
			size := 0
			for _, b := range m {
				size += len(b) + frameCost
			}
			if size > z.cfg.Most+mostCommand {
				t.Fatalf("a message of %d bytes", size)
			}
		}
	})
}
