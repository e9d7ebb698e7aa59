package redistier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// Config says where a store is and what it may take. Zero fields take the defaults named
// beside them.
type Config struct {
	// Redis names a node of the cluster, and others in addr= of its query; see
	// redislink.OpenCluster. Its timeout and connections have defaults of this package:
	// one second and 16.
	Redis redislink.Config
	// Single says that it is one server and no cluster.
	Single bool
	// Prefix begins all keys; stores with another share nothing. Default "kvmesh".
	Prefix string
	// Limit is the most bytes of all processes together, as admitted; default 64 GiB.
	Limit int64
	// TTL is the life of a block since its last use; default 24 h, at least a second.
	TTL time.Duration
	// PartSize is the length of a part in bytes; default 4 MiB.
	PartSize int64
	// Timeout bounds look-ups and reads, 2 s; PutTimeout writes, 10 s. The caller's
	// deadline counts where it is earlier.
	Timeout, PutTimeout time.Duration
	// Away is how long a cluster is left alone that does not answer; default 5 s.
	Away time.Duration
	// Form is the form of the frames; others are refused. Default plain.
	Form     kvcache.Form
	Registry prometheus.Registerer // for the metrics kvmesh_kv_tier_*; default: none
	Log      *slog.Logger          // default: silent
}

// The default of Config.Limit.
const defaultLimit = 64 << 30

// withDefaults returns c with every zero field set.
func (c Config) withDefaults() Config {
	c.Redis.Timeout = cmp.Or(c.Redis.Timeout, time.Second)
	c.Redis.Connections = cmp.Or(c.Redis.Connections, 16)
	c.Prefix = cmp.Or(c.Prefix, "kvmesh")
	c.Limit = cmp.Or(c.Limit, defaultLimit)
	c.TTL = cmp.Or(c.TTL, 24*time.Hour)
	c.PartSize = cmp.Or(c.PartSize, 4<<20)
	c.Timeout = cmp.Or(c.Timeout, 2*time.Second)
	c.PutTimeout = cmp.Or(c.PutTimeout, 10*time.Second)
	c.Away = cmp.Or(c.Away, 5*time.Second)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports the first field that cannot work.
func (c Config) Validate() error {
	switch {
	case c.Limit < 0 || c.PartSize < 0 || c.Timeout < 0 || c.PutTimeout < 0 || c.Away < 0:
		return errors.New("redistier: negative limit or time")
	case c.TTL != 0 && c.TTL < time.Second:
		return fmt.Errorf("redistier: life of %v: at least a second", c.TTL)
	case strings.ContainsAny(c.Prefix, "{}"):
		return fmt.Errorf("redistier: prefix %q has a brace, which decides where keys are", c.Prefix)
	}
	return nil
}

// client is what both kinds of client have.
type client interface {
	redis.Cmdable
	Close() error
}

// Store is a kvcache.Store in a cluster. It is safe for concurrent use, by any number of
// processes that open the same prefix.
type Store struct {
	cfg    Config
	client client
	keys   keys
	ops    *remote.Ops
	find   remote.Finder

	// evicting lets one goroutine make room; the others find that it has.
	evicting sync.Mutex
	// used is what the servers last said.
	used atomic.Int64

	chores chores
	stop   context.CancelFunc
	done   sync.WaitGroup
}

var (
	_ kvcache.Store   = (*Store)(nil)
	_ kvcache.Counted = (*Store)(nil)
)

// Open makes a store and starts a goroutine that Close ends. It does not connect: a
// cluster that is away is one that has nothing.
func Open(cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	s := &Store{cfg: cfg, keys: keys{cfg.Prefix}, chores: newChores()}
	var err error
	if cfg.Single {
		s.client, err = redislink.Open(cfg.Redis)
	} else {
		s.client, err = redislink.OpenCluster(cfg.Redis)
	}
	if err != nil {
		return nil, fmt.Errorf("open KV store in Redis: %w", err)
	}
	s.ops = remote.NewOps(remote.OpsConfig{
		Tier: "redis", Timeout: cfg.Timeout, PutTimeout: cfg.PutTimeout, Away: cfg.Away, Limit: cfg.Limit, Registry: cfg.Registry,
	}, s.inUse)
	// A pipeline costs little more for many blocks than for one.
	s.find = remote.Finder{Source: s, Ahead: 16}
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.done.Go(func() { s.background(ctx) })
	return s, nil
}

// Close implements kvcache.Store.
func (s *Store) Close() error {
	first, err := s.ops.Close()
	if !first {
		return err
	}
	s.stop()
	s.done.Wait()
	return errors.Join(err, s.client.Close())
}

// Stats implements kvcache.Counted. It asks a server for the bytes in use, for a moment.
func (s *Store) Stats() kvcache.Stats { return s.ops.Stats() }

// inUse asks for the bytes in use; what was last heard of them will do.
func (s *Store) inUse() int64 {
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Timeout/8)
	defer cancel()
	if n, err := s.client.Get(ctx, s.keys.lru()[2]).Int64(); err == nil {
		s.used.Store(n)
	} else if errors.Is(err, redis.Nil) {
		s.used.Store(0)
	}
	return s.used.Load()
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
	for _, b := range m.Blocks {
		s.chores.use(member(b.Fingerprint, b.Key))
	}
	return m, op.End(err)
}

// Drop implements kvcache.Store. It drops what the servers have counted; what a failover
// has made them forget lives on for Config.TTL at most, under keys that no model uses any
// more.
func (s *Store) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	ctx, op, err := s.ops.Begin(ctx, remote.OpDrop)
	if err != nil {
		return err
	}
	return op.End(s.drop(ctx, f))
}

// drop removes all blocks of a model, some at a time.
func (s *Store) drop(ctx context.Context, f kvcache.Fingerprint) error {
	var cursor uint64
	for {
		// base64 for URLs has no character that a pattern gives a meaning.
		list, next, err := s.client.ZScan(ctx, s.keys.lru()[0], cursor, model(f)+"*", batch).Result()
		if err != nil {
			return fmt.Errorf("list blocks: %w", err)
		}
		var members []string
		for i := 0; i < len(list); i += 2 { // each with its score
			members = append(members, list[i])
		}
		if len(members) > 0 {
			if _, err := s.discard(ctx, members); err != nil {
				return err
			}
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// pipe sends commands, those for each server in one go, and leaves their answers in
// them. Its error is that of the first which failed otherwise than by finding nothing.
func (s *Store) pipe(ctx context.Context, add func(redis.Pipeliner)) error {
	cmds, err := s.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		add(p)
		return nil
	})
	for _, c := range cmds {
		if err := c.Err(); err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
	}
	if errors.Is(err, redis.Nil) {
		return nil
	}
	return err
}
