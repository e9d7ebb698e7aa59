package kvtest

import (
	"context"
	"errors"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// testWalk shows all blocks of two models, checks them, and finds the one that was changed,
// which is gone then.
func testWalk(t *testing.T, h Harness) {
	dir := newDir(t)
	s := h.open(t, dir, plenty)
	w, ok := s.(kvcache.Walker)
	if !ok {
		t.Skip("the store cannot show its blocks")
	}
	ids := tokens(1, 64*3)
	var all []*kvcache.Frame
	for _, model := range []string{"model", "model 2"} {
		all = append(all, chain(kvcache.NewSpace(model, nil), ids, 64, 200)...)
	}
	put(t, s, all...)
	if n, bad := walked(t, w); n != len(all) || bad != 0 {
		t.Fatalf("%d of %d blocks, %d of them wrong", n, len(all), bad)
	}
	stop := errors.New("stop")
	if err := w.Walk(context.Background(), func(kvcache.Seen) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("a walk that is to end: %v", err)
	}
	never := kvcache.NewSpace("never", nil)
	if err := w.Check(context.Background(), never.Child(never.Root, ids[:64])); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("a block that is not there: %v", err)
	}
	if h.Tamper == nil {
		return
	}
	last := all[len(all)-1]
	if err := h.Tamper(dir, last.Ref, func(b []byte) []byte {
		b[len(b)-1] ^= 1
		return b
	}); err != nil {
		t.Fatal(err)
	}
	if n, bad := walked(t, w); n != len(all) || bad != 1 {
		t.Errorf("%d of %d blocks, %d of them wrong, one was changed", n, len(all), bad)
	}
	if n, bad := walked(t, w); n != len(all)-1 || bad != 0 {
		t.Errorf("%d of %d blocks, %d of them wrong, and the wrong one was found before", n, len(all), bad)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := w.Walk(context.Background(), func(kvcache.Seen) error { return nil }); err == nil {
		t.Error("a closed store shows blocks")
	}
}

// walked counts the blocks that a store shows, and those that are wrong.
func walked(t *testing.T, w kvcache.Walker) (n, bad int) {
	t.Helper()
	var refs []kvcache.Ref
	err := w.Walk(context.Background(), func(s kvcache.Seen) error {
		n++
		switch {
		case s.Name == "" || (s.Header == nil) == (s.Err == nil):
			t.Errorf("a block without a name, or with neither header nor error: %+v", s)
		case s.Err != nil:
			bad++
		default:
			refs = append(refs, s.Header.Ref)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, ref := range refs {
		err := w.Check(context.Background(), ref)
		_, refused := errors.AsType[*kvcache.Refusal](err)
		if err != nil && !refused {
			t.Fatal(err)
		}
		if refused {
			bad++
		}
	}
	return n, bad
}
