package kvmetrics

import (
	"errors"
	"sync/atomic"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Counters count what a store does, by the names of kvcache.Stats. The zero value is
// ready. They are plain atomics, so that a store can be used without a registry.
type Counters struct {
	Puts, PutBytes, Duplicates atomic.Uint64
	Hits, Misses, HitBytes     atomic.Uint64
	Lookups, LookupTokens      atomic.Uint64
	Appends, AppendBytes       atomic.Uint64
	Stale, Full, Failed, Late  atomic.Uint64
	Evictions, EvictedBytes    atomic.Uint64
	Expired, Swept             atomic.Uint64
	Refused                    [len(kvcache.Stats{}.Refused)]atomic.Uint64
}

// Stats returns the counts. Used and Limit, which nobody counts, are 0.
func (c *Counters) Stats() kvcache.Stats {
	st := kvcache.Stats{
		Puts: c.Puts.Load(), PutBytes: c.PutBytes.Load(), Duplicates: c.Duplicates.Load(),
		Hits: c.Hits.Load(), Misses: c.Misses.Load(), HitBytes: c.HitBytes.Load(),
		Lookups: c.Lookups.Load(), LookupTokens: c.LookupTokens.Load(),
		Appends: c.Appends.Load(), AppendBytes: c.AppendBytes.Load(),
		Stale: c.Stale.Load(), Full: c.Full.Load(), Failed: c.Failed.Load(), Late: c.Late.Load(),
		Evictions: c.Evictions.Load(), EvictedBytes: c.EvictedBytes.Load(),
		Expired: c.Expired.Load(), Swept: c.Swept.Load(),
	}
	for i := range st.Refused {
		st.Refused[i] = c.Refused[i].Load()
	}
	return st
}

// Refusal counts a refusal, and returns it if err is one.
func (c *Counters) Refusal(err error) (*kvcache.Refusal, bool) {
	r, ok := errors.AsType[*kvcache.Refusal](err)
	if ok {
		c.Refused[r.Reason].Add(1)
	}
	return r, ok
}

// Failure counts an error that is nobody's decision, unless it is nil, and returns it.
func (c *Counters) Failure(err error) error {
	if err != nil {
		c.Failed.Add(1)
	}
	return err
}
