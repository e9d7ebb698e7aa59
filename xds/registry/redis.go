package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// Pace and bounds of reading Redis.
const (
	// redisEvery is how often Redis is read, whether it answers or not.
	redisEvery = time.Second
	// redisBatch bounds how many workers one round trip asks for.
	redisBatch = 500
	// redisKept is how long a worker that fell silent stays listed: it is TIMEOUT
	// after fleet.TTL and gone after this.
	redisKept = 2 * fleet.TTL
	// redisSwept is when an id without health leaves the set of active workers, so
	// that the ids of the dead do not pile up.
	redisSwept = time.Hour
	// maxEntry bounds the health of one worker, in bytes.
	maxEntry = 64 << 10
	// lookupEvery is how long the address of a host name holds.
	lookupEvery = 30 * time.Second
)

// RedisSink takes what a Redis finds. Its methods are called by one goroutine.
type RedisSink interface {
	// Register takes a worker whose entry is new or was written again.
	Register(r fleet.Registration, l Load)
	// Keep says that Redis is away and a worker that was alive counts as it still.
	Keep(id string, incarnation uint64)
	// Remove says that a worker took its entry back.
	Remove(id string, incarnation uint64)
}

// RedisConfig says where workers are found. All fields but Known are required.
type RedisConfig struct {
	Client *redis.Client // stays the caller's
	// AddressTemplate is where a worker is reached that tells no host or port.
	AddressTemplate string
	// Pool returns the pool of a worker that names none.
	Pool func(model string) (name string, ok bool)
	// Known are workers that were read from Redis before the last restart. They stay
	// while Redis is away.
	Known []fleet.Registration
	Log   *slog.Logger
}

// Redis reads which workers registered in Redis, in the layout that fleet describes.
//
// While Redis is away the last list stands. When it comes back with nothing in it,
// everybody has fleet.TTL to write again; only a worker that is missing while the
// server ran on and others are there is known to have left.
type Redis struct {
	cfg   RedisConfig
	hosts map[string]address // by host:port
	wrong string             // last complaint about the server, to log each once
	gone  map[string]time.Time

	mu    sync.Mutex // guards away and known: Vouches is called by others
	away  bool
	known map[string]*entry // by id
}

// entry is what is known of one worker.
type entry struct {
	run    string        // id of the server's process in which it was seen last, "" = unknown
	raw    string        // its health, as it stands in Redis
	ttl    time.Duration // of raw when it was read
	status string        // its status key
	reg    fleet.Registration
	heard  time.Time // when it last wrote
	wrong  string    // last complaint about it
}

// address is the outcome of a name lookup.
type address struct {
	addr  string // ip:port
	until time.Time
	err   error
}

// NewRedis makes a Redis that has read nothing yet.
func NewRedis(c RedisConfig, now time.Time) *Redis {
	r := &Redis{cfg: c, hosts: map[string]address{}, known: map[string]*entry{}, gone: map[string]time.Time{}}
	for _, reg := range c.Known {
		r.known[reg.ID] = &entry{reg: reg, heard: now}
	}
	return r
}

