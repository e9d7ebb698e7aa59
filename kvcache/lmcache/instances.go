//go:build unix

package lmcache

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
)

// instance is one rank of an engine, as it has registered. The exported fields are kept
// for the next start.
type instance struct {
	ID     int64  `json:"id"`
	Model  string `json:"model"`
	World  int    `json:"world"`
	Layout layout `json:"layout"`
	// Weights is the hash of what it has loaded; "" is not known, or not yet.
	Weights string `json:"weights,omitempty"`
	// Epoch is what makes its state its own after Clear.
	Epoch string `json:"epoch,omitempty"`
	// Pool is the identity of the arena that it has mapped.
	Pool string `json:"pool"`

	conn *conn     // nil: it has none
	seen time.Time // when it last was heard of
}

// newEpoch returns something that never was.
func newEpoch() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// text is what the fingerprint of one rank's chunks is of. It has line breaks only
// between its lines.
func (i *instance) text(cfg Config, rank int) string {
	var b strings.Builder
	line := func(format string, args ...any) {
		b.WriteString(strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", "\\n") + "\n")
	}
	l := i.Layout
	line("kvmesh lmcache v1")
	line("model %s", i.Model)
	line("weights %s", i.Weights)
	line("rank %d of %d", rank, i.World)
	line("chunk %d tokens, %d planes of %d layers, %d slots of %d %s", cfg.Chunk, l.Planes, l.Layers, l.Slots, l.Hidden, l.DType)
	if cfg.Variant != "" {
		line("variant %s", cfg.Variant)
	}
	if i.Epoch != "" {
		line("cleared %s", i.Epoch)
	}
	return b.String()
}

// alive says whether the engine may still call.
func (i *instance) alive(now time.Time, grace time.Duration) bool {
	return i.conn != nil || now.Sub(i.seen) < grace
}

// stranger is an engine that calls and is not registered, or not with the pool of today.
type stranger struct {
	told bool // by a ping that has failed
	seen time.Time
}

// mostInstances bounds how many engines are remembered. Those that are alive are.
const mostInstances = 1024

// bindTime is how long a registration waits for the hash of the weights. Usually that is
// known already; if not, it follows.
const bindTime = 500 * time.Millisecond

// RegisterKvCacheEngineDrivenContext implements the service. To register again is to begin
// anew: a chunk that is being stored stays so.
func (s *Server) RegisterKvCacheEngineDrivenContext(ctx context.Context, r *lmcachepb.RegisterKvCacheEngineDrivenContextRequest) (*lmcachepb.RegisterKvCacheEngineDrivenContextResponse, error) {
	out := &lmcachepb.RegisterKvCacheEngineDrivenContextResponse{}
	l, err := layoutOf(r, s.cfg.Chunk)
	if err == nil && (r.GetWorldSize() < 1 || r.GetWorldSize() > mostWorld || len(r.GetModelName()) > mostName) {
		err = fmt.Errorf("world of %d", r.GetWorldSize())
	}
	if err != nil {
		s.count.refused.Add(1)
		s.cfg.Log.Warn("an engine's KV is of a kind that is not kept", "instance", r.GetInstanceId(), "err", err)
		return out, nil
	}
	s.watchPool()
	i := &instance{ID: r.GetInstanceId(), Model: r.GetModelName(), World: int(r.GetWorldSize()), Layout: l, conn: connOf(ctx), seen: time.Now()}
	s.mu.Lock()
	if s.pool == nil {
		// It learns by a ping that fails that it has to come again.
		s.strangerLocked(i.ID).seen = i.seen
		s.mu.Unlock()
		s.cfg.Log.Warn("an engine registers while the KV node has never been there: nothing is kept until it is", "instance", i.ID)
		return out, nil
	}
	i.Pool = hex.EncodeToString(s.pool.id[:])
	out.ShmName, out.PoolSize = s.pool.name, s.pool.size
	if old := s.instances[i.ID]; old != nil && old.Model == i.Model {
		i.Epoch, i.Weights = old.Epoch, old.Weights // the process, and what it has in memory, is the same
	}
	known := i.Weights != ""
	s.instances[i.ID] = i
	delete(s.strangers, i.ID)
	s.trimLocked(time.Now())
	s.mu.Unlock()
	if known {
		s.save()
		return out, nil
	}
	bound := make(chan struct{})
	s.work.Go(func() {
		defer close(bound)
		s.bind(i)
	})
	select {
	case <-bound:
	case <-time.After(bindTime):
	case <-ctx.Done():
	}
	return out, nil
}

// bind finds out what weights an engine has. Until then it stores nothing and finds nothing,
// and keeps others from finding anything that call their model the same. It is bound once,
// however often it registers: the files may change while it runs, and what it has loaded
// does not.
func (s *Server) bind(i *instance) {
	hash, err := s.cfg.Weights(s.ctx, i.Model)
	if s.ctx.Err() != nil && err != nil {
		return // the server ends: with the next one the engine registers again
	}
	if err == nil && hash == "" {
		err = fmt.Errorf("no hash")
	}
	if err != nil {
		s.cfg.Log.Warn("the weights of an engine's model are not known: nothing is kept for it", "instance", i.ID, "model", i.Model, "err", err)
	} else {
		s.cfg.Log.Info("engine registered", "instance", i.ID, "model", i.Model, "world", i.World, "weights", hash, "object_bytes", i.Layout.size())
	}
	s.mu.Lock()
	for _, one := range []*instance{i, s.instances[i.ID]} { // it may have registered again meanwhile
		if one != nil && one.Model == i.Model && one.Weights == "" {
			one.Weights = hash
		}
	}
	s.mu.Unlock()
	s.save()
}

// trimLocked forgets engines that have gone, if there are too many, the longest first.
func (s *Server) trimLocked(now time.Time) {
	if len(s.instances) <= mostInstances {
		return
	}
	list := slices.SortedFunc(maps.Values(s.instances), func(a, b *instance) int { return a.seen.Compare(b.seen) })
	for _, i := range list[:len(list)-mostInstances] {
		if !i.alive(now, s.cfg.Grace) {
			delete(s.instances, i.ID)
		}
	}
}

// UnregisterKvCacheEngineDrivenContext implements the service. What the engine was reading
// or writing is given up: it has done.
func (s *Server) UnregisterKvCacheEngineDrivenContext(_ context.Context, r *lmcachepb.UnregisterKvCacheEngineDrivenContextRequest) (*lmcachepb.UnregisterKvCacheEngineDrivenContextResponse, error) {
	s.mu.Lock()
	delete(s.instances, r.GetInstanceId())
	delete(s.strangers, r.GetInstanceId())
	for key := range s.writes {
		if key.instance == r.GetInstanceId() {
			s.dropWriteLocked(key)
		}
	}
	for key := range s.reads {
		if key.instance == r.GetInstanceId() {
			s.dropReadLocked(key)
		}
	}
	s.mu.Unlock()
	s.save()
	return &lmcachepb.UnregisterKvCacheEngineDrivenContextResponse{}, nil
}

// strangerLocked is an engine that has to register. As many are remembered as engines; of more
// the one that was not heard of for longest is forgotten, and is told once more.
func (s *Server) strangerLocked(id int64) *stranger {
	st := s.strangers[id]
	if st != nil {
		return st
	}
	if len(s.strangers) >= mostInstances {
		delete(s.strangers, slices.MinFunc(slices.Collect(maps.Keys(s.strangers)), func(a, b int64) int {
			return s.strangers[a].seen.Compare(s.strangers[b].seen)
		}))
	}
	st = &stranger{}
	s.strangers[id] = st
	return st
}

// Ping implements the service. An engine registers again when a ping succeeds after one
// that has failed; so the first one of an engine that has to is answered as if the server
// were not well.
func (s *Server) Ping(ctx context.Context, r *lmcachepb.PingRequest) (*lmcachepb.PingResponse, error) {
	if r.InstanceId == nil {
		return &lmcachepb.PingResponse{Ok: true}, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if s.instanceLocked(ctx, r.GetInstanceId()) != nil {
		return &lmcachepb.PingResponse{Ok: true}, nil
	}
	st := s.strangerLocked(r.GetInstanceId())
	ok := st.told
	st.told, st.seen = true, now
	return &lmcachepb.PingResponse{Ok: ok}, nil
}

// instanceLocked returns an engine that calls, if it is registered with the pool of today,
// and notes that it lives.
func (s *Server) instanceLocked(ctx context.Context, id int64) *instance {
	i := s.instances[id]
	if i == nil {
		return nil
	}
	if c := connOf(ctx); c != nil {
		i.conn = c
	}
	i.seen = time.Now()
	if s.pool != nil && i.Pool != hex.EncodeToString(s.pool.id[:]) {
		return nil
	}
	return i
}

// caller returns an engine's registration for a call that stores or reads, if there is
// one and its weights are known.
func (s *Server) caller(ctx context.Context, id int64) (instance, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.instanceLocked(ctx, id)
	if i == nil || i.Weights == "" || s.pool == nil {
		return instance{}, false
	}
	return *i, true
}

// isStillLocked says whether an engine is registered as what it was when a call began: it
// may have registered again or off meanwhile, and everything may have been cleared.
func (s *Server) isStillLocked(was instance) bool {
	i := s.instances[was.ID]
	return i != nil && i.Pool == was.Pool && i.text(s.cfg, 0) == was.text(s.cfg, 0)
}

// bindingsLocked are the different kinds of engines that a look-up may come from, which
// does not say: those that live and call their model so. None if one of them is not to be
// served, since it could not read what was found for another.
func (s *Server) bindingsLocked(model string, world int, now time.Time) []instance {
	for id, st := range s.strangers {
		if now.Sub(st.seen) >= s.cfg.Grace {
			delete(s.strangers, id)
		}
	}
	if len(s.strangers) > 0 || s.pool == nil {
		return nil
	}
	var list []instance
	kinds := map[string]bool{}
	for _, i := range s.instances {
		if i.Model != model || i.World != world || !i.alive(now, s.cfg.Grace) {
			continue
		}
		if i.Weights == "" || i.Pool != hex.EncodeToString(s.pool.id[:]) {
			return nil
		}
		if kind := i.text(s.cfg, 0); !kinds[kind] {
			kinds[kind] = true
			list = append(list, *i)
		}
	}
	return list
}

// space is where the chunks of one rank of an engine are.
func (s *Server) space(i instance, r *run, rank int) kvcache.Space {
	return kvcache.NewSpace(i.text(s.cfg, rank), r.salt)
}
