// Package registry knows which workers exist. Embedded takes the registrations
// that workers send to the control plane; Static watches servers that a policy
// lists and that know nothing of the mesh.
package registry

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// Errors of an Embedded registry.
var (
	// ErrStale refuses a registration that a later start of the same worker, or
	// another worker at its address, has replaced.
	ErrStale = errors.New("a later start of the worker is registered")
	// ErrTaken refuses a registration for an address at which another worker lives.
	ErrTaken = errors.New("another worker is alive at this address")
	// ErrUnknown says that no such worker is registered.
	ErrUnknown = errors.New("no such worker")
)

// How long things are kept or put off.
const (
	// drainKept is how long the drain of a worker that is gone is remembered.
	drainKept = 24 * time.Hour
	// saveEvery bounds how often registrations are written: when a large fleet
	// starts, Flush stores the rest. A drain never waits.
	saveEvery = 200 * time.Millisecond
)

// Member is one registered worker.
type Member struct {
	fleet.Registration
	Drained bool // drained by an operator
	// KeepStreams goes with Drained: running streams end where they are.
	KeepStreams bool
	// ReadySince is when this incarnation was first registered as ready, zero
	// while it was not.
	ReadySince time.Time
	// Heard is when the last registration came. After a restart of the control
	// plane it is the time of the restart: everybody gets a full TTL.
	Heard time.Time
}

// Embedded is the registry of the control plane's own process. What matters
// survives its death in one file of StateDir. Safe for concurrent use.
type Embedded struct {
	path  string // of registry.json
	log   *slog.Logger
	alive func(id string) bool // Config.Alive, never nil

	mu      sync.Mutex
	static  map[string]bool      // ids of the policy's servers
	members map[string]*Member   // by id
	drains  map[string]time.Time // id → when it was drained
	keep    map[string]bool      // ids among drains whose running streams stay
	saved   time.Time            // when the file was last written
	dirty   bool                 // the file lacks something
}

// Config of an Embedded registry.
type Config struct {
	Dir string // directory of the file
	// Static lists the ids of servers the policy names: they can be drained, and
	// nobody can register under them.
	Static []string
	Log    *slog.Logger
	// Alive says whether a worker was heard of a moment ago and is not known to be gone
	// from its address. nil knows of nobody.
	// It is called with the registry's lock held.
	Alive func(id string) bool
}

// file is the stored form.
type file struct {
	Workers []stored             `json:"workers"`
	Drains  map[string]time.Time `json:"drains,omitempty"`
	Keep    map[string]bool      `json:"keep_streams,omitempty"`
}

// stored is one worker in the file. When it was last heard is not: after a restart
// that says nothing.
type stored struct {
	fleet.Registration
	ReadySince time.Time `json:"ready_since,omitzero"`
}

// Open loads the registry of a directory; a missing file is an empty registry. A
// damaged file is set aside with a warning, never a reason not to start: living
// workers register again within a heartbeat.
func Open(c Config, now time.Time) (*Embedded, error) {
	e := &Embedded{
		path: filepath.Join(c.Dir, "registry.json"), log: c.Log, alive: c.Alive,
		members: map[string]*Member{}, drains: map[string]time.Time{}, keep: map[string]bool{},
	}
	if e.alive == nil {
		e.alive = func(string) bool { return false }
	}
	e.SetStatic(c.Static)
	raw, err := os.ReadFile(e.path)
	if errors.Is(err, fs.ErrNotExist) {
		return e, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open registry: %w", err)
	}
	var f file
	if err := json.Unmarshal(raw, &f); err != nil {
		e.log.Error("registry file is damaged, starting empty; the old one is kept beside it", "path", e.path, "err", err)
		if err := os.Rename(e.path, e.path+".damaged"); err != nil {
			return nil, fmt.Errorf("set damaged registry aside: %w", err)
		}
		return e, nil
	}
	if f.Drains != nil {
		e.drains = f.Drains
	}
	if f.Keep != nil {
		e.keep = f.Keep
	}
	for _, s := range f.Workers {
		// The file may be older than the policy or the rules.
		if err := s.Validate(); err != nil || e.static[s.ID] {
			e.log.Warn("registration in the registry file is invalid, left out", "worker", s.ID, "err", err)
			continue
		}
		e.members[s.ID] = &Member{Registration: s.Registration, ReadySince: s.ReadySince, Heard: now}
	}
	return e, nil
}