// Run reads until ctx ends.
func (r *Redis) Run(ctx context.Context, sink RedisSink) {
	tick := time.NewTicker(redisEvery)
	defer tick.Stop()
	for {
		r.Poll(ctx, sink)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Vouches reports whether a worker stays listed although it is silent: for a while,
// or because Redis is away and cannot tell.
func (r *Redis) Vouches(id string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.known[id]
	return e != nil && (r.away || now.Sub(e.heard) < redisKept)
}

// Poll reads once and tells sink what changed. Run calls it; it must not be called
// twice at the same time.
func (r *Redis) Poll(ctx context.Context, sink RedisSink) {
	found, err := r.read(ctx)
	now := time.Now()
	if ctx.Err() != nil {
		return
	}
	r.mu.Lock()
	was := r.away
	r.away = err != nil
	r.mu.Unlock()
	if err != nil {
		if r.wrong != err.Error() {
			r.wrong = err.Error()
			r.cfg.Log.Warn("Redis is away, the workers it listed stay", "workers", len(r.known), "err", err)
		}
		r.keep(sink, now)
		return
	}
	if was {
		r.wrong = ""
		r.cfg.Log.Info("Redis is back", "workers", len(found.entries))
		r.mu.Lock()
		for _, e := range r.known { // their silence was ours
			e.heard = now
		}
		r.mu.Unlock()
	}
	r.take(ctx, found, sink, now)
}

// keep has every worker that was alive count as alive.
func (r *Redis) keep(sink RedisSink, now time.Time) {
	for _, id := range slices.Sorted(maps.Keys(r.known)) {
		if e := r.known[id]; e.reg.ID != "" && now.Sub(e.heard) < fleet.TTL {
			r.mu.Lock()
			e.heard = now
			r.mu.Unlock()
			sink.Keep(id, e.reg.Incarnation)
		}
	}
}

// reading is what one look at Redis found.
type reading struct {
	run     string          // id of the server's process, "" = it does not tell
	active  map[string]bool // ids in the set
	entries map[string]rawEntry
}

// rawEntry is one worker's keys.
type rawEntry struct {
	health string // "" when there is none
	ttl    time.Duration
	status string
}

// read looks at everybody in the set, and at those who were there before.
func (r *Redis) read(ctx context.Context) (reading, error) {
	out := reading{active: map[string]bool{}, entries: map[string]rawEntry{}}
	pipe := r.cfg.Client.Pipeline()
	members, server := pipe.SMembers(ctx, fleet.RedisActive), pipe.Info(ctx, "server")
	if _, err := pipe.Exec(ctx); members.Err() != nil {
		return out, fmt.Errorf("read %s: %w", fleet.RedisActive, cmp.Or(members.Err(), err))
	}
	out.run = runID(server.Val()) // a server may forbid INFO
	for _, id := range members.Val() {
		out.active[id] = true
	}
	ids := slices.Collect(maps.Keys(out.active))
	for id := range r.known {
		if !out.active[id] {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	for batch := range slices.Chunk(ids, redisBatch) {
		if err := r.readBatch(ctx, batch, out.entries); err != nil {
			return out, err
		}
	}
	return out, nil
}

// readBatch reads the keys of some workers in one round trip.
func (r *Redis) readBatch(ctx context.Context, ids []string, to map[string]rawEntry) error {
	type keys struct {
		health, status *redis.StringCmd
		ttl            *redis.DurationCmd
	}
	pipe := r.cfg.Client.Pipeline()
	asked := make([]keys, len(ids))
	for i, id := range ids {
		health := fleet.RedisHealthKey(id)
		asked[i] = keys{pipe.Get(ctx, health), pipe.Get(ctx, fleet.RedisStatusKey(id)), pipe.PTTL(ctx, health)}
	}
	_, _ = pipe.Exec(ctx) // the first of the errors that follow
	for i, id := range ids {
		for _, err := range []error{asked[i].health.Err(), asked[i].status.Err(), asked[i].ttl.Err()} {
			// A missing key is nothing, and one of another type its worker's own fault.
			if err != nil && !errors.Is(err, redis.Nil) && !strings.HasPrefix(err.Error(), "WRONGTYPE") {
				return fmt.Errorf("read workers: %w", err)
			}
		}
		to[id] = rawEntry{asked[i].health.Val(), asked[i].ttl.Val(), asked[i].status.Val()}
	}
	return nil
}

// runID finds the id of the server's process in its INFO.
func runID(info string) string {
	for line := range strings.Lines(info) {
		if id, ok := strings.CutPrefix(line, "run_id:"); ok {
			return strings.TrimSpace(id)
		}
	}
	return ""
}

// take compares with what was known.
func (r *Redis) take(ctx context.Context, found reading, sink RedisSink, now time.Time) {
	r.lookUp(ctx, found, now)
	for _, id := range slices.Sorted(maps.Keys(found.entries)) {
		raw, e := found.entries[id], r.known[id]
		if raw.health != "" {
			delete(r.gone, id)
			r.takeEntry(id, raw, found.run, sink, now)
			continue
		}
		switch {
		case e == nil:
		// It was there in this run of the server, and others still are.
		case !found.active[id] && e.run != "" && e.run == found.run && len(found.active) > 0, now.Sub(e.heard) >= redisKept:
			r.mu.Lock()
			delete(r.known, id)
			r.mu.Unlock()
			if e.reg.ID != "" {
				sink.Remove(id, e.reg.Incarnation)
			}
		}
		if found.active[id] {
			r.sweep(ctx, id, now)
		}
	}
}

// sweep takes an id out of the set that has had no health for long.
func (r *Redis) sweep(ctx context.Context, id string, now time.Time) {
	since, ok := r.gone[id]
	if !ok {
		r.gone[id] = now
		return
	}
	if now.Sub(since) < redisSwept {
		return
	}
	delete(r.gone, id)
	// If it fails, the next hour comes.
	_ = r.cfg.Client.SRem(ctx, fleet.RedisActive, id).Err()
}

// takeEntry passes on a worker that wrote since the last reading, or whose status
// key changed.
func (r *Redis) takeEntry(id string, raw rawEntry, run string, sink RedisSink, now time.Time) {
	e := r.known[id]
	if e == nil {
		e = &entry{}
	}
	// The time to live goes down between two writes and up with each.
	wrote := raw.health != e.raw || raw.ttl > e.ttl || run != e.run
	moved := raw.status != e.status
	e.ttl, e.run = raw.ttl, run
	if !wrote && !moved {
		return
	}
	h, reg, err := r.registration(id, raw)
	if err != nil {
		if e.wrong != err.Error() {
			r.cfg.Log.Warn("entry in Redis is of no use", "worker", id, "err", err)
		}
		// It is remembered only for the complaint; a worker it was before stays until
		// its time is over.
		e.wrong = err.Error()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.known[id] = e
		return
	}
	r.mu.Lock()
	e.raw, e.status, e.wrong, e.reg = raw.health, raw.status, "", reg
	if wrote {
		e.heard = now
	}
	r.known[id] = e
	r.mu.Unlock()
	sink.Register(reg, Load{Running: uint32(h.Running), Waiting: uint32(h.Waiting), KVUsage: h.KVUsage})
}

// registration turns a worker's keys into what it would have sent.
func (r *Redis) registration(id string, raw rawEntry) (h fleet.RedisHealth, reg fleet.Registration, err error) {
	if len(raw.health) > maxEntry {
		return h, reg, fmt.Errorf("health of %d bytes, at most %d are read", len(raw.health), maxEntry)
	}
	if h, err = fleet.ParseRedisHealth(id, []byte(raw.health)); err != nil {
		return h, reg, err
	}
	if h.Pool == "" {
		var ok bool
		if h.Pool, ok = r.cfg.Pool(h.Model); !ok {
			return h, reg, fmt.Errorf("no WorkerPool serves the model %.100q", h.Model)
		}
	}
	host, port, err := h.Address(r.cfg.AddressTemplate)
	if err != nil {
		return h, reg, err
	}
	at := r.hosts[host+" "+port]
	if at.addr == "" {
		return h, reg, fmt.Errorf("look up %s: %w", host, cmp.Or(at.err, errors.New("not yet")))
	}
	reg = fleet.Registration{
		ID: id, Address: at.addr, Pool: h.Pool, Zone: h.Zone, Model: h.Model, Aliases: h.Aliases,
		Engine: cmp.Or(h.Engine, "openai"), Incarnation: max(h.Incarnation, fleet.ForeignIncarnation),
		PID: h.PID, Host: h.Hostname, Process: h.Process, Fingerprint: h.Fingerprint, RelayMark: h.RelayMark, Via: fleet.ViaRedis,
	}
	reg.State, reg.Reason = h.State()
	if raw.status == fleet.RedisDraining {
		reg.State = fleet.StateDraining
	}
	return h, reg, reg.Validate()
}

// lookUp finds the addresses of all hosts whose time is over, side by side: one name
// server that is slow holds up a reading, never each worker after the other.
func (r *Redis) lookUp(ctx context.Context, found reading, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	var mu sync.Mutex // guards fresh
	fresh := map[string]address{}
	maps.DeleteFunc(r.hosts, func(_ string, at address) bool { return now.Sub(at.until) > 10*lookupEvery })
	var group errgroup.Group
	group.SetLimit(32)
	for id, raw := range found.entries {
		if raw.health == "" || len(raw.health) > maxEntry {
			continue
		}
		h, err := fleet.ParseRedisHealth(id, []byte(raw.health))
		if err != nil {
			continue
		}
		host, port, err := h.Address(r.cfg.AddressTemplate)
		key := host + " " + port
		if at, ok := r.hosts[key]; err != nil || ok && now.Before(at.until) {
			continue
		}
		r.hosts[key] = address{addr: r.hosts[key].addr, until: now.Add(lookupEvery)} // once per reading
		group.Go(func() error {
			addr, err := resolve(ctx, host, port)
			mu.Lock()
			defer mu.Unlock()
			fresh[key] = address{addr: addr, err: err, until: now.Add(lookupEvery)}
			return nil
		})
	}
	_ = group.Wait() // each keeps its own error
	for key, at := range fresh {
		if at.err != nil { // the last address has to do; it is asked for again soon
			at.addr, at.until = r.hosts[key].addr, now.Add(redisEvery)
		}
		r.hosts[key] = at
	}
}
