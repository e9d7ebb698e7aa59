package xds

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/xds/registry"
)

// redisMembers brings the workers that registered in Redis into the registry. nil
// where the policy names no Redis: its methods do nothing then.
type redisMembers struct {
	cp     *ControlPlane
	client *redis.Client
	source *registry.Redis
}

// newRedisMembers makes one, where the policy names a Redis.
func newRedisMembers(cp *ControlPlane) (*redisMembers, error) {
	r := cp.policy.Mesh.Registry
	if r.Redis == "" {
		return nil, nil
	}
	link := redislink.Config{URL: r.Redis, TrustedCA: cp.config.RedisCA}
	client, err := redislink.Open(link)
	if err != nil {
		return nil, fmt.Errorf("registry.redis: %w", err)
	}
	var known []fleet.Registration
	for _, m := range cp.registry.Members() {
		if m.Via == fleet.ViaRedis {
			known = append(known, m.Registration)
		}
	}
	cp.log.Info("reads workers from Redis", "url", link.Shown())
	return &redisMembers{cp: cp, client: client, source: registry.NewRedis(registry.RedisConfig{
		Client: client, AddressTemplate: r.AddressTemplate, Pool: cp.poolOf, Known: known, Log: cp.log,
	}, time.Now())}, nil
}

// run reads until ctx ends.
func (r *redisMembers) run(ctx context.Context) {
	if r == nil {
		return
	}
	r.source.Run(ctx, r)
	_ = r.client.Close() // nothing uses it any more
}

// vouches reports whether a silent worker stays listed.
func (r *redisMembers) vouches(id string, now time.Time) bool {
	return r != nil && r.source.Vouches(id, now)
}

// Register implements registry.RedisSink. What a worker registers itself, here, wins
// over what it writes to Redis.
func (r *redisMembers) Register(reg fleet.Registration, l registry.Load) {
	now := time.Now()
	if m, ok := r.cp.registry.Member(reg.ID); ok && m.Via != fleet.ViaRedis && m.Incarnation >= reg.Incarnation && now.Sub(m.Heard) < fleet.TTL {
		return
	}
	if !r.cp.state.hasPool(reg.Pool) {
		r.cp.log.Debug("worker in Redis is of no pool here", "worker", reg.ID, "pool", reg.Pool)
		return
	}
	if err := r.cp.Register(reg); err != nil {
		r.cp.log.Debug("worker in Redis not taken", "worker", reg.ID, "err", err)
		return
	}
	r.cp.state.tell(reg.ID, reg.Incarnation, now, l)
}

// Keep implements registry.RedisSink.
func (r *redisMembers) Keep(id string, incarnation uint64) {
	r.cp.state.heartbeat(id, incarnation, time.Now())
}

// Remove implements registry.RedisSink.
func (r *redisMembers) Remove(id string, incarnation uint64) {
	if m, ok := r.cp.registry.Member(id); !ok || m.Via != fleet.ViaRedis {
		return
	}
	if err := r.cp.registry.Deregister(id, incarnation, time.Now()); err != nil {
		r.cp.log.Debug("worker left Redis", "worker", id, "err", err)
		return
	}
	r.cp.log.Info("worker left Redis", "worker", id)
	r.cp.sync()
}

// poolOf returns the pool of a worker that names none: the one of its model, else
// the first that serves whatever its workers do.
func (cp *ControlPlane) poolOf(model string) (string, bool) {
	cp.mu.Lock()
	set := cp.policy
	cp.mu.Unlock()
	for _, fits := range []func(policy.WorkerPool) bool{
		func(p policy.WorkerPool) bool { return p.Model == model },
		func(p policy.WorkerPool) bool { return p.Model == "" },
	} {
		for _, p := range set.Pools {
			if fits(p) {
				return p.Name, true
			}
		}
	}
	return "", false
}

// foreign reports whether a worker is known from Redis only and reports no load over
// ORCA: its entry is all there is.
func foreign(m registry.Member) bool {
	return m.Via == fleet.ViaRedis && m.Incarnation == fleet.ForeignIncarnation
}

// tell takes in the load that a worker wrote to Redis, unless it reports load itself.
func (s *state) tell(id string, incarnation uint64, now time.Time, l registry.Load) {
	s.update(id, incarnation, now, func(w *worker) {
		if !w.in.Heartbeat {
			return
		}
		w.in.Report = health.Report{At: now, Utilization: l.Utilization()}
		w.load = &fleetpb.Load{Running: l.Running, Waiting: l.Waiting, KvUsage: l.KVUsage, Utilization: l.Utilization()}
	})
}
