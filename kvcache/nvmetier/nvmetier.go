//go:build unix

package nvmetier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/internal/privdir"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// Config says where a store is and what it may take. Zero fields take the defaults named
// beside them.
type Config struct {
	// Dir is the directory; required. It is made if it is not there; if it is, it must be
	// this user's alone.
	Dir string
	// Limit is the most bytes of all files, in whole pages; default 64 GiB.
	Limit int64
	// Quota is the bytes from which on the blocks of one tenant and model go first when
	// room is short; default none.
	Quota int64
	// Away is how long a disk is left alone that failed several times in a row; default
	// 5 s.
	Away time.Duration
	// Form is the form of the frames; others are refused. Default plain.
	Form     kvcache.Form
	Registry prometheus.Registerer // for the metrics kvmesh_kv_tier_*; default: none
	Log      *slog.Logger          // default: silent
}

// defaultLimit is the default of Config.Limit.
const defaultLimit = 64 << 30

// withDefaults returns c with every zero field set.
func (c Config) withDefaults() Config {
	c.Limit = cmp.Or(c.Limit, defaultLimit)
	c.Away = cmp.Or(c.Away, 5*time.Second)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports the first field that cannot work.
func (c Config) Validate() error {
	switch {
	case c.Dir == "":
		return errors.New("nvmetier: no directory")
	case c.Limit < 0 || c.Quota < 0 || c.Away < 0:
		return errors.New("nvmetier: negative limit, quota or time")
	}
	return nil
}

// Names in the directory.
const (
	lockName = "lock"
	tmpDir   = "tmp"
	goneDir  = "gone"
	blockDir = "v1"
)

// patience is what Ops is told of the time that calls take. A call of a file system
// cannot be ended, so whoever has no time leaves it alone; see package stack.
const patience = time.Minute

// Store is a kvcache.Store in a directory. One process owns it. It is safe for concurrent
// use.
type Store struct {
	cfg  Config
	disk disk
	free func() // gives the directory back
	ops  *remote.Ops
	find remote.Finder

	buffers buffers
	// buffered says that the file system has no O_DIRECT.
	buffered atomic.Bool
	number   atomic.Uint64 // of the last name in tmp and gone

	// publish is held while a name and its place in the index come or go together. It is
	// taken before mu.
	publish sync.Mutex

	mu    sync.Mutex // guards what follows; never held during a call of the disk
	index index
}

var (
	_ kvcache.Store   = (*Store)(nil)
	_ kvcache.Counted = (*Store)(nil)
	_ kvcache.Labeled = (*Store)(nil)
)

// Open opens or makes a store, for which it reads the names of all blocks. The error
// wraps privdir.ErrInUse if another process has it.
func Open(cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	root, err := privdir.Open(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("open KV store on a disk: %w", err)
	}
	lock, err := privdir.Lock(root, lockName)
	if err != nil {
		root.Close()
		return nil, fmt.Errorf("open KV store on a disk: %w", err)
	}
	free := func() {
		lock.Close()
		root.Close()
	}
	s, err := open(cfg, rootDisk{root}, free)
	if err != nil {
		free()
		return nil, fmt.Errorf("open KV store on a disk: %w", err)
	}
	return s, nil
}

// open opens a store on a disk that is this process's.
func open(cfg Config, d disk, free func()) (*Store, error) {
	s := &Store{cfg: cfg.withDefaults(), disk: d, free: free, index: newIndex(cfg.Quota)}
	s.buffered.Store(direct == 0)
	for _, dir := range []string{tmpDir, goneDir} {
		if err := removeAll(d, dir); err != nil {
			return nil, err
		}
	}
	for _, dir := range []string{tmpDir, goneDir, blockDir} {
		if err := d.Mkdir(dir); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	if err := s.survey(); err != nil {
		return nil, err
	}
	s.ops = remote.NewOps(remote.OpsConfig{
		Tier: "nvme", Timeout: patience, PutTimeout: patience, Away: s.cfg.Away, Limit: s.cfg.Limit, Registry: cfg.Registry,
	}, s.used)
	// To ask for more costs nothing: the names are in memory.
	s.find = remote.Finder{Source: s, Ahead: 64}
	return s, s.shrink(0, kvcache.Key{})
}

// Close implements kvcache.Store. While a call hangs the directory stays this process's: what
// it changes at last would be nothing that another owner knows of.
func (s *Store) Close() error {
	first, err := s.ops.Close()
	if first && err == nil {
		s.free()
	}
	return err
}

// Stats implements kvcache.Counted. Used is what the files take, in whole pages.
func (s *Store) Stats() kvcache.Stats { return s.ops.Stats() }

// used is the bytes in use.
func (s *Store) used() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.index.used
}

// scratch returns a new name in a folder of what nobody looks for.
func (s *Store) scratch(dir string) string {
	return dir + "/" + strconv.FormatUint(s.number.Add(1), 10)
}

// Longest implements kvcache.Store.
func (s *Store) Longest(ctx context.Context, q kvcache.Query) (kvcache.Match, error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpLookUp)
	if err != nil {
		return kvcache.Match{}, err
	}
	s.ops.Count.Lookups.Add(1)
	m, err := s.find.Longest(ctx, q)
	s.ops.Count.LookupTokens.Add(uint64(m.Tokens() + m.Common))
	now := time.Now()
	s.mu.Lock()
	for _, b := range m.Blocks {
		s.index.use(b.Key, now)
	}
	if m.Common > 0 {
		s.index.use(m.Partial.Key, now)
	}
	s.mu.Unlock()
	return m, op.End(err)
}

