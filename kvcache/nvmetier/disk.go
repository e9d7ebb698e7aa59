//go:build unix

package nvmetier

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// disk is what the store needs of a file system. Names are relative to its directory.
type disk interface {
	// Open opens a file as os.OpenFile does, with mode 0600.
	Open(name string, flag int) (file, error)
	Mkdir(name string) error
	Rename(from, to string) error
	// Remove removes a file or an empty folder.
	Remove(name string) error
	// List names what is in a folder, some of what comes or goes meanwhile too.
	List(dir string, each func(name string)) error
}

// file is an open file.
type file interface {
	io.WriteCloser
	// Sync returns when what was written is on the disk, and lets go of copies in memory.
	Sync() error
	// ReadAt fills b from a place on, as far as the file goes. Where the file was opened
	// with O_DIRECT, b and at are whole pages.
	ReadAt(b []byte, at int64) (int, error)
}

// page is the unit of direct reading, and of what a file takes.
const page = 4096

// pages rounds a length up to whole pages.
func pages(n int64) int64 { return (n + page - 1) &^ (page - 1) }

// rootDisk is a directory.
type rootDisk struct{ *os.Root }

// Open implements disk.
func (d rootDisk) Open(name string, flag int) (file, error) {
	f, err := d.OpenFile(name, flag|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		// What leads out of the directory has an error that nobody can compare.
		if st, no := d.Lstat(name); no == nil && st.Mode()&fs.ModeSymlink != 0 {
			err = &fs.PathError{Op: "open", Path: name, Err: unix.ELOOP}
		}
		return nil, err
	}
	return osFile{f}, nil
}

// Mkdir implements disk.
func (d rootDisk) Mkdir(name string) error { return d.Root.Mkdir(name, 0o700) }

// List implements disk.
func (d rootDisk) List(dir string, each func(name string)) error {
	f, err := d.Root.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		names, err := f.Readdirnames(4096)
		for _, name := range names {
			each(name)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// osFile is a file of the system.
type osFile struct{ *os.File }

// Sync implements file.
func (f osFile) Sync() error {
	if err := f.File.Sync(); err != nil {
		return err
	}
	forget(int(f.Fd()))
	return nil
}

// ReadAt implements file. Unlike that of os.File it does not read on at a place that is
// no whole page.
func (f osFile) ReadAt(b []byte, at int64) (n int, err error) {
	for n < len(b) {
		m, err := unix.Pread(int(f.Fd()), b[n:], at+int64(n))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return n, &fs.PathError{Op: "read", Path: f.Name(), Err: err}
		}
		if n += m; m == 0 || m%page != 0 {
			return n, nil
		}
	}
	return n, nil
}

// buffers gives out aligned memory, which is used again: single pages, which headers take,
// and what blocks take. The zero value is ready, and it is safe for concurrent use.
type buffers struct{ single, large sync.Pool }

// of is the pool for a length.
func (p *buffers) of(n int64) *sync.Pool {
	if n <= page {
		return &p.single
	}
	return &p.large
}

// get returns n bytes, rounded up to whole pages, that begin at a page.
func (p *buffers) get(n int64) []byte {
	n = pages(n)
	if b, ok := p.of(n).Get().(*[]byte); ok && int64(cap(*b)) >= n {
		return (*b)[:n]
	}
	b := make([]byte, n+page)
	skip := int(-uintptr(unsafe.Pointer(&b[0])) & (page - 1))
	return b[skip : skip+int(n) : skip+int(n)]
}

// put takes memory back that get gave out.
func (p *buffers) put(b []byte) { p.of(int64(cap(b))).Put(&b) }

// noRoom says whether an error is that of a disk, or a quota of one, that is full.
func noRoom(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// removeAll removes a folder with everything in it. What is not there is removed already.
func removeAll(d disk, name string) error {
	err := d.Remove(name)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var names []string
	if list := d.List(name, func(n string) { names = append(names, n) }); list != nil {
		return fmt.Errorf("remove %s: %w", name, errors.Join(err, list))
	}
	for _, n := range names {
		if err := removeAll(d, name+"/"+n); err != nil {
			return err
		}
	}
	if err := d.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", name, err)
	}
	return nil
}
