package peers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/placement"
)

// Peer is what one other host serves. Its calls end at their context, and fail at once while
// the host is known to be away.
type Peer interface {
	kvcache.Store
	kvcache.Tails
}

// Config describes the store. Zero fields take the defaults named beside them.
type Config struct {
	// Self is this host's member; its ID is required.
	Self placement.Member
	// Open makes a peer of a member, and does not wait for it. Required.
	Open func(placement.Member) (Peer, error)
	// Near has the tails that Grew tells of. Required for Grew.
	Near kvcache.Tails
	// Copies is on how many hosts a block is to be, this one included; default 2.
	Copies int
	// Interval is after how many new tokens a tail is copied; default 16.
	Interval int
	// Bandwidth bounds what is written to all peers together, in bytes a second; 0 = it is
	// not bounded.
	Bandwidth int64
	// Lost, if any, is called, on a goroutine of its own, when members have gone, are away for
	// longer than a moment or have lost their memory, and when somebody is back: what Missing
	// says is worth offering again.
	Lost func()
	// Waits says whether a block waits to be put here, and counts as a whole where such blocks are
	// counted; default: each one does that is on no other host.
	Waits func(kvcache.Key) bool
	// Keep is how long a member that has gone, and what placement said with it, count for
	// reads; default 1 min.
	Keep time.Duration
	// Own is what this host has itself, to forget again what it may have from a member that
	// was told late; default: nothing.
	Own kvcache.Forgetter
	// Book is a file, which the store makes, with what members are still to forget that were
	// away; default: it is forgotten with the process.
	Book     string
	Registry prometheus.Registerer // for the metrics kvmesh_kv_peer_*; default: none
	Log      *slog.Logger          // default: silent
}

