package kvcache

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// layeredFrame is a frame with a part of no layer, two parts of one layer each in the wrong order,
// and one of two layers.
func layeredFrame(t testing.TB) *Frame {
	t.Helper()
	parts := []Part{{Layer: 1, Layers: 1, Size: 3}, {Size: 1}, {Layer: 0, Layers: 1, Size: 2}, {Layer: 2, Layers: 2, Size: 4}}
	f, err := Encode(nil, Meta{Space: NewSpace("m", nil), Parent: NewSpace("m", nil).Root, IDs: []int32{1, 2}}, parts, []byte("bbb.aacccc"))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestLayersParts(t *testing.T) {
	f := layeredFrame(t)
	for _, c := range []struct {
		l    Layers
		want []int
	}{
		{Layers{From: 0, To: 4}, []int{1, 2, 0, 3}},
		{Layers{From: 0, To: 4, NewestFirst: true}, []int{1, 3, 0, 2}},
		{Layers{From: 1, To: 2}, []int{1, 0}},
		{Layers{From: 3, To: 9}, []int{1, 3}},
		{Layers{From: 9, To: 10}, []int{1}},
	} {
		if got := c.l.Parts(&f.Header); !slices.Equal(got, c.want) {
			t.Errorf("%+v: parts %v, want %v", c.l, got, c.want)
		}
	}
}

// TestPieces: a frame of some parts has those, and says of the others that they were not asked for.
func TestPieces(t *testing.T) {
	f := layeredFrame(t)
	pieces := make([][]byte, 4)
	pieces[2] = []byte("aa")
	p, err := Pieces(f.Header, pieces)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := p.Part(2); err != nil || string(b) != "aa" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := p.Part(0); !errors.Is(err, ErrAbsent) {
		t.Errorf("a part that is not there: %v", err)
	}
	if err := p.Verify(); !errors.Is(err, ErrAbsent) || p.Bytes() != nil {
		t.Errorf("all of it: %v, %d bytes", err, len(p.Bytes()))
	}
	told := 0
	l := NewLent(p, func() {}, func(error) { told++ })
	pieces[2][0] ^= 1
	if _, err := l.Part(2); err == nil || told != 1 {
		t.Errorf("a wrong part: %v, told %d times", err, told)
	}
	l.Release()
	if _, err := l.Part(2); !errors.Is(err, ErrClosed) {
		t.Errorf("after its release: %v", err)
	}
	for _, bad := range [][][]byte{nil, pieces[:3], {nil, nil, []byte("aaa"), nil}} {
		if _, err := Pieces(f.Header, bad); err == nil {
			t.Errorf("%d pieces of another length are taken", len(bad))
		}
	}
}

// slowStore takes a second for a block, and counts what it lends.
type slowStore struct {
	Store
	f    *Frame
	lent atomic.Int64
}

// Get implements Store. It does not heed the context, as a disk does not.
func (s *slowStore) Get(_ context.Context, ref Ref) (*Lent, error) {
	<-time.After(time.Second)
	s.lent.Add(1)
	f := *s.f
	f.Ref = ref
	return NewLent(&f, func() { s.lent.Add(-1) }, nil), nil
}

// TestReadLayersDeadline: at the budget there is what is contiguous, and what comes later is given back.
func TestReadLayersDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &slowStore{f: layeredFrame(t)}
		chain := make([]Found, 20)
		for i := range chain {
			chain[i].First = i
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
		defer cancel()
		begin, last := time.Now(), -1
		n, err := ReadLayers(ctx, s, chain, Layers{To: 1}, func(b Found, _ *Lent) error {
			if b.First != last+1 {
				t.Errorf("block %d behind block %d", b.First, last)
			}
			last = b.First
			return nil
		})
		// Four at once, and the next one is begun when one is taken.
		if took := time.Since(begin); err != nil || took != 2500*time.Millisecond || n < 4 || n >= 20 || n != last+1 {
			t.Errorf("%d blocks in %v, the last one %d, %v", n, took, last, err)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if left := s.lent.Load(); left != 0 {
			t.Errorf("%d blocks are not given back", left)
		}
	})
}
