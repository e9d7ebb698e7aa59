package peers_test

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
	"github.com/kvmesh/kvmesh/kvcache/peers"
	"github.com/kvmesh/kvmesh/kvcache/placement"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// TestSuite: one host that another one uses keeps the promises of a store.
func TestSuite(t *testing.T) {
	kvtest.Run(t, kvtest.Harness{Open: func(dir string, limit int64) (kvcache.Store, error) {
		s, err := peers.New(peers.Config{
			Self: placement.Member{ID: "a"},
			Open: func(placement.Member) (peers.Peer, error) {
				return dirstore.Open(dirstore.Config{Dir: filepath.Join(dir, "b"), Limit: limit})
			},
		})
		if err == nil {
			s.SetMembers([]placement.Member{{ID: "b", Addr: "10.0.0.1:1"}})
		}
		return s, err
	}})
}

// TestSpread: each block goes to one other host, in another zone, runs of a chain together;
// any host finds the whole chain, and asks for no block where it is not.
func TestSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 6, 2)
		defer s.close()
		from := s.store("a", nil)
		defer from.Close()
		var ids [][]int32
		for seed := range int32(8) {
			frames, own := chain(t, seed, 40)
			put(t, from, frames)
			ids = append(ids, own)
		}
		used, total := 0, 0
		for _, m := range s.list {
			n := len(s.hosts[m.ID].puts)
			if n > 0 && m.Zone == "zone-0" {
				t.Errorf("%d blocks are on %s, in the zone of their source", n, m.ID)
			}
			if total += n; n > 0 {
				used++
			}
		}
		if total != 8*40 || used != 3 {
			t.Errorf("%d blocks are on %d hosts, want 320 on 3", total, used)
		}
		for _, id := range []string{"a", "b", "d"} {
			to := s.store(id, nil)
			for i, own := range ids {
				want := 40
				if id != "a" { // what is on the host itself is the near store's
					want = 0
					for n := range 40 {
						frames, _ := chain(t, int32(i), n+1)
						if slices.Contains(s.hosts[id].puts, frames[n].Ref) {
							break
						}
						want++
					}
				}
				if got := found(t, to, own); got != want {
					t.Errorf("host %s finds %d blocks of chain %d, want %d", id, got, i, want)
				}
			}
			to.Close()
		}
		gets, misses := 0, uint64(0)
		for _, h := range s.hosts {
			gets += h.gets
			misses += h.Stats().Misses
		}
		if gets == 0 || misses > 0 {
			t.Errorf("%d of %d reads went where the block is not", misses, gets)
		}
	})
}

// TestDeadHost: with two other copies, one host that fails, or hangs, is read around at
// once, and passed over by writes.
func TestDeadHost(t *testing.T) {
	for name, harm := range map[string]func(*host){
		"fails": func(h *host) { h.err = errors.New("connection refused") },
		"hangs": func(h *host) { h.hang = true },
		"slow":  func(h *host) { h.delay = 500 * time.Millisecond },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSite(t, 3, 3)
				defer s.close()
				p := s.store("a", func(c *peers.Config) { c.Copies = 3 })
				defer p.Close()
				frames, ids := chain(t, 1, 20)
				put(t, p, frames)
				s.hosts["b"].set(harm)
				begin := time.Now()
				if n := found(t, p, ids); n != 20 {
					t.Errorf("%d of 20 blocks are found", n)
				}
				// A moment for the look-up, and one for each block that the other is asked
				// for beside it, or none, when it is known.
				if took := time.Since(begin); took > 3*time.Second {
					t.Errorf("it took %v", took)
				}
				more, ids := chain(t, 2, 3)
				put(t, p, more)
				if n := found(t, p, ids); n != 3 {
					t.Errorf("%d of 3 blocks are found that were put meanwhile", n)
				}
				s.hosts["b"].set(func(h *host) { h.err, h.hang, h.delay = nil, false, 0 })
				time.Sleep(2 * time.Second)
				more, _ = chain(t, 3, 1)
				put(t, p, more)
				if !slices.Contains(s.hosts["b"].puts, more[0].Ref) {
					t.Error("the host is back, and gets nothing")
				}
			})
		})
	}
}

