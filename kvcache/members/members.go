// Package members tells KV nodes of each other through Redis, beside the workers' keys:
//
//	llm:active_kv_nodes    set of ids
//	llm:kv_node:<id>       JSON (Entry), TTL 15 s, written every 5 s
//
// Clocks of hosts need not agree: an entry has no time in it but a number that grows with
// each writing, and a reader takes a node for alive as long as it has seen another number
// within 15 s of its own clock. While Redis is away the last list stands, and when it is
// back everybody has 15 s to write again; so Redis is not what keeps replication going.
// A node that ends in good order takes its entry back, and is gone for the others at once.
//
// An entry carries the incarnation of its writer: where a later one is there, a process
// neither writes nor removes anything.
package members

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/kvcache/placement"
)

// The keys of the layout.
const (
	// Active is the set of ids.
	Active = "llm:active_kv_nodes"
	prefix = "llm:kv_node:"
)

const (
	// TTL is how long an entry stays without being written again.
	TTL = 15 * time.Second
	// heartbeat is the time between two writings, and look that between two readings.
	heartbeat = 5 * time.Second
	look      = time.Second
	// goodbye bounds the removal of the entry at the end.
	goodbye = time.Second
	// mostEntry bounds an entry that is read, in bytes.
	mostEntry = 4 << 10
)

// Key is the key of a node's entry.
func Key(id string) string { return prefix + id }

// Entry is what a node says of itself.
type Entry struct {
	ID   string `json:"id"`
	Zone string `json:"zone"`
	// Address is the host and port of its server for peers.
	Address string `json:"address"`
	// Room is how many bytes its memory has, and Busy how fast that turns over, 0 to 1.
	Room int64   `json:"room_bytes"`
	Busy float64 `json:"busy"`
	// Incarnation is greater with each start of the node, and Seq with each writing.
	Incarnation uint64 `json:"incarnation"`
	Seq         uint64 `json:"seq"`
}

// member is what placement needs of an entry.
func (e Entry) member() placement.Member {
	return placement.Member{ID: e.ID, Zone: e.Zone, Addr: e.Address, Room: e.Room, Busy: e.Busy}
}

// Parse reads an entry that stands under an id. It believes nothing.
func Parse(id string, raw []byte) (e Entry, err error) {
	if len(raw) > mostEntry {
		return e, fmt.Errorf("entry of %d bytes, at most %d are read", len(raw), mostEntry)
	}
	if err := json.Unmarshal(raw, &e); err != nil {
		return e, fmt.Errorf("entry of KV node %.80q: %w", id, err)
	}
	if e.ID != id {
		return e, fmt.Errorf("entry of KV node %.80q is of %.80q", id, e.ID)
	}
	return e, e.member().Validate()
}

// View is who is alive in the eyes of one reader. It is for one goroutine at a time.
type View struct {
	nodes map[string]*seen
	anew  time.Time // when Redis was last found without the reader's own entry, or away
}

// seen is what is known of one node.
type seen struct {
	entry Entry
	heard time.Time // by the reader's clock
}

// Take takes in a reading: the entries that could be read, the ids in the set, and whether
// this reader's own entry was there, without which what is missing says nothing for 15 s:
// Redis may have begun anew. It returns who is alive, by id.
func (v *View) Take(now time.Time, entries map[string]Entry, active map[string]bool, own bool) []placement.Member {
	if v.nodes == nil {
		v.nodes = map[string]*seen{}
	}
	for id, e := range entries {
		n := v.nodes[id]
		if n == nil || n.entry.Incarnation != e.Incarnation || n.entry.Seq != e.Seq {
			v.nodes[id] = &seen{e, now}
		}
	}
	if !own {
		v.anew = now
	}
	signed := now.Sub(v.anew) >= TTL // who is not in the set has left
	maps.DeleteFunc(v.nodes, func(id string, n *seen) bool { return signed && !active[id] || now.Sub(n.heard) >= TTL })
	return v.list()
}

// Away notes that Redis could not be read: nobody's silence counts until it can.
func (v *View) Away(now time.Time) {
	v.anew = now
	for _, n := range v.nodes {
		n.heard = now
	}
}

