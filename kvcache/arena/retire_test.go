//go:build unix

package arena

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// TestManyTenants writes for many more tenants than there is room for, one after the other:
// what is known of those who have nothing any more goes with the journal's next rewriting,
// the numbers that mean others since name the right blocks, before and after a restart, and
// who comes back is served.
func TestManyTenants(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir, Limit: 1 << 20})
	ctx := context.Background()
	kept := kvcache.NewSpace("kept", nil) // has a stream and no block
	if _, err := s.OpenTail(ctx, kvcache.TailSpec{Space: kept, Stream: "s", Attempt: 7}); err != nil {
		t.Fatal(err)
	}
	frames := map[int]*kvcache.Frame{}
	write := func(from, to int) {
		for i := from; i < to; i++ {
			space := kvcache.NewSpace("m", fmt.Append(nil, "tenant ", i))
			frames[i] = sealed(t, space, space.Root, int32(i), 10_000)
			put(t, s, frames[i])
			delete(frames, i-5000)
		}
	}
	const rounds, each = 4, 9000
	for round := range rounds {
		write(round*each, (round+1)*each)
		if err := s.compact(ctx); err != nil {
			t.Fatal(err)
		}
		if most := s.policy.Len() + each + 2; len(s.index.spaces) > most {
			t.Fatalf("%d spaces are known after %d, of which %d have blocks", len(s.index.spaces), (round+1)*each, s.policy.Len())
		}
	}
	write(0, 10) // they come back
	check := func(s *Store) (there int) {
		for i, f := range frames {
			if !has(t, s, f) {
				continue
			}
			there++
			m, err := s.Longest(ctx, kvcache.Query{Space: f.Space, IDs: f.IDs})
			if err != nil || len(m.Blocks) != 1 || m.Blocks[0].Ref != f.Ref {
				t.Fatalf("tenant %d: %v, %v", i, m, err)
			}
		}
		return there
	}
	before := check(s)
	s.Close()
	again := newStore(t, Config{Dir: dir, Limit: 1 << 20})
	if after := check(again); after != before || before < 20 {
		t.Errorf("%d blocks after a restart, %d before", after, before)
	}
	if _, err := again.OpenTail(ctx, kvcache.TailSpec{Space: kept, Stream: "s", Attempt: 6}); err == nil {
		t.Error("a stream without blocks is forgotten")
	}
}

// TestRetireKilled: an owner that ends between the beginning of a compaction and the new
// journal leaves two numbers for a space that came back meanwhile. Its blocks are found.
func TestRetireKilled(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir, Limit: 1 << 20})
	ctx := context.Background()
	a, b := kvcache.NewSpace("m", []byte("a")), kvcache.NewSpace("m", []byte("b"))
	fa, fb := sealed(t, a, a.Root, 1, 1000), sealed(t, b, b.Root, 2, 1000)
	remove := func(f *kvcache.Frame) {
		t.Helper()
		if ok, err := s.Remove(ctx, f.Ref); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	check := func(when string) {
		t.Helper()
		if m, err := s.Longest(ctx, kvcache.Query{Space: b, IDs: fb.IDs}); err != nil || len(m.Blocks) != 1 || !has(t, s, fb) {
			t.Errorf("%s: %+v, %v", when, m, err)
		}
	}
	put(t, s, fa, fb) // numbers 0 and 1
	remove(fa)
	if err := s.compact(ctx); err != nil { // 0 is free
		t.Fatal(err)
	}
	remove(fb)
	s.mu.Lock()
	_, err := s.compactLocked(-1, 1) // 1 is on its way
	s.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	put(t, s, fb)
	if no := s.index.spaceOf[b]; no != 0 {
		t.Fatalf("it has number %d again: the test proves nothing", no)
	}
	check("before")
	for _, when := range []string{"after a restart", "after another one"} {
		s.Close() // and gives the new journal up
		s = newStore(t, Config{Dir: dir, Limit: 1 << 20})
		check(when)
	}
	if err := s.compact(ctx); err != nil || len(s.index.spareSpaces) != 1 {
		t.Errorf("%d numbers are free, want 1: %v", len(s.index.spareSpaces), err)
	}
	put(t, s, fa)
	s.Close()
	s = newStore(t, Config{Dir: dir, Limit: 1 << 20})
	check("when its old number is another's")
	if !has(t, s, fa) {
		t.Error("nor is that one there")
	}
}

// TestRetireWaits: while spaces are being walked through by number, none is given again.
func TestRetireWaits(t *testing.T) {
	s := newStore(t, Config{Limit: 1 << 20})
	ctx := context.Background()
	old := kvcache.NewSpace("old", nil)
	f := sealed(t, old, old.Root, 1, 1000)
	put(t, s, f)
	s.mu.Lock()
	end := s.walkLocked()
	s.mu.Unlock()
	if ok, err := s.Remove(ctx, f.Ref); !ok || err != nil {
		t.Fatal(ok, err)
	}
	for _, want := range []int{0, 1} {
		if err := s.compact(ctx); err != nil {
			t.Fatal(err)
		}
		if n := len(s.index.spareSpaces); n != want {
			t.Errorf("%d numbers are free, want %d", n, want)
		}
		if want == 0 {
			end()
		}
	}
	if l, err := s.Reclaim(ctx, old.Fingerprint, time.Now()); err != nil || l != (Left{}) {
		t.Errorf("%+v, %v", l, err)
	}
	if models, err := s.Models(ctx); err != nil || len(models) != 0 {
		t.Errorf("%+v, %v", models, err)
	}
	next := kvcache.NewSpace("next", nil)
	put(t, s, sealed(t, next, next.Root, 2, 1000))
	if n := len(s.index.spaces); n != 1 {
		t.Errorf("%d spaces", n)
	}
}
