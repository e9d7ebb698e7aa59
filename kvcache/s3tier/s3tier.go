package s3tier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/s3utils"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/internal/s3link"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// Config says where a store is and what it may take. Zero fields take the defaults named
// beside them.
type Config struct {
	// S3 is the server and who asks.
	S3 s3link.Config
	// Bucket is where the objects are; required, and it must be there.
	Bucket string
	// Prefix begins all names; stores with another share nothing. Default "kvmesh".
	Prefix string
	// Limit is the most bytes in the prefix, as the last survey found them and this
	// process has written since; default 1 TiB.
	Limit int64
	// TTL is the life of a block since it was written or made new; default 7 days.
	TTL time.Duration
	// PartSize is the length of the ranges in which a block is read; default 8 MiB.
	PartSize int64
	// Timeout bounds look-ups and reads, 5 s; PutTimeout writes, 30 s. The caller's
	// deadline counts where it is earlier.
	Timeout, PutTimeout time.Duration
	// Away is how long a server is left alone that does not answer; default 10 s.
	Away time.Duration
	// SurveyEvery is the time between two listings of everything; default 10 min.
	SurveyEvery time.Duration
	// Form is the form of the frames; others are refused. Default plain.
	Form     kvcache.Form
	Registry prometheus.Registerer // for the metrics kvmesh_kv_tier_*; default: none
	Log      *slog.Logger          // default: silent
}

// The default of Config.Limit.
const defaultLimit = 1 << 40

// withDefaults returns c with every zero field set.
func (c Config) withDefaults() Config {
	c.Prefix = strings.Trim(cmp.Or(c.Prefix, "kvmesh"), "/")
	c.Limit = cmp.Or(c.Limit, defaultLimit)
	c.TTL = cmp.Or(c.TTL, 7*24*time.Hour)
	c.PartSize = cmp.Or(c.PartSize, 8<<20)
	c.Timeout = cmp.Or(c.Timeout, 5*time.Second)
	c.PutTimeout = cmp.Or(c.PutTimeout, 30*time.Second)
	c.Away = cmp.Or(c.Away, 10*time.Second)
	c.SurveyEvery = cmp.Or(c.SurveyEvery, 10*time.Minute)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports the first field that cannot work.
func (c Config) Validate() error {
	if err := s3utils.CheckValidBucketName(c.Bucket); err != nil {
		return fmt.Errorf("s3tier: bucket %q: %w", c.Bucket, err)
	}
	switch {
	case c.Limit < 0 || c.PartSize < 0 || c.Timeout < 0 || c.PutTimeout < 0 || c.Away < 0 || c.SurveyEvery < 0 || c.TTL < 0:
		return errors.New("s3tier: negative limit or time")
	case c.PartSize != 0 && c.PartSize < headerGuess:
		return fmt.Errorf("s3tier: ranges of %d bytes: at least %d", c.PartSize, headerGuess)
	case len(c.Prefix) > 256:
		return errors.New("s3tier: prefix of more than 256 bytes")
	}
	return c.S3.Validate()
}

// Store is a kvcache.Store in a bucket. It is safe for concurrent use, by any number of
// processes that open the same prefix.
type Store struct {
	cfg  Config
	core *minio.Core
	ops  *remote.Ops
	find remote.Finder

	memory memory
	room   room
	stop   context.CancelFunc
	done   sync.WaitGroup
}

var (
	_ kvcache.Store   = (*Store)(nil)
	_ kvcache.Counted = (*Store)(nil)
)

// Open makes a store and starts a goroutine that Close ends. It does not connect: a
// server that is away is one that has nothing.
func Open(cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	core, err := s3link.Open(cfg.S3)
	if err != nil {
		return nil, fmt.Errorf("open KV store in S3: %w", err)
	}
	s := &Store{cfg: cfg, core: core, memory: newMemory()}
	s.ops = remote.NewOps(remote.OpsConfig{
		Tier: "s3", Timeout: cfg.Timeout, PutTimeout: cfg.PutTimeout, Away: cfg.Away, Limit: cfg.Limit, Registry: cfg.Registry,
	}, s.room.used)
	// Each listing is a request of its own, and most servers charge for it.
	s.find = remote.Finder{Source: s, Ahead: 4}
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.done.Go(func() { s.background(ctx) })
	return s, nil
}

// Close implements kvcache.Store.
func (s *Store) Close() error {
	first, err := s.ops.Close()
	if first {
		s.stop()
		s.done.Wait()
	}
	return err
}

// Stats implements kvcache.Counted. Used is that of the last survey and what this process
// did since.
func (s *Store) Stats() kvcache.Stats { return s.ops.Stats() }

// Longest implements kvcache.Store.
func (s *Store) Longest(ctx context.Context, q kvcache.Query) (kvcache.Match, error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpLookUp)
	if err != nil {
		return kvcache.Match{}, err
	}
	s.ops.Count.Lookups.Add(1)
	m, err := s.find.Longest(ctx, q)
	s.ops.Count.LookupTokens.Add(uint64(m.Tokens() + m.Common))
	for _, b := range m.Blocks {
		s.memory.use(b.Key)
	}
	return m, op.End(err)
}

// Drop implements kvcache.Store.
func (s *Store) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	ctx, op, err := s.ops.Begin(ctx, remote.OpDrop)
	if err != nil {
		return err
	}
	return op.End(s.drop(ctx, f))
}

func (s *Store) drop(ctx context.Context, f kvcache.Fingerprint) error {
	found, err := s.list(ctx, s.modelDir(f), 0)
	if err != nil {
		return fmt.Errorf("list blocks: %w", err)
	}
	return s.removeAll(ctx, found)
}

// modelDir is what the names of all objects of a model begin with, and childrenDir those
// of a block's children.
func (s *Store) modelDir(f kvcache.Fingerprint) string { return s.cfg.Prefix + "/" + f.String() + "/" }

func (s *Store) childrenDir(f kvcache.Fingerprint, parent kvcache.Key) string {
	return s.modelDir(f) + parent.String() + "/"
}

// object is one object as a listing has it.
type object struct {
	path   string
	parent kvcache.Key
	remote.Entry
	size   int64
	stored time.Time
}

// parse reads the name of an object; false = it is none of ours.
func parse(info minio.ObjectInfo) (object, bool) {
	dir, name, ok := cutLast(info.Key)
	if !ok {
		return object{}, false
	}
	_, parent, ok := cutLast(dir)
	if !ok {
		return object{}, false
	}
	key, err := kvcache.ParseKey(parent)
	if err != nil {
		return object{}, false
	}
	o := object{path: info.Key, parent: key, size: info.Size, stored: info.LastModified}
	o.Entry, ok = remote.ParseName(name)
	return o, ok
}

// cutLast cuts at the last slash.
func cutLast(path string) (before, after string, ok bool) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return "", path, false
	}
	return path[:i], path[i+1:], true
}

// list lists what begins with a prefix, in the order of names; most bounds it, 0 does not.
func (s *Store) list(ctx context.Context, prefix string, most int) (found []object, err error) {
	owner := false
	opts := minio.ListObjectsOptions{Prefix: prefix, Recursive: true, MaxKeys: most, FetchOwner: &owner}
	for info := range s.core.ListObjectsIter(ctx, s.cfg.Bucket, opts) {
		if info.Err != nil {
			return nil, info.Err
		}
		if o, ok := parse(info); ok {
			found = append(found, o)
		}
		if most > 0 && len(found) == most {
			break
		}
	}
	// The iterator ends without a word where ctx does.
	return found, ctx.Err()
}
