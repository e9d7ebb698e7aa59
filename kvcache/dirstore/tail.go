//go:build unix

package dirstore

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/tailrec"
)

// fenceName is the file of one word per stream: the highest attempt that was
// opened, plus one, or dropped.
const (
	fenceName = "fence"
	fenceSize = 8
	dropped   = math.MaxUint64
)

// streamDir is the folder of a stream's tails. Ids come from outside and may be
// long, so their hash is the name.
func streamDir(f kvcache.Fingerprint, stream string) string {
	sum := sha256.Sum256([]byte(stream))
	return tailsDir(f) + "/" + hex.EncodeToString(sum[:])
}

// OpenTail implements kvcache.Tails.
func (s *Store) OpenTail(ctx context.Context, spec kvcache.TailSpec) (kvcache.TailWriter, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.leave()
	if spec.Stream == "" || spec.Choice < 0 || spec.Choice > math.MaxInt32 || spec.Attempt < 0 || spec.First < 0 {
		return nil, fmt.Errorf("open tail: bad choice %d, attempt %d or position %d, or no stream", spec.Choice, spec.Attempt, spec.First)
	}
	t := &tail{s: s, spec: spec, dir: streamDir(spec.Fingerprint, spec.Stream)}
	for range 8 {
		again, err := t.open()
		if err == nil {
			return t, nil
		}
		t.free()
		if errors.Is(err, kvcache.ErrStale) {
			s.count.Stale.Add(1)
			return nil, fmt.Errorf("open tail: %w", err)
		}
		if !again {
			return nil, s.count.Failure(fmt.Errorf("open tail: %w", err))
		}
	}
	return nil, s.count.Failure(errors.New("open tail: the stream is being dropped again and again"))
}

// tail is an open tail of this process. It is one goroutine's, as the interface
// says, so it has no lock; other processes only read its files.
type tail struct {
	s    *Store
	spec kvcache.TailSpec // of the current file
	dir  string           // the stream's folder

	// fence is the mapped word of the stream, nil after Close.
	fence words
	// file is the current one, and seq its number.
	file *os.File
	seq  int
	// end is where the next record begins, and next the position of its first
	// token. What the file has behind end is of an append that failed.
	end  int64
	next int
	head []byte // the last record's header, kept for its memory
	done bool   // closed

	epoch int // of the store when the tail was opened
}

// open raises the fence and makes the first file. It asks for another try if the
// stream was dropped at the same time.
func (t *tail) open() (again bool, err error) {
	t.epoch = t.s.epoch
	if t.fence, err = t.s.openWords(t.dir, fenceName, make([]byte, fenceSize)); err != nil {
		return errors.Is(err, fs.ErrNotExist), err
	}
	// The fence goes up before there is a file: from here on lower attempts are
	// refused, even if this one gets no further.
	want := uint64(t.spec.Attempt) + 1
	var have uint64
	err = t.fence.with(func(b []byte) {
		word := word64(b, 0)
		for have = word.Load(); have <= want && !word.CompareAndSwap(have, want); have = word.Load() {
		}
	})
	switch {
	case err != nil:
		return false, err
	case have == dropped:
		// Whoever dropped it may have died before it removed the folder.
		return true, errors.Join(errors.New("the stream is being dropped"), t.s.removeTails(t.dir))
	case have > want:
		return false, kvcache.ErrStale
	}
	err = t.begin(t.spec)
	return errors.Is(err, fs.ErrNotExist), err
}

// begin makes a new file and appends to it from now on.
func (t *tail) begin(spec kvcache.TailSpec) error {
	head := tailHeader(spec)
	for seq := t.seq + 1; ; seq++ {
		file, err := t.s.publish(t.dir, tailName(spec.Choice, spec.Attempt, seq), head, false)
		if errors.Is(err, fs.ErrExist) {
			continue // another writer of the same attempt
		}
		if err != nil {
			return err
		}
		t.s.control.addUsed(room(tailHeaderLen))
		if t.file != nil {
			t.file.Close()
		}
		t.file, t.seq, t.spec, t.end, t.next = file, seq, spec, tailHeaderLen, spec.First
		return nil
	}
}

