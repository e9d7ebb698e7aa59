//go:build unix

package lmcache

import (
	"context"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// slow is a tier that answers when its caller gives up, and drops when it is let.
type slow struct {
	kvcache.Store
	drop chan struct{}
}

// Longest implements kvcache.Store.
func (slow) Longest(ctx context.Context, _ kvcache.Query) (kvcache.Match, error) {
	<-ctx.Done()
	return kvcache.Match{}, ctx.Err()
}

// Put implements kvcache.Store.
func (slow) Put(context.Context, *kvcache.Frame) error { return nil }

// Drop implements kvcache.Store.
func (s slow) Drop(ctx context.Context, _ kvcache.Fingerprint) error {
	select {
	case <-s.drop:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close implements kvcache.Store.
func (slow) Close() error { return nil }

// withSlowTier gives the node a slow tier, and takes change over into the server.
func (p *place) withSlowTier(change func(*Config)) slow {
	p.t.Helper()
	s := slow{drop: make(chan struct{})}
	p.stopServer()
	p.stopNode()
	p.far = []stack.Tier{{Name: "slow", Store: s}}
	change(&p.cfg)
	p.startNode()
	p.startServer()
	return s
}

// TestRanksShareTheBudget: a tier that hangs takes no rank the time for what is near.
func TestRanksShareTheBudget(t *testing.T) {
	p := newPlace(t)
	p.withSlowTier(func(c *Config) { c.Budget = 4 * time.Second })
	ids := tokens(1, 10*testChunk)
	var last *engine
	for rank := range int64(4) {
		last = p.newEngine(1+rank, func(e *engine) { e.world, e.rank = 4, rank }).register()
		last.save(ids, 0, 2)
	}
	if n := last.ask(ids); n != 2 {
		t.Errorf("%d chunks are found, want the 2 that all ranks have near", n)
	}
}

// TestEndTwice: a look-up that is ended once more, after its client has begun another one of
// the same name, does not end that.
func TestEndTwice(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, testChunk)
	e.save(ids, 0, 1)
	e.ask(ids)
	p.srv.mu.Lock()
	first := p.srv.jobs[jobKey{"b", "r"}]
	p.srv.mu.Unlock()
	if n := e.ask(ids); n != 1 {
		t.Fatalf("%d chunks", n)
	}
	p.srv.mu.Lock()
	p.srv.endLocked(first)
	left := p.srv.jobs[jobKey{"b", "r"}]
	p.srv.mu.Unlock()
	if left == nil || left == first || len(left.loans) != 1 {
		t.Errorf("the other one is %+v", left)
	}
}

// TestSlowDrop: a tier that takes its time to drop what was cleared keeps no engine from
// storing and finding, and in the end it is dropped.
func TestSlowDrop(t *testing.T) {
	p := newPlace(t)
	tier := p.withSlowTier(func(c *Config) { c.NodeTime = 2 * time.Second })
	e := p.newEngine(1).register()
	ids := tokens(1, 2*testChunk)
	e.save(ids, 0, 2)
	answer, err := e.Clear(e.ctx, &lmcachepb.ClearRequest{})
	must(e, answer, err)
	if n := e.save(ids, 0, 2); n != 2 {
		t.Errorf("%d chunks of 2 are stored", n)
	}
	if n := e.ask(ids); n != 2 {
		t.Errorf("%d chunks are found", n)
	}
	close(tier.drop)
	await(t, "dropped", func() bool {
		p.srv.mu.Lock()
		defer p.srv.mu.Unlock()
		return len(p.srv.drops.list) == 0
	})
}

// TestDropPauses: a drop that fails is tried again, each time later.
func TestDropPauses(t *testing.T) {
	p := newPlace(t)
	p.stopServer()
	s, err := New(p.cfg) // which nobody serves: nothing is dropped but here
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	p.stopNode()
	s.drops.list[kvcache.FingerprintOf("m")] = true
	<-s.drop(time.Time{})
	if s.drops.pause != leastPause {
		t.Errorf("a pause of %v", s.drops.pause)
	}
	<-s.drop(s.drops.next.Add(-1))
	if s.drops.pause != leastPause {
		t.Errorf("tried at once, a pause of %v", s.drops.pause)
	}
	<-s.drop(s.drops.next)
	if s.drops.pause != 2*leastPause {
		t.Errorf("a second pause of %v", s.drops.pause)
	}
	p.startNode()
	<-s.drop(time.Time{})
	if s.drops.pause != 0 || len(s.drops.list) != 0 {
		t.Errorf("a pause of %v after all is dropped", s.drops.pause)
	}
}
