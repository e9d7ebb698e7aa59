package peers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Drop implements kvcache.Store, on all members. The error is of those that could not, also
// because they have left: they are told when they are there again.
func (s *Store) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	if s.isClosed() {
		return kvcache.ErrClosed
	}
	s.forgetHolders(func(space kvcache.Space) bool { return space.Fingerprint == f })
	defer s.tails.drop(func(spec kvcache.TailSpec) bool { return spec.Fingerprint == f })()
	return s.owing(debt{Fingerprint: f.String()}, s.all(func(m *member) error { return m.peer.Drop(ctx, f) }))
}

// EraseTenant implements kvcache.Eraser, on all members, with what they have on disks too.
// The error is of those that could not, also because they have left: they are told when they
// are there again.
//
// It is done twice: at the first time a member may be copying to another one that has erased
// already.
func (s *Store) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	if s.isClosed() {
		return 0, kvcache.ErrClosed
	}
	s.forgetHolders(e.Has)
	defer s.tails.drop(func(spec kvcache.TailSpec) bool { return e.Has(spec.Space) })()
	failed := map[string]error{}
	for range 2 {
		n := s.eraseAll(ctx, e, failed)
		if blocks += n; n == 0 {
			break
		}
	}
	return blocks, s.owing(debt{Tenant: e.Tenant}, failed)
}

// eraseAll erases a tenant on all members but those that could not before, and adds to them.
func (s *Store) eraseAll(ctx context.Context, e kvcache.Erasure, failed map[string]error) int {
	before := maps.Clone(failed)
	var blocks atomic.Int64
	maps.Copy(failed, s.all(func(m *member) error {
		if before[m.ID] != nil {
			return nil
		}
		begin := time.Now()
		n, err := eraseOn(ctx, m, e)
		blocks.Add(int64(n))
		return s.called(ctx, m, begin, err)
	}))
	return int(blocks.Load())
}

// eraseOn erases a tenant on one member.
func eraseOn(ctx context.Context, m *member, e kvcache.Erasure) (int, error) {
	p, ok := m.peer.(kvcache.Eraser)
	if !ok {
		return 0, errors.New("it cannot erase a tenant's blocks")
	}
	return p.EraseTenant(ctx, e)
}

// forgetHolders forgets who has what of some spaces.
func (s *Store) forgetHolders(which func(kvcache.Space) bool) {
	known := map[kvcache.Space]bool{}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.holders, func(_ kvcache.Key, h holding) bool {
		if _, asked := known[h.space]; !asked {
			known[h.space] = which(h.space)
		}
		return known[h.space]
	})
}

// Label implements kvcache.Labeled, on the members that can.
func (s *Store) Label(ctx context.Context, f kvcache.Fingerprint, l kvcache.Label) error {
	return joined(s.all(func(m *member) error {
		if p, ok := m.peer.(kvcache.Labeled); ok {
			return p.Label(ctx, f, l)
		}
		return nil
	}))
}

// all does something with all members at once, and says who could not.
func (s *Store) all(what func(*member) error) map[string]error {
	s.mu.Lock()
	list := slices.Collect(maps.Values(s.members))
	s.mu.Unlock()
	type result struct {
		id  string
		err error
	}
	results := make(chan result, len(list))
	for _, m := range list {
		go func() { results <- result{m.ID, what(m)} }()
	}
	failed := map[string]error{}
	for range list {
		if r := <-results; r.err != nil {
			failed[r.id] = r.err
		}
	}
	return failed
}

// joined is one error of those of members, by id.
func joined(failed map[string]error) error {
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(failed)) {
		errs = append(errs, fmt.Errorf("KV peer %s: %w", id, failed[id]))
	}
	return errors.Join(errs...)
}
