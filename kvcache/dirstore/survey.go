//go:build unix

package dirstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/tailrec"
)

// Model is what a store has of one fingerprint. Sizes are bytes of files.
type Model struct {
	Fingerprint kvcache.Fingerprint
	// Label is empty where nobody gave one.
	Label      kvcache.Label
	Blocks     int
	BlockBytes int64
	// Tails are the files of open ends of streams.
	Tails     int
	TailBytes int64
	// Used is when any of it was last used; zero for a model without blocks and tails.
	Used time.Time
}

// Models lists what is in the store, from the names of its files alone, by name and
// fingerprint.
func (s *Store) Models(ctx context.Context) ([]Model, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.leave()
	names, err := s.names(modelsDir)
	if err != nil {
		return nil, fmt.Errorf("list models: %w", err)
	}
	var models []Model
	for _, name := range names {
		key, err := kvcache.ParseKey(name)
		if err != nil {
			continue // not ours
		}
		m := Model{Fingerprint: kvcache.Fingerprint(key)}
		m.Label = s.label(m.Fingerprint)
		for path, st := range s.files(ctx, modelDir(m.Fingerprint)) {
			m.add(path, st)
		}
		models = append(models, m)
	}
	slices.SortFunc(models, func(a, b Model) int {
		return cmp.Or(cmp.Compare(a.Label.Model, b.Label.Model), slices.Compare(a.Fingerprint[:], b.Fingerprint[:]))
	})
	return models, ctx.Err()
}

// add counts one file.
func (m *Model) add(path string, st fs.FileInfo) {
	parts := strings.Split(path, "/")
	switch {
	case len(parts) != 5 || parts[4] == fenceName:
		return
	case parts[2] == "blocks":
		m.Blocks++
		m.BlockBytes += st.Size()
	default:
		m.Tails++
		m.TailBytes += st.Size()
	}
	if st.ModTime().After(m.Used) {
		m.Used = st.ModTime()
	}
}

// files lists the regular files below a folder until ctx ends. What goes away
// meanwhile, or cannot be read, is left out.
func (s *Store) files(ctx context.Context, dir string) iter.Seq2[string, fs.FileInfo] {
	return func(yield func(string, fs.FileInfo) bool) {
		// The function below has no error but SkipAll, so neither has WalkDir.
		_ = fs.WalkDir(s.root.FS(), dir, func(path string, d fs.DirEntry, err error) error {
			if ctx.Err() != nil {
				return fs.SkipAll
			}
			if err != nil || !d.Type().IsRegular() {
				return nil
			}
			if st, err := d.Info(); err == nil && !yield(path, st) {
				return fs.SkipAll
			}
			return nil
		})
	}
}

// Entry is one block or tail of a store, as it lies there.
type Entry struct {
	// Path is below the store's directory.
	Path string
	Tail bool
	// Header is the block's, without its lengths where Err is set.
	Header kvcache.Header
	// Size is that of the file in bytes.
	Size int64
	Used time.Time
	// Err says why it cannot be used: a *kvcache.Refusal, or the file system's error.
	Err error
}

// Entries walks over the blocks and tails of a model until ctx ends or the store is
// closed. It looks at headers; where whole is set it reads and verifies everything.
// What was removed meanwhile is left out, and an unfinished end of a tail is no error.
// Nothing is changed, and nothing counted as refused.
func (s *Store) Entries(ctx context.Context, f kvcache.Fingerprint, whole bool) iter.Seq[Entry] {
	return func(yield func(Entry) bool) {
		if s.enter(ctx) != nil {
			return
		}
		defer s.leave()
		for path, st := range s.files(ctx, modelDir(f)) {
			parts := strings.Split(path, "/")
			if len(parts) != 5 || parts[4] == fenceName {
				continue
			}
			e := Entry{Path: path, Tail: parts[2] == "tails", Size: st.Size(), Used: st.ModTime()}
			if e.Tail {
				e.Err = s.lookAtTail(path, f, whole)
			} else {
				e.Header, e.Err = s.lookAtBlock(path, f, whole)
			}
			if errors.Is(e.Err, fs.ErrNotExist) {
				continue
			}
			if !yield(e) {
				return
			}
		}
	}
}