// withDefaults returns c with every zero field set.
func (c Config) withDefaults() Config {
	c.Copies = cmp.Or(c.Copies, 2)
	c.Interval = cmp.Or(c.Interval, 16)
	c.Keep = cmp.Or(c.Keep, time.Minute)
	if c.Waits == nil {
		c.Waits = func(kvcache.Key) bool { return true }
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports the first field that cannot work.
func (c Config) Validate() error {
	switch {
	case c.Self.ID == "" || c.Open == nil:
		return errors.New("peers: this host has no id, or there is no way to others")
	case c.Copies < 0 || c.Copies == 1 || c.Interval < 0 || c.Bandwidth < 0 || c.Keep < 0:
		return fmt.Errorf("peers: %d copies, every %d tokens, %d bytes a second, %v: want 2 copies or more, and nothing negative", c.Copies, c.Interval, c.Bandwidth, c.Keep)
	}
	return nil
}

// Store is the memory of the other hosts. It is safe for concurrent use.
type Store struct {
	cfg     Config
	metrics *metrics
	pace    *rate.Limiter // nil = no bound
	tails   follower

	ctx  context.Context // ends when the store is closed
	stop context.CancelFunc
	done sync.WaitGroup

	// The lock is held for moments, and never while a member is called. The follower's lock
	// is taken before this one.
	mu     sync.Mutex
	closed bool
	// live are the members of now, without this host, by id.
	live []placement.Member
	// members are the live ones and those that are kept, by id.
	members map[string]*member
	// past is who was there before, the latest last.
	past []past
	// runs says where blocks are placed that were put; forgotten, a chain begins a new run.
	runs map[kvcache.Key]run
	// holders say who has a block, as far as was heard. It may be wrong either way: a member
	// forgets without a word.
	holders map[kvcache.Key]holding
	// ledger is what members are still to forget.
	ledger ledger
	// size is the tokens of the last block that was met; 0 is 64.
	size int
}

var (
	_ kvcache.Store   = (*Store)(nil)
	_ kvcache.Tails   = (*Store)(nil)
	_ kvcache.Labeled = (*Store)(nil)
	_ kvcache.Eraser  = (*Store)(nil)
)

// past is who was there before.
type past struct {
	members []placement.Member
	until   time.Time
}

// New makes a store without members and starts goroutines that Close ends.
func New(cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	s := &Store{
		cfg: cfg, members: map[string]*member{}, runs: map[kvcache.Key]run{}, holders: map[kvcache.Key]holding{},
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	if cfg.Bandwidth > 0 {
		s.pace = rate.NewLimiter(rate.Limit(cfg.Bandwidth), int(max(cfg.Bandwidth/10, 1<<16)))
	}
	s.metrics = newMetrics(cfg.Registry, s)
	s.load()
	s.tails.begin(s)
	s.done.Go(s.settle)
	s.done.Go(s.watch)
	return s, nil
}

// member is one other host with what is known of it.
type member struct {
	placement.Member
	peer Peer

	// Guarded by the store's lock.
	until time.Time // it is passed over until then
	wrong string    // the last failure, "" = the last call went well
	gone  time.Time // when it was no longer a member; zero = it is one

	failing  time.Time // when it failed first, of those times that are the last; zero = it does not
	answered time.Time // when it answered last; zero = never
	// missed says that a block is on too few members because this one was not there. That it is
	// there again is told at retry at the earliest, and then no sooner than after wait, which is 0
	// when it has taken a block.
	missed bool
	retry  time.Time
	wait   time.Duration
	// away says that it has failed for so long that what it has does not count.
	away bool
	// memory is the name of its memory, "" = not known yet, and memories how often that was
	// found to be another one.
	memory   string
	memories int
	probing  bool
}

// SetMembers says who is there now, this host included or not. A member that has another
// address or is of another kind than before counts as another one.
func (s *Store) SetMembers(list []placement.Member) {
	if s.setMembers(list, time.Now()) {
		s.save()
	}
}

// setMembers does so, and says whether somebody has come or left who is to be remembered.
func (s *Store) setMembers(list []placement.Member, now time.Time) (news bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	list = slices.DeleteFunc(slices.Clone(list), func(m placement.Member) bool { return m.ID == s.cfg.Self.ID })
	slices.SortFunc(list, func(a, b placement.Member) int { return cmp.Compare(a.ID, b.ID) })
	list = slices.CompactFunc(list, func(a, b placement.Member) bool { return a.ID == b.ID })
	s.expireLocked(now)
	if slices.Equal(list, s.live) {
		return false
	}
	if len(s.live) > 0 {
		s.past = append(s.past, past{s.live, now.Add(s.cfg.Keep)})
		s.past = s.past[max(0, len(s.past)-mostPast):]
	}
	there := map[string]bool{}
	s.live = nil
	var left []string
	for _, m := range list {
		if was := s.members[m.ID]; was != nil && was.Addr != m.Addr {
			left = append(left, m.ID)
		}
		if s.meetLocked(m) {
			there[m.ID] = true
			s.live = append(s.live, m)
		}
	}
	for id, m := range s.members {
		if !there[id] && m.gone.IsZero() {
			m.gone, left = now, append(left, id)
			s.cfg.Log.Info("KV peer has left", "peer", id)
		}
	}
	if len(left) > 0 {
		s.done.Go(func() { s.lost(left...) })
	}
	return s.metLocked(now)
}

// mostPast is how many earlier sets of members are remembered.
const mostPast = 4

// meetLocked takes a member in, and says whether that could be done.
func (s *Store) meetLocked(m placement.Member) bool {
	if was := s.members[m.ID]; was != nil {
		if was.Addr == m.Addr {
			was.Member, was.gone = m, time.Time{}
			s.probeLocked(was)
			return true
		}
		s.endLocked(was)
	}
	p, err := s.cfg.Open(m)
	if err != nil {
		s.cfg.Log.Error("KV peer cannot be used", "peer", m.ID, "addr", m.Addr, "err", err)
		return false
	}
	s.members[m.ID] = &member{Member: m, peer: p}
	s.probeLocked(s.members[m.ID])
	s.cfg.Log.Info("KV peer has joined", "peer", m.ID, "zone", m.Zone, "addr", m.Addr)
	return true
}

// endLocked forgets a member, and what it had. Its peer is closed when its calls have ended.
func (s *Store) endLocked(m *member) {
	delete(s.members, m.ID)
	s.purgeLocked(m.ID)
	s.done.Go(func() { s.shut(m) })
}

// shut closes the connection to a member.
func (s *Store) shut(m *member) {
	if err := m.peer.Close(); err != nil {
		s.cfg.Log.Debug("close a KV peer", "peer", m.ID, "err", err)
	}
}

// expireLocked forgets who has been gone for long.
func (s *Store) expireLocked(now time.Time) {
	s.past = slices.DeleteFunc(s.past, func(p past) bool { return now.After(p.until) })
	for _, m := range s.members {
		if !m.gone.IsZero() && now.Sub(m.gone) > s.cfg.Keep {
			s.endLocked(m)
		}
	}
}

// Close implements kvcache.Store.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	for _, m := range s.members {
		s.endLocked(m)
	}
	s.live = nil
	s.mu.Unlock()
	s.stop()
	s.done.Wait()
	s.tails.end()
	return nil
}

// State is what is known of one member.
type State struct {
	placement.Member
	// Gone says that it is no longer a member and is only read from.
	Gone bool
	// Trouble is the last failure, "" = the last call went well or there was none.
	Trouble string
	// Away says that it has failed for so long that what it has does not count.
	Away bool
	// Answered is when it answered last; zero = never.
	Answered time.Time
	// Owed is how many tenants and models it is still to forget.
	Owed int
}

// States lists the members, and those that have left and are still to forget something, by id.
func (s *Store) States() []State {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.awayLocked()
	for _, m := range s.members {
		list = append(list, State{
			Member: m.Member, Gone: !m.gone.IsZero(), Trouble: m.wrong, Away: m.away, Answered: m.answered, Owed: s.owedLocked(m.ID),
		})
	}
	slices.SortFunc(list, func(a, b State) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// Stats are the counters of each member that has some, by its id: of what this host did
// there, and how many bytes of its room are used. It asks all at once, and waits for as long
// as a member's own Stats takes.
func (s *Store) Stats() map[string]kvcache.Stats {
	s.mu.Lock()
	list := slices.Collect(maps.Values(s.members))
	s.mu.Unlock()
	var mu sync.Mutex
	var all sync.WaitGroup
	stats := map[string]kvcache.Stats{}
	for _, m := range list {
		c, ok := m.peer.(kvcache.Counted)
		if !ok {
			continue
		}
		all.Go(func() {
			st := c.Stats()
			mu.Lock()
			defer mu.Unlock()
			stats[m.ID] = st
		})
	}
	all.Wait()
	return stats
}
