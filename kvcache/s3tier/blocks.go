package s3tier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

const (
	// abreast is how many ranges of a block, and apart how many requests of a
	// look-up, are on their way at once.
	abreast, apart = 4, 16
	// headerGuess is enough of a frame for the header of a block of the usual size.
	headerGuess = 4096
)

// Put implements kvcache.Store. The frame is sent from where it lies.
func (s *Store) Put(ctx context.Context, f *kvcache.Frame) error {
	ctx, op, err := s.ops.Begin(ctx, remote.OpPut)
	if err != nil {
		return err
	}
	return op.End(s.put(ctx, f))
}

func (s *Store) put(ctx context.Context, f *kvcache.Frame) error {
	if int64(len(f.Bytes())) != f.Total {
		return kvcache.ErrClosed // it was lent and given back
	}
	path := s.childrenDir(f.Fingerprint, f.Parent) + remote.EntryOf(&f.Header).Name()
	// Most puts of a shared prefix end here, without sending anything.
	_, err := s.core.StatObject(ctx, s.cfg.Bucket, path, minio.StatObjectOptions{})
	if err == nil {
		return s.duplicate(f, path)
	}
	if status(err) != http.StatusNotFound {
		return fmt.Errorf("look for a block: %w", err)
	}
	if err := s.reserve(ctx, f.Total); err != nil {
		return err
	}
	// The sums in the frame are better than those of the protocol, which cost a hash
	// of all bytes; a copy of the body in several parts could not have a condition.
	opts := minio.PutObjectOptions{DisableContentSha256: true, DisableMultipart: true, ContentType: "application/octet-stream"}
	opts.SetMatchETagExcept("*")
	_, err = s.core.PutObject(ctx, s.cfg.Bucket, path, bytes.NewReader(f.Bytes()), f.Total, "", "", opts)
	s.room.settle(f.Total, err == nil)
	switch code := status(err); {
	case err == nil:
	case code == http.StatusPreconditionFailed || code == http.StatusConflict:
		return s.duplicate(f, path) // another writer was faster
	default:
		return fmt.Errorf("write a block: %w", err)
	}
	s.memory.learn(f.Key, path, nil)
	s.ops.Count.Puts.Add(1)
	s.ops.Count.PutBytes.Add(uint64(f.Total))
	return nil
}

// duplicate counts a block that is there.
func (s *Store) duplicate(f *kvcache.Frame, path string) error {
	s.memory.learn(f.Key, path, nil)
	s.ops.Count.Duplicates.Add(1)
	return nil
}

// status is the HTTP status of an error, 0 if it is not the server's answer.
func status(err error) int {
	var r minio.ErrorResponse
	if errors.As(err, &r) && r.Code != "NoSuchBucket" { // that is no miss
		return r.StatusCode
	}
	return 0
}

// Get implements kvcache.Store. The frame's bytes are this call's own.
func (s *Store) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpGet)
	if err != nil {
		return nil, err
	}
	l, err := s.get(ctx, ref)
	return l, op.End(err)
}

func (s *Store) get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	path, err := s.path(ctx, ref)
	if err != nil {
		return nil, err
	}
	if path == "" {
		return nil, s.miss(ref)
	}
	data, info, err := s.read(ctx, path)
	switch code := status(err); {
	case code == http.StatusNotFound || code == http.StatusPreconditionFailed:
		s.memory.forget(ref.Key) // removed, perhaps while it was read
		return nil, s.miss(ref)
	case code == http.StatusRequestedRangeNotSatisfiable:
		err = kvcache.Refuse(kvcache.ReasonTorn, "empty")
	}
	var f *kvcache.Frame
	if err == nil {
		f, err = s.cfg.Form.Decode(data, ref)
	}
	if err != nil {
		if s.ops.Refused(err) && !s.right(data, ref) {
			s.purge(ref.Key, path)
		}
		return nil, fmt.Errorf("block %s: %w", ref.Key, err)
	}
	s.memory.use(ref.Key)
	if time.Since(info.LastModified) > s.cfg.TTL/4 {
		s.memory.age(ref.Key, path)
	}
	s.ops.Count.Hits.Add(1)
	s.ops.Count.HitBytes.Add(uint64(f.Total))
	// What is released is gone for its reader, although nothing has to be given back.
	return kvcache.NewLent(f, func() {}, func(err error) {
		// A part is wrong: whoever comes next shall not try again.
		if s.ops.Refused(err) {
			s.purge(ref.Key, path)
		}
	}), nil
}

