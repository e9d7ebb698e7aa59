//go:build unix

package dirstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvmetrics"
)

// Config says where a store is and how large it may grow.
type Config struct {
	// Dir is the directory, best on a tmpfs. It is made if it is not there; if it
	// is, it must belong to this user alone.
	Dir string
	// Limit is the most bytes in use, by all processes together. Each process
	// should have the same one; 0 is 4 GiB.
	Limit int64
	// TailTTL is the age without an append at which a tail is dropped; 0 is 10
	// minutes.
	TailTTL time.Duration
	// SweepEvery is the time between two sweeps; 0 is 30 seconds.
	SweepEvery time.Duration
	// Log gets what is swept and what fails in the background; nil is silent.
	Log *slog.Logger
}

// Validate says what is wrong with a configuration.
func (c Config) Validate() error {
	switch {
	case c.Dir == "":
		return errors.New("dirstore: no directory")
	case c.Limit < 0 || c.TailTTL < 0 || c.SweepEvery < 0:
		return errors.New("dirstore: negative limit or time")
	}
	return nil
}

// withDefaults fills in what is zero.
func (c Config) withDefaults() Config {
	if c.Limit == 0 {
		c.Limit = 4 << 30
	}
	if c.TailTTL == 0 {
		c.TailTTL = 10 * time.Minute
	}
	if c.SweepEvery == 0 {
		c.SweepEvery = 30 * time.Second
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Store is a kvcache.Store with Tails in a directory. It is safe for concurrent
// use, by any number of processes that open the same directory.
type Store struct {
	cfg  Config
	dir  string // as configured, for messages
	root *os.Root

	control control // words shared with other processes
	index   index   // what this process remembers
	count   kvmetrics.Counters
	writer  writer // its mark in the directory
	buffers buffers
	// pending is what this process has reserved and not yet written.
	pending atomic.Int64

	// life is held for reading by every call, and for writing by Close and again,
	// because they unmap the control words.
	life   sync.RWMutex
	closed bool
	epoch  int // how often the directory was made again
	// patience is how long Close waits for calls. It does not change.
	patience time.Duration

	// evicting lets one goroutine make room; the others find that it has.
	evicting sync.Mutex
	wake     chan struct{} // capacity 1: room is getting short
	stop     context.CancelFunc
	done     sync.WaitGroup
}

var (
	_ kvcache.Store   = (*Store)(nil)
	_ kvcache.Tails   = (*Store)(nil)
	_ kvcache.Counted = (*Store)(nil)
)

// The folders of a store.
const (
	modelsDir  = "models"
	writersDir = "writers"
)

// Open opens or makes a store. It starts a goroutine that Close ends.
func Open(cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	s := &Store{cfg: cfg, dir: cfg.Dir, wake: make(chan struct{}, 1), patience: closeTime}
	if err := s.open(); err != nil {
		s.abandon()
		return nil, fmt.Errorf("open KV store: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.done.Go(func() { s.background(ctx) })
	return s, nil
}

// open does the parts of Open that can fail.
func (s *Store) open() (err error) {
	if err := os.MkdirAll(filepath.Dir(s.dir), 0o700); err != nil {
		return err
	}
	if err := os.Mkdir(s.dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if s.root, err = os.OpenRoot(s.dir); err != nil {
		return err
	}
	if err := s.ours(); err != nil {
		return err
	}
	// The two folders that nobody ever removes; the others come and go.
	for _, dir := range []string{modelsDir, writersDir} {
		if err := s.root.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := s.enroll(); err != nil {
		return err
	}
	return s.openControl()
}

// ErrOpenToOthers says that a directory with something in it can be reached by others.
var ErrOpenToOthers = errors.New("others can reach it")

// ours refuses a directory that others can read or have put there, as anybody
// may in /dev/shm. One of ours in which there is nothing yet is closed to them.
func (s *Store) ours() error {
	st, err := s.root.Stat(".")
	if err != nil {
		return err
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) != os.Getuid() {
		return fmt.Errorf("%s belongs to user %d", s.dir, sys.Uid)
	}
	if st.Mode().Perm()&0o077 == 0 {
		return nil
	}
	// Twice, because others may have been about to put something there. A sticky folder,
	// as /dev/shm and /tmp are, is everybody's.
	for range 2 {
		names, err := s.names(".")
		if err != nil {
			return err
		}
		if len(names) > 0 || st.Mode()&fs.ModeSticky != 0 {
			return fmt.Errorf("%s has mode %04o and is not new: %w", s.dir, st.Mode().Perm(), ErrOpenToOthers)
		}
		if err := s.root.Chmod(".", 0o700); err != nil {
			return err
		}
	}
	return nil
}

// closeTime bounds the wait for calls that hang in the file system.
const closeTime = 5 * time.Second

// Close implements kvcache.Store. Tails that are open can only be closed then. A call that
// hangs in the file system is not waited for for ever: then the error says so, and what it
// uses stays mapped.
func (s *Store) Close() error {
	ended := make(chan error, 1)
	go func() { ended <- s.close() }()
	select {
	case err := <-ended:
		return err
	case <-time.After(s.patience):
		return fmt.Errorf("close KV store %s: a call still waits for the file system after %v", s.dir, s.patience)
	}
}

// close is Close, for as long as it takes.
func (s *Store) close() error {
	s.life.Lock()
	if s.closed {
		s.life.Unlock()
		return nil
	}
	s.closed = true
	s.life.Unlock()
	// The goroutine may be in a call, so it is waited for without the lock.
	s.stop()
	s.done.Wait()
	s.control.shared.close()
	s.retire()
	return s.root.Close()
}

// enter admits a call until leave, unless the store is closed or ctx has ended.
func (s *Store) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	// It cannot be had only while Close waits for it, which may be long, or again, after
	// which the call would find nothing.
	if !s.life.TryRLock() {
		return kvcache.ErrClosed
	}
	if s.closed {
		s.life.RUnlock()
		return kvcache.ErrClosed
	}
	return nil
}

// leave ends what enter began.
func (s *Store) leave() { s.life.RUnlock() }

// modelDir, blocksDir and tailsDir name the folders of one fingerprint.
func modelDir(f kvcache.Fingerprint) string  { return modelsDir + "/" + f.String() }
func blocksDir(f kvcache.Fingerprint) string { return modelDir(f) + "/blocks" }
func tailsDir(f kvcache.Fingerprint) string  { return modelDir(f) + "/tails" }

// writer is this process's mark in the directory; a store that is opened twice in
// one process has two.
type writer struct {
	id   string        // random, so that ids of dead processes do not come again
	lock *os.File      // held until Close
	next atomic.Uint64 // number of the last scratch name
}

// scratch returns a new name for what is not published.
func (s *Store) scratch() string {
	return writersDir + "/" + s.writer.id + "." + strconv.FormatUint(s.writer.next.Add(1), 10)
}

// publish makes a file with the given content appear whole in a folder, and
// returns it open for reading and writing. The error is fs.ErrExist if the name
// is taken, and fs.ErrNotExist if the folder is missing and shall not be made.
func (s *Store) publish(dir, base string, content []byte, mkdir bool) (*os.File, error) {
	temp := s.scratch()
	f, err := s.root.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a file: %w", err)
	}
	if _, err = f.Write(content); err == nil {
		err = s.link(temp, dir, base, mkdir)
	}
	// Gone from here on success too: the name is the second link.
	if rm := s.root.Remove(temp); err == nil && rm != nil {
		s.cfg.Log.Warn("KV store: temporary file stays", "err", rm)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("publish: %w", err)
	}
	return f, nil
}

// link gives a file its name, which fails where there is one already.
func (s *Store) link(temp, dir, base string, mkdir bool) (err error) {
	// Whoever evicts may remove the folder between two lines.
	for range 8 {
		if err = s.root.Link(temp, dir+"/"+base); !mkdir || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := s.root.MkdirAll(dir, 0o700); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return err
}

// discard removes a folder that has been renamed out of everybody's sight. A call
// that had it open before may still add a file or two.
func (s *Store) discard(dir string) (err error) {
	for range 8 {
		if err = s.root.RemoveAll(dir); err == nil {
			return nil
		}
	}
	return err
}
