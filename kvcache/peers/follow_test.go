package peers_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/peers"
)

// stream is a tail on host a that p follows.
type stream struct {
	testing.TB
	p    *peers.Store
	w    kvcache.TailWriter
	spec kvcache.TailSpec
	next int
}

// open opens a tail behind a block.
func open(t testing.TB, s *site, p *peers.Store, attempt int, parent kvcache.Key, first int) *stream {
	t.Helper()
	st := &stream{TB: t, p: p, next: first, spec: kvcache.TailSpec{
		Space: kvcache.NewSpace("m", []byte("t")), Stream: "stream", Attempt: attempt, Parent: parent, First: first,
	}}
	var err error
	if st.w, err = s.hosts["a"].Store.OpenTail(t.Context(), st.spec); err != nil {
		t.Fatal(err)
	}
	return st
}

// grow appends tokens one by one.
func (st *stream) grow(n int) {
	st.Helper()
	for range n {
		if err := st.w.Append(kvcache.Range{First: st.next, IDs: []int32{int32(st.next)}, Data: []byte("state")}); err != nil {
			st.Fatal(err)
		}
		st.next++
		st.p.Grew(st.spec, st.next)
	}
}

// rotate begins the tail anew behind a block.
func (st *stream) rotate(parent kvcache.Key, first int) {
	st.Helper()
	if err := st.w.Rotate(parent, first); err != nil {
		st.Fatal(err)
	}
	st.spec.Parent, st.spec.First, st.next = parent, first, first
}

// elsewhere is the first tail that another host finds: where it begins and ends.
func (st *stream) elsewhere(other *peers.Store) (spec kvcache.TailSpec, end int) {
	st.Helper()
	tails, err := other.ReadTail(st.Context(), st.spec.Space, st.spec.Stream, 0)
	if err != nil {
		st.Fatal(err)
	}
	if len(tails) == 0 {
		return spec, 0
	}
	for i, id := range tails[0].IDs() {
		if id != int32(tails[0].First+i) || string(tails[0].Ranges[i].Data) != "state" {
			st.Fatalf("token %d of the copy is %d", i, id)
		}
	}
	return tails[0].TailSpec, tails[0].First + len(tails[0].IDs())
}

// TestTailCopied: a tail is on another host after every 16 tokens, and when it rests; what
// is not there yet is counted; behind a block it begins anew, and nothing of the block is
// given up before that is on another host, too.
func TestTailCopied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 3, 3)
		defer s.close()
		registry := prometheus.NewRegistry()
		p := s.store("a", func(c *peers.Config) { c.Registry = registry })
		defer p.Close()
		// What the second host would find, wherever the copy is.
		other := s.store("none", func(c *peers.Config) { c.Self.ID = "d" })
		defer other.Close()
		s.hosts["a"].set(func(h *host) { h.err = errors.New("what it has is not to count") })

		frames, _ := chain(t, 1, 3)
		st := open(t, s, p, 1, frames[0].Key, 8)
		st.grow(15)
		if n := p.Behind(); n != 15 {
			t.Errorf("%d tokens are behind, want 15", n)
		}
		st.grow(1)
		synctest.Wait()
		if _, end := st.elsewhere(other); end != 24 || p.Behind() != 0 {
			t.Errorf("the copy ends at %d, want 24; %d tokens are behind", end, p.Behind())
		}
		st.grow(3)
		if n := p.Behind(); n != 3 {
			t.Errorf("%d tokens are behind, want 3", n)
		}
		time.Sleep(time.Second)
		if _, end := st.elsewhere(other); end != 27 || p.Behind() != 0 {
			t.Errorf("a tail that rests ends at %d, want 27; %d tokens are behind", end, p.Behind())
		}
		// Another block, which is not there yet: the copy of the tail before stays.
		st.rotate(frames[2].Key, 32)
		st.grow(2)
		if n := p.Behind(); n != 2-19 {
			t.Errorf("%d tokens are behind; 2 are, and 19 of a block that waits are not", n)
		}
		time.Sleep(time.Second)
		tails, err := other.ReadTail(t.Context(), st.spec.Space, "stream", 0)
		if err != nil || len(tails) != 2 || tails[1].First != 8 || len(tails[1].IDs()) != 19 {
			t.Errorf("before the block is there: %+v, %v", tails, err)
		}
		put(t, p, frames)
		if n := p.Behind(); n != 0 {
			t.Errorf("%d tokens are behind, want none", n)
		}
		more, _ := chain(t, 1, 6)
		put(t, p, more[3:])
		st.rotate(more[5].Key, 48)
		st.grow(1)
		time.Sleep(time.Second)
		tails, err = other.ReadTail(t.Context(), st.spec.Space, "stream", 0)
		if err != nil || len(tails) != 1 || tails[0].TailSpec != st.spec || len(tails[0].IDs()) != 1 {
			t.Errorf("behind a block that is there: %+v, %v", tails, err)
		}
		if families, err := registry.Gather(); err != nil || len(families) < 5 {
			t.Errorf("%d metrics: %v", len(families), err)
		}
	})
}

