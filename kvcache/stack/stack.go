package stack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Tier is one far store.
type Tier struct {
	// Name is its name in messages and metrics; each has another one.
	Name  string
	Store kvcache.Store
	// Apart says that the tier is other hosts' memory, which they reclaim themselves.
	Apart bool
}

// Config describes a stack. Zero fields take the defaults named beside them.
type Config struct {
	Near kvcache.Store // required
	Far  []Tier        // in the order in which they are asked
	// Queue is how many blocks may wait for one tier; default 4096.
	Queue int
	// Abreast is how many blocks of one tier are written, and how many are read, at
	// once; default 4.
	Abreast int
	// FetchBytes bounds the bytes of blocks on their way from one tier; default 256 MiB.
	// A larger block goes alone.
	FetchBytes int64
	// Usual bounds reads whose context has no end; default 2 s.
	Usual time.Duration
	// Flush is how long Close waits for blocks that wait to be written; default 3 s.
	Flush    time.Duration
	Registry prometheus.Registerer // for the metrics kvmesh_kv_stack_*; default: none
	Log      *slog.Logger          // default: silent
}

// withDefaults returns c with every zero field set.
func (c Config) withDefaults() Config {
	c.Queue = cmp.Or(c.Queue, 4096)
	c.Abreast = cmp.Or(c.Abreast, 4)
	c.FetchBytes = cmp.Or(c.FetchBytes, 256<<20)
	c.Usual = cmp.Or(c.Usual, 2*time.Second)
	c.Flush = cmp.Or(c.Flush, 3*time.Second)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports the first field that cannot work.
func (c Config) Validate() error {
	if c.Near == nil {
		return errors.New("stack: no near store")
	}
	if c.Queue < 0 || c.Abreast < 0 || c.FetchBytes < 0 || c.Usual < 0 || c.Flush < 0 {
		return errors.New("stack: a limit or time is negative")
	}
	names := map[string]bool{}
	for _, t := range c.Far {
		if t.Store == nil || t.Name == "" || names[t.Name] {
			return fmt.Errorf("stack: far tier %q: each has a store and a name of its own", t.Name)
		}
		names[t.Name] = true
	}
	return nil
}

// Peeker is the ability of a near store to lend a block without counting that as its use.
type Peeker interface {
	// Peek lends a block as kvcache.Store.Get does.
	Peek(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error)
}

// Stack is a kvcache.Store of a near store and far ones. It is safe for concurrent use.
type Stack struct {
	cfg     Config
	near    kvcache.Store
	tiers   []*tier
	metrics *metrics

	ctx  context.Context // ends when the stack is closed
	stop context.CancelFunc
	done sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	flights map[kvcache.Key]*flight     // of those of one block, the last
	drops   map[drop]int                // how often each was
	labels  map[kvcache.Fingerprint]int // forgottenLocked when the tiers were told its label
	owed    map[Owed]*dropping
}

var (
	_ kvcache.Store   = (*Stack)(nil)
	_ kvcache.Counted = (*Stack)(nil)
	_ kvcache.Labeled = (*Stack)(nil)
)

// New puts stores on top of each other and starts goroutines that Close ends. The stores
// are the caller's to close, after the stack.
func New(cfg Config) (*Stack, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	s := &Stack{
		cfg: cfg, near: cfg.Near,
		flights: map[kvcache.Key]*flight{}, drops: map[drop]int{}, labels: map[kvcache.Fingerprint]int{}, owed: map[Owed]*dropping{},
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	for _, t := range cfg.Far {
		own := &tier{
			Tier: t, queue: make(chan kvcache.Found, cfg.Queue), slots: make(chan struct{}, cfg.Abreast), room: semaphore.NewWeighted(cfg.FetchBytes),
		}
		own.waits.times, own.waits.again = map[kvcache.Key]int{}, map[kvcache.Key]bool{}
		s.tiers = append(s.tiers, own)
	}
	s.metrics = newMetrics(cfg.Registry, s.tiers)
	for _, t := range s.tiers {
		for range cfg.Abreast {
			s.done.Go(func() { s.write(t) })
		}
	}
	return s, nil
}

// Close implements kvcache.Store, but for the stores, which it leaves open. It waits for
// Config.Flush at most until what waits is written; a call of a tier that hangs is left
// alone.
func (s *Stack) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	if !first {
		return nil
	}
	end := time.Now().Add(s.cfg.Flush)
	for s.Behind() > 0 && time.Now().Before(end) {
		time.Sleep(flushLook)
	}
	s.stop()
	ended := make(chan struct{})
	go func() {
		s.done.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-time.After(s.cfg.Flush):
		return errors.New("close the stack of KV stores: a tier still has not answered")
	}
}

// Tiers lists the far tiers, in the order in which they are asked.
func (s *Stack) Tiers() (list []Tier) {
	for _, t := range s.tiers {
		list = append(list, t.Tier)
	}
	return list
}

// flushLook is the time between two looks at what waits.
const flushLook = 10 * time.Millisecond

// Behind is how many blocks wait to be written, or are being written, to all far tiers
// together.
func (s *Stack) Behind() (blocks int64) {
	for _, t := range s.tiers {
		blocks += t.behind.blocks.Load()
	}
	return blocks
}

// Backlog is what one tier does not have.
type Backlog struct {
	// Blocks wait to be written, or are being written; Bytes and Tokens are theirs.
	Blocks, Bytes, Tokens int64
	// GivenUp is how many blocks were not written since the start, although the near store
	// still had them.
	GivenUp int64
}

// BehindIn is what one tier does not have yet.
func (s *Stack) BehindIn(tier string) (b Backlog) {
	for _, t := range s.tiers {
		if t.Name == tier {
			b = Backlog{t.behind.blocks.Load(), t.behind.bytes.Load(), t.behind.tokens.Load(), t.givenUp.Load()}
		}
	}
	return b
}

// Waits says whether a block waits to be written to a tier, or is being written.
func (s *Stack) Waits(tier string, key kvcache.Key) bool {
	for _, t := range s.tiers {
		if t.Name == tier {
			t.waits.Lock()
			defer t.waits.Unlock()
			return t.waits.times[key] > 0
		}
	}
	return false
}

// Stats implements kvcache.Counted: those of the near store. The far ones have their own.
func (s *Stack) Stats() kvcache.Stats {
	if c, ok := s.near.(kvcache.Counted); ok {
		return c.Stats()
	}
	return kvcache.Stats{}
}

// Put implements kvcache.Store. It returns when the near store has the block.
func (s *Stack) Put(ctx context.Context, f *kvcache.Frame) error {
	if s.isClosed() {
		return kvcache.ErrClosed
	}
	if err := s.near.Put(ctx, f); err != nil {
		return err
	}
	s.Wrote(kvcache.Found{Ref: f.Ref, First: f.First, Tokens: len(f.IDs), Size: f.Total})
	return nil
}

// isClosed says whether the stack takes no more calls.
func (s *Stack) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Get implements kvcache.Store. A block that only a far tier has is brought near first; if
// the near store has no room for it, it is lent from there.
func (s *Stack) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	if s.isClosed() {
		return nil, kvcache.ErrClosed
	}
	l, err := s.near.Get(ctx, ref)
	if !errors.Is(err, kvcache.ErrNotFound) {
		return l, err
	}
	bounded, cancel := s.bound(ctx)
	defer cancel()
	dropped := s.dropped(nil, ref.Fingerprint)
	for _, t := range s.tiers {
		if s.owes(t, ref.Fingerprint) {
			s.metrics.cut(t, cutDropped)
			continue
		}
		if !t.admits() {
			s.metrics.cut(t, cutAway)
			continue
		}
		fl := s.bring(bounded, t, kvcache.Found{Ref: ref})
		if fl == nil || !fl.wait(bounded) {
			if fl != nil {
				t = fl.t
			}
			s.metrics.cut(t, cutDeadline)
			return nil, fmt.Errorf("block %s: %w", ref.Key, errors.Join(kvcache.ErrNotFound, bounded.Err()))
		}
		switch {
		case fl.err == nil:
			return s.near.Get(ctx, ref)
		case errors.Is(fl.err, kvcache.ErrFull):
			far, err := t.Store.Get(bounded, ref)
			if err != nil {
				return nil, err
			}
			if far = s.unlessDropped(t, ref.Fingerprint, dropped, far); far != nil {
				return far, nil
			}
		}
	}
	return nil, err
}

// bound gives a read an end, where it has none.
func (s *Stack) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, s.cfg.Usual)
}
