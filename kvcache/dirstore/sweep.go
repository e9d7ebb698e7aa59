//go:build unix

package dirstore

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"
)

// enroll marks this process as alive: it holds a lock that ends with it, whatever
// pid namespace it is in.
func (s *Store) enroll() error {
	for range 8 {
		var id [8]byte
		rand.Read(id[:]) // never fails
		name := writersDir + "/" + hex.EncodeToString(id[:]) + ".lock"
		f, err := s.root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		// A sweep between the two lines may have taken the file for a dead
		// process's: then it has gone, or goes soon.
		if lock(f) && s.is(f, name) {
			s.writer.id, s.writer.lock = hex.EncodeToString(id[:]), f
			return nil
		}
		f.Close()
	}
	return errors.New("no lock to be had")
}

// is says whether a name still stands for an open file.
func (s *Store) is(f *os.File, name string) bool {
	have, err1 := f.Stat()
	want, err2 := s.root.Lstat(name)
	return err1 == nil && err2 == nil && os.SameFile(have, want)
}

// retire removes this process's mark.
func (s *Store) retire() {
	_ = s.root.Remove(writersDir + "/" + s.writer.id + ".lock") // else the next sweep does
	s.writer.lock.Close()
}

// background makes room before it is short, sweeps now and then, and makes a directory
// again that somebody removed. It is the
// only goroutine of a store; what goes wrong in it is logged and tried again.
func (s *Store) background(ctx context.Context) {
	tick := time.NewTicker(s.cfg.SweepEvery)
	defer tick.Stop()
	looks := time.NewTicker(lookEvery)
	defer looks.Stop()
	failed := false
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
			if err = s.evict(ctx); err == nil && ctx.Err() == nil {
				continue
			}
		case <-looks.C:
			failed = s.look(ctx, failed)
		case now := <-tick.C:
			err = s.Sweep(ctx, now)
		}
		if err != nil && ctx.Err() == nil {
			s.cfg.Log.Warn("KV store: sweep", "dir", s.dir, "err", s.count.Failure(err))
		}
	}
}

// Sweep removes what dead processes were writing and tails that nobody has
// appended to for Config.TailTTL, and corrects the count of bytes. The store
// does so by itself every Config.SweepEvery.
func (s *Store) Sweep(ctx context.Context, now time.Time) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.leave()
	s.control.rejoin()
	return errors.Join(s.sweepWriters(), s.sweepTails(now), s.recount())
}

// sweepWriters removes the files of dead processes. A lock is removed last, so
// that a file without one is nobody's.
func (s *Store) sweepWriters() error {
	names, err := s.names(writersDir)
	if err != nil {
		return fmt.Errorf("sweep writers: %w", err)
	}
	dead := map[string]*os.File{}
	defer func() {
		for _, f := range dead {
			f.Close()
		}
	}()
	for _, name := range names {
		id, _, _ := strings.Cut(name, ".")
		if _, seen := dead[id]; !seen && id != s.writer.id {
			if f, ok := s.dead(id); ok {
				dead[id] = f
			}
		}
	}
	// Held while their files go: no other sweep takes them for its own, and one
	// that dies here leaves the lock file, so the next one finishes the work.
	for _, name := range names {
		id, rest, _ := strings.Cut(name, ".")
		if _, ok := dead[id]; ok && rest != "lock" {
			if err := s.root.RemoveAll(writersDir + "/" + name); err != nil {
				return fmt.Errorf("sweep writers: %w", err)
			}
			s.count.Swept.Add(1)
		}
	}
	for id := range dead {
		// Two sweeps may both come here.
		_ = s.root.Remove(writersDir + "/" + id + ".lock")
	}
	return nil
}

// dead says whether a process is gone, and returns its lock, held.
func (s *Store) dead(id string) (*os.File, bool) {
	name := writersDir + "/" + id + ".lock"
	f, err := s.openRegular(name, os.O_RDWR)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, true
	}
	if err != nil {
		return nil, false
	}
	if lock(f) {
		return f, true
	}
	f.Close()
	return nil, false
}

// names lists a folder; one that is not there is empty.
func (s *Store) names(dir string) ([]string, error) {
	d, err := s.root.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // removed after it was opened
	}
	return names, err
}