// TestTailHostDies: the copy goes on on another host, with all that the tail has; while
// there is none, nobody waits and everything counts as behind.
func TestTailHostDies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 3, 3)
		defer s.close()
		p := s.store("a", nil)
		defer p.Close()
		other := s.store("none", func(c *peers.Config) { c.Self.ID = "d" })
		defer other.Close()
		s.hosts["a"].set(func(h *host) { h.err = errors.New("what it has is not to count") })
		space := kvcache.NewSpace("m", []byte("t"))
		st := open(t, s, p, 1, space.Root, 0)
		st.grow(20)
		time.Sleep(time.Second)
		on := ""
		for _, id := range []string{"b", "c"} {
			if tails, err := s.hosts[id].Store.ReadTail(t.Context(), space, "stream", 0); err == nil && len(tails) > 0 {
				on = id
			}
		}
		if on == "" {
			t.Fatal("no host has a copy")
		}
		dead := errors.New("connection refused")
		s.hosts[on].set(func(h *host) { h.err = dead })
		st.grow(20)
		time.Sleep(time.Second)
		if _, end := st.elsewhere(other); end != 40 || p.Behind() != 0 {
			t.Errorf("the copy ends at %d, want 40; %d tokens are behind", end, p.Behind())
		}
		for _, id := range []string{"b", "c"} {
			s.hosts[id].set(func(h *host) { h.err = dead })
		}
		begin := time.Now()
		st.grow(60)
		if took := time.Since(begin); took != 0 {
			t.Errorf("the stream waited for %v", took)
		}
		time.Sleep(3 * time.Second)
		if n := p.Behind(); n != 100 {
			t.Errorf("%d tokens are behind, want all 100", n)
		}
		for _, id := range []string{"b", "c"} {
			s.hosts[id].set(func(h *host) { h.err = nil })
		}
		time.Sleep(3 * time.Second)
		if _, end := st.elsewhere(other); end != 100 || p.Behind() != 0 {
			t.Errorf("the copy ends at %d, want 100; %d tokens are behind", end, p.Behind())
		}
	})
}

// TestTailOvertaken: when the stream has gone on elsewhere nothing of the old attempt is
// copied, or counted; and it may come back with a higher one.
func TestTailOvertaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 2, 1)
		defer s.close()
		p := s.store("a", nil)
		defer p.Close()
		space := kvcache.NewSpace("m", []byte("t"))
		st := open(t, s, p, 1, space.Root, 0)
		st.grow(16)
		synctest.Wait()
		spec := st.spec
		spec.Attempt = 2
		w, err := s.hosts["b"].OpenTail(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Append(kvcache.Range{IDs: []int32{7}, Data: []byte("theirs")}); err != nil {
			t.Fatal(err)
		}
		st.grow(40)
		time.Sleep(time.Second)
		if n := p.Behind(); n != 0 {
			t.Errorf("%d tokens of an attempt that was overtaken count", n)
		}
		tails, err := p.ReadTail(t.Context(), space, "stream", 0)
		if err != nil || len(tails) != 2 || tails[0].Attempt != 2 || tails[1].Attempt != 1 || len(tails[1].IDs()) != 16 {
			t.Errorf("the tails are %+v, %v", tails, err)
		}
		st = open(t, s, p, 3, space.Root, 0)
		st.grow(16)
		synctest.Wait()
		if spec, end := st.elsewhere(p); end != 16 || spec.Attempt != 3 {
			t.Errorf("attempt %d ends at %d", spec.Attempt, end)
		}
		if err := p.DropTail(t.Context(), space, "stream"); err != nil {
			t.Fatal(err)
		}
		if _, end := st.elsewhere(p); end != 0 || p.Behind() != 0 {
			t.Errorf("a dropped tail ends at %d", end)
		}
	})
}

