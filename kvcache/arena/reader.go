//go:build unix

package arena

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/internal/privdir"
	"github.com/kvmesh/kvmesh/kvcache"
)

// newSuffix marks the file of a reader that is being made.
const newSuffix = ".new"

// Reader reads blocks in place that the owner of an arena, another process, lends it, and
// one that OpenWriter made fills room that it is lent. Only the latter maps the arena with
// the right to write. It is safe for concurrent use.
type Reader struct {
	name  string
	prot  int // of its mappings
	root  *os.Root
	file  *os.File // holds the lock that says that this process lives
	words words

	mu     sync.Mutex
	free   []int
	ticket uint64
	lent   int // blocks that are being read
	closed bool
	fills  bool // new mappings are filled at once
	view   *view
}

// view is one mapping of an arena. An arena that was begun anew is another one.
type view struct {
	b    []byte
	id   arenaID
	uses int
	old  bool // there is a newer one
	// inMemory says that all of it is in memory, and filled, once it is being filled, is
	// closed when that is done; see Reader.FillLater.
	inMemory bool
	filled   chan struct{}
}

// OpenReader makes a reader of the arena whose owner has dir.
func OpenReader(dir string) (*Reader, error) { return openReader(dir, unix.PROT_READ) }

// OpenWriter makes one that can fill room, too. It could spoil what others have stored,
// which whoever reads that then refuses.
func OpenWriter(dir string) (*Reader, error) {
	return openReader(dir, unix.PROT_READ|unix.PROT_WRITE)
}

func openReader(dir string, prot int) (*Reader, error) {
	root, err := privdir.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open reader: %w", err)
	}
	r := &Reader{root: root, prot: prot}
	for range mostEnroll {
		if err = r.enroll(); !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errNoLock) {
			break
		}
	}
	if err != nil {
		root.Close()
		return nil, fmt.Errorf("open reader: %w", err)
	}
	for slot := range Slots {
		r.free = append(r.free, Slots-1-slot)
	}
	return r, nil
}

// mostEnroll is how often a reader makes its file: an owner that starts just then may take
// it for a dead process's before it is locked, and looks once.
const mostEnroll = 4

// errNoLock says that somebody else has locked the file of a reader.
var errNoLock = errors.New("no lock to be had")

// enroll makes the file of words. It is locked before it has its name, so that the
// owner never takes it for a dead process's.
func (r *Reader) enroll() (err error) {
	if err := r.root.Mkdir(readersDir, 0o700); err != nil && !os.IsExist(err) {
		return err
	}
	var id [8]byte
	rand.Read(id[:]) // never fails
	if id[0] = min(id[0], writerMark-1); r.prot&unix.PROT_WRITE != 0 {
		id[0] = writerMark
	}
	r.name = hex.EncodeToString(id[:])
	path := readersDir + "/" + r.name
	if r.file, err = r.root.OpenFile(path+newSuffix, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return err
	}
	if !flock(r.file) {
		err = errNoLock
	} else if _, err = r.file.Write(make([]byte, peerSize)); err == nil {
		err = r.root.Rename(path+newSuffix, path)
	}
	if err == nil {
		r.words, err = openWords(r.file)
	}
	if err != nil {
		r.file.Close()
	}
	return err
}

// Name is what the owner knows the reader by.
func (r *Reader) Name() string { return r.name }

// ErrNoSlot says that a reader reads as many blocks as it can.
var ErrNoSlot = fmt.Errorf("a reader reads at most %d blocks at once", Slots)

// Ask takes a slot to ask the owner for a block with. Take or Abandon must follow.
func (r *Reader) Ask() (slot int, t Ticket, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0, 0, kvcache.ErrClosed
	}
	n := len(r.free)
	if n == 0 {
		return 0, 0, ErrNoSlot
	}
	slot, r.free = r.free[n-1], r.free[:n-1]
	r.ticket += 2
	r.lent++
	t = Ticket(r.ticket | 1)
	r.words.slot(slot).Store(uint64(t))
	return slot, t, nil
}

// Abandon gives a slot back without a block. The owner may be about to lend one: it
// finds the ticket gone.
func (r *Reader) Abandon(slot int) {
	r.words.slot(slot).Store(0)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.free = append(r.free, slot)
	r.lent--
	r.unmapLocked()
}

