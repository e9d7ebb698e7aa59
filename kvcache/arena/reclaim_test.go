//go:build unix

package arena

import (
	"context"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// TestReclaim: what no stream needs goes; a chain before a tail stays until that is gone, and
// what has just come for a moment; other models and what is being read are left alone.
func TestReclaim(t *testing.T) {
	s := newStore(t, Config{})
	ctx := context.Background()
	old, other := kvcache.NewSpace("old", nil), kvcache.NewSpace("other", nil)
	head := sealed(t, old, old.Root, 1, 50_000)
	second := sealed(t, old, head.Key, 2, 50_000)
	branch := sealed(t, old, head.Key, 3, 50_000)
	theirs := sealed(t, other, other.Root, 1, 50_000)
	put(t, s, head, second, branch, theirs)
	w, err := s.OpenTail(ctx, kvcache.TailSpec{Space: old, Stream: "s", Attempt: 1, Parent: second.Key, First: 2})
	if err != nil {
		t.Fatal(err)
	}
	reclaim := func(now time.Time) Left {
		t.Helper()
		l, err := s.Reclaim(ctx, old.Fingerprint, now)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	if l := reclaim(time.Now()); l.Blocks != 3 || l.Freed != 0 || l.Tails != 1 {
		t.Errorf("what has just come: %+v", l)
	}
	lent, err := s.Get(ctx, branch.Ref)
	if err != nil {
		t.Fatal(err)
	}
	later := time.Now().Add(time.Hour)
	if l := reclaim(later); l.Blocks != 2 || l.Freed != 1 || l.FreedBytes != branch.Total || l.Tails != 1 {
		t.Errorf("beside a stream: %+v", l)
	}
	if has(t, s, branch) || !has(t, s, head) || !has(t, s, second) {
		t.Error("a block of a stream is gone, or one that nobody needs is not")
	}
	if err := lent.Verify(); err != nil {
		t.Errorf("what was being read has changed: %v", err)
	}
	lent.Release()
	if err := w.Append(kvcache.Range{First: 2, IDs: []int32{7}, Data: []byte("kv")}); err != nil {
		t.Errorf("the stream goes on: %v", err)
	}
	if err := s.DropTail(ctx, old, "s"); err != nil {
		t.Fatal(err)
	}
	if l := reclaim(later); l.Tails != 0 || l.Blocks != 2 {
		t.Errorf("right behind the stream: %+v", l)
	}
	if err := s.Sweep(ctx, later); err != nil {
		t.Fatal(err)
	}
	if l := reclaim(later); l.Blocks != 0 || l.Bytes != 0 || l.Freed != 2 {
		t.Errorf("at last: %+v", l)
	}
	if !has(t, s, theirs) {
		t.Error("another model's block is gone")
	}
	if l := reclaim(later); l != (Left{}) {
		t.Errorf("once more: %+v", l)
	}
	if l, err := s.Reclaim(ctx, kvcache.FingerprintOf("never"), later); err != nil || l != (Left{}) {
		t.Errorf("what never was: %+v, %v", l, err)
	}
}