// TestTailKept: what the copy of a tail had of a block is subtracted only while that copy is there,
// and the block counts elsewhere: not when the copy has been rotated behind the block and the block's
// host dies, nor when another model is dropped, nor when the block waits no longer.
func TestTailKept(t *testing.T) {
	for name, harm := range map[string]func(*testing.T, *site, *peers.Store, string){
		"host dies": func(_ *testing.T, s *site, _ *peers.Store, holder string) {
			s.hosts[holder].set(func(h *host) { h.err = errors.New("connection refused") })
		},
		"drop": func(t *testing.T, _ *site, p *peers.Store, _ string) {
			if err := p.Drop(t.Context(), kvcache.NewSpace("another", nil).Fingerprint); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSite(t, 5, 5)
				defer s.close()
				p := s.store("a", nil)
				defer p.Close()
				st := open(t, s, p, 1, kvcache.NewSpace("m", []byte("t")).Root, 0)
				st.grow(16)
				time.Sleep(time.Second)
				frames, holder := s.apart(p, st)
				st.rotate(frames[1].Key, 16)
				st.grow(4)
				time.Sleep(time.Second)
				if n, missing := p.Behind(), len(p.Missing(foundOf(frames))); n != 0 || missing != 0 {
					t.Fatalf("%d tokens are behind, and %d blocks are on no other host", n, missing)
				}
				harm(t, s, p, holder)
				time.Sleep(15 * time.Second)
				if missing := len(p.Missing(foundOf(frames))) == 2; missing != (name == "host dies") {
					t.Errorf("the blocks are on no other host: %v", missing)
				}
				st.grow(10)
				if n := p.Behind(); n != 10 {
					t.Errorf("%d tokens are behind, want 10", n)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 2, 2)
		defer s.close()
		waits := true
		p := s.store("a", func(c *peers.Config) { c.Waits = func(kvcache.Key) bool { return waits } })
		defer p.Close()
		frames, _ := chain(t, 1, 2)
		st := open(t, s, p, 1, frames[0].Parent, 0)
		st.grow(16)
		time.Sleep(time.Second)
		st.rotate(frames[1].Key, 16)
		st.grow(1)
		if n := p.Behind(); n != 1-16 {
			t.Errorf("%d tokens are behind; 1 is, and 16 of a block that waits are not", n)
		}
		if waits = false; p.Behind() != 1 {
			t.Errorf("%d tokens are behind, and the block was given up", p.Behind())
		}
	})
}

// apart puts a chain of two blocks on another host than the one with the copy of a stream's tail, and
// names that.
func (s *site) apart(p *peers.Store, st *stream) (frames []*kvcache.Frame, holder string) {
	s.Helper()
	copied := func(id string) bool {
		tails, err := s.hosts[id].Store.ReadTail(s.Context(), st.spec.Space, st.spec.Stream, 0)
		if err != nil {
			s.Fatal(err)
		}
		return len(tails) > 0
	}
	for seed := int32(1); ; seed++ {
		frames, _ = chain(s, seed, 2)
		put(s, p, frames)
		for _, id := range []string{"b", "c", "d", "e"} {
			if s.blocksOn(id, frames) == 2 && !copied(id) {
				return frames, id
			}
		}
	}
}

// TestTailLeft: the copy of a tail that is dropped is not written any more, whether that was being
// copied or not, and no copy is when the store is closed.
func TestTailLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 2, 2)
		defer s.close()
		p := s.store("a", nil)
		defer p.Close()
		b := s.hosts["b"]
		writers := func() (n int) {
			b.set(func(h *host) { n = h.open })
			return n
		}
		root := kvcache.NewSpace("m", []byte("t")).Root
		for i, delay := range []time.Duration{0, time.Second} {
			st := open(t, s, p, i+1, root, 0)
			st.grow(16)
			time.Sleep(time.Second)
			if writers() != 1 {
				t.Fatalf("%d copies of 1 tail are written", writers())
			}
			b.set(func(h *host) { h.delay = delay })
			st.grow(16)
			time.Sleep(time.Second / 2)
			if err := p.DropTail(t.Context(), st.spec.Space, st.spec.Stream); err != nil {
				t.Fatal(err)
			}
			b.set(func(h *host) { h.delay = 0 })
			time.Sleep(time.Minute)
			if writers() != 0 {
				t.Errorf("%d copies of a tail that was dropped are written", writers())
			}
		}
		open(t, s, p, 3, root, 0).grow(16)
		time.Sleep(time.Second)
		if p.Close(); writers() != 0 {
			t.Errorf("%d copies are written when the store is closed", writers())
		}
	})
}
