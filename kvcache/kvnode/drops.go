//go:build unix

package kvnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

const (
	// mostModelNames is how many names of models are remembered, the newest.
	mostModelNames = 4096
	// mostModelName bounds one, in bytes.
	mostModelName = 512
)

// modelName is a name under which a model was served.
type modelName struct {
	Fingerprint kvcache.Fingerprint `json:"fingerprint"`
	Model       string              `json:"model"`
}

// dropLog is what the records know for those who drop models, beside whose weights are whose:
// names, which the memory forgets with the blocks, and what tiers have not dropped yet. The
// lock of the records guards it.
type dropLog struct {
	names []modelName // the newest last
	has   map[modelName]bool
	owed  []stack.Owed // as the stack had it last
	// fresh is what a file had of drops, and the stack has not been told.
	fresh []stack.Owed
	lost  bool // there was no file in the node's directory, or no good one
}

// takeNamesLocked takes over names that were read.
func (e *Epochs) takeNamesLocked(names []modelName) {
	for _, n := range names {
		if len(e.names) < mostModelNames {
			e.nameLocked(n)
		}
	}
}

// nameLocked remembers a name, and says whether that is news.
func (e *Epochs) nameLocked(n modelName) bool {
	if n.Model == "" || len(n.Model) > mostModelName || e.has[n] {
		return false
	}
	if e.has == nil {
		e.has = map[modelName]bool{}
	}
	if more := len(e.names) - mostModelNames + 1; more > 0 {
		delete(e.has, e.names[0])
		e.names = slices.Clone(e.names[more:])
	}
	e.names, e.has[n] = append(e.names, n), true
	return true
}

// nameModel remembers a name. It is called for every block.
func (e *Epochs) nameModel(f kvcache.Fingerprint, model string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.nameLocked(modelName{f, model}) {
		return
	}
	if err := e.keepLocked(); err != nil {
		e.cfg.Log.Warn("the name of a model is not kept", "model", model, "err", err)
	}
}

// keepLocked writes the file now and the copy soon.
func (e *Epochs) keepLocked() error {
	e.behind = true
	e.wake()
	return e.saveLocked()
}

// restored returns the drops that were read from a file, once.
func (e *Epochs) restored() []stack.Owed {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	fresh := e.fresh
	e.owed, e.fresh = append(e.owed[:len(e.owed):len(e.owed)], fresh...), nil
	return fresh
}

// keepOwed keeps what the tiers still have to drop.
func (e *Epochs) keepOwed(s *stack.Stack) error {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	owed := s.Owing()
	if slices.Equal(owed, e.owed) {
		return e.saveRestLocked()
	}
	e.owed = owed
	return e.keepLocked()
}

