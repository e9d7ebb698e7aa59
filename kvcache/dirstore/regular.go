//go:build unix

package dirstore

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/kvcache"
)

// openRegular opens a file that must be a regular one. To open a FIFO would wait for its
// other end, and to read a device may do anything, so whatever else lies there is refused:
// the error is a *kvcache.Refusal. Flags are those of os.OpenFile.
func (s *Store) openRegular(name string, flags int) (*os.File, error) {
	// With O_NONBLOCK nothing waits in open itself; on a regular file it means nothing.
	f, err := s.root.OpenFile(name, flags|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.EISDIR) { // a socket, or a FIFO for writing; a folder
		return nil, &kvcache.Refusal{Reason: kvcache.ReasonKind, Detail: "no regular file"}
	}
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = &kvcache.Refusal{Reason: kvcache.ReasonKind, Detail: "no regular file"}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// readFile reads a regular file of at most most bytes; a longer one is refused.
func (s *Store) readFile(name string, most int64) ([]byte, error) {
	f, err := s.openRegular(name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() > most {
		return nil, &kvcache.Refusal{Reason: kvcache.ReasonTorn, Detail: fmt.Sprintf("%d bytes, at most %d", st.Size(), most)}
	}
	b := make([]byte, st.Size()+1) // one more, so that the end is seen at once
	n, err := io.ReadFull(f, b)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil // shorter than a moment ago, or as long
	}
	return b[:n], err
}