// Drop implements kvcache.Store. Nothing of the model is found from the moment on at which
// its folder has another name; when Drop ends, its room is free.
func (s *Store) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	_, op, err := s.ops.Begin(ctx, remote.OpDrop)
	if err != nil {
		return err
	}
	return op.End(s.drop(f))
}

func (s *Store) drop(f kvcache.Fingerprint) error {
	gone := s.scratch(goneDir)
	s.publish.Lock()
	err := s.disk.Rename(modelDir(f), gone)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		s.mu.Lock()
		s.index.drop(f)
		s.mu.Unlock()
	}
	s.publish.Unlock()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("drop model %s: %w", f, err)
	}
	return removeAll(s.disk, gone)
}

// survey fills the index from the names, and removes what has a block's place and is none.
func (s *Store) survey() error {
	var found []placed
	var strange int
	// What has the place of a folder and is none is left where it is.
	list := func(dir string, each func(string)) error {
		err := s.disk.List(dir, each)
		if errors.Is(err, unix.ENOTDIR) || notFile(err) {
			strange++
			return nil
		}
		return err
	}
	var failed error
	err := list(blockDir, func(model string) {
		f, err := kvcache.ParseKey(model)
		if err != nil {
			strange++
			return
		}
		failed = cmp.Or(failed, list(blockDir+"/"+model, func(root string) {
			if root == labelName {
				s.readLabel(kvcache.Fingerprint(f))
				return
			}
			r, err := kvcache.ParseKey(root)
			if err != nil {
				strange++
				return
			}
			space := kvcache.Space{Fingerprint: kvcache.Fingerprint(f), Root: r}
			failed = cmp.Or(failed, list(spaceDir(space), func(name string) {
				if b, ok := parseName(name); ok {
					found = append(found, placed{space, b})
				} else {
					strange++
				}
			}))
		}))
	})
	if err := cmp.Or(err, failed); err != nil {
		return err
	}
	if strange > 0 {
		s.cfg.Log.Warn("KV store on a disk: names that are none of its own", "dir", s.cfg.Dir, "names", strange)
	}
	for _, p := range s.index.fill(found) {
		if err := s.disk.Remove(spaceDir(p.space) + "/" + p.name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// modelDir and spaceDir name folders.
func modelDir(f kvcache.Fingerprint) string { return blockDir + "/" + f.String() }

func spaceDir(s kvcache.Space) string { return modelDir(s.Fingerprint) + "/" + s.Root.String() }

// remove removes the file of a block that is in the index no more.
func (s *Store) remove(p placed) error {
	err := s.disk.Remove(spaceDir(p.space) + "/" + p.name())
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("remove a block: %w", err)
	}
	return nil
}