// check says whether this attempt may still write.
func (t *tail) check() error {
	if t.done {
		return kvcache.ErrClosed
	}
	if t.epoch != t.s.epoch {
		if err := t.renew(); err != nil {
			return err
		}
	}
	// A load from memory that is shared with whoever opens a higher attempt: this
	// is all that an append pays for the fence.
	var have uint64
	if err := t.fence.with(func(b []byte) { have = word64(b, 0).Load() }); err != nil {
		return t.s.count.Failure(fmt.Errorf("fence of the stream: %w", err))
	}
	if have != uint64(t.spec.Attempt)+1 {
		t.s.count.Stale.Add(1)
		return kvcache.ErrStale
	}
	return nil
}

// Append implements kvcache.TailWriter. Errors are the plain ones of kvcache, or
// the file system's.
func (t *tail) Append(r kvcache.Range) error {
	if err := t.s.enter(context.Background()); err != nil {
		return err
	}
	defer t.s.leave()
	if err := t.check(); err != nil {
		return err
	}
	if err := t.fits(r); err != nil {
		return err
	}
	t.head = tailrec.AppendHeader(t.head[:0], t.end, uint64(t.end), r)
	data := t.end + int64(len(t.head))
	end := data + int64(len(r.Data))
	// Tails do not evict, because the token that is being generated would wait
	// for it. Near the limit they have it done, at the limit they do without.
	grown := room(end) - room(t.end)
	used := t.s.control.addUsed(grown)
	if used > t.s.cfg.Limit-t.s.cfg.Limit/16 {
		t.s.roomIsShort()
	}
	if used > t.s.cfg.Limit {
		t.s.control.addUsed(-grown)
		t.s.count.Full.Add(1)
		return kvcache.ErrFull
	}
	// The header last: it vouches for the data.
	if _, err := t.file.WriteAt(r.Data, data); err != nil {
		return t.failed(grown, err)
	}
	if _, err := t.file.WriteAt(t.head, t.end); err != nil {
		return t.failed(grown, err)
	}
	t.end, t.next = end, t.next+len(r.IDs)
	t.s.count.Appends.Add(1)
	t.s.count.AppendBytes.Add(uint64(len(r.Data)))
	return nil
}

// fits checks a range against the tail.
func (t *tail) fits(r kvcache.Range) error {
	if r.First != t.next {
		return kvcache.ErrGap
	}
	return tailrec.Check(r)
}

// failed takes back an append that the file system refused.
func (t *tail) failed(grown int64, err error) error {
	t.s.control.addUsed(-grown)
	return t.s.count.Failure(fmt.Errorf("append to tail: %w", err))
}

// roomIsShort wakes the goroutine that evicts.
func (s *Store) roomIsShort() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Rotate implements kvcache.TailWriter.
func (t *tail) Rotate(parent kvcache.Key, first int) error {
	if err := t.s.enter(context.Background()); err != nil {
		return err
	}
	defer t.s.leave()
	if err := t.check(); err != nil {
		return err
	}
	if first < 0 {
		return fmt.Errorf("rotate tail to position %d", first)
	}
	spec := t.spec
	spec.Parent, spec.First = parent, first
	// The new file first: a writer that dies in between leaves both, and readers
	// take the newer.
	if err := t.begin(spec); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return kvcache.ErrStale // dropped in this moment
		}
		return t.s.count.Failure(fmt.Errorf("rotate tail: %w", err))
	}
	t.removeOlder()
	return nil
}

// removeOlder removes the files that the current one replaces. What cannot be
// removed goes with the stream.
func (t *tail) removeOlder() {
	names, err := t.s.names(t.dir)
	if err != nil {
		return
	}
	for _, name := range names {
		n, ok := parseTailName(name)
		if !ok || n.choice != t.spec.Choice || n.attempt > t.spec.Attempt ||
			n.attempt == t.spec.Attempt && n.seq >= t.seq {
			continue
		}
		path := t.dir + "/" + name
		if st, err := t.s.root.Lstat(path); err == nil && t.s.root.Remove(path) == nil {
			t.s.control.addUsed(-room(st.Size()))
		}
	}
}