// right says whether a frame that was refused is right, and only the asker is not.
func (s *Store) right(data []byte, ref kvcache.Ref) bool {
	h, err := s.cfg.Form.DecodeHeader(data)
	return err == nil && h.Total == int64(len(data)) && remote.Keeps(h, ref)
}

// miss counts one.
func (s *Store) miss(ref kvcache.Ref) error {
	s.ops.Count.Misses.Add(1)
	return fmt.Errorf("block %s: %w", ref.Key, kvcache.ErrNotFound)
}

// purge removes an object that was refused, also for a caller that has no time left.
func (s *Store) purge(key kvcache.Key, path string) {
	ctx, op, err := s.ops.Begin(context.Background(), remote.OpRemove)
	if err != nil {
		return // closed, or away: it is refused again
	}
	s.memory.forget(key)
	if err := op.End(s.core.RemoveObject(ctx, s.cfg.Bucket, path, minio.RemoveObjectOptions{})); err != nil {
		s.cfg.Log.Warn("KV store in S3: remove what was refused", "err", err)
	}
}

// path finds the object of a block: it is known, or its name ends with its key. "" = it
// is not there.
func (s *Store) path(ctx context.Context, ref kvcache.Ref) (string, error) {
	dir := s.childrenDir(ref.Fingerprint, ref.Parent)
	if path := s.memory.path(ref.Key); strings.HasPrefix(path, dir) {
		return path, nil
	}
	found, err := s.list(ctx, dir, 0)
	if err != nil {
		return "", fmt.Errorf("look for a block: %w", err)
	}
	for _, o := range found {
		if o.Key == ref.Key {
			s.memory.learn(o.Key, o.path, nil)
			return o.path, nil
		}
	}
	return "", nil
}

// read fetches an object by ranges, each into its place.
func (s *Store) read(ctx context.Context, path string) ([]byte, minio.ObjectInfo, error) {
	body, info, total, err := s.open(ctx, path, 0, s.cfg.PartSize, "")
	if err != nil {
		return nil, info, err
	}
	if total > s.cfg.Limit {
		body.Close()
		return nil, info, kvcache.Refuse(kvcache.ReasonTorn, "%d bytes, more than the store may hold", total)
	}
	data := make([]byte, total)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(abreast)
	g.Go(func() error { return fill(data[:min(total, s.cfg.PartSize)], body) })
	for from := s.cfg.PartSize; from < total; from += s.cfg.PartSize {
		g.Go(func() error {
			to := min(total, from+s.cfg.PartSize)
			// Of the same object, not of one that has taken its place.
			body, _, _, err := s.open(ctx, path, from, to-from, info.ETag)
			if err != nil {
				return err
			}
			return fill(data[from:to], body)
		})
	}
	return data, info, g.Wait()
}

// fill reads all of b from a body and closes it. A body that ends early says that the
// connection did, and nothing about the object.
func fill(b []byte, body io.ReadCloser) error {
	defer body.Close()
	if _, err := io.ReadFull(body, b); err != nil {
		return fmt.Errorf("read a block: %w", err)
	}
	return nil
}

// open asks for a range of an object with a tag, or with any, and says how long the
// object is.
func (s *Store) open(ctx context.Context, path string, from, size int64, tag string) (io.ReadCloser, minio.ObjectInfo, int64, error) {
	var opts minio.GetObjectOptions
	err := opts.SetRange(from, from+size-1)
	if err == nil && tag != "" {
		err = opts.SetMatchETag(tag)
	}
	if err != nil {
		return nil, minio.ObjectInfo{}, 0, err
	}
	body, info, header, err := s.core.GetObject(ctx, s.cfg.Bucket, path, opts)
	if err != nil {
		return nil, info, 0, fmt.Errorf("read a block: %w", err)
	}
	_, all, ok := strings.Cut(header.Get("Content-Range"), "/")
	total, err := strconv.ParseInt(all, 10, 64)
	if !ok || err != nil || total < 0 || !strings.HasPrefix(header.Get("Content-Range"), fmt.Sprintf("bytes %d-", from)) {
		body.Close()
		return nil, info, 0, errors.New("read a block: the server does not know ranges")
	}
	return body, info, total, nil
}

