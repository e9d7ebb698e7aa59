//go:build unix

package nvmetier

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

const (
	// apart is how many headers are read at once.
	apart = 16
	// headerGuess is enough of a frame for the header of a block of the usual size.
	headerGuess = page
)

// Put implements kvcache.Store.
func (s *Store) Put(ctx context.Context, f *kvcache.Frame) error {
	_, op, err := s.ops.Begin(ctx, remote.OpPut)
	if err != nil {
		return err
	}
	return op.End(s.put(f))
}

func (s *Store) put(f *kvcache.Frame) error {
	if int64(len(f.Bytes())) != f.Total {
		return kvcache.ErrClosed // it was lent and given back
	}
	if s.known(f.Ref) {
		s.ops.Count.Duplicates.Add(1)
		return nil
	}
	size := pages(f.Total)
	if err := s.reserve(size, f.Parent); err != nil {
		return err
	}
	published, err := s.write(f)
	if !published {
		s.mu.Lock()
		s.index.used -= size
		s.mu.Unlock()
	}
	if err == nil && published {
		s.ops.Count.Puts.Add(1)
		s.ops.Count.PutBytes.Add(uint64(f.Total))
	} else if err == nil {
		s.ops.Count.Duplicates.Add(1)
	}
	return err
}

// known says whether a block is there, and of the same model and tenant.
func (s *Store) known(ref kvcache.Ref) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.index.get(ref.Key)
	if e == nil {
		return false
	}
	p := s.index.placed(e)
	return p.ref() == ref
}

// reserve counts bytes that are about to be written, and makes room where they are too many.
func (s *Store) reserve(size int64, follow kvcache.Key) error {
	if size > s.cfg.Limit {
		s.ops.Count.Full.Add(1)
		return fmt.Errorf("block of %d bytes, limit %d: %w", size, s.cfg.Limit, kvcache.ErrFull)
	}
	s.mu.Lock()
	s.index.used += size
	s.mu.Unlock()
	err := s.shrink(0, follow)
	if err != nil {
		s.mu.Lock()
		s.index.used -= size
		s.mu.Unlock()
	}
	return err
}

// shrink evicts until the limit is kept, and at least so many bytes.
func (s *Store) shrink(least int64, follow kvcache.Key) error {
	for freed := int64(0); ; {
		s.mu.Lock()
		if s.index.used <= s.cfg.Limit && freed >= least {
			s.mu.Unlock()
			return nil
		}
		p, ok := s.index.victim(follow, time.Now())
		s.mu.Unlock()
		if !ok {
			s.ops.Count.Full.Add(1)
			return fmt.Errorf("nothing can leave: %w", kvcache.ErrFull)
		}
		if err := s.remove(p); err != nil {
			s.restore(p)
			return err
		}
		freed += pages(p.size)
		s.ops.Count.Evictions.Add(1)
		s.ops.Count.EvictedBytes.Add(uint64(p.size))
	}
}

// restore puts a block back whose file could not be removed, with its bytes.
func (s *Store) restore(p placed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.index.get(p.key) == nil {
		s.index.used += pages(p.size)
		s.index.insert(p, time.Time{})
	}
}

// write writes a block and publishes it; false without an error = another writer was faster.
func (s *Store) write(f *kvcache.Frame) (published bool, err error) {
	temp := s.scratch(tmpDir)
	err = s.writeFile(temp, f.Bytes())
	if noRoom(err) {
		// Others have filled the disk. What is given up here is worth no more than the
		// new block, and the next put gives up no more than it needs either.
		_ = s.disk.Remove(temp) // or it is there when the directory is opened again
		if err := s.shrink(pages(f.Total), f.Parent); err != nil {
			return false, fmt.Errorf("the disk is full: %w", err)
		}
		err = s.writeFile(temp, f.Bytes())
	}
	if err == nil {
		published, err = s.rename(temp, f)
	}
	if !published {
		_ = s.disk.Remove(temp)
	}
	if noRoom(err) {
		s.ops.Count.Full.Add(1)
		return false, fmt.Errorf("the disk is full: %w: %w", kvcache.ErrFull, err)
	}
	return published, err
}

// writeFile writes a new file and returns when it is on the disk.
func (s *Store) writeFile(name string, content []byte) error {
	f, err := s.disk.Open(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return fmt.Errorf("write a block: %w", err)
	}
	if _, err = f.Write(content); err == nil {
		err = f.Sync()
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return fmt.Errorf("write a block: %w", err)
	}
	return nil
}