// Close implements kvcache.TailWriter.
func (t *tail) Close() error {
	t.done = true
	t.free()
	return nil
}

// free gives up what the tail holds of the process.
func (t *tail) free() {
	t.fence.close()
	if t.file != nil {
		t.file.Close()
		t.file = nil
	}
}

// DropTail implements kvcache.Tails.
func (s *Store) DropTail(ctx context.Context, space kvcache.Space, stream string) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.leave()
	if err := s.removeTails(streamDir(space.Fingerprint, stream)); err != nil {
		return s.count.Failure(fmt.Errorf("drop tail: %w", err))
	}
	return nil
}

// removeTails drops a stream's folder: its writers are told by the fence, then it
// goes at once from its place and after that from the disk.
func (s *Store) removeTails(dir string) error {
	// A writer may have opened the folder's fence and be about to raise it: it
	// finds the mark, and begins in a new folder.
	s.overtake(dir)
	trash := s.scratch()
	if err := s.root.Rename(dir, trash); errors.Is(err, fs.ErrNotExist) {
		return nil // no tails, or another call was faster
	} else if err != nil {
		return err
	}
	names, err := s.names(trash)
	if err != nil {
		return err
	}
	size := int64(0)
	for _, name := range names {
		if name == fenceName {
			continue // a recount knows it, nobody else
		}
		if st, err := s.root.Lstat(trash + "/" + name); err == nil {
			size += room(st.Size())
		}
	}
	s.control.addUsed(-size)
	return s.discard(trash)
}

// overtake makes the writers of a stream stale.
func (s *Store) overtake(dir string) {
	f, err := s.openRegular(dir+"/"+fenceName, os.O_RDWR)
	if err != nil {
		return // no writer
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || st.Size() < fenceSize {
		return
	}
	if w, err := mapWords(f, fenceSize); err == nil {
		_ = w.with(func(b []byte) { word64(b, 0).Store(dropped) }) // writers of a fence that is cut fail by themselves
		w.close()
	}
}

// overtakeAll does it for all streams of a model.
func (s *Store) overtakeAll(f kvcache.Fingerprint) {
	streams, _ := s.names(tailsDir(f)) // none, if it cannot be read
	for _, stream := range streams {
		s.overtake(tailsDir(f) + "/" + stream)
	}
}

// sweepTails drops the streams that nobody has appended to for too long.
func (s *Store) sweepTails(now time.Time) error {
	models, err := s.names(modelsDir)
	if err != nil {
		return fmt.Errorf("sweep tails: %w", err)
	}
	for _, model := range models {
		dir := modelsDir + "/" + model + "/tails"
		streams, err := s.names(dir)
		if err != nil {
			return fmt.Errorf("sweep tails: %w", err)
		}
		for _, stream := range streams {
			path := dir + "/" + stream
			if last, ok := s.lastAppend(path); !ok || now.Sub(last) <= s.cfg.TailTTL {
				continue
			}
			if err := s.removeTails(path); err != nil {
				return fmt.Errorf("sweep tails: %w", err)
			}
			s.count.Expired.Add(1)
		}
	}
	return nil
}

// lastAppend is the time of the last write to any file of a folder, or to the
// folder itself.
func (s *Store) lastAppend(dir string) (last time.Time, ok bool) {
	st, err := s.root.Lstat(dir)
	if err != nil {
		return last, false
	}
	last = st.ModTime()
	names, err := s.names(dir)
	if err != nil {
		return last, false
	}
	for _, name := range names {
		if st, err := s.root.Lstat(dir + "/" + name); err == nil && st.ModTime().After(last) {
			last = st.ModTime()
		}
	}
	return last, true
}
