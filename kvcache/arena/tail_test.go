//go:build unix

package arena

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// one is the range of one token at a position.
func one(at int) kvcache.Range {
	return kvcache.Range{First: at, IDs: []int32{int32(at)}, Data: make([]byte, 3000+at)}
}

// TestWriterGoesOn: a writer whose process or connection was lost goes on where it knows
// that it was, in the same tail, over a restart of the owner, too.
func TestWriterGoesOn(t *testing.T) {
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir})
	space := kvcache.NewSpace("m", nil)
	tw, err := s.OpenTail(ctx, kvcache.TailSpec{Space: space, Stream: "s", First: 10})
	if err != nil {
		t.Fatal(err)
	}
	no := tw.(*TailWriter).No()
	for at := 10; at < 50; at++ {
		if err := tw.Append(one(at)); err != nil {
			t.Fatal(err)
		}
	}
	check := func(want int) {
		t.Helper()
		tails, err := s.ReadTail(ctx, space, "s", 0)
		if err != nil || len(tails) != 1 || len(tails[0].Ranges) != want-10 {
			t.Fatalf("%d tails, %d ranges, want %d: %v", len(tails), len(tails[0].Ranges), want-10, err)
		}
		for i, r := range tails[0].Ranges {
			if r.First != 10+i || len(r.Data) != 3010+i {
				t.Fatalf("range %d is at %d with %d bytes", i, r.First, len(r.Data))
			}
		}
	}
	check(50)
	// It had not heard of the last ones.
	for _, next := range []int{50, 49, 30, 12} {
		s.Close()
		s = newStore(t, Config{Dir: dir})
		w, err := s.Writer(ctx, no, next)
		if err != nil {
			t.Fatalf("from %d: %v", next, err)
		}
		check(next)
		if err := w.Append(one(next)); err != nil {
			t.Fatal(err)
		}
		check(next + 1)
		if err := w.Append(kvcache.Range{First: next + 1, IDs: make([]int32, 3), Data: make([]byte, 10)}); err != nil {
			t.Fatal(err)
		}
		if _, err = s.Writer(ctx, no, next+1); err != nil {
			t.Fatal(err)
		}
		check(next + 1)
	}
	for name, c := range map[string]struct {
		no   uint64
		next int
		want error
	}{
		"unknown": {no + 100, 13, kvcache.ErrStale}, "before": {no, 9, kvcache.ErrGap}, "behind": {no, 14, kvcache.ErrGap},
	} {
		if _, err := s.Writer(ctx, c.no, c.next); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if _, err := s.OpenTail(ctx, kvcache.TailSpec{Space: space, Stream: "s", First: 10, Attempt: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Writer(ctx, no, 13); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("overtaken: %v", err)
	}
}

// TestTailRoomComesBack: rotating for ever takes no more room than one tail.
func TestTailRoomComesBack(t *testing.T) {
	s := newStore(t, Config{})
	space := kvcache.NewSpace("m", nil)
	w, err := s.OpenTail(context.Background(), kvcache.TailSpec{Space: space, Stream: "s"})
	if err != nil {
		t.Fatal(err)
	}
	most := int64(0)
	for round := range 200 {
		for at := range 8 {
			if err := w.Append(one(8*round + at)); err != nil {
				t.Fatal(err)
			}
		}
		if most = max(most, s.Stats().Used); round == 0 {
			continue
		}
		if err := w.Rotate(space.Root, 8*(round+1)); err != nil {
			t.Fatal(err)
		}
		if used := s.Stats().Used; used != grain {
			t.Fatalf("%d bytes in use after rotation", used)
		}
		if round == 1 {
			most = 0
		}
	}
	if most > 100_000 {
		t.Errorf("%d bytes in use at most", most)
	}
}
