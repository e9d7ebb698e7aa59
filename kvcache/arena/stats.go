//go:build unix

package arena

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Stats implements kvcache.Counted. Used is the room that is given out, in whole grains.
func (s *Store) Stats() kvcache.Stats {
	st := s.count.Stats()
	st.Limit = s.cfg.Limit
	s.mu.Lock()
	defer s.mu.Unlock()
	st.Used = int64(s.room.used) * grain
	return st
}

// Label implements kvcache.Labeled.
func (s *Store) Label(ctx context.Context, f kvcache.Fingerprint, l kvcache.Label) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	m := s.modelLocked(f)
	if m.named > 0 {
		return nil
	}
	r, err := labelRecord(f, l)
	if err != nil {
		return fmt.Errorf("label model %s: %w", f, err)
	}
	s.named++
	m.label, m.named = l, s.named
	s.usedLocked(f)
	s.log.add(r)
	return s.count.Failure(s.log.flush())
}

// labelRecord is the record of a label.
func labelRecord(f kvcache.Fingerprint, l kvcache.Label) (record, error) {
	text, err := json.Marshal(l)
	if most := mostRecord - recordFixed - len(f); err == nil && len(text) > most {
		err = fmt.Errorf("%d bytes, at most %d", len(text), most)
	}
	return record{kind: kindLabel, in: kvcache.Space{Fingerprint: f}, text: text}, err
}

// labelRecordsLocked lists all labels in the order in which they came.
func (s *Store) labelRecordsLocked() (records []record) {
	type named struct {
		f kvcache.Fingerprint
		*model
	}
	var all []named
	for f, m := range s.models {
		if m.named > 0 {
			all = append(all, named{f, m})
		}
	}
	slices.SortFunc(all, func(a, b named) int { return cmp.Compare(a.named, b.named) })
	for _, m := range all {
		if r, err := labelRecord(m.f, m.label); err == nil {
			records = append(records, r)
		}
	}
	return records
}

// Values is the space of values that clients keep here under names of their own. They are no
// KV of a model and go to no other store.
func Values() kvcache.Space { return kvcache.NewSpace("kvmesh resp v1\n", nil) }

// Newest lists the blocks that came last, so many at most, in the order in which they came:
// about, because the place of one that has left is used again. Values are not among them.
func (s *Store) Newest(most int) (list []kvcache.Found) {
	s.mu.Lock()
	defer s.mu.Unlock()
	values := Values()
	for i := len(s.index.entries) - 1; i >= 0 && len(list) < most; i-- {
		e := &s.index.entries[i]
		if e.live && !s.index.spaces[e.space].dropped && s.index.ref(e).Space != values {
			list = append(list, kvcache.Found{Ref: s.index.ref(e), First: int(e.first), Tokens: int(e.tokens), Size: e.size})
		}
	}
	slices.Reverse(list)
	return list
}

// Model is what an arena has of one fingerprint. Sizes are bytes of frames and records.
type Model struct {
	Fingerprint kvcache.Fingerprint
	// Label is empty where nobody gave one.
	Label  kvcache.Label
	Blocks int
	Bytes  int64
	// Tails are the open ends of streams.
	Tails     int
	TailBytes int64
	Tenants   int
	Tokens    int64
	// Used is when any of it was last used, or the arena opened if that is later.
	Used time.Time
}

// Models lists what is in the arena, by name and fingerprint.
func (s *Store) Models(ctx context.Context) ([]Model, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	of := map[uint32]*Model{}
	var list []*Model
	for f, m := range s.models {
		one := &Model{Fingerprint: f, Label: m.label, Tenants: len(m.spaces), Used: m.used}
		list = append(list, one)
		for _, no := range m.spaces {
			of[no] = one
		}
	}
	for i := range s.index.entries {
		if e := &s.index.entries[i]; e.live && of[e.space] != nil {
			m := of[e.space]
			m.Blocks++
			m.Bytes += e.size
			m.Tokens += int64(e.tokens)
		}
	}
	for _, t := range s.tails.byNo {
		if m := of[t.key.space]; m != nil {
			m.Tails++
			m.TailBytes += t.bytes()
		}
	}
	slices.SortFunc(list, func(a, b *Model) int {
		return cmp.Or(cmp.Compare(a.Label.Model, b.Label.Model), slices.Compare(a.Fingerprint[:], b.Fingerprint[:]))
	})
	models := make([]Model, len(list))
	for i, m := range list {
		models[i] = *m
	}
	return models, nil
}
