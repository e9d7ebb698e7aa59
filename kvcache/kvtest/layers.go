package kvtest

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

const (
	// manyLayers is how many layers the blocks of testLayers have, of keys and values of layerLen bytes
	// each, behind a part of no layer: so much that it is worth not to read them all.
	manyLayers = 8
	layerLen   = 20_000
)

// layered makes a block with layers.
func layered(space kvcache.Space, parent kvcache.Key, first int, ids []int32) *kvcache.Frame {
	parts := []kvcache.Part{{Plane: kvcache.PlaneMeta, Size: 100}}
	for i := range manyLayers {
		parts = append(parts,
			kvcache.Part{Layer: uint16(i), Layers: 1, Plane: kvcache.PlaneKeys, Size: layerLen},
			kvcache.Part{Layer: uint16(i), Layers: 1, Plane: kvcache.PlaneValues, Size: layerLen})
	}
	payload := content(space.Key(parent, ids), 0, 100+2*manyLayers*layerLen)
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: first, IDs: ids}, parts, payload)
	if err != nil {
		panic(err) // of this package's own making
	}
	return f
}

// layeredChain makes n of them.
func layeredChain(space kvcache.Space, n int) (frames []*kvcache.Frame, found []kvcache.Found) {
	ids, parent := tokens(9, 16*n), space.Root
	for i := range n {
		f := layered(space, parent, 16*i, ids[16*i:16*(i+1)])
		frames, parent = append(frames, f), f.Key
		found = append(found, kvcache.Found{Ref: f.Ref, First: f.First, Tokens: 16, Size: f.Total})
	}
	return frames, found
}

// rightLayers checks that what is lent has the layers, and of others nothing that is wrong.
func rightLayers(t testing.TB, l *kvcache.Lent, f *kvcache.Frame, r kvcache.Layers) {
	t.Helper()
	wanted := r.Parts(&f.Header)
	if !slices.Equal(l.IDs, f.IDs) || l.Ref != f.Ref || len(l.Parts) != len(f.Parts) {
		t.Errorf("layers %+v: header %+v", r, l.Header)
		return
	}
	for i, p := range f.Parts {
		b, err := l.Part(i)
		if errors.Is(err, kvcache.ErrAbsent) && !slices.Contains(wanted, i) {
			continue
		}
		if err != nil || !bytes.Equal(b, f.Bytes()[p.Offset:p.Offset+p.Size]) {
			t.Errorf("layers %+v: part %d, of layer %d: %v, or other bytes", r, i, p.Layer, err)
		}
	}
}

// testLayers: a range of layers is there and right, whatever the store does with the others, and a
// chain is read in the order asked for as far as it goes.
func testLayers(t *testing.T, h Harness) {
	ctx := context.Background()
	dir := newDir(t)
	s := h.open(t, dir, plenty)
	space := kvcache.NewSpace("model", nil)
	frames, chain := layeredChain(space, 3)
	if _, err := kvcache.GetLayers(ctx, s, frames[0].Ref, kvcache.Layers{To: 1}); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("layers of a block that is not there: %v", err)
	}
	put(t, s, frames...)
	for _, r := range []kvcache.Layers{
		{From: 0, To: 8},
		{From: 0, To: 1},
		{From: 2, To: 5},
		{From: 7, To: 8, NewestFirst: true},
		{From: 6, To: 90, NewestFirst: true},
		{From: 9, To: 12},
	} {
		for _, f := range frames {
			l, err := kvcache.GetLayers(ctx, s, f.Ref, r)
			if err != nil {
				t.Fatalf("layers %+v: %v", r, err)
			}
			rightLayers(t, l, f, r)
			l.Release()
			if _, err := l.Part(0); err == nil {
				t.Error("what was released is read")
			}
		}
	}
	for _, r := range []kvcache.Layers{{From: 3, To: 3}, {From: -1, To: 2}} {
		if _, err := kvcache.GetLayers(ctx, s, frames[0].Ref, r); err == nil {
			t.Errorf("layers %+v are there", r)
		}
	}
	foreign := frames[0].Ref
	foreign.Space = kvcache.NewSpace("model", []byte("another tenant"))
	if l, err := kvcache.GetLayers(ctx, s, foreign, kvcache.Layers{To: 8}); err == nil {
		l.Release()
		t.Error("served to another tenant")
	}
	if !has(t, s, frames[0].Ref) {
		t.Error("gone, because another tenant has asked for it")
	}
	if h.Ranged {
		fewerBytes(t, s, frames[0])
	}
	readChain(t, s, frames, chain)
	damagedLayers(t, h, dir, s, frames)
}

