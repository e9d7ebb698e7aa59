package peers_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/peers"
	"github.com/kvmesh/kvmesh/kvcache/placement"
)

// EraseTenant is that of a host's store, where the host answers.
func (h *host) EraseTenant(ctx context.Context, e kvcache.Erasure) (int, error) {
	if err := h.enter(ctx); err != nil {
		return 0, err
	}
	h.set(func(h *host) { h.told = append(h.told, len(h.puts)) })
	return h.Store.EraseTenant(ctx, e)
}

// Drop is that of a host's store, where the host answers.
func (h *host) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	if err := h.enter(ctx); err != nil {
		return err
	}
	h.set(func(h *host) { h.told = append(h.told, len(h.puts)) })
	return h.Store.Drop(ctx, f)
}

// blocksOn is how many of some blocks a host has.
func (s *site) blocksOn(id string, frames []*kvcache.Frame) (n int) {
	s.Helper()
	for _, f := range frames {
		l, err := s.hosts[id].Store.Get(s.Context(), f.Ref)
		if err == nil {
			l.Release()
			n++
		} else if !errors.Is(err, kvcache.ErrNotFound) {
			s.Error(err)
		}
	}
	return n
}

// owed is how much each member is still to forget that has something to.
func owed(p *peers.Store) map[string]int {
	m := map[string]int{}
	for _, st := range p.States() {
		if st.Owed > 0 {
			m[st.ID] = st.Owed
		}
	}
	return m
}

// forgets are both ways to have the other hosts forget blocks of tenant t.
func forgets(p *peers.Store, frames []*kvcache.Frame) map[string]func() error {
	return map[string]func() error{
		"tenant": func() error {
			_, err := p.EraseTenant(context.Background(), kvcache.ErasureOf("t", func(int) {}))
			return err
		},
		"model": func() error { return p.Drop(context.Background(), frames[0].Fingerprint) },
	}
}

// TestForget: all hosts forget a tenant, or a model. One that fails, hangs or has left is
// named, and told when it is back, by the next process too.
func TestForget(t *testing.T) {
	for _, what := range []string{"tenant", "model"} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { forget(t, what) })
		})
	}
}

func forget(t *testing.T, what string) {
	s := newSite(t, 5, 1)
	defer s.close()
	book := filepath.Join(t.TempDir(), "book")
	open := func() *peers.Store {
		return s.store("a", func(c *peers.Config) { c.Book, c.Copies, c.Keep, c.Own = book, 5, time.Second, s.hosts["a"] })
	}
	p := open()
	frames, _ := chain(t, 1, 3)
	put(t, p, frames)
	for _, f := range frames {
		if err := s.hosts["a"].Store.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	left := func(m placement.Member) bool { return m.ID == "e" }
	all := s.list
	s.list = slices.DeleteFunc(slices.Clone(all), left)
	p.SetMembers(s.list)
	<-time.After(2 * time.Second)
	p.SetMembers(s.list) // it is forgotten for reads now
	s.hosts["c"].set(func(h *host) { h.err = errors.New("refused") })
	s.hosts["d"].set(func(h *host) { h.hang = true })

	err := forgets(p, frames)[what]()
	if err == nil {
		t.Fatal("three hosts are away, and nobody is told")
	}
	for id, named := range map[string]bool{"b": false, "c": true, "d": true, "e": true} {
		if strings.Contains(err.Error(), "KV peer "+id+": not done yet") != named {
			t.Errorf("host %s is named: %v, in: %v", id, !named, err)
		}
		want := 0
		if named {
			want = 3
		}
		if n := s.blocksOn(id, frames); n != want {
			t.Errorf("%d blocks on host %s, want %d", n, id, want)
		}
	}
	s.hosts["c"].set(func(h *host) { h.err = nil })
	<-time.After(2 * time.Minute)
	if n := s.blocksOn("c", frames); n != 0 || owed(p)["c"] != 0 || owed(p)["d"] != 1 || owed(p)["e"] != 1 {
		t.Errorf("%d blocks on a host that is back; %v is still to be done", n, owed(p))
	}
	p.Close()

	p = open()
	defer p.Close()
	if o := owed(p); o["d"] != 1 || o["e"] != 1 {
		t.Errorf("the next process knows of %v", o)
	}
	s.hosts["d"].set(func(h *host) { h.hang = false })
	// What one of them sends on before it is told does not stay.
	for _, id := range []string{"b", "e"} {
		if err := s.hosts[id].Store.Put(t.Context(), frames[0]); err != nil {
			t.Fatal(err)
		}
	}
	p.SetMembers(all)
	<-time.After(5 * time.Second)
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		if n := s.blocksOn(id, frames); n != 0 || len(owed(p)) != 0 {
			t.Errorf("%d blocks on host %s that is back; %v is still to be done", n, id, owed(p))
		}
	}
	if err := forgets(p, frames)[what](); err != nil {
		t.Errorf("all are there: %v", err)
	}
}