// lookAtBlock checks a block against its place, and its parts where whole is set.
func (s *Store) lookAtBlock(path string, f kvcache.Fingerprint, whole bool) (h kvcache.Header, err error) {
	parts := strings.Split(path, "/")
	parent, err1 := kvcache.ParseKey(parts[3])
	key, err2 := kvcache.ParseKey(parts[4])
	if err1 != nil || err2 != nil {
		return h, &kvcache.Refusal{Reason: kvcache.ReasonMagic, Detail: "no block has such a name"}
	}
	file, err := s.openRegular(path, os.O_RDONLY)
	if err != nil {
		return h, err
	}
	h, _, err = readHeader(file)
	file.Close()
	ref := kvcache.Ref{Space: kvcache.Space{Fingerprint: f, Root: h.Root}, Parent: parent, Key: key}
	if err == nil {
		err = h.Check(ref)
	}
	if err != nil || !whole {
		return h, err
	}
	b, _, err := s.readBlock(path)
	if err != nil {
		return h, err
	}
	defer s.buffers.put(b)
	frame, err := kvcache.Decode(b, ref)
	if err == nil {
		err = frame.Verify()
	}
	return h, err
}

// lookAtTail checks a tail's header, and its records where whole is set.
func (s *Store) lookAtTail(path string, f kvcache.Fingerprint, whole bool) error {
	h, err := s.readTailHeader(path)
	if err == nil && h.Fingerprint != f {
		err = &kvcache.Refusal{Reason: kvcache.ReasonForeign, Detail: "tail of another model"}
	}
	if err != nil || !whole {
		return err
	}
	b, err := s.readFile(path, s.cfg.Limit)
	if err != nil {
		return err
	}
	for at, next := int64(tailHeaderLen), h.First; at < int64(len(b)); {
		r, after, err := tailrec.Parse(b, at, tailrec.Want{Mark: uint64(at), First: next})
		if err == tailrec.ErrEnd {
			return nil // being written, or its writer died there
		}
		if err != nil {
			return err
		}
		at, next = after, next+len(r.IDs)
	}
	return nil
}

// Remove removes a block or tail that Entries found. A tail of a live writer goes on
// being written to, and nobody finds it any more.
func (s *Store) Remove(ctx context.Context, e Entry) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.leave()
	parts := strings.Split(e.Path, "/")
	if len(parts) != 5 || parts[0] != modelsDir {
		return fmt.Errorf("remove %q: no block and no tail", e.Path)
	}
	if err := s.root.Remove(e.Path); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return s.count.Failure(fmt.Errorf("remove: %w", err))
	}
	s.control.addUsed(-room(e.Size))
	if parent, err := kvcache.ParseKey(parts[3]); err == nil && !e.Tail {
		s.control.changed(parent)
		_ = s.root.Remove(strings.TrimSuffix(e.Path, "/"+parts[4])) // fails while it has others
	}
	return nil
}

// MakeRoom removes the least used blocks until an eighth of Config.Limit is free, and
// the folders of models that have nothing left. It is what a writer does that finds
// no room.
func (s *Store) MakeRoom(ctx context.Context) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.leave()
	if err := s.evict(ctx); err != nil {
		return s.count.Failure(fmt.Errorf("make room: %w", err))
	}
	models, err := s.names(modelsDir)
	if err != nil {
		return s.count.Failure(fmt.Errorf("make room: %w", err))
	}
	for _, name := range models {
		s.removeEmpty(modelsDir + "/" + name)
	}
	return nil
}

// removeEmpty removes a model's folder if it holds at most a label. Whoever writes to
// it at the same time makes what it needs again.
func (s *Store) removeEmpty(dir string) {
	for _, sub := range []string{"/blocks", "/tails"} {
		// Fails where there is something in it.
		if err := s.root.Remove(dir + sub); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return
		}
	}
	if st, err := s.root.Lstat(dir + "/" + labelName); err == nil && s.root.Remove(dir+"/"+labelName) == nil {
		s.control.addUsed(-room(st.Size()))
	}
	_ = s.root.Remove(dir)
}
