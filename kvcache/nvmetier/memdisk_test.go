//go:build unix

package nvmetier

import (
	"bytes"
	"errors"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// memDisk is a disk in memory that can be stopped at any change, as by the death of the
// process, and cloned as a loss of power would leave it. It is safe for concurrent use.
type memDisk struct {
	mu    sync.Mutex
	names map[string]*memFile // nil = a folder
	// durable are the names that are on the disk for good.
	durable map[string]*memFile
	r       *rand.Rand

	changes int  // so far
	stop    int  // the change that is the last, and which is done in part; 0 = none
	lies    bool // Sync says that it has, and has not
	room    int64
	direct  bool // else O_DIRECT is an error, as on some file systems
}

// memFile is the content of a file.
type memFile struct{ data, synced []byte }

var errStopped = errors.New("the process is dead")

func newMemDisk(seed uint64) *memDisk {
	return &memDisk{names: map[string]*memFile{}, durable: map[string]*memFile{}, r: rand.New(rand.NewPCG(seed, 9)), room: 1 << 40}
}

// change counts one, and says whether it is the last, which is cut off somewhere.
func (d *memDisk) change() (last bool, err error) {
	d.changes++
	if d.stop > 0 && d.changes > d.stop {
		return false, errStopped
	}
	if d.r.IntN(8) == 0 { // now and then the file system writes by itself
		d.durable = maps.Clone(d.names)
	}
	return d.changes == d.stop, nil
}

// parent reports a folder that is missing.
func (d *memDisk) parent(name string) error {
	dir := path.Dir(name)
	if f, ok := d.names[dir]; dir != "." && (!ok || f != nil) {
		return fs.ErrNotExist
	}
	return nil
}

// Open implements disk.
func (d *memDisk) Open(name string, flag int) (file, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if direct != 0 && flag&direct != 0 && !d.direct {
		return nil, unix.EINVAL
	}
	f, ok := d.names[name]
	if flag&os.O_CREATE == 0 {
		if !ok {
			return nil, fs.ErrNotExist
		}
		return &memOpen{d, f, flag}, nil
	}
	if ok {
		return nil, fs.ErrExist
	}
	if err := d.parent(name); err != nil {
		return nil, err
	}
	if _, err := d.change(); err != nil {
		return nil, err
	}
	f = &memFile{}
	d.names[name] = f
	return &memOpen{d, f, flag}, nil
}

// Mkdir implements disk.
func (d *memDisk) Mkdir(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.names[name]; ok {
		return fs.ErrExist
	}
	if err := d.parent(name); err != nil {
		return err
	}
	if _, err := d.change(); err != nil {
		return err
	}
	d.names[name] = nil
	return nil
}

// Rename implements disk.
func (d *memDisk) Rename(from, to string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	f, ok := d.names[from]
	if !ok {
		return fs.ErrNotExist
	}
	if err := d.parent(to); err != nil {
		return err
	}
	if _, err := d.change(); err != nil {
		return err
	}
	delete(d.names, from)
	d.names[to] = f
	for name, f := range maps.Clone(d.names) { // of a folder with all that is in it
		if rest, ok := strings.CutPrefix(name, from+"/"); ok {
			delete(d.names, name)
			d.names[to+"/"+rest] = f
		}
	}
	return nil
}

// Remove implements disk.
func (d *memDisk) Remove(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.names[name]; !ok {
		return fs.ErrNotExist
	}
	for other := range d.names {
		if strings.HasPrefix(other, name+"/") {
			return unix.ENOTEMPTY
		}
	}
	if _, err := d.change(); err != nil {
		return err
	}
	delete(d.names, name)
	return nil
}

// List implements disk.
func (d *memDisk) List(dir string, each func(string)) error {
	d.mu.Lock()
	f, ok := d.names[dir]
	var found []string
	for name := range d.names {
		if path.Dir(name) == dir {
			found = append(found, path.Base(name))
		}
	}
	d.mu.Unlock()
	if !ok || f != nil {
		return fs.ErrNotExist
	}
	slices.Sort(found)
	for _, name := range found {
		each(name)
	}
	return nil
}

// memOpen is an open file.
type memOpen struct {
	d    *memDisk
	f    *memFile
	flag int
}

// used is the bytes of all files.
func (d *memDisk) used() (n int64) {
	for _, f := range d.names {
		if f != nil {
			n += pages(int64(len(f.data)))
		}
	}
	return n
}

// Write implements file.
func (o *memOpen) Write(b []byte) (int, error) {
	o.d.mu.Lock()
	defer o.d.mu.Unlock()
	last, err := o.d.change()
	if err != nil {
		return 0, err
	}
	if n := o.d.room - o.d.used(); int64(len(b)) > n {
		o.f.data = append(o.f.data, b[:max(n, 0)]...)
		return int(max(n, 0)), unix.ENOSPC
	}
	if last {
		n := o.d.r.IntN(len(b) + 1)
		o.f.data = append(o.f.data, b[:n]...)
		return n, errStopped
	}
	o.f.data = append(o.f.data, b...)
	return len(b), nil
}

// Sync implements file.
func (o *memOpen) Sync() error {
	o.d.mu.Lock()
	defer o.d.mu.Unlock()
	last, err := o.d.change()
	switch {
	case err != nil:
		return err
	case last:
		return errStopped
	case !o.d.lies:
		o.f.synced = bytes.Clone(o.f.data)
	}
	return nil
}

// ReadAt implements file.
func (o *memOpen) ReadAt(b []byte, at int64) (int, error) {
	o.d.mu.Lock()
	defer o.d.mu.Unlock()
	if o.f == nil {
		return 0, unix.EISDIR
	}
	if direct != 0 && o.flag&direct != 0 && (len(b)%page != 0 || at%page != 0) {
		return 0, unix.EINVAL
	}
	return copy(b, o.f.data[min(at, int64(len(o.f.data))):]), nil
}

// Close implements file.
func (o *memOpen) Close() error { return nil }

// killed is the disk after the death of the process.
func (d *memDisk) killed() *memDisk {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := newMemDisk(d.r.Uint64())
	for name, f := range d.names {
		if c.names[name] = nil; f != nil {
			c.names[name] = &memFile{bytes.Clone(f.data), bytes.Clone(f.synced)}
		}
	}
	return c
}

// unpowered is the disk after a loss of power: of each name that came, went or changed
// since it was written either, and of what was not synced a part, or zeros.
func (d *memDisk) unpowered() *memDisk {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := newMemDisk(d.r.Uint64())
	all := maps.Clone(d.names)
	maps.Copy(all, d.durable)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		from := d.names
		if d.r.IntN(2) == 0 {
			from = d.durable
		}
		f, ok := from[name]
		if !ok || c.parent(name) != nil {
			continue
		}
		if c.names[name] = nil; f != nil {
			data := d.left(f)
			c.names[name] = &memFile{data, bytes.Clone(data)}
		}
	}
	c.durable = maps.Clone(c.names)
	return c
}

// left is what a loss of power leaves of a file.
func (d *memDisk) left(f *memFile) []byte {
	data := bytes.Clone(f.data)
	if bytes.Equal(f.data, f.synced) {
		return data
	}
	from := len(f.synced) + d.r.IntN(len(data)-len(f.synced)+1)
	if d.r.IntN(2) == 0 {
		return data[:from]
	}
	clear(data[from:])
	return data
}