// fewerBytes checks that a store that reads layers alone does so.
func fewerBytes(t *testing.T, s kvcache.Store, f *kvcache.Frame) {
	before, counted := stats(s)
	l, err := kvcache.GetLayers(context.Background(), s, f.Ref, kvcache.Layers{From: 6, To: 7})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	after, _ := stats(s)
	if n := after.HitBytes - before.HitBytes; counted && (after.Hits != before.Hits+1 || n < 2*layerLen || n > uint64(f.Total)/2) {
		t.Errorf("one layer of %d counts as %d hits with %d bytes of %d", manyLayers, after.Hits-before.Hits, n, f.Total)
	}
	if _, err := l.Part(1); !errors.Is(err, kvcache.ErrAbsent) {
		t.Errorf("layer 0 was read, too: %v", err)
	}
}

// readChain reads a chain's layers in all ways.
func readChain(t *testing.T, s kvcache.Store, frames []*kvcache.Frame, chain []kvcache.Found) {
	stop := errors.New("stop")
	over, cancel := context.WithCancel(context.Background())
	cancel()
	gap := slices.Clone(chain)
	gap[1].Key[0] ^= 1
	for name, c := range map[string]struct {
		ctx    context.Context
		chain  []kvcache.Found
		newest bool
		at     int // where take has an error, from 1
		want   int
	}{
		"all":            {context.Background(), chain, false, 0, 3},
		"newest first":   {context.Background(), chain, true, 0, 3},
		"no time":        {over, chain, false, 0, 0},
		"a gap":          {context.Background(), gap, false, 0, 1},
		"a gap, newest":  {context.Background(), gap, true, 0, 1},
		"error":          {context.Background(), chain, false, 2, 1},
		"nothing at all": {context.Background(), nil, false, 0, 0},
	} {
		r, n := kvcache.Layers{From: 3, To: 5, NewestFirst: c.newest}, 0
		got, err := kvcache.ReadLayers(c.ctx, s, c.chain, r, func(b kvcache.Found, l *kvcache.Lent) error {
			at := n
			if n++; c.newest {
				at = len(frames) - n
			}
			if b != c.chain[at] {
				t.Errorf("%s: block %d is another one", name, n)
			}
			if n == c.at {
				return stop
			}
			rightLayers(t, l, frames[at], r)
			return nil
		})
		if got != c.want || (c.at > 0) != errors.Is(err, stop) || c.at == 0 && err != nil {
			t.Errorf("%s: %d blocks, %v; want %d", name, got, err, c.want)
		}
	}
}

// damagedLayers: what is wrong in a layer is refused by whoever reads that one, counted, and then gone.
func damagedLayers(t *testing.T, h Harness, dir string, s kvcache.Store, frames []*kvcache.Frame) {
	if h.Tamper == nil {
		return
	}
	f, ctx := frames[1], context.Background()
	bad := kvcache.Layers{From: 2, To: 3}
	wrong := bad.Parts(&f.Header)[1]
	for name, change := range map[string]func([]byte) []byte{
		"a bit of the layer":  func(b []byte) []byte { b[f.Parts[wrong].Offset+77] ^= 4; return b },
		"a bit of the header": func(b []byte) []byte { b[70] ^= 4; return b },
		"the end":             func(b []byte) []byte { return b[:len(b)-1] },
		"all":                 func([]byte) []byte { return nil },
	} {
		put(t, s, frames...)
		if err := h.Tamper(dir, f.Ref, change); errors.Is(err, ErrSame) {
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		// Another layer may be right, and is if it is served.
		other := kvcache.Layers{From: 5, To: 6}.Parts(&f.Header)[1]
		if l, err := kvcache.GetLayers(ctx, s, f.Ref, kvcache.Layers{From: 5, To: 6}); err == nil {
			p := f.Parts[other]
			if b, err := l.Part(other); err == nil && !bytes.Equal(b, f.Bytes()[p.Offset:p.Offset+p.Size]) {
				t.Errorf("%s: another layer is served with other bytes", name)
			}
			l.Release()
		}
		l, err := kvcache.GetLayers(ctx, s, f.Ref, bad)
		if err == nil {
			_, err = l.Part(wrong)
			l.Release()
		}
		if name == "a bit of the layer" && (err == nil || has(t, s, f.Ref)) {
			t.Errorf("%s: served (%v), or still there", name, err)
		}
		_ = readBlock(s, f.Ref) // by now it is gone, however little of it was wrong
		if has(t, s, f.Ref) {
			t.Errorf("%s: still there", name)
		}
	}
}
