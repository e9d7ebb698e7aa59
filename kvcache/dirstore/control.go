//go:build unix

package dirstore

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync/atomic"

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
// maxListing does not mend. So does one whose file was cut: it is made whole again, and
// where that fails the process goes on with words of its own. Safe for concurrent use.
type control struct {
	s      *Store
	shared words
	own    []byte      // in place of the shared words while alone
	alone  atomic.Bool // the shared words are out of reach
}

// openControl maps the control file and makes it if there is none.
func (s *Store) openControl() error {
	w, err := s.openWords(".", controlName, freshControl())
	if err != nil {
		return err
	}
	var got uint64
	if err := w.with(func(b []byte) { got = word64(b, 0).Load() }); err != nil || got != controlMagic {
		w.close()
		return errors.Join(fmt.Errorf("%s was made by another version (%x): remove it or take another one", s.dir, got), err)
	}
	s.control.s, s.control.shared, s.control.own = s, w, freshControl()
	return nil
}

// freshControl is the content of a new control file.
func freshControl() []byte {
	b := make([]byte, controlSize)
	word64(b, 0).Store(controlMagic)
	return b
}

// with lets f reach the words.
func (c *control) with(f func(b []byte)) {
	if !c.alone.Load() {
		if c.shared.with(f) == nil {
			return
		}
		if err := c.mend(); err != nil && c.alone.CompareAndSwap(false, true) {
			c.s.cfg.Log.Error("KV store: the words that its processes share are lost to this one", "dir", c.s.dir, "err", err)
		}
		if !c.alone.Load() && c.shared.with(f) == nil {
			return
		}
	}
	f(c.own)
}

// mend makes a control file whole that was cut, for all that have it mapped. What it
// counted is wrong then until the next recount.
func (c *control) mend() error {
	file, err := c.s.openRegular(controlName, os.O_RDWR)
	if err != nil {
		return err
	}
	defer file.Close()
	st, err := file.Stat()
	if err != nil {
		return err
	}
	if st.Size() < controlSize {
		_ = c.s.count.Failure(errFault)
		c.s.cfg.Log.Warn("KV store: its control file was cut and is made whole", "dir", c.s.dir, "bytes", st.Size())
		if _, err := file.WriteAt(freshControl()[st.Size():], st.Size()); err != nil {
			return err
		}
	}
	return c.shared.with(func(b []byte) { word64(b, 0).Store(controlMagic) })
}

// rejoin ends the time alone if the shared words can be reached again.
func (c *control) rejoin() {
	if c.alone.Load() && c.mend() == nil {
		c.alone.Store(false)
	}
}

// used is the number of bytes that all processes hold in the store.
func (c *control) used() (n int64) {
	c.with(func(b []byte) { n = int64(word64(b, 8).Load()) })
	return n
}

// addUsed changes it, and returns what it is then.
func (c *control) addUsed(by int64) (n int64) {
	c.with(func(b []byte) { n = int64(word64(b, 8).Add(uint64(by))) })
	return n
}

// slot is the number of the word that changes with the folder of a parent's children.
func slot(parent kvcache.Key) int { return int(parent[0])<<4 | int(parent[1])>>4 }

// generation changes with the folder of a parent's children, and sometimes with
// another's.
func (c *control) generation(parent kvcache.Key) (n uint32) {
	c.with(func(b []byte) { n = word32(b, 4096+4*slot(parent)).Load() })
	return n
}

// changed tells all processes that a folder has changed.
func (c *control) changed(parent kvcache.Key) {
	c.with(func(b []byte) { word32(b, 4096+4*slot(parent)).Add(1) })
}

// changedAll tells it of all folders.
func (c *control) changedAll() {
	c.with(func(b []byte) {
		for i := range generations {
			word32(b, 4096+4*i).Add(1)
		}
	})
}

// openWords maps a small file of shared words; if there is none it makes one
// with the content fresh. All processes get the same file, and none sees it
// before it is whole.
func (s *Store) openWords(dir, base string, fresh []byte) (words, error) {
	name := dir + "/" + base
	f, err := s.openRegular(name, os.O_RDWR)
	if errors.Is(err, fs.ErrNotExist) {
		// Written in full, not truncated to size: a hole of a full file system is a fault
		// of the memory, too.
		f, err = s.publish(dir, base, fresh, true)
		if errors.Is(err, fs.ErrExist) {
			// Another process was faster.
			f, err = s.openRegular(name, os.O_RDWR)
		}
	}
	if err != nil {
		return words{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return words{}, fmt.Errorf("look at %s: %w", name, err)
	}
	if st.Size() != int64(len(fresh)) {
		return words{}, fmt.Errorf("%s/%s has %d bytes, want %d: remove it", s.dir, name, st.Size(), len(fresh))
	}
	return mapWords(f, len(fresh))
}
