//go:build unix

package arena

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// The header of the arena, in its first grain; see the package comment.
const (
	arenaMagic   = "KVMA"
	arenaVersion = 1
	headerLen    = 64

	// grain is the unit in which room is given out.
	grain = 4096
	// step is how much memory is taken from the file system at once.
	step = 64 << 20
)

// arenaID tells arenas, and the journals that belong to them, apart.
type arenaID [16]byte

// region is the mapped arena.
type region struct {
	file   *os.File
	b      []byte // all of it, shared
	id     arenaID
	device bool  // not a regular file: its size is its own
	taken  int64 // bytes from the start that the file system has surely given
}

// openRegion opens or makes the arena. A file of another size, or one that is no
// arena, is replaced, never cut: other processes may have it mapped.
func openRegion(name string, size int64) (*region, error) {
	r := &region{}
	st, err := os.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return r, r.make(name, size)
	case err != nil:
		return nil, err
	case st.Mode().IsRegular() && st.Size() != size:
		return r, r.make(name, size)
	case !st.Mode().IsRegular() && st.IsDir():
		return nil, fmt.Errorf("%s is a directory", name)
	}
	r.device = !st.Mode().IsRegular()
	if r.file, err = os.OpenFile(name, os.O_RDWR, 0); err != nil {
		return nil, err
	}
	if err := r.mmap(size); err != nil {
		return nil, err
	}
	switch id, err := parseHeader(r.b[:headerLen], size); {
	case err == nil:
		r.id = id
	case string(r.b[:4]) == arenaMagic || r.empty():
		// Damaged, or of another version, or never written: a cache begins anew.
		r.renew()
	default:
		r.close()
		return nil, fmt.Errorf("%s holds something else than an arena: overwrite its first %d bytes with zeros, or name another one", name, headerLen)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Blocks*512 >= size {
		r.taken = size // no holes
	}
	return r, nil
}

// empty says whether nothing was ever written to the header.
func (r *region) empty() bool {
	for _, b := range r.b[:headerLen] {
		if b != 0 {
			return false
		}
	}
	return true
}

// make makes the file under another name first, so that there is never a half of one.
func (r *region) make(name string, size int64) error {
	temp := name + ".new"
	_ = os.Remove(temp) // of one that died here
	file, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	r.file = file
	if err := file.Truncate(size); err != nil {
		file.Close()
		return err
	}
	if err := r.grow(grain); err != nil {
		file.Close()
		return err
	}
	if err := r.mmap(size); err != nil {
		return err
	}
	r.renew()
	if err := os.Rename(temp, name); err != nil {
		r.close()
		return err
	}
	return nil
}

// mmap maps the file; on failure it is closed.
func (r *region) mmap(size int64) (err error) {
	if int64(int(size)) != size {
		err = fmt.Errorf("an arena of %d bytes does not fit into the address space", size)
	} else {
		r.b, err = unix.Mmap(int(r.file.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		r.file.Close()
		return fmt.Errorf("map %s: %w", r.file.Name(), err)
	}
	return nil
}

// renew gives the arena a new identity: whatever was in it belongs to nobody.
func (r *region) renew() arenaID {
	rand.Read(r.id[:]) // never fails
	copy(r.b, arenaHeader(r.id, int64(len(r.b))))
	return r.id
}

// grow makes sure that the first bytes up to end are there: a store into a hole of a
// full file system would kill the process.
func (r *region) grow(end int64) error {
	if r.device || end <= r.taken {
		return nil
	}
	if err := setAside(r.file, r.taken, end-r.taken); err != nil {
		return err
	}
	r.taken = end
	return nil
}

// close gives everything back.
func (r *region) close() {
	if r.b != nil {
		_ = unix.Munmap(r.b) // cannot fail for what Mmap returned
		r.b = nil
	}
	r.file.Close()
}

// arenaHeader writes the header of an arena.
func arenaHeader(id arenaID, size int64) []byte {
	b := make([]byte, headerLen)
	le := binary.LittleEndian
	copy(b, arenaMagic)
	le.PutUint16(b[4:], arenaVersion)
	le.PutUint64(b[8:], uint64(size))
	copy(b[16:], id[:])
	le.PutUint32(b[headerLen-4:], checksum(b[:headerLen-4]))
	return b
}

// parseHeader reads it.
func parseHeader(b []byte, size int64) (id arenaID, err error) {
	le := binary.LittleEndian
	switch {
	case len(b) < headerLen || string(b[:4]) != arenaMagic:
		return id, errors.New("no arena")
	case checksum(b[:headerLen-4]) != le.Uint32(b[headerLen-4:]):
		return id, errors.New("the header is damaged")
	case le.Uint16(b[4:]) != arenaVersion:
		return id, fmt.Errorf("version %d, want %d", le.Uint16(b[4:]), arenaVersion)
	case int64(le.Uint64(b[8:])) != size:
		return id, fmt.Errorf("made for %d bytes, not %d", le.Uint64(b[8:]), size)
	}
	copy(id[:], b[16:])
	return id, nil
}

// sizeOf is the size that a header names.
func sizeOf(b []byte) int64 { return int64(binary.LittleEndian.Uint64(b[8:])) }
