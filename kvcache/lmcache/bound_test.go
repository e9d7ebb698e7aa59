//go:build unix

package lmcache

import (
	"context"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
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

// TestOtherConfigs: configurations that are not the same are not taken for each other,
// whatever their values are, as text would have some of them.
func TestOtherConfigs(t *testing.T) {
	salts := map[string]int{}
	for i, v := range []any{
		nil, true, false, "true", "", "AQI=",
		[]byte{1, 2},
		"\xff", "\xfe", "\ufffd", uint64(1), int64(-1), 1.0, "1",
		[]any{},
		[]any{"a", "b"},
		[]any{"ab"},
		[]any{[]any{"a"}, "b"},
		map[string]any{},
		map[string]any{"a": "b"},
		map[string]any{"ab": ""},
		map[string]any{"a": nil, "b": nil},
	} {
		b, err := msgp.AppendIntf(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "k"), v)
		if err != nil {
			t.Fatal(err)
		}
		salt, err := saltOf("s", b)
		if err != nil {
			t.Fatalf("%#v: %v", v, err)
		}
		if was, there := salts[string(salt)]; there {
			t.Errorf("values %d and %d are the same", was, i)
		}
		salts[string(salt)] = i
	}
	one, err1 := saltOf("s", msgp.AppendInt64(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "k"), 300))
	two, err2 := saltOf("s", msgp.AppendUint64(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "k"), 300))
	if err1 != nil || err2 != nil || string(one) != string(two) {
		t.Errorf("one number, written in two ways: %q, %q", one, two)
	}
}

// TestTooMany: engines that are not known, and look-ups, are remembered up to a bound; a
// look-up more finds nothing, and those that are there go on.
func TestTooMany(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, 2*testChunk)
	e.save(ids, 0, 2)
	p.srv.mu.Lock()
	p.srv.looking = mostLooking
	p.srv.mu.Unlock()
	if n := e.ask(ids); n != 0 {
		t.Errorf("%d chunks are found by a look-up too many", n)
	}
	p.srv.mu.Lock()
	p.srv.looking = 0
	p.srv.mu.Unlock()
	if n := e.ask(ids); n != 2 {
		t.Errorf("%d of 2 chunks are found", n)
	}
	await(t, "nothing looks any more", func() bool {
		p.srv.mu.Lock()
		defer p.srv.mu.Unlock()
		return p.srv.looking == 0
	})
	for id := range int64(mostInstances + 10) {
		other := 1000 + id
		if a, err := e.Ping(t.Context(), &lmcachepb.PingRequest{InstanceId: &other}); err != nil || a.Ok {
			t.Fatalf("an engine that nobody knows: %v, %v", a, err)
		}
	}
	p.srv.mu.Lock()
	defer p.srv.mu.Unlock()
	if n := len(p.srv.strangers); n != mostInstances {
		t.Errorf("%d strangers are remembered", n)
	}
}
