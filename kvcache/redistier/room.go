package redistier

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// The sizes of batches.
const (
	batch      = 256 // blocks that are removed in one go
	candidates = 16  // blocks that are looked at to evict some
)

// admit counts a block that is about to be written, and makes room for it.
func (s *Store) admit(ctx context.Context, m *manifest, size int64) error {
	if size > s.cfg.Limit {
		s.ops.Count.Full.Add(1)
		return fmt.Errorf("block of %d bytes, limit %d: %w", size, s.cfg.Limit, kvcache.ErrFull)
	}
	own := member(m.header.Fingerprint, m.header.Key)
	used, err := s.client.Eval(ctx, scriptAdmit, s.keys.lru(), own, size).Int64()
	if err != nil {
		return fmt.Errorf("admit a block: %w", err)
	}
	s.used.Store(used)
	if used <= s.cfg.Limit {
		return nil
	}
	err = s.evict(ctx, own)
	if err != nil {
		s.abandon(m)
	}
	if errors.Is(err, kvcache.ErrFull) {
		s.ops.Count.Full.Add(1)
	}
	return err
}

// abandon takes a block out of the count that was not written. Where that fails it goes
// with what is not used.
func (s *Store) abandon(m *manifest) {
	s.chores.forget(member(m.header.Fingerprint, m.header.Key))
}

// evict removes the longest unused blocks until the rest is within the limit. own is the
// block that is being written, and stays.
func (s *Store) evict(ctx context.Context, own string) error {
	s.evicting.Lock()
	defer s.evicting.Unlock()
	s.flush(ctx)
	for {
		used, err := s.client.Get(ctx, s.keys.lru()[2]).Int64()
		if err != nil {
			return fmt.Errorf("make room: %w", err)
		}
		s.used.Store(used)
		if used <= s.cfg.Limit {
			return nil
		}
		oldest, err := s.client.ZRange(ctx, s.keys.lru()[0], 0, candidates-1).Result()
		if err != nil {
			return fmt.Errorf("make room: %w", err)
		}
		if len(oldest) == 0 || len(oldest) == 1 && oldest[0] == own {
			return fmt.Errorf("%d bytes in use, limit %d: %w", used, s.cfg.Limit, kvcache.ErrFull)
		}
		if err := s.evictSome(ctx, oldest, own); err != nil {
			return err
		}
	}
}

// evictSome removes the first of some blocks that have no children, and puts those before
// it that have some behind their children.
func (s *Store) evictSome(ctx context.Context, oldest []string, own string) error {
	children := make([]*redis.StringSliceCmd, len(oldest))
	err := s.pipe(ctx, func(p redis.Pipeliner) {
		for i, m := range oldest {
			if key, err := keyOf(m); err == nil {
				// One child is enough to stay; the youngest of a page will do.
				children[i] = p.ZRangeByLex(ctx, s.keys.children(key), &redis.ZRangeBy{Min: "-", Max: "+", Count: remote.Page})
			}
		}
	})
	if err != nil {
		return fmt.Errorf("make room: %w", err)
	}
	for i, m := range oldest {
		if m == own {
			continue
		}
		if children[i] != nil && len(children[i].Val()) > 0 {
			args := []any{m}
			for _, name := range children[i].Val() {
				if e, ok := remote.ParseName(name); ok {
					args = append(args, sibling(m, e.Key))
				}
			}
			parent, err := s.client.Eval(ctx, scriptOutlive, s.keys.lru()[:1], args...).Int()
			if err != nil {
				return fmt.Errorf("make room: %w", err)
			}
			if parent == 1 {
				continue
			}
		}
		bytes, err := s.discard(ctx, []string{m})
		if err == nil {
			s.ops.Count.Evictions.Add(1)
			s.ops.Count.EvictedBytes.Add(uint64(bytes))
		}
		return err
	}
	return nil
}

// discard removes blocks by their members, and says how many bytes of frames that was.
func (s *Store) discard(ctx context.Context, members []string) (bytes int64, err error) {
	var list []kvcache.Key
	for _, m := range members {
		if key, err := keyOf(m); err == nil {
			list = append(list, key)
		}
	}
	blocks, err := s.look(ctx, list)
	if err == nil {
		err = s.remove(ctx, blocks)
	}
	if err == nil {
		err = s.retire(ctx, members)
	}
	for _, b := range blocks {
		bytes += b.header.Total
	}
	return bytes, err
}

// remove removes blocks as they were found: their names first, so that no look-up finds
// what is about to go. Parts of one that has no good manifest go at the end of their life.
func (s *Store) remove(ctx context.Context, blocks []block) error {
	err := s.pipe(ctx, func(p redis.Pipeliner) {
		for _, b := range blocks {
			if b.text != nil && b.header.Key == b.key {
				p.ZRem(ctx, s.keys.children(b.header.Parent), remote.EntryOf(&b.header).Name())
			}
		}
	})
	if err != nil {
		return fmt.Errorf("remove names: %w", err)
	}
	var members []string
	err = s.pipe(ctx, func(p redis.Pipeliner) {
		for _, b := range blocks {
			if b.text == nil {
				continue
			}
			all := []string{s.keys.manifest(b.key)}
			if b.header.Key == b.key {
				all = s.keys.all(&b.manifest)
			}
			p.Eval(ctx, scriptRemove, all, b.text)
			members = append(members, member(b.model, b.key))
		}
	})
	if err != nil {
		return fmt.Errorf("remove blocks: %w", err)
	}
	return s.retire(ctx, members)
}

