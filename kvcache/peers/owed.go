package peers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

const (
	// mostOwed bounds what is remembered that members are still to forget, and mostMet who
	// has been a member.
	mostOwed, mostMet = 4096, 1024
	// remembered is how long who has left is taken for one that may come back.
	remembered = 7 * 24 * time.Hour
	// owedLook is the time between two looks for members that can be told, and owedWait the
	// most between two tries at one.
	owedLook, owedWait = time.Second, time.Minute
)

// debt is what a member is still to forget: a tenant, or a model.
type debt struct {
	Peer        string `json:"peer"`
	Tenant      string `json:"tenant,omitempty"`
	Fingerprint string `json:"fingerprint,omitempty"` // as text

	// Told says that the member has forgotten it. What it had sent off before may still be
	// anywhere.
	Told bool `json:"told,omitempty"`

	// When it is tried again, and how long after that.
	next time.Time
	wait time.Duration
}

// same says whether two are of the same member and about the same.
func (d debt) same(o debt) bool {
	return d.Peer == o.Peer && d.Tenant == o.Tenant && d.Fingerprint == o.Fingerprint
}

// book is what is to outlive the process.
type book struct {
	// Left are those that have been members, and when they left; zero = they have not.
	Left map[string]time.Time `json:"left"`
	Owed []debt               `json:"owed"`
}

// ledger is the book with its file. The file's lock is taken before the store's, which
// guards the book.
type ledger struct {
	book
	file sync.Mutex
}

// load reads the book of the process before. What cannot be read is begun anew, and said.
func (s *Store) load() {
	s.ledger.Left = map[string]time.Time{}
	if s.cfg.Book == "" {
		return
	}
	b, err := os.ReadFile(s.cfg.Book)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	old := book{Left: map[string]time.Time{}}
	if err == nil {
		err = json.Unmarshal(b, &old)
	}
	if err != nil || old.Left == nil {
		s.cfg.Log.Error("what KV peers were still to forget is not known any more: run `kvmesh kv invalidate` again", "file", s.cfg.Book, "err", err)
		return
	}
	for id, left := range old.Left {
		if left.IsZero() {
			old.Left[id] = time.Now() // until it is a member
		}
	}
	s.ledger.book = old
}

// save writes the book. Without it what is owed ends with the process.
func (s *Store) save() {
	if s.cfg.Book == "" {
		return
	}
	s.ledger.file.Lock()
	defer s.ledger.file.Unlock()
	s.mu.Lock()
	b, err := json.Marshal(s.ledger.book)
	s.mu.Unlock()
	next := s.cfg.Book + ".new"
	if err == nil {
		err = os.WriteFile(next, b, 0o600)
	}
	if err == nil {
		err = os.Rename(next, s.cfg.Book)
	}
	if err != nil {
		s.cfg.Log.Error("what KV peers are still to forget is not on disk", "err", err)
	}
}

// metLocked notes who is a member now, and who has left, and says whether that is news.
func (s *Store) metLocked(now time.Time) (news bool) {
	left := s.ledger.Left
	live := map[string]bool{}
	for _, m := range s.live {
		live[m.ID] = true
		if was, known := left[m.ID]; !known || !was.IsZero() {
			left[m.ID], news = time.Time{}, true
		}
	}
	for id, when := range left {
		switch {
		case live[id]:
		case when.IsZero():
			left[id], news = now, true
		case now.Sub(when) > remembered:
			delete(left, id)
			news = true
		}
	}
	for len(left) > mostMet {
		delete(left, slices.MinFunc(slices.Collect(maps.Keys(left)), func(a, b string) int { return left[a].Compare(left[b]) }))
	}
	return news
}

// errLeft says that a member is not there to be told.
var errLeft = errors.New("it has left")

// owing notes who could not forget something, among them who has left, and returns the error
// that names them.
func (s *Store) owing(d debt, failed map[string]error) error {
	s.mu.Lock()
	for id, when := range s.ledger.Left {
		if s.members[id] == nil && !when.IsZero() {
			failed[id] = fmt.Errorf("%w, %v ago", errLeft, time.Since(when).Round(time.Second))
		}
	}
	for id := range failed {
		d.Peer = id
		s.oweLocked(d)
		failed[id] = fmt.Errorf("not done yet: %w", failed[id])
	}
	s.mu.Unlock()
	if len(failed) > 0 {
		s.save()
	}
	return joined(failed)
}

// oweLocked notes a debt.
func (s *Store) oweLocked(d debt) {
	l := &s.ledger
	l.Owed = append(slices.DeleteFunc(l.Owed, d.same), d)
	if more := len(l.Owed) - mostOwed; more > 0 {
		s.cfg.Log.Error("KV peers that are away have too much to forget: run `kvmesh kv invalidate` again when they are back", "not_remembered", more, "peer", l.Owed[0].Peer)
		l.Owed = slices.Delete(l.Owed, 0, more)
	}
}

