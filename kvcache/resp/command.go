//go:build unix

package resp

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// Bounds of what a client may send.
const (
	mostArgs  = 1024
	mostArg   = 64 << 10
	mostValue = 512 << 20 // as Redis has it
	// Before a client has given the password, AUTH has so many strings of so many bytes.
	mostLogin = 2
	mostName  = 1 << 10
)

// errProtocol says that what was sent is no command; the connection is of no more use.
var errProtocol = errors.New("protocol error")

// reader reads commands: arrays of bulk strings. The last one may be read by its owner,
// straight to where it belongs.
type reader struct {
	r    *bufio.Reader
	left int // strings of the command that were not begun
}

// next begins a command and returns its first string, the name.
func (c *reader) next() (string, error) {
	n, err := c.line('*')
	if err != nil {
		return "", err
	}
	if n < 1 || n > mostArgs {
		return "", fmt.Errorf("%w: %d strings", errProtocol, n)
	}
	c.left = n
	return c.arg()
}

// line reads a line that begins with a mark and has a number.
func (c *reader) line(mark byte) (int, error) {
	b, err := c.r.ReadSlice('\n')
	if err != nil {
		if errors.Is(err, bufio.ErrBufferFull) {
			err = fmt.Errorf("%w: a long line", errProtocol)
		}
		return 0, err
	}
	if len(b) < 4 || len(b) > 16 || b[0] != mark || b[len(b)-2] != '\r' {
		return 0, notNumber(mark, b)
	}
	n, err := strconv.Atoi(string(b[1 : len(b)-2]))
	if err != nil || n < 0 || b[1] == '+' || b[1] == '-' {
		return 0, notNumber(mark, b)
	}
	return n, nil
}

// notNumber is about a line without telling it: it may hold a password, or a key.
func notNumber(mark byte, b []byte) error {
	return fmt.Errorf("%w: a line of %d bytes instead of %q and a number", errProtocol, len(b), mark)
}

// begin begins the next string and returns its length.
func (c *reader) begin() (int, error) {
	if c.left == 0 {
		return 0, fmt.Errorf("%w: no more strings", errProtocol)
	}
	n, err := c.line('$')
	if err != nil {
		return 0, err
	}
	if n > mostValue {
		return 0, fmt.Errorf("%w: %d bytes", errProtocol, n)
	}
	c.left--
	return n, nil
}

// fill reads all of the string that was begun into b, which is as long.
func (c *reader) fill(b []byte) error {
	if _, err := io.ReadFull(c.r, b); err != nil {
		return err
	}
	return c.end()
}

// end reads what ends a string.
func (c *reader) end() error {
	var crlf [2]byte
	if _, err := io.ReadFull(c.r, crlf[:]); err != nil {
		return err
	}
	if string(crlf[:]) != "\r\n" {
		return fmt.Errorf("%w: a string does not end", errProtocol)
	}
	return nil
}

// arg reads a whole string that is no value.
func (c *reader) arg() (string, error) { return c.argOf(mostArg) }

// argOf is arg with another bound.
func (c *reader) argOf(most int) (string, error) {
	n, err := c.begin()
	if err != nil {
		return "", err
	}
	if n > most {
		return "", fmt.Errorf("%w: a string of %d bytes", errProtocol, n)
	}
	b := make([]byte, n)
	if err := c.fill(b); err != nil {
		return "", err
	}
	return string(b), nil
}

// args reads all that are left.
func (c *reader) args() ([]string, error) { return c.argsOf(mostArg) }

// argsOf is args with another bound of each.
func (c *reader) argsOf(most int) ([]string, error) {
	var list []string
	for c.left > 0 {
		a, err := c.argOf(most)
		if err != nil {
			return nil, err
		}
		list = append(list, a)
	}
	return list, nil
}

// skip reads n bytes of a string that was begun, and its end, for nothing.
func (c *reader) skip(n int) error {
	if _, err := c.r.Discard(n); err != nil {
		return err
	}
	return c.end()
}

// drop reads the rest of the command for nothing.
func (c *reader) drop() error {
	for c.left > 0 {
		n, err := c.begin()
		if err == nil {
			err = c.skip(n)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
