package rivaltest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
)

// Memcached is a client that does no more than it must: it sends from where the bytes lie
// and reads into memory that is used again. It checks nothing, and is for one goroutine.
type Memcached struct {
	c net.Conn
	r *bufio.Reader
}

// DialMemcached connects to a server until the test ends.
func DialMemcached(tb testing.TB, s *Server) *Memcached {
	tb.Helper()
	c, err := net.Dial(s.Network, s.Addr)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	return &Memcached{c, bufio.NewReaderSize(c, 4<<10)}
}

// Set stores a value.
func (m *Memcached) Set(key string, value []byte) error {
	bufs := net.Buffers{fmt.Appendf(nil, "set %s 0 0 %d\r\n", key, len(value)), value, []byte("\r\n")}
	if _, err := bufs.WriteTo(m.c); err != nil {
		return err
	}
	return m.line("STORED")
}

// Get reads values that are as long as room into it, one after the other, and calls use, if
// it is not nil, behind each. They are asked for at once.
func (m *Memcached) Get(keys []string, room []byte, use func()) error {
	if _, err := fmt.Fprintf(m.c, "get %s\r\n", strings.Join(keys, " ")); err != nil {
		return err
	}
	for _, key := range keys {
		if err := m.line(fmt.Sprintf("VALUE %s 0 %d", key, len(room))); err != nil {
			return err
		}
		if _, err := io.ReadFull(m.r, room); err != nil {
			return err
		}
		if use != nil {
			use()
		}
		if err := m.line(""); err != nil {
			return err
		}
	}
	return m.line("END")
}

// Clear forgets everything.
func (m *Memcached) Clear() error {
	if _, err := io.WriteString(m.c, "flush_all\r\n"); err != nil {
		return err
	}
	return m.line("OK")
}

// line reads one that must be as wanted.
func (m *Memcached) line(want string) error {
	got, err := m.r.ReadString('\n')
	if err == nil && got != want+"\r\n" {
		err = fmt.Errorf("memcached says %.100q", got)
	}
	return err
}
