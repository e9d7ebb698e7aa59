//go:build unix

package dirstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
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
		s.count.duplicates.Add(1)
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
		s.count.duplicates.Add(1)
		return nil
	case err != nil:
		s.settle(size, false)
		return s.failed(fmt.Errorf("put block %s: %w", f.Key, err))
	}
	file.Close()
	s.settle(size, true)
	// After the file is in place: a look-up that reads the folder in between
	// remembers it under the old generation, and reads it again.
	s.control.generation(f.Parent).Add(1)
	s.count.puts.Add(1)
	s.count.putBytes.Add(uint64(f.Total))
	return nil
}

// Get implements kvcache.Store. The frame's bytes are the file's own pages.
func (s *Store) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.leave()
	name := blockName(ref)
	b, used, err := s.mapBlock(name)
	if errors.Is(err, fs.ErrNotExist) {
		// A look-up that named it was wrong: it shall not name it again.
		s.count.misses.Add(1)
		s.index.forget(ref.Fingerprint, ref.Parent)
		return nil, fmt.Errorf("block %s: %w", ref.Key, kvcache.ErrNotFound)
	}
	if err != nil {
		return nil, s.failed(fmt.Errorf("get block %s: %w", ref.Key, err))
	}
	f, err := kvcache.Decode(b, ref)
	if err != nil {
		defer unmap(b)
		s.refuseFile(ref, b, err)
		return nil, fmt.Errorf("block %s: %w", ref.Key, err)
	}
	if now := time.Now(); now.Sub(used) > useGrain {
		_ = s.root.Chtimes(name, now, now) // a hint for eviction only
	}
	s.count.hits.Add(1)
	s.count.hitBytes.Add(uint64(f.Total))
	return kvcache.NewLent(f, func() { unmap(b) }, func(err error) {
		// A part is wrong: whoever comes next shall not try again.
		s.refused(err)
		if s.enter(context.Background()) == nil {
			defer s.leave()
			s.removeBlock(ref, f.Total)
		}
	}), nil
}

// useGrain is how exactly the last use of a block is kept.
const useGrain = time.Second

// mapBlock maps a whole file and returns when it was last used.
func (s *Store) mapBlock(name string) ([]byte, time.Time, error) {
	// The mapping outlives the descriptor, and the name too.
	file, err := s.root.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return nil, time.Time{}, err
	}
	defer file.Close()
	st, err := file.Stat()
	if err != nil {
		return nil, time.Time{}, err
	}
	if st.Size() == 0 || !st.Mode().IsRegular() {
		return []byte{}, st.ModTime(), nil // refused as torn
	}
	b, err := mapFile(file, st.Size(), false)
	return b, st.ModTime(), err
}

// refuseFile counts the refusal of a block's file and removes the file unless it
// is right and only the asker is not: then it has another tenant's root.
func (s *Store) refuseFile(ref kvcache.Ref, b []byte, err error) {
	r, ok := s.refused(err)
	if !ok {
		return
	}
	if r.Reason == kvcache.ReasonForeign {
		h, err := kvcache.DecodeHeader(b)
		if err == nil && h.Fingerprint == ref.Fingerprint && h.Parent == ref.Parent && h.Key == ref.Key {
			return
		}
	}
	s.removeBlock(ref, int64(len(b)))
}

// removeBlock removes a block's file and says whether it was this call that did.
func (s *Store) removeBlock(ref kvcache.Ref, size int64) bool {
	if err := s.root.Remove(blockName(ref)); err != nil {
		return false
	}
	s.control.used().Add(-room(size))
	s.control.generation(ref.Parent).Add(1)
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
		return s.failed(fmt.Errorf("drop model %s: %w", f, err))
	}
	s.index.forgetModel(f)
	// Which folders there were is not worth finding out: everybody reads anew.
	for i := range generations {
		s.control.generationAt(i).Add(1)
	}
	if err := s.discard(trash); err != nil {
		return s.failed(fmt.Errorf("drop model %s: %w", f, err))
	}
	return s.failed(s.recount())
}
