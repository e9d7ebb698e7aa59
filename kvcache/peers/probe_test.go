package peers_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/peers"
	"github.com/kvmesh/kvmesh/kvcache/placement"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// Probe names the memory of a host that answers.
func (h *host) Probe(ctx context.Context) (string, error) {
	if err := h.enter(ctx); err != nil {
		return "", err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.memory, nil
}

// foundOf are blocks as a store lists them.
func foundOf(frames []*kvcache.Frame) (list []kvcache.Found) {
	for _, f := range frames {
		list = append(list, kvcache.Found{Ref: f.Ref, First: f.First, Tokens: len(f.IDs), Size: f.Total})
	}
	return list
}

// stateOf is what is known of a host.
func stateOf(t testing.TB, p *peers.Store, id string) peers.State {
	t.Helper()
	for _, st := range p.States() {
		if st.ID == id {
			return st
		}
	}
	t.Fatalf("nothing is known of %s", id)
	return peers.State{}
}

// TestSilentDeath: a host that nobody calls is found to fail, and soon what it has counts as
// being on no other host: blocks, and the copy of a tail. When it is back with its memory, its
// blocks count again.
func TestSilentDeath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 2, 2)
		defer s.close()
		var lost atomic.Int32
		p := s.store("a", func(c *peers.Config) { c.Lost = func() { lost.Add(1) } })
		defer p.Close()
		b := s.hosts["b"]
		b.set(func(h *host) { h.memory = "one" })
		frames, _ := chain(t, 1, 20)
		put(t, p, frames)
		st := open(t, s, p, 0, frames[19].Key, 160)
		st.grow(20)
		time.Sleep(3 * time.Second)
		missing := func() int { return len(p.Missing(foundOf(frames))) }
		if up := stateOf(t, p, "b"); up.Trouble != "" || time.Since(up.Answered) > 3*time.Second || missing() != 0 || p.Behind() != 0 || lost.Load() != 0 {
			t.Fatalf("%+v; %d blocks and %d tokens are on no other host, lost %d times", up, missing(), p.Behind(), lost.Load())
		}
		b.set(func(h *host) { h.err = errors.New("connection refused") })
		time.Sleep(3 * time.Second)
		if down := stateOf(t, p, "b"); down.Trouble == "" || down.Away || missing() != 0 {
			t.Errorf("after a moment: %+v, %d blocks on no other host", down, missing())
		}
		time.Sleep(6 * time.Second)
		if down := stateOf(t, p, "b"); !down.Away || missing() != 20 || p.Behind() != 20 || lost.Load() != 1 {
			t.Errorf("after 9 s: %+v; %d of 20 blocks and %d of 20 tokens are on no other host, lost %d times", down, missing(), p.Behind(), lost.Load())
		}
		b.set(func(h *host) { h.err = nil })
		time.Sleep(4 * time.Second)
		if up := stateOf(t, p, "b"); up.Away || up.Trouble != "" || missing() != 0 || p.Behind() != 0 || lost.Load() != 2 {
			t.Errorf("it is back: %+v; %d blocks and %d tokens are on no other host, lost %d times", up, missing(), p.Behind(), lost.Load())
		}
		s.add("c", "zone-0")
		other := s.store("c", nil)
		defer other.Close()
		if _, end := st.elsewhere(other); end != 180 {
			t.Errorf("the copy of the tail ends at %d, want 180", end)
		}
	})
}

// TestOtherMemory: a host that has another memory has nothing of what was put before, however
// short it was away; a block that is being put meanwhile is not taken for written.
func TestOtherMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 3, 3)
		defer s.close()
		lost := make(chan struct{}, 8)
		for _, id := range []string{"b", "c"} {
			s.hosts[id].set(func(h *host) { h.memory = "one of " + id })
		}
		p := s.store("a", func(c *peers.Config) { c.Copies, c.Lost = 3, func() { lost <- struct{}{} } })
		defer p.Close()
		frames, _ := chain(t, 1, 20)
		put(t, p, frames)
		time.Sleep(3 * time.Second)
		if n := len(p.Missing(foundOf(frames))); n != 0 || len(lost) != 0 {
			t.Fatalf("%d blocks are on too few hosts", n)
		}
		s.hosts["b"].set(func(h *host) { h.memory = "another" })
		<-lost
		if n := len(p.Missing(foundOf(frames))); n != 20 {
			t.Errorf("%d of 20 blocks are on too few hosts", n)
		}
		put(t, p, frames)
		if n := len(p.Missing(foundOf(frames))); n != 0 || stateOf(t, p, "b").Trouble != "" {
			t.Errorf("%d blocks are on too few hosts when they are copied again", n)
		}

		s.list = s.list[:2]
		p.SetMembers(s.list)
		<-lost
		synctest.Wait() // until those that stay have been probed for that
		if n := len(p.Missing(foundOf(frames))); n != 0 {
			t.Errorf("%d blocks are on too few hosts, where one has left", n)
		}
		b := s.hosts["b"]
		b.set(func(h *host) { h.late, h.memory = 5*time.Second, "a third" })
		fresh, _ := chain(t, 2, 1)
		if err := p.Put(t.Context(), fresh[0]); !errors.Is(err, remote.ErrAway) {
			t.Errorf("a block that was put while the memory was lost: %v", err)
		}
		b.set(func(h *host) { h.late = 0 })
		put(t, p, fresh)
		if n := len(p.Missing(foundOf(fresh))); n != 0 {
			t.Error("the block is not known to be there")
		}
	})
}