// rename gives a block its name and its place in the index; false without an error = it
// has both.
func (s *Store) rename(temp string, f *kvcache.Frame) (bool, error) {
	s.publish.Lock()
	defer s.publish.Unlock()
	if s.known(f.Ref) {
		return false, nil
	}
	now := time.Now()
	p := placed{f.Space, blockOf(&f.Header, now.Unix())}
	dir := spaceDir(f.Space)
	err := s.disk.Rename(temp, dir+"/"+p.name())
	if errors.Is(err, fs.ErrNotExist) {
		for _, d := range []string{modelDir(f.Fingerprint), dir} {
			if err := s.disk.Mkdir(d); err != nil && !errors.Is(err, fs.ErrExist) {
				return false, fmt.Errorf("publish a block: %w", err)
			}
		}
		err = s.disk.Rename(temp, dir+"/"+p.name())
	}
	if err != nil {
		return false, fmt.Errorf("publish a block: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.index.insert(p, now)
	s.index.learn(&f.Header)
	return true, nil
}

// Get implements kvcache.Store. The frame's bytes are lent from memory that is used again.
func (s *Store) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	_, op, err := s.ops.Begin(ctx, remote.OpGet)
	if err != nil {
		return nil, err
	}
	l, err := s.get(ref)
	return l, op.End(err)
}

func (s *Store) get(ref kvcache.Ref) (*kvcache.Lent, error) {
	p, err := s.look(ref)
	if err != nil {
		return nil, err
	}
	// One page more shows whether the file is longer than it says.
	buf := s.buffers.get(p.size + 1)
	n, err := s.read(p, buf)
	var f *kvcache.Frame
	if err == nil && int64(n) != p.size {
		err = kvcache.Refuse(kvcache.ReasonTorn, "%d bytes of a file of %d", n, p.size)
	}
	if err == nil {
		f, err = s.cfg.Form.Decode(buf[:n:n], ref)
	}
	if err != nil {
		s.buffers.put(buf)
		return nil, s.refused(p, err)
	}
	s.mu.Lock()
	s.index.use(ref.Key, time.Now())
	s.mu.Unlock()
	s.ops.Count.Hits.Add(1)
	s.ops.Count.HitBytes.Add(uint64(f.Total))
	return kvcache.NewLent(f, func() { s.buffers.put(buf) }, func(err error) { _ = s.refused(p, err) }), nil
}

// look finds a block in the index.
func (s *Store) look(ref kvcache.Ref) (placed, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.index.get(ref.Key)
	if e == nil {
		s.ops.Count.Misses.Add(1)
		return placed{}, fmt.Errorf("block %s: %w", ref.Key, kvcache.ErrNotFound)
	}
	p := s.index.placed(e)
	if have := p.ref(); have != ref {
		// It is right, only the asker is not.
		why := kvcache.ReasonKey
		if have.Space != ref.Space {
			why = kvcache.ReasonForeign
		}
		err := kvcache.Refuse(why, "of another model, tenant or parent")
		s.ops.Refused(err)
		return placed{}, fmt.Errorf("block %s: %w", ref.Key, err)
	}
	return p, nil
}

// refused counts a refusal and removes the block; whoever comes next shall not try again.
// A file that is not there is a miss. Other errors pass.
func (s *Store) refused(p placed, err error) error {
	missing := errors.Is(err, fs.ErrNotExist)
	if missing {
		s.ops.Count.Misses.Add(1)
		err = kvcache.ErrNotFound
	} else if notFile(err) {
		err = kvcache.Refuse(kvcache.ReasonKind, "in its place is no regular file")
	}
	if s.ops.Refused(err) || missing {
		s.purge(p)
	}
	return fmt.Errorf("block %s: %w", p.key, err)
}

// notFile says whether an error is that of something else than a regular file.
func notFile(err error) bool {
	for _, no := range []error{unix.ELOOP, unix.EISDIR, unix.ESPIPE, unix.ENXIO} {
		if errors.Is(err, no) {
			return true
		}
	}
	return false
}

// purge takes a block out of the index, unless it has been written anew meanwhile, and
// removes its file.
func (s *Store) purge(p placed) {
	s.publish.Lock()
	defer s.publish.Unlock()
	s.mu.Lock()
	id, ok := s.index.byKey[p.key]
	if ok = ok && s.index.entries[id].block == p.block; ok {
		s.index.take(id, false)
	}
	s.mu.Unlock()
	if !ok {
		return
	}
	if err := s.remove(p); err != nil {
		// A folder in its place stays, and is met again when the directory is opened.
		s.cfg.Log.Warn("KV store on a disk: remove what was refused", "err", err)
	}
}

// read fills a buffer of whole pages from the beginning of a block's file.
func (s *Store) read(p placed, buf []byte) (int, error) {
	// Who opens a FIFO waits for its other end, unless it says that it will not.
	const flags = os.O_RDONLY | unix.O_NONBLOCK
	name := spaceDir(p.space) + "/" + p.name()
	if !s.buffered.Load() {
		n, err := s.readFile(name, flags|direct, buf)
		if !errors.Is(err, unix.EINVAL) {
			return n, err
		}
		if s.buffered.CompareAndSwap(false, true) {
			s.cfg.Log.Info("KV store on a disk: the file system has no direct reads", "dir", s.cfg.Dir)
		}
	}
	return s.readFile(name, flags, buf)
}

// readFile reads the beginning of a file.
func (s *Store) readFile(name string, flags int, buf []byte) (int, error) {
	f, err := s.disk.Open(name, flags)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return f.ReadAt(buf, 0)
}

// List implements remote.Source, from memory.
func (s *Store) List(ctx context.Context, space kvcache.Space, asks []remote.Ask) ([][]remote.Entry, error) {
	answers := make([][]remote.Entry, len(asks))
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, a := range asks {
		begin, err := tokensOf(a.Prefix)
		if err != nil {
			return nil, err
		}
		answers[i] = s.index.list(space, a.Parent, begin)
	}
	return answers, ctx.Err()
}

// tokensOf reads what remote.Prefix wrote.
func tokensOf(prefix string) (ids []int32, err error) {
	b, err := hex.DecodeString(prefix)
	if err != nil {
		return nil, fmt.Errorf("prefix %q: %w", prefix, err)
	}
	for ; len(b) >= 4; b = b[4:] {
		ids = append(ids, int32(binary.BigEndian.Uint32(b)))
	}
	return ids, nil
}

// Headers implements remote.Source. Those that were read before are not read again.
func (s *Store) Headers(ctx context.Context, space kvcache.Space, children []remote.Child) ([]*kvcache.Header, error) {
	headers := make([]*kvcache.Header, len(children))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(apart)
	for i, c := range children {
		p, h := s.remembered(kvcache.Ref{Space: space, Parent: c.Parent, Key: c.Key})
		if h != nil || p.tokens == 0 {
			headers[i] = h
			continue
		}
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			h, err := s.header(p)
			if err == nil {
				headers[i] = &h
				return nil
			}
			err = s.refused(p, err)
			if _, ok := errors.AsType[*kvcache.Refusal](err); ok || errors.Is(err, kvcache.ErrNotFound) {
				return nil // the look-up goes on without it
			}
			return fmt.Errorf("read a header: %w", err)
		})
	}
	return headers, g.Wait()
}

