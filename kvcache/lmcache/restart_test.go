//go:build unix

package lmcache

import (
	"context"
	"os"
	"testing"
)

// TestServerRestartWhileReading: a server that ends in good order does not give up what engines
// were told: what one reads stays, what one writes is nobody else's room.
func TestServerRestartWhileReading(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, 4*testChunk)
	e.save(ids, 0, 3)
	if n := e.ask(ids); n != 3 {
		t.Fatalf("%d chunks", n)
	}
	read, ok := e.open(ids, 0, 2)
	room, chunks := e.prepare(ids, 3, 4)
	if !ok || len(room) != 1 {
		t.Fatal("cannot be read or written")
	}
	e.fill(ids, 3, room, chunks)
	p.stopServer()
	p.startServer()
	p.churn(100)
	if !e.same(ids, 0, read) || !e.same(ids, 3, room) {
		t.Error("others have got the room")
	}
	if n := p.newEngine(2).register().ask(ids); n != 3 {
		t.Errorf("%d chunks are left of what was promised", n)
	}
}

// TestRestartWhileBound: a server that ends while it hashes an engine's weights leaves no
// registration that is never bound: with the next one the engine registers again, and until
// then nothing is found that it could not read.
func TestRestartWhileBound(t *testing.T) {
	p := newPlace(t)
	known := p.newEngine(2).register()
	ids := tokens(1, testChunk)
	known.save(ids, 0, 1)
	byWay := p.cfg.Weights
	p.srv.cfg.Weights = weightsFrom(nil)
	e := p.newEngine(1).register()
	before, err := os.ReadFile(p.srv.cfg.State)
	if err != nil {
		t.Fatal(err)
	}
	p.stopServer()
	after, err := os.ReadFile(p.srv.cfg.State)
	if err != nil || string(after) != string(before) {
		t.Errorf("a registration that was not bound is kept: %s, %v", after, err)
	}
	// Another one's registration may have kept it, or weights that could not be hashed.
	p.cfg.Weights = func(context.Context, string) (string, error) { return "", os.ErrNotExist }
	p.startServer()
	e.register()
	await(t, "kept", func() bool {
		text, err := os.ReadFile(p.srv.cfg.State)
		return err == nil && len(text) > len(before)
	})
	p.stopServer()
	p.cfg.Weights = byWay
	p.startServer()
	if n := known.ask(ids); n != 0 {
		t.Errorf("%d chunks are found while nobody knows who asks", n)
	}
	if e.ping() || !e.ping() {
		t.Fatal("it does not have to register again")
	}
	if n := e.register().ask(ids); n != 1 {
		t.Errorf("%d chunks are found after", n)
	}
	e.reads(ids, 0, 1)
}