// TestMissedOut: a host that was not there for a moment, while a block went to another one only,
// is given it when it answers.
func TestMissedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 3, 3)
		defer s.close()
		c := s.hosts["c"]
		c.set(func(h *host) { h.err = errors.New("connection refused") })
		back := make(chan struct{}, 8)
		p := s.store("a", func(c *peers.Config) { c.Copies, c.Lost = 3, func() { back <- struct{}{} } })
		defer p.Close()
		time.Sleep(time.Second / 2)
		frames, _ := chain(t, 1, 2)
		put(t, p, frames)
		if n := s.blocksOn("c", frames); n != 0 || len(p.Missing(foundOf(frames))) != 2 {
			t.Errorf("the dead host has %d blocks; 2 are on too few, not %d", n, len(p.Missing(foundOf(frames))))
		}
		c.set(func(h *host) { h.err = nil })
		<-back
		put(t, p, frames)
		if n := s.blocksOn("c", frames); n != 2 || len(p.Missing(foundOf(frames))) != 0 {
			t.Errorf("%d of 2 blocks are on the host that is there; %d are on too few", n, len(p.Missing(foundOf(frames))))
		}
		time.Sleep(time.Minute)
		if len(back) != 0 {
			t.Error("who is there is back again and again")
		}
	})
}

// TestLeavesMeanwhile: a block that was sent to a host that has left before it came is put on
// another one.
func TestLeavesMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 3, 3)
		defer s.close()
		p := s.store("a", nil)
		defer p.Close()
		for _, id := range []string{"b", "c"} {
			s.hosts[id].set(func(h *host) { h.late = time.Second })
		}
		frames, _ := chain(t, 1, 1)
		done := make(chan error, 1)
		go func() { done <- p.Put(t.Context(), frames[0]) }()
		time.Sleep(500 * time.Millisecond)
		var left string
		p.SetMembers(slices.DeleteFunc(slices.Clone(s.list), func(m placement.Member) bool {
			s.hosts[m.ID].set(func(h *host) {
				if len(h.puts) > 0 {
					left = m.ID
				}
			})
			return m.ID == left
		}))
		err := <-done
		other := map[string]string{"b": "c", "c": "b"}[left]
		if n := s.blocksOn(other, frames); err != nil || n != 1 || len(p.Missing(foundOf(frames))) != 0 {
			t.Errorf("%v; it was sent to %q, which has left, and is on %d of 1 other", err, left, n)
		}
	})
}

// TestAwayMeanwhile: a block that was sent to a host that is found to be away before it came is not
// taken for written.
func TestAwayMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 2, 2)
		defer s.close()
		lost := make(chan struct{}, 8)
		p := s.store("a", func(c *peers.Config) { c.Lost = func() { lost <- struct{}{} } })
		defer p.Close()
		synctest.Wait()
		b := s.hosts["b"]
		b.set(func(h *host) { h.late = 20 * time.Second })
		frames, _ := chain(t, 1, 1)
		done := make(chan error, 1)
		go func() { done <- p.Put(t.Context(), frames[0]) }()
		time.Sleep(time.Second)
		b.set(func(h *host) { h.err = errors.New("no route to host") })
		<-lost
		if err := <-done; !errors.Is(err, remote.ErrAway) {
			t.Errorf("a block that was put on a host that is away: %v", err)
		}
	})
}

// TestMovesMeanwhile: a block that was sent to a host's old address does not count for who has its
// name at the new one.
func TestMovesMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 2, 2)
		defer s.close()
		p := s.store("a", nil)
		defer p.Close()
		synctest.Wait()
		old := s.hosts["b"]
		defer old.Store.Close()
		old.set(func(h *host) { h.late = time.Second })
		frames, _ := chain(t, 1, 1)
		done := make(chan error, 1)
		go func() { done <- p.Put(t.Context(), frames[0]) }()
		time.Sleep(500 * time.Millisecond)
		s.list = s.list[:1]
		s.add("b", "zone-1")
		s.list[1].Addr = "10.0.0.2:1"
		p.SetMembers(s.list)
		if err := <-done; !errors.Is(err, remote.ErrAway) {
			t.Errorf("a block that was put at the old address: %v", err)
		}
		if n := len(p.Missing(foundOf(frames))); n != 1 {
			t.Errorf("%d of 1 blocks are on no other host", n)
		}
		put(t, p, frames)
		if n := s.blocksOn("b", frames); n != 1 || len(p.Missing(foundOf(frames))) != 0 {
			t.Errorf("%d of 1 blocks at the new address", n)
		}
	})
}

// TestTakesNothing: for a host that answers probes and takes no blocks, blocks are offered again ever
// more seldom, and soon when it has taken one.
func TestTakesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 3, 3)
		defer s.close()
		c := s.hosts["c"]
		c.set(func(h *host) { h.bad = errors.New("the port for blocks is closed") })
		back := make(chan struct{}, 100)
		p := s.store("a", func(c *peers.Config) { c.Copies, c.Lost = 3, func() { back <- struct{}{} } })
		defer p.Close()
		frames, _ := chain(t, 1, 3)
		put(t, p, frames)
		offers := 0
		for end := time.After(10 * time.Minute); end != nil; {
			select {
			case <-back:
				offers++
				put(t, p, frames)
			case <-end:
				end = nil
			}
		}
		if offers < 5 || offers > 12 {
			t.Errorf("blocks were offered %d times in 10 min", offers)
		}
		c.set(func(h *host) { h.bad = nil })
		put(t, p, frames[:1])
		time.Sleep(5 * time.Second)
		select {
		case <-back:
			put(t, p, frames)
		default:
		}
		if n := s.blocksOn("c", frames); n != 3 {
			t.Errorf("%d of 3 blocks are on the host that takes some again", n)
		}
	})
}