// Loan says where a block lies that the owner has lent.
type Loan struct {
	// Data is the path of the arena, and ID what is in its header.
	Data string
	ID   [16]byte
	Slot int
	// At and Size are where the frame is, in bytes.
	At, Size int64
}

// Take looks at a block that the owner has lent, checks its header and returns it; its
// release gives the slot back. On an error the slot is given back already. What it refuses, now
// or in a part, refused is told.
func (r *Reader) Take(l Loan, ref kvcache.Ref, refused func(error)) (*kvcache.Lent, error) {
	b, done, err := r.bytes(l)
	if err != nil {
		return nil, err
	}
	f, err := kvcache.Decode(b, ref)
	if err != nil {
		done()
		refused(err)
		return nil, fmt.Errorf("block %s: %w", ref.Key, err)
	}
	return kvcache.NewLent(f, done, refused), nil
}

// Room returns the bytes of room that the owner has lent to a reader that OpenWriter made,
// and what gives the slot back, to be called once. On an error the slot is given back
// already.
func (r *Reader) Room(l Loan) (b []byte, release func(), err error) { return r.bytes(l) }

// bytes returns what is lent.
func (r *Reader) bytes(l Loan) (b []byte, done func(), err error) {
	v, err := r.use(l)
	if err != nil {
		r.Abandon(l.Slot)
		return nil, nil, err
	}
	done = func() {
		r.leave(v)
		r.Abandon(l.Slot)
	}
	if l.At < 0 || l.Size < 0 || l.At > int64(len(v.b)) || l.Size > int64(len(v.b))-l.At {
		done()
		return nil, nil, fmt.Errorf("%d bytes at %d are outside the arena", l.Size, l.At)
	}
	return v.b[l.At : l.At+l.Size : l.At+l.Size], done, nil
}

// use returns the mapping of the arena that a loan is of. A reader that is closed begins to
// use none, since nobody would give that back.
func (r *Reader) use(l Loan) (*view, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, kvcache.ErrClosed
	}
	if r.view == nil || r.view.id != l.ID {
		v, err := openView(l, r.prot)
		if err != nil {
			return nil, fmt.Errorf("map the arena: %w", err)
		}
		if old := r.view; old != nil {
			old.old = true
			old.unmap()
		}
		if r.view = v; r.fills {
			r.fillingLocked(v)
		}
	}
	r.view.uses++
	return r.view, nil
}

// leave ends one use of a mapping.
func (r *Reader) leave(v *view) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v.uses--
	v.unmap()
}

// unmap gives a mapping back that is old and not used.
func (v *view) unmap() {
	if v.old && v.uses == 0 && v.b != nil {
		_ = unix.Munmap(v.b) // cannot fail for what Mmap returned
		v.b = nil
	}
}

// openView maps an arena that must have the identity that the owner tells.
func openView(l Loan, prot int) (*view, error) {
	mode := os.O_RDONLY
	if prot&unix.PROT_WRITE != 0 {
		mode = os.O_RDWR
	}
	f, err := os.OpenFile(l.Data, mode, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	head := make([]byte, headerLen)
	b, err := unix.Mmap(int(f.Fd()), 0, grain, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	copy(head, b)
	_ = unix.Munmap(b)
	size := sizeOf(head)
	id, err := parseHeader(head, size)
	if err != nil {
		return nil, err
	}
	if id != arenaID(l.ID) {
		return nil, errors.New("it is another one than that of its owner")
	}
	if b, err = unix.Mmap(int(f.Fd()), 0, int(size), prot, unix.MAP_SHARED); err != nil {
		return nil, err
	}
	return &view{b: b, id: id, inMemory: inMemory(f, size)}, nil
}

// Close ends the reader. What is being read stays readable, and the owner's promise
// holds, until it is released.
func (r *Reader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	r.unmapLocked()
	return nil
}

// unmapLocked gives everything back once the reader is closed and reads nothing.
func (r *Reader) unmapLocked() {
	if !r.closed || r.lent > 0 || r.words == nil {
		return
	}
	if r.view != nil {
		r.view.old = true
		r.view.unmap()
	}
	_ = r.root.Remove(readersDir + "/" + r.name) // else the owner does
	_ = unix.Munmap(r.words)                     // cannot fail for what Mmap returned
	r.words = nil
	r.file.Close()
	r.root.Close()
}