// owedLocked is how much a member is still to forget.
func (s *Store) owedLocked(id string) (n int) {
	for _, d := range s.ledger.Owed {
		if d.Peer == id {
			n++
		}
	}
	return n
}

// owingLocked are the members that could be asked and have yet to forget what is of a space.
func (s *Store) owingLocked(space kvcache.Space, now time.Time) (list []*member) {
	for _, d := range s.ledger.Owed {
		if m := s.members[d.Peer]; m != nil && !now.Before(m.until) && !d.Told && d.of(space) {
			list = append(list, m)
		}
	}
	return list
}

// of says whether a debt is about what is of a space.
func (d debt) of(space kvcache.Space) bool {
	if d.Tenant != "" {
		return slices.Contains(space.Fingerprint.TenantRoots(d.Tenant), space.Root)
	}
	return d.Fingerprint == space.Fingerprint.String()
}

// urgeLocked has a member told at once what it owes: it is back.
func (s *Store) urgeLocked(id string) {
	for i := range s.ledger.Owed {
		if o := &s.ledger.Owed[i]; o.Peer == id {
			o.next, o.wait = time.Time{}, 0
		}
	}
}

// settle tells members what they were not there to hear, until the store is closed.
func (s *Store) settle() {
	tick := time.NewTicker(owedLook)
	defer tick.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
		for m, d := range s.due(time.Now()) {
			s.paid(m, d, s.pay(m, d))
		}
	}
}

// paid notes that a member was told, or could not be.
func (s *Store) paid(m *member, d debt, err error) {
	s.mu.Lock()
	i := slices.IndexFunc(s.ledger.Owed, d.same)
	if i < 0 || s.ledger.Owed[i].Told != d.Told {
		s.mu.Unlock()
		return // it has come up again meanwhile
	}
	o := &s.ledger.Owed[i]
	switch {
	case err != nil:
		o.wait = min(max(2*o.wait, owedLook), owedWait)
	case !d.Told:
		o.Told, o.wait = true, owedLook
	default:
		s.ledger.Owed = slices.Delete(s.ledger.Owed, i, i+1)
	}
	if err != nil || !d.Told {
		o.next = time.Now().Add(o.wait)
	}
	s.mu.Unlock()
	if err != nil {
		s.cfg.Log.Debug("have a KV peer forget", "peer", m.ID, "err", err)
		return
	}
	s.save()
	if d.Told {
		s.cfg.Log.Info("KV peer has forgotten what it was not there for", "peer", m.ID)
	}
}

// due are the members that can be told something, each once, with what.
func (s *Store) due(now time.Time) map[*member]debt {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := map[*member]debt{}
	for _, d := range s.ledger.Owed {
		m := s.members[d.Peer]
		if m == nil || !m.gone.IsZero() || now.Before(m.until) || now.Before(d.next) {
			continue
		}
		if _, busy := list[m]; !busy {
			list[m] = d
		}
	}
	return list
}

// pay has a member forget something, or, when it has, everybody: before it was told it may
// have sent its blocks to others, such as those that a node offers at its start.
func (s *Store) pay(m *member, d debt) error {
	if d.Told {
		return s.again(d)
	}
	begin := time.Now()
	return s.called(s.ctx, m, begin, d.forget(s.ctx, func(e kvcache.Erasure) error {
		_, err := eraseOn(s.ctx, m, e)
		return err
	}, m.peer.Drop))
}

// again has everybody forget something, this host too. It is done twice: at the first time a host
// that has forgotten it may be reading it from one that has yet to.
func (s *Store) again(d debt) (err error) {
	for range 2 {
		// Who cannot owes it, too.
		_ = d.forget(s.ctx, func(e kvcache.Erasure) error {
			_, err := s.EraseTenant(s.ctx, e)
			return err
		}, s.Drop)
		if s.cfg.Own == nil {
			continue
		}
		if err = d.forget(s.ctx, func(e kvcache.Erasure) error {
			_, err := s.cfg.Own.EraseTenant(s.ctx, e)
			return err
		}, s.cfg.Own.Drop); err != nil {
			return err
		}
	}
	return nil
}

// forget calls one of two, as what is to be forgotten is a tenant or a model.
func (d debt) forget(ctx context.Context, tenant func(kvcache.Erasure) error, model func(context.Context, kvcache.Fingerprint) error) error {
	if d.Tenant != "" {
		return tenant(kvcache.ErasureOf(d.Tenant, func(int) {}))
	}
	k, err := kvcache.ParseKey(d.Fingerprint)
	if err != nil {
		return err
	}
	return model(ctx, kvcache.Fingerprint(k))
}

// awayLocked is who is still to forget something and is not there to be asked.
func (s *Store) awayLocked() (list []State) {
	for id, when := range s.ledger.Left {
		if n := s.owedLocked(id); s.members[id] == nil && n > 0 {
			st := State{Gone: true, Owed: n, Trouble: fmt.Sprintf("left %s", when.UTC().Format(time.RFC3339))}
			st.ID = id
			list = append(list, st)
		}
	}
	return list
}