// remembered is a block in the index, and its header if that was read before. A block that
// is not there has no tokens.
func (s *Store) remembered(ref kvcache.Ref) (placed, *kvcache.Header) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.index.get(ref.Key)
	if e == nil {
		return placed{}, nil
	}
	p := s.index.placed(e)
	if p.ref() != ref {
		return placed{}, nil
	}
	return p, s.index.headers[ref.Key]
}

// header reads the header of a block, which must be what its name says.
func (s *Store) header(p placed) (kvcache.Header, error) {
	for need := headerGuess; ; {
		buf := s.buffers.get(int64(need))
		n, err := s.read(p, buf)
		var h kvcache.Header
		var more int
		if err == nil {
			more, err = kvcache.HeaderNeed(buf[:n])
		}
		if err == nil && more > n && n == len(buf) {
			s.buffers.put(buf)
			need = more
			continue
		}
		if err == nil {
			h, err = s.cfg.Form.DecodeHeader(buf[:n])
		}
		s.buffers.put(buf)
		if err == nil {
			err = h.Check(p.ref())
		}
		if err == nil && h.Total != p.size {
			err = kvcache.Refuse(kvcache.ReasonTorn, "name and frame differ in length")
		}
		if err != nil {
			return kvcache.Header{}, err
		}
		s.mu.Lock()
		if s.index.get(p.key) != nil {
			s.index.learn(&h)
		}
		s.mu.Unlock()
		return h, nil
	}
}
