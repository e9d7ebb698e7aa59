package sealed

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Config describes a store. Zero fields take the defaults named beside them.
type Config struct {
	// Store keeps the encrypted frames; required. It is closed with this one.
	Store kvcache.Store
	// Keys are the keys of tenants; required.
	Keys *Keys
	// Tier is the store's name in metrics.
	Tier     string
	Registry prometheus.Registerer // for kvmesh_kv_sealed_no_key_total; default: none
}

// Validate reports the first field that cannot work.
func (c Config) Validate() error {
	if c.Store == nil || c.Keys == nil {
		return errors.New("sealed: a store and keys are wanted")
	}
	return nil
}

// Store is a kvcache.Store that encrypts. It is safe for concurrent use.
type Store struct {
	under kvcache.Store
	keys  *Keys
	noKey prometheus.Counter
	salt  func() [32]byte
	// again counts looks for one block beyond the first, and none calls without a key.
	again, none atomic.Uint64
}

var (
	_ kvcache.Store   = (*Store)(nil)
	_ kvcache.Counted = (*Store)(nil)
	_ kvcache.Labeled = (*Store)(nil)
)

// New puts encryption before a store.
func New(cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Store{under: cfg.Store, keys: cfg.Keys, salt: randomSalt}
	s.noKey = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kvmesh_kv_sealed_no_key_total", Help: "Calls for tenants without a key, which are misses.",
		ConstLabels: prometheus.Labels{"tier": cfg.Tier},
	})
	if cfg.Registry != nil {
		cfg.Registry.MustRegister(s.noKey)
	}
	return s, nil
}

func randomSalt() (b [32]byte) {
	_, _ = rand.Read(b[:]) // never fails
	return b
}

// of returns the keys of a space; without any it counts that.
func (s *Store) of(sp kvcache.Space) []*secret {
	list := s.keys.of(sp)
	if len(list) == 0 {
		s.noKey.Inc()
	}
	return list
}

// Put implements kvcache.Store. The error wraps kvcache.ErrNoKey where the tenant has none.
func (s *Store) Put(ctx context.Context, f *kvcache.Frame) error {
	keys := s.of(f.Space)
	if len(keys) == 0 {
		return fmt.Errorf("encrypt a block: %w", kvcache.ErrNoKey)
	}
	e, err := keys[0].seal(f, s.salt())
	if err != nil {
		return err
	}
	return s.under.Put(ctx, e)
}

// Get implements kvcache.Store. The frame's bytes are this call's own.
func (s *Store) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	err := fmt.Errorf("block %s: %w", ref.Key, kvcache.ErrNotFound)
	keys := s.of(ref.Space)
	if len(keys) == 0 {
		s.none.Add(1)
	}
	for i, k := range keys {
		if i > 0 {
			s.again.Add(1)
		}
		var f *kvcache.Frame
		f, err = s.get(ctx, k, k.ref(ref), &ref)
		if err == nil {
			return kvcache.NewLent(f, func() {}, nil), nil
		}
		if !errors.Is(err, kvcache.ErrNotFound) {
			break
		}
	}
	return nil, err
}

// get reads and opens a block; see secret.open.
func (s *Store) get(ctx context.Context, k *secret, at kvcache.Ref, want *kvcache.Ref) (*kvcache.Frame, error) {
	l, err := s.under.Get(ctx, at)
	if err != nil {
		return nil, err
	}
	defer l.Release()
	f, err := k.open(l.Frame, want)
	if err != nil {
		// The store has been told of what its own sums show.
		if _, refused := errors.AsType[*kvcache.Refusal](err); refused && l.Verify() == nil {
			l.Reject(err)
		}
		return nil, fmt.Errorf("block %s: %w", at.Key, err)
	}
	return f, nil
}

// Drop implements kvcache.Store.
func (s *Store) Drop(ctx context.Context, f kvcache.Fingerprint) error { return s.under.Drop(ctx, f) }

// Labels implements kvcache.Lister, where the store that keeps the frames does.
func (s *Store) Labels(ctx context.Context) (map[kvcache.Fingerprint]kvcache.Label, error) {
	if n, ok := s.under.(kvcache.Lister); ok {
		return n.Labels(ctx)
	}
	return nil, nil
}

// Close implements kvcache.Store, and closes the store that keeps the frames.
func (s *Store) Close() error { return s.under.Close() }

// Stats implements kvcache.Counted: those of the store that keeps the frames, but one miss
// for a block that none of a tenant's keys finds, and for one whose tenant has none.
func (s *Store) Stats() (st kvcache.Stats) {
	again, none := s.again.Load(), s.none.Load() // first: the other only grows
	if c, ok := s.under.(kvcache.Counted); ok {
		st = c.Stats()
	}
	st.Misses = st.Misses - min(again, st.Misses) + none
	return st
}

// Label implements kvcache.Labeled, where the store that keeps the frames does.
func (s *Store) Label(ctx context.Context, f kvcache.Fingerprint, l kvcache.Label) error {
	if n, ok := s.under.(kvcache.Labeled); ok {
		return n.Label(ctx, f, l)
	}
	return nil
}