// List implements remote.Source.
func (s *Store) List(ctx context.Context, space kvcache.Space, asks []remote.Ask) ([][]remote.Entry, error) {
	answers := make([][]remote.Entry, len(asks))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(apart)
	for i, a := range asks {
		g.Go(func() error {
			found, err := s.list(ctx, s.childrenDir(space.Fingerprint, a.Parent)+a.Prefix, remote.Page)
			for _, o := range found {
				answers[i] = append(answers[i], o.Entry)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, fmt.Errorf("list children: %w", err)
	}
	return answers, nil
}

// Headers implements remote.Source. Those that were read before are not read again.
func (s *Store) Headers(ctx context.Context, space kvcache.Space, children []remote.Child) ([]*kvcache.Header, error) {
	headers := make([]*kvcache.Header, len(children))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(apart)
	for i, c := range children {
		if headers[i] = s.memory.header(c.Key); headers[i] != nil {
			continue
		}
		g.Go(func() (err error) {
			path := s.childrenDir(space.Fingerprint, c.Parent) + c.Name()
			h, err := s.header(ctx, path)
			if err == nil {
				err = h.Check(kvcache.Ref{Space: space, Parent: c.Parent, Key: c.Key})
			}
			switch {
			case err == nil:
				s.memory.learn(c.Key, path, &h)
				headers[i] = &h
			case status(err) == http.StatusNotFound:
				s.memory.forget(c.Key)
			case s.ops.Refused(err):
				// The look-up goes on without it.
				if !remote.Keeps(h, kvcache.Ref{Space: space, Parent: c.Parent, Key: c.Key}) {
					s.purge(c.Key, path)
				}
			default:
				return fmt.Errorf("read a header: %w", err)
			}
			return nil
		})
	}
	return headers, g.Wait()
}

// header reads the header of an object, which must be as long as the header says.
func (s *Store) header(ctx context.Context, path string) (kvcache.Header, error) {
	need, tag := headerGuess, ""
	for {
		body, info, total, err := s.open(ctx, path, 0, int64(need), tag)
		if status(err) == http.StatusRequestedRangeNotSatisfiable {
			err = kvcache.Refuse(kvcache.ReasonTorn, "empty")
		}
		if err != nil {
			return kvcache.Header{}, err
		}
		b := make([]byte, min(total, int64(need)))
		if err := fill(b, body); err != nil {
			return kvcache.Header{}, err
		}
		more, err := kvcache.HeaderNeed(b)
		if err == nil && more > need && int64(more) <= total {
			need, tag = more, info.ETag
			continue
		}
		h, err := s.cfg.Form.DecodeHeader(b)
		if err == nil && h.Total != total {
			err = kvcache.Refuse(kvcache.ReasonTorn, "object and frame differ in length")
		}
		return h, err
	}
}

// memory is what a process knows of blocks: they never change, so only that they are
// there can be out of date. It is safe for concurrent use.
type memory struct {
	mu     sync.Mutex
	blocks map[kvcache.Key]*known
	old    map[kvcache.Key]string // paths of those that are to be made new
}

// known is one block.
type known struct {
	path   string
	header *kvcache.Header // nil until it was read
	used   time.Time
}

// maxKnown bounds the memory; beyond it, it begins anew.
const maxKnown = 1 << 16

func newMemory() memory {
	return memory{blocks: map[kvcache.Key]*known{}, old: map[kvcache.Key]string{}}
}

// learn notes where a block is, which counts as its use, and its header unless nil.
func (m *memory) learn(key kvcache.Key, path string, h *kvcache.Header) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.blocks[key]
	if k == nil || k.path != path {
		if len(m.blocks) >= maxKnown {
			clear(m.blocks)
		}
		k = &known{path: path}
		m.blocks[key] = k
	}
	if h != nil {
		k.header = h
	}
	k.used = time.Now()
}

// use notes the use of a block.
func (m *memory) use(key kvcache.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k := m.blocks[key]; k != nil {
		k.used = time.Now()
	}
}

// forget forgets a block that is not there.
func (m *memory) forget(key kvcache.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.blocks, key)
	delete(m.old, key)
}

// path is where a block is, "" if that is not known.
func (m *memory) path(key kvcache.Key) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k := m.blocks[key]; k != nil {
		return k.path
	}
	return ""
}

// header is the header of a block, nil if it was not read.
func (m *memory) header(key kvcache.Key) *kvcache.Header {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k := m.blocks[key]; k != nil {
		return k.header
	}
	return nil
}

// usedAt is when this process used a block last.
func (m *memory) usedAt(key kvcache.Key) time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k := m.blocks[key]; k != nil {
		return k.used
	}
	return time.Time{}
}

// age notes that a block is to be made new.
func (m *memory) age(key kvcache.Key, path string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.old) < maxKnown {
		m.old[key] = path
	}
}

// aged returns what is to be made new, once.
func (m *memory) aged() map[kvcache.Key]string {
	m.mu.Lock()
	defer m.mu.Unlock()
	old := m.old
	m.old = map[kvcache.Key]string{}
	return old
}