// retire takes blocks out of the count.
func (s *Store) retire(ctx context.Context, members []string) error {
	if len(members) == 0 {
		return nil
	}
	used, err := s.client.Eval(ctx, scriptRetire, s.keys.lru(), anys(members)...).Int64()
	if err != nil {
		return fmt.Errorf("count what was removed: %w", err)
	}
	s.used.Store(used)
	return nil
}

func anys(list []string) []any {
	out := make([]any, len(list))
	for i, s := range list {
		out[i] = s
	}
	return out
}

// chores are what a call leaves to the background: none of it is needed for an answer. It
// is safe for concurrent use.
type chores struct {
	mu sync.Mutex
	// used is when members were used, gone are those to be taken out of the count.
	used    map[string]time.Time
	gone    map[string]bool
	renewed map[kvcache.Key]block
	unnamed []remote.Child
}

// mostChores bounds each list; what does not fit is left undone.
const mostChores = 1 << 16

func newChores() chores {
	return chores{used: map[string]time.Time{}, gone: map[string]bool{}, renewed: map[kvcache.Key]block{}}
}

// use notes that a block was used.
func (c *chores) use(member string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.used) < mostChores {
		c.used[member] = time.Now()
	}
}

// forget takes a block out of the count.
func (c *chores) forget(member string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.gone) < mostChores {
		c.gone[member] = true
	}
}

// unname removes a name that leads nowhere, and its block from the count.
func (c *chores) unname(child remote.Child, f kvcache.Fingerprint) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.unnamed) < mostChores {
		c.unnamed = append(c.unnamed, child)
		c.gone[member(f, child.Key)] = true
	}
}

// renew notes the use of a block, and gives it a new life when an eighth of it is over.
func (s *Store) renew(f kvcache.Fingerprint, b block) {
	s.chores.use(member(f, b.key))
	if b.life > s.cfg.TTL*7/8 {
		return
	}
	s.chores.mu.Lock()
	defer s.chores.mu.Unlock()
	if len(s.chores.renewed) < mostChores {
		s.chores.renewed[b.key] = b
	}
}

// flushEvery is how long the use of a block may go unnoted, and sweepEvery the time
// between two searches for what nobody used for its life.
const (
	flushEvery = time.Second
	sweepEvery = time.Minute
)

// background does the chores until ctx ends.
func (s *Store) background(ctx context.Context) {
	flush, sweep := time.NewTicker(flushEvery), time.NewTicker(sweepEvery)
	defer flush.Stop()
	defer sweep.Stop()
	for {
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.Background(), s.cfg.Timeout/2)
			defer cancel()
			s.flush(last)
			return
		case <-flush.C:
			s.flush(ctx)
		case <-sweep.C:
			if err := s.sweep(ctx); err != nil && ctx.Err() == nil {
				s.cfg.Log.Debug("KV store in Redis: sweep", "err", err)
			}
		}
	}
}

// flush does what has to be done. What fails is not tried again: it is about order, or
// it ends with the life of its keys.
func (s *Store) flush(ctx context.Context) {
	c := &s.chores
	c.mu.Lock()
	used, gone, renewed, unnamed := c.used, c.gone, c.renewed, c.unnamed
	c.used, c.gone, c.renewed, c.unnamed = map[string]time.Time{}, map[string]bool{}, map[kvcache.Key]block{}, nil
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	life := s.cfg.TTL.Milliseconds()
	s.note(s.pipe(ctx, func(p redis.Pipeliner) {
		for _, u := range unnamed {
			p.ZRem(ctx, s.keys.children(u.Parent), u.Name())
		}
		for _, b := range renewed {
			p.Eval(ctx, scriptRenew, s.keys.all(&b.manifest), life)
			p.PExpire(ctx, s.keys.children(b.header.Parent), s.cfg.TTL)
		}
	}))
	s.note(s.retire(ctx, slices.Collect(maps.Keys(gone))))
	var uses []any
	for m, at := range used {
		uses = append(uses, m, time.Since(at).Milliseconds())
	}
	if len(uses) > 0 {
		s.note(s.client.Eval(ctx, scriptUse, s.keys.lru()[:1], uses...).Err())
	}
}

// note logs what went wrong in the background.
func (s *Store) note(err error) {
	if err != nil {
		s.cfg.Log.Debug("KV store in Redis: background", "err", err)
	}
}

// sweep takes out of the count what nobody used for its life: the servers have removed
// it.
func (s *Store) sweep(ctx context.Context) error {
	for {
		ctx, cancel := context.WithTimeout(ctx, s.cfg.PutTimeout)
		old, err := s.client.Eval(ctx, scriptAged, s.keys.lru()[:1], s.cfg.TTL.Milliseconds(), batch).StringSlice()
		if err == nil && len(old) > 0 {
			_, err = s.discard(ctx, old)
		}
		cancel()
		if err != nil || len(old) == 0 {
			return err
		}
		s.ops.Count.Expired.Add(uint64(len(old)))
	}
}