// SetStatic replaces the ids of the servers that the policy names.
func (e *Embedded) SetStatic(ids []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.static = map[string]bool{}
	for _, id := range ids {
		e.static[id] = true
		delete(e.members, id)
	}
}

// Register takes a registration or its renewal. changed says whether it told
// anything new.
func (e *Embedded) Register(r fleet.Registration, now time.Time) (changed bool, err error) {
	if err := r.Validate(); err != nil {
		return false, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.static[r.ID] {
		return false, fmt.Errorf("worker %s: %w: the policy lists a server of this id", r.ID, ErrStale)
	}
	old := e.members[r.ID]
	// A process that lost its place must not take it back, for instance when it
	// wakes from a long pause.
	if old != nil && old.Incarnation > r.Incarnation {
		return false, fmt.Errorf("worker %s: %w", r.ID, ErrStale)
	}
	m := &Member{Registration: r, Heard: now}
	// Readiness is remembered per incarnation, over draining and back.
	if old != nil && old.Incarnation == r.Incarnation {
		m.ReadySince = old.ReadySince
	}
	if m.ReadySince.IsZero() && m.State != fleet.StateLoading && m.State != fleet.StateFailed {
		m.ReadySince = now
	}
	evicted, err := e.takeAddressLocked(r)
	if err != nil {
		return false, err
	}
	e.members[r.ID] = m
	if old != nil && same(old, m) && !evicted {
		return false, nil
	}
	e.changedLocked(now)
	return true, nil
}

// changedLocked stores the members, now or at the next Flush. A disk that takes
// nothing must not keep workers out, so the error is only logged.
func (e *Embedded) changedLocked(now time.Time) {
	e.dirty = true
	if now.Sub(e.saved) < saveEvery {
		return
	}
	if err := e.saveLocked(now, WriteFile); err != nil {
		e.log.Error("registry not stored, will try again", "err", err)
	}
}

// Flush stores what Register put off.
func (e *Embedded) Flush(now time.Time) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.dirty {
		return nil
	}
	return e.saveLocked(now, WriteFile)
}

// takeAddressLocked removes earlier workers at the same address: only one process
// can listen there. Whoever is alive there stays; else the later incarnation has it.
func (e *Embedded) takeAddressLocked(r fleet.Registration) (evicted bool, err error) {
	for id, m := range e.members {
		if id == r.ID || m.Address != r.Address {
			continue
		}
		if m.Incarnation > r.Incarnation {
			return false, fmt.Errorf("worker %s: %w (%s at %s)", r.ID, ErrStale, id, r.Address)
		}
		if e.alive(id) {
			return false, fmt.Errorf("worker %s: %w (%s at %s)", r.ID, ErrTaken, id, r.Address)
		}
		e.log.Info("worker replaced at its address", "worker", id, "address", r.Address, "by", r.ID)
		delete(e.members, id)
		evicted = true
	}
	return evicted, nil
}

// same reports whether a registration told anything new.
func same(a, b *Member) bool {
	return reflect.DeepEqual(a.Registration, b.Registration) && a.ReadySince.Equal(b.ReadySince)
}

// Deregister removes a worker that says goodbye. incarnation is that of the
// process which leaves, 0 for whichever is registered; a later one stays.
func (e *Embedded) Deregister(id string, incarnation uint64, now time.Time) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	m := e.members[id]
	if m == nil {
		return fmt.Errorf("worker %q: %w", id, ErrUnknown)
	}
	if incarnation != 0 && m.Incarnation > incarnation {
		return fmt.Errorf("worker %s: %w", id, ErrStale)
	}
	delete(e.members, id)
	e.changedLocked(now)
	return nil
}

// Drain is what an operator wants of one worker.
type Drain struct {
	On bool
	// KeepStreams lets the running streams end where they are, instead of moving.
	KeepStreams bool
}

