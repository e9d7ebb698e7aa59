//go:build unix

package lmcache

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// pool is the node's arena as engines know it.
type pool struct {
	id   [16]byte
	path string
	name string // in Config.ShmDir
	size int64
}

// poolPrefix is how the names of pools begin.
const poolPrefix = "kvmesh-lmcache-"

// PoolError says that engines cannot open the node's arena.
type PoolError struct {
	Path string
	Err  error
}

// Error implements error.
func (e *PoolError) Error() string {
	return fmt.Sprintf("engines cannot open the memory %s: %v", e.Path, e.Err)
}

// Unwrap lets errors.Is see why.
func (e *PoolError) Unwrap() error { return e.Err }

// findPool asks the node for its arena and gives that a name that engines can open.
func (s *Server) findPool(ctx context.Context) error {
	path, id, err := s.node.Arena(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	known := s.pool != nil && s.pool.id == id
	s.mu.Unlock()
	if known {
		return nil
	}
	p := &pool{id: id, path: path, name: poolPrefix + hex.EncodeToString(id[:8])}
	if p.size, err = link(path, filepath.Join(s.cfg.ShmDir, p.name)); err != nil {
		return &PoolError{path, err}
	}
	s.mu.Lock()
	old := s.pool
	s.pool = p
	s.mu.Unlock()
	if old != nil {
		s.cfg.Log.Warn("the KV node has another memory than before: engines have to register again", "dir", s.cfg.Dir)
	}
	Tidy(s.cfg.ShmDir)
	return nil
}

// link gives a file a second name and returns its size.
func link(path, name string) (size int64, err error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	if !st.Mode().IsRegular() {
		return 0, errors.New("it is no regular file")
	}
	if have, err := os.Lstat(name); err == nil {
		if os.SameFile(have, st) {
			return st.Size(), nil
		}
		if err := os.Remove(name); err != nil {
			return 0, err
		}
	}
	return st.Size(), os.Link(path, name)
}

// Tidy removes names of arenas that have no other any more: nobody will use them again, and
// their memory is free when the last engine that has them mapped ends.
func Tidy(dir string) {
	names, err := filepath.Glob(filepath.Join(dir, poolPrefix+"*"))
	if err != nil {
		return
	}
	for _, name := range names {
		st, err := os.Lstat(name)
		if err != nil || !st.Mode().IsRegular() || len(strings.TrimPrefix(filepath.Base(name), poolPrefix)) != 16 {
			continue
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Nlink == 1 && int(sys.Uid) == os.Getuid() {
			_ = os.Remove(name) // else the next start does
		}
	}
}

// watchPool looks whether the node has another arena.
func (s *Server) watchPool() {
	ctx, cancel := s.nodeContext()
	defer cancel()
	if err := s.findPool(ctx); err != nil {
		if _, wrong := errors.AsType[*PoolError](err); wrong {
			s.cfg.Log.Error("nothing is kept for engines", "err", err)
		}
	}
}

// unlinkLocked takes the arena's second name away.
func (s *Server) unlinkLocked() {
	if s.pool == nil {
		return
	}
	if err := os.Remove(filepath.Join(s.cfg.ShmDir, s.pool.name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.cfg.Log.Warn("a name of the memory stays", "err", err)
	}
}
