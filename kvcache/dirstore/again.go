//go:build unix

package dirstore

import (
	"context"
	"fmt"
	"os"
	"time"
)

// lookEvery is how often a store sees whether its directory is still there.
const lookEvery = time.Second

// gone reports whether the directory, or what is in it, was removed from outside: it has
// lost its name, or this process its mark.
func (s *Store) gone() bool {
	have, err1 := s.root.Stat(".")
	named, err2 := os.Stat(s.dir)
	return err1 != nil || err2 != nil || !os.SameFile(have, named) || !s.is(s.writer.lock, writersDir+"/"+s.writer.id+".lock")
}

// again makes the directory again. What was in it is lost; tails that are open begin
// anew at their next append.
func (s *Store) again() error {
	next := &Store{cfg: s.cfg, dir: s.dir}
	if err := next.open(); err != nil {
		next.abandon()
		return fmt.Errorf("make the KV store's directory again: %w", err)
	}
	s.life.Lock() // nobody is in a call now
	defer s.life.Unlock()
	old := &Store{root: s.root}
	old.writer.lock = s.writer.lock
	s.root, s.writer.id, s.writer.lock = next.root, next.writer.id, next.writer.lock
	s.control.shared.close()
	s.control.shared = next.control.shared
	s.control.alone.Store(false)
	s.epoch++
	s.index.mu.Lock()
	s.index.folders = nil
	s.index.mu.Unlock()
	old.abandon()
	return nil
}

// abandon closes what open opened.
func (s *Store) abandon() {
	if s.writer.lock != nil {
		s.writer.lock.Close()
	}
	if s.root != nil {
		s.root.Close()
	}
}

// look makes the directory again where it is gone, and says so: once for each loss, also
// when it cannot.
func (s *Store) look(ctx context.Context, failed bool) (stillFailed bool) {
	if ctx.Err() != nil || !s.gone() {
		return false
	}
	err := s.again()
	switch {
	case err == nil:
		s.cfg.Log.Warn("the KV store's directory was removed under its users, and is made again; what was in it is lost", "dir", s.dir)
	case !failed:
		s.cfg.Log.Error("the KV store's directory was removed under its users: nothing is kept until it can be made again", "dir", s.dir, "err", err)
	}
	return err != nil
}

// renew begins a tail anew in the directory that was made again.
func (t *tail) renew() error {
	next := &tail{s: t.s, spec: t.spec, dir: t.dir}
	if _, err := next.open(); err != nil {
		next.free()
		return t.s.count.Failure(fmt.Errorf("begin a tail again: %w", err))
	}
	t.free()
	*t = *next
	return nil
}