// Drain sets or lifts an operator's drain. It is stored before Drain returns, and
// holds until it is lifted, over restarts of the worker too.
func (e *Embedded) Drain(id string, want Drain, now time.Time) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	// A worker that is away but drained can be undrained.
	_, drained := e.drains[id]
	if e.members[id] == nil && !drained && !e.static[id] {
		return fmt.Errorf("worker %q: %w", id, ErrUnknown)
	}
	if drained == want.On && e.keep[id] == (want.On && want.KeepStreams) {
		return nil
	}
	drains, keep := maps.Clone(e.drains), maps.Clone(e.keep)
	delete(e.keep, id)
	switch {
	case !want.On:
		delete(e.drains, id)
	case !drained:
		e.drains[id] = now
	}
	if want.On && want.KeepStreams {
		e.keep[id] = true
	}
	if err := e.saveLocked(now, WriteSynced); err != nil {
		e.drains, e.keep = drains, keep // what is not stored was not promised
		return err
	}
	return nil
}

// Drained reports what an operator wants of the worker.
func (e *Embedded) Drained(id string) Drain {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, ok := e.drains[id]
	return Drain{On: ok, KeepStreams: e.keep[id]}
}

// Members returns a copy of all members, sorted by id.
func (e *Embedded) Members() []Member {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := make([]Member, 0, len(e.members))
	for id, m := range e.members {
		c := *m // the caller's own, though aliases stay shared and are never changed
		_, c.Drained = e.drains[id]
		c.KeepStreams = e.keep[id]
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// Member returns a copy of one member.
func (e *Embedded) Member(id string) (Member, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	m := e.members[id]
	if m == nil {
		return Member{}, false
	}
	c := *m
	_, c.Drained = e.drains[id]
	c.KeepStreams = e.keep[id]
	return c, true
}

// Expire removes the members that were silent for longer than ttl and that alive
// does not vouch for, and returns their ids.
func (e *Embedded) Expire(now time.Time, ttl time.Duration, alive func(id string) bool) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var gone []string
	for _, id := range slices.Sorted(maps.Keys(e.members)) {
		if now.Sub(e.members[id].Heard) > ttl && !alive(id) {
			delete(e.members, id)
			gone = append(gone, id)
		}
	}
	if len(gone) > 0 {
		e.changedLocked(now)
	}
	return gone
}

// saveLocked writes the file so that a crash at any moment leaves the old or the
// new one whole.
func (e *Embedded) saveLocked(now time.Time, write func(string, []byte) error) error {
	maps.DeleteFunc(e.drains, func(id string, at time.Time) bool {
		return e.members[id] == nil && !e.static[id] && now.Sub(at) > drainKept
	})
	maps.DeleteFunc(e.keep, func(id string, _ bool) bool { _, drained := e.drains[id]; return !drained })
	// Sorted, so that equal registries give equal files.
	f := file{Workers: []stored{}, Drains: e.drains, Keep: e.keep}
	for _, id := range slices.Sorted(maps.Keys(e.members)) {
		m := e.members[id]
		f.Workers = append(f.Workers, stored{Registration: m.Registration, ReadySince: m.ReadySince})
	}
	raw, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return fmt.Errorf("store registry: %w", err)
	}
	if err := write(e.path, raw); err != nil {
		return fmt.Errorf("store registry: %w", err)
	}
	e.saved, e.dirty = now, false
	return nil
}

// WriteFile replaces a file by renaming a finished one over it: a crash of the
// process leaves the old or the new one whole. With WriteSynced a crash of the
// machine does too.
func WriteFile(path string, raw []byte) error { return replace(path, raw, false) }

// WriteSynced is WriteFile, and when it returns the new file is on disk.
func WriteSynced(path string, raw []byte) error { return replace(path, raw, true) }

func replace(path string, raw []byte, sync bool) (err error) {
	dir := filepath.Dir(path)
	tmp, err := os.CreateTemp(dir, filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp.Name()) // the write's error is the one that matters
		}
	}()
	_, werr := tmp.Write(raw)
	if sync && werr == nil {
		werr = tmp.Sync()
	}
	if err := errors.Join(werr, tmp.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), path); err != nil || !sync {
		return err
	}
	// The new name is in the directory, which is a file of its own.
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