// TestForgetOnTheWay: what one host copies to another while a tenant is erased is erased, too.
func TestForgetOnTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 3, 1)
		defer s.close()
		p := s.store("a", nil)
		defer p.Close()
		frames, _ := chain(t, 1, 2)
		if err := s.hosts["b"].Store.Put(t.Context(), frames[0]); err != nil {
			t.Fatal(err)
		}
		// The slow one erases last; what it has sent off before comes to the other, which has
		// erased already.
		s.hosts["b"].set(func(h *host) { h.delay = 200 * time.Millisecond })
		go func() {
			<-time.After(100 * time.Millisecond)
			if err := s.hosts["c"].Store.Put(t.Context(), frames[0]); err != nil {
				t.Error(err)
			}
		}()
		if err := forgets(p, frames)["tenant"](); err != nil {
			t.Fatal(err)
		}
		if b, c := s.blocksOn("b", frames), s.blocksOn("c", frames); b+c != 0 {
			t.Errorf("%d and %d blocks are left", b, c)
		}
	})
}

// TestBookDamaged: a book that cannot be read is said, and costs nothing else.
func TestBookDamaged(t *testing.T) {
	s := newSite(t, 2, 1)
	defer s.close()
	book := filepath.Join(t.TempDir(), "book")
	for _, text := range []string{"{", `{"left":null}`, ""} {
		if err := os.WriteFile(book, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		p := s.store("a", func(c *peers.Config) { c.Book = book })
		frames, _ := chain(t, 1, 1)
		put(t, p, frames)
		if err := forgets(p, frames)["tenant"](); err != nil || len(owed(p)) != 0 {
			t.Errorf("%q: %v", text, err)
		}
		p.Close()
	}
}

// TestForgetMeanwhile: a host that is back is not asked for what it has yet to forget, and is not
// given any of it, before it has been told, which is soon.
func TestForgetMeanwhile(t *testing.T) {
	for _, what := range []string{"tenant", "model"} {
		synctest.Test(t, func(t *testing.T) {
			s := newSite(t, 2, 2)
			defer s.close()
			p := s.store("a", nil)
			defer p.Close()
			frames, ids := chain(t, 1, 3)
			put(t, p, frames)
			b := s.hosts["b"]
			b.set(func(h *host) { h.err = errors.New("no route to host") })
			if err := forgets(p, frames)[what](); err == nil {
				t.Fatal("a host that is away has forgotten something")
			}
			<-time.After(10*time.Minute + 10*time.Second)
			b.set(func(h *host) { h.err, h.puts = nil, nil })
			more, _ := chain(t, 2, 1)
			for range 100 {
				_ = p.Put(t.Context(), more[0]) // fails at first
				m, err := p.Longest(t.Context(), kvcache.Query{Space: frames[0].Space, IDs: ids})
				if err == nil && len(m.Blocks) > 0 {
					t.Fatalf("%s: %d blocks are found of what was forgotten", what, len(m.Blocks))
				}
				<-time.After(100 * time.Millisecond)
			}
			if n := s.blocksOn("b", frames); len(owed(p)) != 0 || n != 0 || len(b.told) == 0 || b.told[0] != 0 {
				t.Errorf("%s: %d blocks are there 10 s later, and %v is to be forgotten; it was told after so many puts: %v", what, n, owed(p), b.told)
			}
			put(t, p, frames)
			if n := found(t, p, ids); n != 3 {
				t.Errorf("%s: %d of 3 blocks are found that were put since", what, n)
			}
		})
	}
}

// readFrom is what a host has itself, from which another one reads a block before it has forgotten it.
type readFrom struct {
	*host
	read func()
}

// Drop implements kvcache.Forgetter.
func (r *readFrom) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	r.read()
	return r.host.Drop(ctx, f)
}

// TestForgetReadBack: what a host reads back, when it was told once more, from one that was not yet,
// does not stay.
func TestForgetReadBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, 2, 2)
		defer s.close()
		frames, _ := chain(t, 1, 1)
		b, reads := s.hosts["b"], 0
		p := s.store("a", func(c *peers.Config) {
			c.Own = &readFrom{s.hosts["a"], func() {
				if reads++; reads == 1 {
					if err := b.Store.Put(t.Context(), frames[0]); err != nil {
						t.Error(err)
					}
				}
			}}
		})
		defer p.Close()
		b.set(func(h *host) { h.err = errors.New("no route to host") })
		if err := forgets(p, frames)["model"](); err == nil {
			t.Fatal("a host that is away has forgotten something")
		}
		b.set(func(h *host) { h.err = nil })
		<-time.After(time.Minute)
		if n := s.blocksOn("b", frames); n != 0 || reads == 0 || len(owed(p)) != 0 {
			t.Errorf("%d blocks are on the host that read one back; %v is to be forgotten", n, owed(p))
		}
	})
}
