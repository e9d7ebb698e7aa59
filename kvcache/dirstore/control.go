//go:build unix

package dirstore

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync/atomic"
	"unsafe"

	"github.com/kvmesh/kvmesh/kvcache"
)

// The control file is words in the machine's own byte order, since only
// processes of one machine map it:
//
//	   0  8  magic and version
//	   8  8  bytes in use
//	4096  4 × 4096  generations of folders of blocks, by the first bits of the parent's key
const (
	controlName  = "control"
	controlMagic = 0x0001_4c52_5443_564b // "KVCTRL" and version 1
	controlSize  = 4096 + 4*generations
	generations  = 4096
)

// control is the mapped file. Its words are hints for speed and room: a process
// that dies between a change and its word does no harm that a recount or
// maxListing does not mend.
type control struct{ b []byte }

// openControl maps the control file and makes it if there is none.
func (s *Store) openControl() error {
	fresh := make([]byte, controlSize)
	word64(fresh, 0).Store(controlMagic)
	b, err := s.openWords(".", controlName, fresh)
	if err != nil {
		return err
	}
	if got := word64(b, 0).Load(); got != controlMagic {
		unmap(b)
		return fmt.Errorf("%s was made by another version (%x): remove it or take another one", s.dir, got)
	}
	s.control = control{b}
	return nil
}

// used is the number of bytes that all processes hold in the store.
func (c control) used() *atomic.Int64 { return (*atomic.Int64)(unsafe.Pointer(word64(c.b, 8))) }

// generation changes with the folder of a parent's children, and sometimes with
// another's.
func (c control) generation(parent kvcache.Key) *atomic.Uint32 {
	return c.generationAt(int(parent[0])<<4 | int(parent[1])>>4)
}

// generationAt returns the i-th of them all.
func (c control) generationAt(i int) *atomic.Uint32 { return word32(c.b, 4096+4*i) }

// openWords maps a small file of shared words; if there is none it makes one
// with the content fresh. All processes get the same file, and none sees it
// before it is whole.
func (s *Store) openWords(dir, base string, fresh []byte) ([]byte, error) {
	name := dir + "/" + base
	f, err := s.root.OpenFile(name, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		// Written in full, not truncated to size: in a hole of a full file system the
		// first store would kill the process.
		f, err = s.publish(dir, base, fresh, true)
		if errors.Is(err, fs.ErrExist) {
			// Another process was faster.
			f, err = s.root.OpenFile(name, os.O_RDWR, 0)
		}
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("look at %s: %w", name, err)
	}
	if st.Size() != int64(len(fresh)) {
		return nil, fmt.Errorf("%s/%s has %d bytes, want %d: remove it", s.dir, name, st.Size(), len(fresh))
	}
	return mapFile(f, st.Size(), true)
}