// named lists the names of each model that has a record or was labelled.
func (e *Epochs) named() map[kvcache.Fingerprint][]string {
	names := map[kvcache.Fingerprint][]string{}
	if e == nil {
		return names
	}
	add := func(f kvcache.Fingerprint, model string) {
		if !slices.Contains(names[f], model) {
			names[f] = append(names[f], model)
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, n := range slices.Backward(e.names) {
		add(n.Fingerprint, n.Model)
	}
	for f, s := range e.standing {
		add(f, s.key.Model)
	}
	return names
}

// drop forgets a model in all tiers that there are. That it is to be forgotten is kept before
// the first of them is asked, and until each has: what one that is away still has is found no
// more, and goes when it is back.
func (s *Server) drop(ctx context.Context, f kvcache.Fingerprint) error {
	if s.stack == nil {
		return s.store.Drop(ctx, f)
	}
	for _, t := range s.stack.Tiers() {
		if !t.Apart {
			s.stack.Owe(stack.Owed{Tier: t.Name, Fingerprint: f})
		}
	}
	kept := s.epochs.keepOwed(s.stack)
	err := s.stack.Drop(ctx, f)
	return errors.Join(err, kept, s.epochs.keepOwed(s.stack))
}

// settle has tiers drop what they were not there to, until ctx ends. What was computed again of
// the models meanwhile is offered to them again, since it went with the rest.
func (s *Server) settle(ctx context.Context) {
	every := EpochConfig{}.withDefaults().Every
	if s.epochs != nil {
		every = s.epochs.cfg.Every
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for ctx.Err() == nil {
		s.stack.Owe(s.epochs.restored()...)
		if before := s.stack.Owing(); len(before) > 0 {
			far, cancel := context.WithTimeout(ctx, farTime)
			err := s.stack.DropOwed(far)
			cancel()
			if err := s.epochs.keepOwed(s.stack); err != nil {
				s.log.Warn("what tiers still have to drop is not kept", "err", err)
			}
			if after := s.stack.Owing(); len(after) < len(before) {
				s.log.Info("tiers have dropped models that they were not there for", "done", len(before)-len(after), "left", len(after))
				s.stack.Offer(slices.DeleteFunc(s.store.Newest(offered), func(b kvcache.Found) bool {
					return !slices.ContainsFunc(before, func(o stack.Owed) bool { return o.Fingerprint == b.Fingerprint })
				}))
			}
			s.log.Debug("have tiers drop models", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// Known is a model that a node knows of, whether its memory has anything of it or not.
type Known struct {
	arena.Model
	// Names are those under which it was served, and its label's in a tier.
	Names []string `json:"names,omitempty"`
	// Owed are the tiers that still have to drop it.
	Owed []string `json:"owed,omitempty"`
}

// known lists what there is in memory, what tiers say that they have, and what was ever named
// or dropped, by fingerprint. A tier that cannot say has nothing in it: that is slow to find
// out (Survey).
func (s *Server) known(ctx context.Context) ([]Known, error) {
	models, err := s.store.Models(ctx)
	if err != nil {
		return nil, err
	}
	all := map[kvcache.Fingerprint]*Known{}
	of := func(f kvcache.Fingerprint) *Known {
		if all[f] == nil {
			all[f] = &Known{Model: arena.Model{Fingerprint: f}}
		}
		return all[f]
	}
	for _, m := range models {
		of(m.Fingerprint).Model = m
	}
	for f, names := range s.epochs.named() {
		of(f).Names = names
	}
	if s.stack != nil {
		for _, o := range s.stack.Owing() {
			k := of(o.Fingerprint)
			k.Owed = append(k.Owed, o.Tier)
		}
		for f, l := range s.labels(ctx) {
			k := of(f)
			if k.Label == (kvcache.Label{}) {
				k.Label = l
			}
			if l.Model != "" && !slices.Contains(k.Names, l.Model) {
				k.Names = append(k.Names, l.Model)
			}
		}
	}
	list := make([]Known, 0, len(all))
	for _, k := range all {
		if k.Label.Model == "" && len(k.Names) > 0 {
			k.Label.Model = k.Names[0]
		}
		list = append(list, *k)
	}
	slices.SortFunc(list, func(a, b Known) int { return slices.Compare(a.Fingerprint[:], b.Fingerprint[:]) })
	return list, nil
}

// labels lists what tiers say that they have.
func (s *Server) labels(ctx context.Context) map[kvcache.Fingerprint]kvcache.Label {
	all := map[kvcache.Fingerprint]kvcache.Label{}
	for _, t := range s.stack.Tiers() {
		l, ok := t.Store.(kvcache.Lister)
		if !ok {
			continue
		}
		labels, err := l.Labels(ctx)
		if err != nil {
			s.log.Debug("list the models of a far tier", "tier", t.Name, "err", err)
		}
		for f, l := range labels {
			if all[f] == (kvcache.Label{}) {
				all[f] = l
			}
		}
	}
	return all
}

// Known lists the models that the node knows of: in its memory, in tiers that can say so at
// once, by their names, and those that tiers still have to drop.
func (c *Client) Known(ctx context.Context) (list []Known, err error) {
	err = c.ask(ctx, opKnown, nil, func(_ *conn, body cursor) error { return json.Unmarshal(body.Rest(), &list) })
	if err != nil {
		return nil, fmt.Errorf("models that the node knows: %w", err)
	}
	return list, nil
}
