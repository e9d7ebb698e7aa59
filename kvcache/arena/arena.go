//go:build unix

package arena

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/internal/privdir"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
	"github.com/kvmesh/kvmesh/kvcache/kvmetrics"
)

// Config says where an arena is, how large it is, and what leaves first.
type Config struct {
	// Dir is the directory of the journal and, unless Data says otherwise, of the
	// arena. It is made if it is not there; if it is, it must be this user's alone.
	Dir string
	// Data is the arena's own path: a file on any file system that can be mapped, or a
	// device. "" is a file in Dir.
	Data string
	// Limit is the size of the arena in bytes; 0 is 4 GiB. An arena of another size is
	// begun anew.
	Limit int64
	// Quota is the bytes from which on the blocks of one tenant and model go first when
	// room is short; 0 is none.
	Quota int64
	// Prefault takes all memory at the start, instead of when it is first needed.
	Prefault bool
	// TailTTL is the time without an append after which a tail is dropped; 0 is 10
	// minutes.
	TailTTL time.Duration
	// Linger is how long the blocks before a tail stay pinned after it is gone; 0 is 10
	// seconds.
	Linger time.Duration
	// Lease is how long a block that a look-up named, or that has just come, is spared while
	// there are others; 0 is 2 seconds.
	Lease time.Duration
	// DeadAfter is how long an older version of a model must be unused for its blocks
	// to go first; 0 is 1 minute.
	DeadAfter time.Duration
	// SweepEvery is the time between two rounds of house-keeping; 0 is 10 seconds.
	SweepEvery time.Duration
	// Log gets what fails in the background; nil is silent.
	Log *slog.Logger
}

// leastLimit is the smallest arena.
const leastLimit = 64 << 10

// Validate says what is wrong with a configuration.
func (c Config) Validate() error {
	switch {
	case c.Dir == "":
		return errors.New("arena: no directory")
	case c.Limit != 0 && c.Limit < leastLimit:
		return fmt.Errorf("arena: %d bytes, at least %d", c.Limit, leastLimit)
	case c.Limit > grain<<31:
		return fmt.Errorf("arena: %d bytes, at most %d", c.Limit, int64(grain)<<31)
	case min(c.TailTTL, c.Linger, c.Lease, c.DeadAfter, c.SweepEvery) < 0 || c.Quota < 0:
		return errors.New("arena: negative time or quota")
	}
	return nil
}

