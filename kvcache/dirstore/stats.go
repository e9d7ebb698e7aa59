//go:build unix

package dirstore

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/kvmesh/kvmesh/kvcache"
)

// counters are this process's, by the names of kvcache.Stats. They are plain
// atomics and not metrics, so that a store can be used without a registry.
type counters struct {
	puts, putBytes, duplicates atomic.Uint64
	hits, misses, hitBytes     atomic.Uint64
	lookups, lookupTokens      atomic.Uint64
	appends, appendBytes       atomic.Uint64
	stale, full, failed        atomic.Uint64
	evictions, evictedBytes    atomic.Uint64
	expired, swept             atomic.Uint64
	refused                    [len(kvcache.Stats{}.Refused)]atomic.Uint64
}

// Stats implements kvcache.Counted.
func (s *Store) Stats() kvcache.Stats {
	c := &s.count
	st := kvcache.Stats{
		Puts: c.puts.Load(), PutBytes: c.putBytes.Load(), Duplicates: c.duplicates.Load(),
		Hits: c.hits.Load(), Misses: c.misses.Load(), HitBytes: c.hitBytes.Load(),
		Lookups: c.lookups.Load(), LookupTokens: c.lookupTokens.Load(),
		Appends: c.appends.Load(), AppendBytes: c.appendBytes.Load(),
		Stale: c.stale.Load(), Full: c.full.Load(), Failed: c.failed.Load(),
		Evictions: c.evictions.Load(), EvictedBytes: c.evictedBytes.Load(),
		Expired: c.expired.Load(), Swept: c.swept.Load(),
		Limit: s.cfg.Limit,
	}
	for i := range st.Refused {
		st.Refused[i] = c.refused[i].Load()
	}
	if s.enter(context.Background()) == nil {
		defer s.leave()
		st.Used = s.control.used()
	}
	return st
}

// refused counts a refusal and says whether err is one.
func (s *Store) refused(err error) (*kvcache.Refusal, bool) {
	r, ok := errors.AsType[*kvcache.Refusal](err)
	if ok {
		s.count.refused[r.Reason].Add(1)
	}
	return r, ok
}

// failed counts an error that is nobody's decision and returns it.
func (s *Store) failed(err error) error {
	if err != nil {
		s.count.failed.Add(1)
	}
	return err
}
