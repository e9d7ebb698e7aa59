//go:build unix

package arena

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
)

// Readers in other processes say what they read in a file of words that they share
// with the owner; see the package comment.
const (
	// Slots is how many blocks one reader can read at once: a million tokens in blocks of
	// the usual size.
	Slots    = 16384
	peerSize = 8 * Slots

	// writerMark is the first byte of the names of readers that fill room, and of theirs only.
	writerMark = 0xff
	// orphaned is how long what such a reader held stays when its process has ended: it
	// may have told others where that is.
	orphaned = time.Minute
)

// Ticket is what a reader writes into a slot before it asks for a block. It is odd, and
// never used twice.
type Ticket uint64

// word is what the owner writes there: the extent. It is even and not 0.
func (e extent) word() uint64 { return uint64(e.at)<<32 | uint64(e.n)<<1 }

// extentOf reads it; anything else is no extent.
func extentOf(word uint64) (extent, bool) {
	e := extent{uint32(word >> 32), uint32(word) >> 1}
	return e, word&1 == 0 && e.at > 0 && e.n > 0
}

// words is a mapped file of slots.
type words []byte

func (w words) slot(i int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&w[8*i : 8*i+8][0]))
}

// openWords maps the file of a reader.
func openWords(f *os.File) (words, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() != peerSize {
		return nil, fmt.Errorf("%s has %d bytes, want %d", f.Name(), st.Size(), peerSize)
	}
	return unix.Mmap(int(f.Fd()), 0, peerSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// peer is a reader in another process, as the owner sees it. The words say what the reader
// reads; held is what the owner has put there, so that it notices what was given back.
type peer struct {
	file  *os.File
	words words
	held  map[int]pin // by slot: what was lent and not found to be given back
	dead  time.Time   // when it was found to have ended, of one that fills room
}

// pin is one block that a reader reads.
type pin struct {
	hold
	word   uint64
	ticket Ticket // that it was lent for; 0 if an owner before this one did
}

// close forgets a reader.
func (p *peer) close() {
	_ = unix.Munmap(p.words) // cannot fail for what Mmap returned
	p.file.Close()
}

// Lend lets a reader in another process read a block: its slot, which must hold the
// ticket, then holds the extent, and the block's bytes stay until the reader clears the
// slot or ends. It returns where the frame lies and how long it is. Of the bytes nothing
// is known yet: the reader checks them.
func (s *Store) Lend(ctx context.Context, reader string, slot int, ticket Ticket, ref kvcache.Ref) (at, size int64, err error) {
	if slot < 0 || slot >= Slots || ticket&1 == 0 {
		return 0, 0, fmt.Errorf("lend: slot %d, ticket %d", slot, ticket)
	}
	if err := s.enter(ctx); err != nil {
		return 0, 0, err
	}
	defer s.mu.Unlock()
	p, err := s.peerLocked(reader)
	if err != nil {
		return 0, 0, s.count.Failure(fmt.Errorf("lend: %w", err))
	}
	if !s.waitsLocked(p, slot, ticket) {
		return 0, 0, fmt.Errorf("lend: %w", context.Canceled)
	}
	h, err := s.holdLocked(ref, true)
	if err != nil {
		return 0, 0, err
	}
	if !p.words.slot(slot).CompareAndSwap(uint64(ticket), h.word()) {
		s.dropLocked(h) // it does not wait any more
		return 0, 0, fmt.Errorf("lend: %w", context.Canceled)
	}
	p.held[slot] = pin{h, h.word(), ticket}
	s.count.Hits.Add(1)
	s.count.HitBytes.Add(uint64(h.size))
	return int64(h.at) * grain, h.size, nil
}

// waitsLocked says whether a reader waits for what is to be lent in a slot; then it has done
// with what was lent there before. A request that was given up may come late, when the slot
// has another ticket or what that was answered with, which is left as it is.
func (s *Store) waitsLocked(p *peer, slot int, ticket Ticket) bool {
	if p.words.slot(slot).Load() != uint64(ticket) {
		return false
	}
	if old, ok := p.held[slot]; ok {
		delete(p.held, slot)
		s.dropLocked(old.hold)
	}
	return true
}

// Refused removes a block that a reader found to be wrong, after a look at it.
func (s *Store) Refused(ctx context.Context, ref kvcache.Ref) error {
	l, err := s.Get(ctx, ref)
	if err != nil {
		return nil // gone, or removed by this look
	}
	defer l.Release()
	_ = l.Verify() // removes and counts what is wrong
	return nil
}

// peerLocked returns a reader by its name.
func (s *Store) peerLocked(name string) (*peer, error) {
	if p := s.peers[name]; p != nil {
		return p, nil
	}
	if !isReader(name) {
		return nil, fmt.Errorf("reader %.40q: want 16 hexadecimal digits", name)
	}
	p, err := s.openPeer(name)
	if err != nil {
		return nil, err
	}
	s.peers[name] = p
	return p, nil
}

// isReader says whether a name is one that a reader gives itself.
func isReader(name string) bool {
	b, err := hex.DecodeString(name)
	return err == nil && len(b) == 8
}

// openPeer maps a reader's words.
func (s *Store) openPeer(name string) (*peer, error) {
	f, err := s.root.OpenFile(readersDir+"/"+name, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	w, err := openWords(f)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("map a reader's words: %w", err)
	}
	return &peer{file: f, words: w, held: map[int]pin{}}, nil
}

// reapLocked gives back what readers have done with, and says whether that was
// anything.
func (s *Store) reapLocked() (any bool) {
	for _, p := range s.peers {
		for slot, h := range p.held {
			if p.words.slot(slot).Load() != h.word {
				delete(p.held, slot)
				s.dropLocked(h.hold)
				any = true
			}
		}
	}
	return any
}

// fills says whether the name is that of a reader that fills room.
func fills(name string) bool { return strings.HasPrefix(name, fmt.Sprintf("%02x", writerMark)) }

// buryLocked forgets readers whose process has ended, and what they were reading.
func (s *Store) buryLocked(now time.Time) {
	for name, p := range s.peers {
		if !flock(p.file) {
			continue
		}
		if p.dead.IsZero() {
			p.dead = now
		}
		if fills(name) && now.Sub(p.dead) < orphaned {
			continue
		}
		for _, h := range p.held {
			s.dropLocked(h.hold)
		}
		p.close()
		delete(s.peers, name)
		_ = s.root.Remove(readersDir + "/" + name) // else the next start does
		s.count.Swept.Add(1)
	}
}

// findPeers is for the start: nobody has been lent anything by this process yet, but what
// the one before it has lent is still being read. It opens the words of the readers that live, removes those of the others,
// and lists the extents that are being read.
func (s *Store) findPeers() (held []extent, err error) {
	d, err := s.root.Open(readersDir)
	if err != nil {
		return nil, err
	}
	names, err := d.Readdirnames(-1)
	d.Close()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		path := readersDir + "/" + name
		f, err := s.root.OpenFile(path, os.O_RDWR, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		dead := flock(f)
		f.Close()
		if dead && (!fills(name) || strings.HasSuffix(name, newSuffix)) {
			_ = s.root.Remove(path) // else the next start does
			continue
		}
		if !isReader(strings.TrimSuffix(name, newSuffix)) || strings.HasSuffix(name, newSuffix) {
			continue // being made
		}
		p, err := s.openPeer(name)
		if err != nil {
			return nil, err
		}
		s.peers[name] = p
		for slot := range Slots {
			if e, ok := extentOf(p.words.slot(slot).Load()); ok && int64(e.end()) <= s.cfg.Limit/grain {
				held = append(held, e)
			}
		}
	}
	return held, nil
}

// adoptHeld puts what readers read into the books: as uses of blocks that are in the
// index, or as extents that wait for their readers. It returns the latter.
func (s *Store) adoptHeld(held []extent) (taken []extent) {
	if len(held) == 0 {
		return nil
	}
	at := map[extent]evict.ID{}
	for i := range s.index.entries {
		if e := &s.index.entries[i]; e.live {
			at[e.extent()] = evict.ID(i)
		}
	}
	for _, p := range s.peers {
		for slot := range Slots {
			word := p.words.slot(slot).Load()
			e, ok := extentOf(word)
			if !ok || int64(e.end()) > s.cfg.Limit/grain {
				continue
			}
			h := hold{extent: e, id: evict.None}
			if id, known := at[e]; known {
				entry := &s.index.entries[id]
				entry.refs++
				h.id, h.gen, h.size = id, entry.gen, entry.size
			} else if l := s.limbo[e.at]; l != nil && l.extent == e {
				l.refs++
			} else if slices.ContainsFunc(taken, e.overlaps) {
				continue // nobody lent that
			} else {
				s.limbo[e.at] = &limbo{e, 1}
				taken = append(taken, e)
			}
			p.held[slot] = pin{h, word, 0}
		}
	}
	return taken
}