func (v *View) list() (all []placement.Member) {
	for _, n := range v.nodes {
		all = append(all, n.entry.member())
	}
	slices.SortFunc(all, func(a, b placement.Member) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

// Config says who is announced, and who is told of the others. All fields are required.
type Config struct {
	Client *redis.Client // stays the caller's
	// Self returns this node, with its room and load. Its ID does not change.
	Self        func() placement.Member
	Incarnation uint64
	// Changed is told who is alive, this node included, after each reading.
	Changed func([]placement.Member)
	Log     *slog.Logger
}

// Run announces and reads until ctx ends, then removes this node's entry, for which it takes
// a second at most. Redis is never waited for by anybody else.
func Run(ctx context.Context, cfg Config) {
	r := &runner{cfg: cfg}
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		r.turn(ctx)
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), goodbye)
			defer cancel()
			if err := r.remove(last); err != nil && !errors.Is(err, errReplaced) {
				cfg.Log.Info("could not sign off in Redis; the entry will expire", "err", err)
			}
			return
		case <-tick.C:
		}
	}
}

// runner is a node that announces itself.
type runner struct {
	cfg  Config
	view View
	// seq is the number of the last writing, and written when that was.
	seq     uint64
	written time.Time
	// missed says that its own entry was not there where it ought to have been.
	missed bool
	// wrong is the last complaint, to log each once.
	wrong string
}

// errReplaced says that a later start of the node has announced itself.
var errReplaced = errors.New("a later start of the KV node is in Redis")

// turn writes, if it is time, and reads.
func (r *runner) turn(ctx context.Context) {
	var err error
	if time.Since(r.written) >= heartbeat {
		if err = r.write(ctx); err == nil {
			r.written = time.Now()
		}
	}
	if rerr := r.read(ctx); err == nil {
		err = rerr
	}
	switch {
	case ctx.Err() != nil:
	case err == nil:
		if r.wrong != "" {
			r.cfg.Log.Info("KV nodes are in Redis again")
		}
		r.wrong = ""
	case r.wrong != err.Error():
		r.wrong = err.Error()
		r.cfg.Log.Warn("KV nodes in Redis: the last list stands", "err", err)
	}
}

// write writes this node's entry, unless a later start of it is there.
func (r *runner) write(ctx context.Context) error {
	m := r.cfg.Self()
	r.seq++
	raw, err := json.Marshal(Entry{ID: m.ID, Zone: m.Zone, Address: m.Addr, Room: m.Room, Busy: m.Busy, Incarnation: r.cfg.Incarnation, Seq: r.seq})
	if err != nil {
		return err
	}
	return r.change(ctx, "announce this KV node", func(p redis.Pipeliner) {
		p.SAdd(ctx, Active, m.ID)
		p.Set(ctx, Key(m.ID), raw, TTL)
	})
}

// remove takes the entry back.
func (r *runner) remove(ctx context.Context) error {
	id := r.cfg.Self().ID
	return r.change(ctx, "sign off", func(p redis.Pipeliner) {
		p.SRem(ctx, Active, id)
		p.Del(ctx, Key(id))
	})
}

// change changes what is this node's own, unless a later start of it is there.
func (r *runner) change(ctx context.Context, what string, do func(redis.Pipeliner)) error {
	id := r.cfg.Self().ID
	err := r.cfg.Client.Watch(ctx, func(tx *redis.Tx) error {
		raw, err := tx.Get(ctx, Key(id)).Bytes()
		r.missed = r.missed || errors.Is(err, redis.Nil)
		if err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
		// What cannot be read is nobody's.
		if there, perr := Parse(id, raw); err == nil && perr == nil && there.Incarnation > r.cfg.Incarnation {
			return errReplaced
		}
		_, err = tx.TxPipelined(ctx, func(p redis.Pipeliner) error {
			do(p)
			return nil
		})
		return err
	}, Key(id))
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// read reads who is there and tells.
func (r *runner) read(ctx context.Context) error {
	ids, err := r.cfg.Client.SMembers(ctx, Active).Result()
	var raws []any
	if keys := keysOf(ids); err == nil && len(keys) > 0 {
		raws, err = r.cfg.Client.MGet(ctx, keys...).Result()
	}
	now := time.Now()
	if err != nil {
		r.view.Away(now)
		return fmt.Errorf("read the KV nodes: %w", err)
	}
	active, entries := map[string]bool{}, map[string]Entry{}
	for i, id := range ids {
		text, ok := raws[i].(string)
		if active[id] = true; !ok {
			continue // it has expired
		}
		e, err := Parse(id, []byte(text))
		if err != nil {
			r.cfg.Log.Debug("entry in Redis is of no use", "err", err)
			continue
		}
		entries[id] = e
	}
	_, own := entries[r.cfg.Self().ID]
	r.cfg.Changed(r.view.Take(now, entries, active, own && !r.missed))
	r.missed = false
	return nil
}

// keysOf are the keys of the entries of ids.
func keysOf(ids []string) []string {
	keys := make([]string, len(ids))
	for i, id := range ids {
		keys[i] = Key(id)
	}
	return keys
}