// TestNobody: what is on no other host waits, and is not taken for written.
func TestNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 3, 1)
		defer s.close()
		all := s.list
		s.list = all[:1]
		p := s.store("a", nil)
		defer p.Close()
		s.list = all
		frames, ids := chain(t, 1, 2)
		if err := p.Put(t.Context(), frames[0]); !errors.Is(err, remote.ErrAway) {
			t.Errorf("put with nobody there: %v", err)
		}
		q := kvcache.Query{Space: frames[0].Space, IDs: ids}
		if _, err := p.Longest(t.Context(), q); !errors.Is(err, remote.ErrAway) {
			t.Errorf("look-up with nobody there: %v", err)
		}
		if _, err := p.Get(t.Context(), frames[0].Ref); !errors.Is(err, remote.ErrAway) {
			t.Errorf("get with nobody there: %v", err)
		}
		p.SetMembers(s.list)
		for _, id := range []string{"b", "c"} {
			s.hosts[id].set(func(h *host) { h.full = true })
		}
		if err := p.Put(t.Context(), frames[0]); !errors.Is(err, kvcache.ErrFull) || errors.Is(err, remote.ErrAway) {
			t.Errorf("put where everybody is full: %v", err)
		}
		s.hosts["c"].set(func(h *host) { h.full = false })
		put(t, p, frames)
		if len(s.hosts["c"].puts) != 2 {
			t.Error("what one host has no room for is not on the other")
		}
		s.hosts["b"].set(func(h *host) { h.err = errors.New("refused") })
		s.hosts["c"].set(func(h *host) { h.err = errors.New("refused") })
		more, _ := chain(t, 2, 1)
		if err := p.Put(t.Context(), more[0]); !errors.Is(err, remote.ErrAway) {
			t.Errorf("put where everybody fails: %v", err)
		}
		down := 0
		for _, st := range p.States() {
			if st.Trouble != "" {
				down++
			}
		}
		if down != 2 {
			t.Errorf("%d of 2 hosts are known to fail", down)
		}
	})
}

// TestComeAndGo: after a host has joined everything is found where it was; after one has
// left, all but its own share, which is offered again.
func TestComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 12, 1)
		defer s.close()
		left := make(chan struct{}, 1)
		p := s.store("a", func(c *peers.Config) { c.Lost = func() { left <- struct{}{} } })
		defer p.Close()
		var all [][]int32
		var frames [][]*kvcache.Frame
		for seed := range int32(30) {
			f, ids := chain(t, seed, 4)
			put(t, p, f)
			all, frames = append(all, ids), append(frames, f)
		}
		s.add("new", "zone-0")
		p.SetMembers(s.list)
		// Another host, which has heard of nothing, finds what was placed before the last came,
		// since it knows who was there.
		other := s.store("l", nil)
		defer other.Close()
		missing := 0
		for i, ids := range all {
			if n := found(t, p, ids); n != 4 {
				t.Errorf("%d of 4 blocks of chain %d after a join", n, i)
			}
			if slices.Contains(s.hosts["l"].puts, frames[i][0].Ref) {
				continue // near to it
			}
			if n := found(t, other, ids); n != 4 {
				missing++
			}
		}
		if missing > len(all)/3 {
			t.Errorf("a host that does not know of the join finds %d of %d chains not", missing, len(all))
		}
		gone := s.hosts["b"]
		gone.set(func(h *host) { h.err = errors.New("no route to host") })
		p.SetMembers(slices.DeleteFunc(slices.Clone(s.list), func(m placement.Member) bool { return m.ID == "b" }))
		<-left
		for i, ids := range all {
			on := slices.Contains(gone.puts, frames[i][0].Ref)
			if n := found(t, p, ids); on != (n == 0) {
				t.Errorf("%d blocks of chain %d are found; it was on the one that left: %v", n, i, on)
			}
			put(t, p, frames[i])
			if n := found(t, p, ids); n != 4 {
				t.Errorf("%d blocks of chain %d are found when it was offered again", n, i)
			}
		}
	})
}

// TestBandwidth: no more goes to the other hosts than is allowed, and reads are not bounded.
func TestBandwidth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 2, 1)
		defer s.close()
		p := s.store("a", func(c *peers.Config) { c.Bandwidth = 100_000 })
		defer p.Close()
		frames, ids := chain(t, 1, 40) // 10 KB and a little more each
		begin := time.Now()
		put(t, p, frames)
		if took := time.Since(begin); took < 3*time.Second || took > 6*time.Second {
			t.Errorf("400 KB at 100 KB/s took %v", took)
		}
		begin = time.Now()
		if n := found(t, p, ids); n != 40 || time.Since(begin) > time.Second {
			t.Errorf("%d blocks found in %v", n, time.Since(begin))
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		more, _ := chain(t, 2, 8)
		for _, f := range more {
			if err := p.Put(ctx, f); err != nil {
				return
			}
		}
		t.Error("a put does not end when its caller has no more time")
	})
}