// withDefaults fills in what is zero.
func (c Config) withDefaults() Config {
	c.Limit = cmp.Or(c.Limit, 4<<30) / grain * grain
	c.TailTTL = cmp.Or(c.TailTTL, 10*time.Minute)
	c.Linger = cmp.Or(c.Linger, 10*time.Second)
	c.Lease = cmp.Or(c.Lease, 2*time.Second)
	c.DeadAfter = cmp.Or(c.DeadAfter, time.Minute)
	c.SweepEvery = cmp.Or(c.SweepEvery, 10*time.Second)
	c.Data = cmp.Or(c.Data, filepath.Join(c.Dir, dataName))
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Names in the directory.
const (
	dataName   = "arena"
	lockName   = "lock"
	readersDir = "readers"
)

// Store is a kvcache.Store with Tails in one arena. One process owns it; others read
// in place through a Reader. It is safe for concurrent use.
//
// One lock guards all that is known of the arena. It is held for some microseconds and
// never while a frame or the state of a range is copied or verified: who does that has
// room that nobody else knows of yet, or a count in refs, busy and out, which keep bytes
// and mapping where they are.
type Store struct {
	cfg   Config
	root  *os.Root
	lock  *os.File
	count kvmetrics.Counters

	mu     sync.Mutex // guards everything below, and the bytes of what is not published
	closed bool
	region *region
	room   *extents
	policy *evict.Policy
	index  index
	log    *journal
	tails  tails
	models map[kvcache.Fingerprint]*model
	named  uint64    // models that were labelled
	judged time.Time // when dead versions were last looked for

	retired []uint32 // numbers of spaces that the journal which is being written leaves out
	walks   int      // calls that look for blocks of spaces by number, and let others in between

	limbo map[uint32]*limbo // extents that left the index while somebody reads them, by first grain
	out   int               // blocks lent in this process, and calls at work in the arena
	peers map[string]*peer  // readers in other processes
	watch watch

	stop context.CancelFunc
	done sync.WaitGroup
}

var (
	_ kvcache.Store   = (*Store)(nil)
	_ kvcache.Tails   = (*Store)(nil)
	_ kvcache.Counted = (*Store)(nil)
	_ kvcache.Labeled = (*Store)(nil)
)

// limbo is an extent that is to be free when nobody reads it any more.
type limbo struct {
	extent
	refs int
}

// Open opens or makes an arena and takes its index from the journal. It starts a
// goroutine that Close ends. The error wraps privdir.ErrInUse if another process has it.
func Open(cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Store{
		cfg: cfg.withDefaults(), models: map[kvcache.Fingerprint]*model{}, limbo: map[uint32]*limbo{}, peers: map[string]*peer{},
	}
	s.policy = evict.New(evict.Config{Quota: cfg.Quota})
	s.index, s.tails = newIndex(), newTails()
	if err := s.open(time.Now()); err != nil {
		s.free()
		return nil, fmt.Errorf("open arena: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.done.Go(func() { s.background(ctx) })
	return s, nil
}

// open does the parts of Open that can fail.
func (s *Store) open(now time.Time) (err error) {
	if s.root, err = privdir.Open(s.cfg.Dir); err != nil {
		return err
	}
	if err := s.root.Mkdir(readersDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if s.lock, err = privdir.Lock(s.root, lockName); err != nil {
		return err
	}
	if s.region, err = openRegion(s.cfg.Data, s.cfg.Limit); err != nil {
		return err
	}
	s.room = newExtents(1, uint32(s.cfg.Limit/grain))
	if err := s.recover(now); err != nil {
		return err
	}
	if s.cfg.Prefault {
		return s.region.grow(s.cfg.Limit)
	}
	return s.region.grow(max(grain, int64(s.room.top)*grain))
}

// flock takes the exclusive lock of a file if nobody has it. The kernel frees it when
// the process ends, however it ends.
func flock(f *os.File) bool { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil }

// Close implements kvcache.Store. What is lent stays readable, in this process and in
// others.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	err := s.log.flush()
	s.mu.Unlock()
	s.stop()
	s.done.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.peers {
		p.close()
	}
	s.log.close()
	s.root.Close()
	s.lock.Close() // another may open it from here on
	s.unmapLocked()
	return err
}

// unmapLocked gives the mapping back when the store is closed and nobody uses it.
func (s *Store) unmapLocked() {
	if s.closed && s.out == 0 && s.region.b != nil {
		s.region.close()
	}
}

// free gives up what a failed Open holds.
func (s *Store) free() {
	if s.log != nil {
		s.log.close()
	}
	for _, p := range s.peers {
		p.close()
	}
	if s.region != nil && s.region.b != nil {
		s.region.close()
	}
	if s.lock != nil {
		s.lock.Close()
	}
	if s.root != nil {
		s.root.Close()
	}
}

// enter takes the lock for a call, unless the store is closed or ctx has ended.
func (s *Store) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return kvcache.ErrClosed
	}
	return nil
}

// bytes is the part of the arena that an extent is.
func (s *Store) bytes(e extent) []byte {
	return s.region.b[int64(e.at)*grain : int64(e.end())*grain : int64(e.end())*grain]
}

// grains is how many grains n bytes take.
func grains(n int64) uint32 { return uint32((n + grain - 1) / grain) }

// ID is the arena's identity, which readers compare, and Data its path.
func (s *Store) ID() [16]byte { return s.region.id }

// Data is the path of the arena.
func (s *Store) Data() string { return s.cfg.Data }
