//go:build unix

package dirstore

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// childrenDir is the folder of a block's children, and blockName the path of a
// block's file.
func childrenDir(f kvcache.Fingerprint, parent kvcache.Key) string {
	return blocksDir(f) + "/" + parent.String()
}

func blockName(ref kvcache.Ref) string {
	return childrenDir(ref.Fingerprint, ref.Parent) + "/" + ref.Key.String()
}

// room is what a file of n bytes takes: whole pages.
func room(n int64) int64 { return (n + 4095) &^ 4095 }

// Put implements kvcache.Store.
func (s *Store) Put(ctx context.Context, f *kvcache.Frame) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.leave()
	name := blockName(f.Ref)
	// Most puts of a shared prefix end here, without writing anything. That there
	// is a file is enough: it was whole when it got its name.
	if _, err := s.root.Lstat(name); err == nil {
		s.count.Duplicates.Add(1)
		return nil
	}
	if int64(len(f.Bytes())) != f.Total {
		return kvcache.ErrClosed // it was lent and given back
	}
	size := room(f.Total)
	if err := s.reserve(ctx, size); err != nil {
		return err
	}
	file, err := s.publish(childrenDir(f.Fingerprint, f.Parent), f.Key.String(), f.Bytes(), true)
	switch {
	case errors.Is(err, fs.ErrExist):
		// Another writer of the same block was faster.
		s.settle(size, false)
		s.count.Duplicates.Add(1)
		return nil
	case err != nil:
		s.settle(size, false)
		return s.count.Failure(fmt.Errorf("put block %s: %w", f.Key, err))
	}
	file.Close()
	s.settle(size, true)
	// After the file is in place: a look-up that reads the folder in between
	// remembers it under the old generation, and reads it again.
	s.control.changed(f.Parent)
	s.count.Puts.Add(1)
	s.count.PutBytes.Add(uint64(f.Total))
	return nil
}

// Get implements kvcache.Store. The frame's bytes are a copy: a mapped file that somebody
// cuts is a fault of the memory for whoever reads it, which may be an engine in C.
func (s *Store) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.leave()
	name := blockName(ref)
	b, st, err := s.readBlock(name)
	if errors.Is(err, fs.ErrNotExist) {
		// A look-up that named it was wrong: it shall not name it again.
		s.count.Misses.Add(1)
		s.index.forget(ref.Fingerprint, ref.Parent)
		return nil, fmt.Errorf("block %s: %w", ref.Key, kvcache.ErrNotFound)
	}
	var f *kvcache.Frame
	if err == nil {
		f, err = kvcache.Decode(b, ref)
	}
	if err != nil {
		size := int64(0)
		if st != nil {
			size = st.Size()
		}
		if !s.refuseFile(ref, b, size, err) {
			_ = s.count.Failure(err)
		}
		s.buffers.put(b)
		return nil, fmt.Errorf("get block %s: %w", ref.Key, err)
	}
	if now := time.Now(); now.Sub(st.ModTime()) > useGrain {
		_ = s.root.Chtimes(name, now, now) // a hint for eviction only
	}
	s.count.Hits.Add(1)
	s.count.HitBytes.Add(uint64(f.Total))
	return kvcache.NewLent(f, func() { s.buffers.put(b) }, func(err error) {
		// A part is wrong: whoever comes next shall not try again.
		s.count.Refusal(err)
		if s.enter(context.Background()) == nil {
			defer s.leave()
			s.removeBlock(ref, f.Total)
		}
	}), nil
}

// useGrain is how exactly the last use of a block is kept.
const useGrain = time.Second

// readBlock reads a whole file. The bytes are from s.buffers; the FileInfo is nil where
// there is no regular file.
func (s *Store) readBlock(name string) ([]byte, fs.FileInfo, error) {
	file, err := s.openRegular(name, os.O_RDONLY)
	if err != nil {
		return nil, nil, err
	}
	defer file.Close()
	st, err := file.Stat()
	if err != nil {
		return nil, nil, err
	}
	// How long the frame is before room is made for it: a file can be made to say that
	// it has any number of bytes.
	var first [24]byte
	n, err := file.ReadAt(first[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, st, err
	}
	if _, err := kvcache.HeaderNeed(first[:n]); err != nil {
		return nil, st, err
	}
	if binary.LittleEndian.Uint64(first[16:]) != uint64(st.Size()) || int64(int(st.Size())) != st.Size() {
		return nil, st, &kvcache.Refusal{Reason: kvcache.ReasonTorn, Detail: "file and frame differ in length"}
	}
	b := s.buffers.get(int(st.Size()))
	n, err = io.ReadFull(io.NewSectionReader(file, 0, st.Size()), b)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil // it was cut a moment ago, which shows
	}
	return b[:n], st, err
}

// buffers keeps memory for blocks between uses. Safe for concurrent use.
type buffers struct{ pool sync.Pool }

// get returns size bytes of any content.
func (p *buffers) get(size int) []byte {
	if b, ok := p.pool.Get().(*[]byte); ok && cap(*b) >= size {
		return (*b)[:size]
	}
	return make([]byte, size)
}

// put takes bytes back that nobody uses any more.
func (p *buffers) put(b []byte) {
	if cap(b) > 0 {
		p.pool.Put(&b)
	}
}

// refuseFile counts the refusal of a block's file and removes the file unless it
// is right and only the asker is not: then it has another tenant's root. It returns false
// for an error that is no refusal.
func (s *Store) refuseFile(ref kvcache.Ref, b []byte, size int64, err error) bool {
	r, ok := s.count.Refusal(err)
	if !ok {
		return false
	}
	if r.Reason == kvcache.ReasonForeign {
		h, err := kvcache.DecodeHeader(b)
		if err == nil && h.Fingerprint == ref.Fingerprint && h.Parent == ref.Parent && h.Key == ref.Key {
			return true
		}
	}
	s.removeBlock(ref, size)
	return true
}

// removeBlock removes a block's file and says whether it was this call that did.
func (s *Store) removeBlock(ref kvcache.Ref, size int64) bool {
	if err := s.root.Remove(blockName(ref)); err != nil {
		return false
	}
	s.control.addUsed(-room(size))
	s.control.changed(ref.Parent)
	// The folder goes with its last file; this fails while there are others.
	_ = s.root.Remove(childrenDir(ref.Fingerprint, ref.Parent))
	return true
}

// Drop implements kvcache.Store. The model disappears at once, its bytes after.
func (s *Store) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.leave()
	// Writers first: one that appends to a file that is on its way out would not
	// notice. A writer that opens a tail in between is told when its folder is
	// gone, because it cannot rotate.
	s.overtakeAll(f)
	// The name is that of this process, so whoever sweeps after it removes the
	// rest if it dies in the middle.
	trash := s.scratch()
	if err := s.root.Rename(modelDir(f), trash); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return s.count.Failure(fmt.Errorf("drop model %s: %w", f, err))
	}
	s.index.forgetModel(f)
	// Which folders there were is not worth finding out: everybody reads anew.
	s.control.changedAll()
	if err := s.discard(trash); err != nil {
		return s.count.Failure(fmt.Errorf("drop model %s: %w", f, err))
	}
	return s.count.Failure(s.recount())
}
