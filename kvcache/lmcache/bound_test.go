//go:build unix

package lmcache

import (
	"context"
	"testing"
)

// TestRegisterAgainWithOtherFiles: an engine that registers again, also with a server that has
// come since, keeps the weights that it was bound to, though the files have others by then;
// what it stores is not found by an engine that has loaded those.
func TestRegisterAgainWithOtherFiles(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	before, ids, more := tokens(1, testChunk), tokens(2, testChunk), tokens(3, testChunk)
	e.save(before, 0, 1)
	newer := func(context.Context, string) (string, error) { return "new", nil }
	p.srv.cfg.Weights = newer
	e.register().save(ids, 0, 1)
	e.reads(before, 0, 1)
	p.stopServer()
	p.cfg.Weights = newer
	p.startServer()
	e.register().save(more, 0, 1)
	e.reads(before, 0, 1)
	other := p.newEngine(2).register()
	for _, of := range [][]int64{before, ids, more} {
		if _, ok := other.open(of, 0, 1); ok {
			t.Error("what old weights have computed is read for the new ones")
		}
		e.reads(of, 0, 1)
	}
}

// TestRegisterAgainWhileBound: an engine that registers again while its weights are being
// hashed has those that were hashed for its first registration.
func TestRegisterAgainWhileBound(t *testing.T) {
	p := newPlace(t)
	hash := make(chan string)
	p.srv.cfg.Weights = weightsFrom(hash)
	e := p.newEngine(1).register().register()
	hash <- "first"
	await(t, "bound", func() bool { _, ok := p.srv.caller(t.Context(), e.id); return ok })
	hash <- "second"
	p.stopServer() // waits for it
	p.cfg.Weights = weightsFrom(nil)
	p.startServer()
	if i, ok := p.srv.caller(t.Context(), e.id); !ok || i.Weights != "first" {
		t.Errorf("it has the weights %q", i.Weights)
	}
}
