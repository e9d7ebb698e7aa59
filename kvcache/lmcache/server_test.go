//go:build unix

package lmcache

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
)

// TestRoundTrip: what one engine stores another one reads, bit for bit, and it is stored
// once.
func TestRoundTrip(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	size, err := e.GetChunkSize(e.ctx, &lmcachepb.GetChunkSizeRequest{})
	if must(e, size, err).GetChunkSize() != testChunk {
		t.Errorf("chunks of %d tokens", size.GetChunkSize())
	}
	ids := tokens(1, 5*testChunk+1)
	if n := e.ask(ids); n != 0 {
		t.Fatalf("%d chunks of nothing", n)
	}
	slots, chunks := e.prepare(ids, 0, 2)
	if len(slots) != 2 || !slices.Equal(chunks, []int{0, 1}) {
		t.Fatalf("room for %v", chunks)
	}
	if g := slots[1]; g.length != 2*2*testChunk*8*4 || !slices.Equal(g.shape, []int{2, 2, testChunk, 8}) || g.dtype != "float32" || g.offset%64 != 0 {
		t.Errorf("slot %+v", g)
	}
	e.over()
	if e.ask(ids) != 0 {
		t.Error("what is not committed is found")
	}
	e.fill(ids, 0, slots, chunks)
	if !e.commit(ids, 0, 2) {
		t.Fatal("not committed")
	}
	// The middle is there already.
	if n := e.save(ids, 0, 2); n != 0 {
		t.Errorf("%d chunks were stored twice", n)
	}
	if n := e.save(ids, 1, 4); n != 2 {
		t.Errorf("%d of 3 chunks were new, want 2", n)
	}
	other := p.newEngine(2).register()
	if n := other.ask(ids); n != 4 {
		t.Fatalf("%d chunks found, want 4", n)
	}
	if n := other.found(); n != 0 {
		t.Errorf("told twice: %d", n)
	}
	other.reads(ids, 0, 4)
	other.over()
	other.reads(ids, 2, 4) // also without a look-up
	if branch := append(slices.Clone(ids[:2*testChunk]), tokens(9, 3*testChunk)...); other.ask(branch) != 2 {
		t.Error("of another continuation not just the common beginning is found")
	}
	if models, err := p.store.Models(t.Context()); err != nil || len(models) != 1 || models[0].Label.Model != "m" || models[0].Blocks != 4 {
		t.Errorf("models %+v, %v", models, err)
	}
}

// TestFrame: a chunk is a block whose parts are layers of keys, then of values.
func TestFrame(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, testChunk)
	e.save(ids, 0, 1)
	i := p.srv.instances[1]
	r, err := runOf(e.key(ids, 0, 1), testChunk)
	if err != nil {
		t.Fatal(err)
	}
	l, err := p.store.Get(t.Context(), r.refs(p.srv.space(*i, &r, 0), testChunk)[0])
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	want := make([]byte, i.Layout.size())
	e.state(want, ids, 0)
	if got, err := l.Payload(); err != nil || string(got) != string(want) {
		t.Errorf("the payload is not what the engine wrote: %v", err)
	}
	if len(l.Parts) != 4 || l.Parts[1].Layer != 1 || l.Parts[1].Plane != kvcache.PlaneKeys || l.Parts[2].Layer != 0 || l.Parts[2].Plane != kvcache.PlaneValues {
		t.Errorf("parts %+v", l.Parts)
	}
}

// TestKeptApart: nothing of another tenant, configuration, model, layout, weights, variant
// or rank is found or read.
func TestKeptApart(t *testing.T) {
	p := newPlace(t)
	ids := tokens(1, 2*testChunk)
	p.newEngine(1).register().save(ids, 0, 2)
	for name, change := range map[string]func(*engine){
		"salt":   func(e *engine) { e.salt = "tenant" },
		"config": func(e *engine) { e.configs = msgp.AppendMapStrStr(nil, map[string]string{"lmcache.tag.lora": "a"}) },
		"model":  func(e *engine) { e.model = "other" },
		"layout": func(e *engine) { e.layers = 3 },
		"world":  func(e *engine) { e.world = 2 },
	} {
		t.Run(name, func(t *testing.T) {
			e := p.newEngine(2, change).register()
			if n := e.ask(ids); n != 0 {
				t.Errorf("%d chunks of another %s are found", n, name)
			}
			if _, ok := e.open(ids, 0, 1); ok {
				t.Errorf("a chunk of another %s is read", name)
			}
			if n := e.save(ids, 0, 2); n != 2 {
				t.Errorf("%d chunks of 2 are new", n)
			}
			e.over()
			if e.world == 1 {
				e.reads(ids, 0, 2)
			}
			answer, err := e.UnregisterKvCacheEngineDrivenContext(e.ctx, &lmcachepb.UnregisterKvCacheEngineDrivenContextRequest{InstanceId: e.id})
			must(e, answer, err)
		})
	}
	p.stopServer()
	p.cfg.Variant = "yarn"
	p.startServer()
	if n := p.newEngine(3).register().ask(ids); n != 0 {
		t.Errorf("%d chunks of another variant are found", n)
	}
}

// TestConfigs: the order of a configuration's entries does not count.
func TestConfigs(t *testing.T) {
	one := msgp.AppendString(msgp.AppendString(msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 2), "a"), "1"), "b"), "2")
	two := msgp.AppendString(msgp.AppendString(msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 2), "b"), "2"), "a"), "1")
	first, err := saltOf("s", one)
	second, err2 := saltOf("s", two)
	if err != nil || err2 != nil || string(first) != string(second) {
		t.Errorf("%q and %q: %v, %v", first, second, err, err2)
	}
	if none, err := saltOf("", msgp.AppendMapHeader(nil, 0)); err != nil || none != nil {
		t.Errorf("an empty configuration is %q: %v", none, err)
	}
	// A salt does not run into the configuration.
	if a, _ := saltOf(`x{"a":"1"}`, nil); string(a) == string(first) {
		t.Error("a salt is taken for a configuration")
	}
	for _, bad := range [][]byte{{0xc1}, append(slices.Clone(one), 0), msgp.AppendString(nil, "x")} {
		if _, err := saltOf("", bad); err == nil {
			t.Errorf("% x is a configuration", bad)
		}
	}
}

// TestRanks: a chunk is there when all ranks have it.
func TestRanks(t *testing.T) {
	p := newPlace(t)
	rank := func(r int64) func(*engine) { return func(e *engine) { e.world, e.rank = 2, r } }
	zero, one := p.newEngine(1, rank(0)).register(), p.newEngine(2, rank(1)).register()
	ids := tokens(1, 3*testChunk)
	zero.save(ids, 0, 3)
	if n := zero.ask(ids); n != 0 {
		t.Errorf("%d chunks that rank 1 does not have", n)
	}
	one.save(ids, 0, 2)
	if n := zero.ask(ids); n != 2 {
		t.Errorf("%d chunks, want the 2 that both have", n)
	}
	zero.reads(ids, 0, 2)
	one.reads(ids, 0, 2)
	if n := len(p.srv.jobs[jobKey{"b", "r"}].loans[0]); n != 0 {
		t.Errorf("%d blocks are held after both have read", n)
	}
}

// TestUnknown: an engine that is not registered gets nothing, and no errors; its pings
// have it register.
func TestUnknown(t *testing.T) {
	p := newPlace(t)
	ids := tokens(1, testChunk)
	known := p.newEngine(1).register()
	known.save(ids, 0, 1)
	e := p.newEngine(7)
	if slots, _ := e.prepare(ids, 0, 1); len(slots) > 0 || e.commit(ids, 0, 1) {
		t.Error("it can store")
	}
	if _, ok := e.open(ids, 0, 1); ok {
		t.Error("it can read")
	}
	e.shut(ids, 0, 1)
	if e.ping() {
		t.Error("it does not learn that it has to register")
	}
	if n := known.ask(ids); n != 0 {
		t.Errorf("%d chunks are found while nobody knows who asks", n)
	}
	if !e.ping() {
		t.Error("it may not register")
	}
	e.register()
	if !e.ping() || known.ask(ids) != 1 {
		t.Error("all is not well after it has registered")
	}
	e.reads(ids, 0, 1)
	if answer, err := e.Ping(e.ctx, &lmcachepb.PingRequest{}); !must(e, answer, err).GetOk() {
		t.Error("a scheduler's ping fails")
	}
}

// TestRegisterAgain: to register again harms nothing that is going on.
func TestRegisterAgain(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, 2*testChunk)
	slots, chunks := e.prepare(ids, 0, 2)
	e.register()
	e.fill(ids, 0, slots, chunks)
	if again, _ := e.prepare(ids, 0, 2); !slices.EqualFunc(again, slots, func(a, b gap) bool { return a.offset == b.offset }) {
		t.Errorf("asked again, it is to write at %v instead of %v", again, slots)
	}
	if !e.commit(ids, 0, 2) {
		t.Error("what it has begun before is not stored")
	}
	e.register()
	e.reads(ids, 0, 2)
	if e.commit(ids, 0, 2) {
		t.Error("a second commit succeeds")
	}
}

// TestRefused: calls that make no sense are answered, with nothing.
func TestRefused(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, 2*testChunk)
	for name, change := range map[string]func(*lmcachepb.IpcCacheServerKey){
		"no rank":       func(k *lmcachepb.IpcCacheServerKey) { k.WorkerId = nil },
		"rank":          func(k *lmcachepb.IpcCacheServerKey) { k.WorkerId = new(int64(1)) },
		"world":         func(k *lmcachepb.IpcCacheServerKey) { k.WorldSize = 0 },
		"another world": func(k *lmcachepb.IpcCacheServerKey) { k.WorldSize = 2 },
		"another model": func(k *lmcachepb.IpcCacheServerKey) { k.ModelName = "x" },
		"start":         func(k *lmcachepb.IpcCacheServerKey) { k.Start = 1 },
		"negative":      func(k *lmcachepb.IpcCacheServerKey) { k.Start = -4 },
		"end":           func(k *lmcachepb.IpcCacheServerKey) { k.End = 1000 },
		"order":         func(k *lmcachepb.IpcCacheServerKey) { k.Start, k.End = 8, 4 },
		"token":         func(k *lmcachepb.IpcCacheServerKey) { k.TokenIds[0] = -1 },
		"large token":   func(k *lmcachepb.IpcCacheServerKey) { k.TokenIds[0] = 1 << 40 },
		"config":        func(k *lmcachepb.IpcCacheServerKey) { k.EncodedRequestConfigs = []byte{0xc1} },
		"nothing":       func(k *lmcachepb.IpcCacheServerKey) { k.End = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			key := e.key(slices.Clone(ids), 0, 2)
			change(key)
			answer, err := e.PrepareStore(e.ctx, &lmcachepb.PrepareStoreRequest{Key: key, InstanceId: 1})
			if slots, _, absent := slotsOf(t, must(e, answer, err).GetEncodedContext()); absent || len(slots) > 0 {
				t.Errorf("room: %v", slots)
			}
			commit, err := e.CommitStore(e.ctx, &lmcachepb.CommitStoreRequest{Key: key, InstanceId: 1})
			read, err2 := e.PrepareRetrieve(e.ctx, &lmcachepb.PrepareRetrieveRequest{Key: key, InstanceId: 1})
			if must(e, commit, err).GetSuccess() || must(e, read, err2).GetSuccess() {
				t.Error("it succeeds")
			}
			done, err := e.CommitRetrieve(e.ctx, &lmcachepb.CommitRetrieveRequest{Key: key, InstanceId: 1})
			must(e, done, err)
			look, err := e.Lookup(e.ctx, &lmcachepb.LookupRequest{Key: key})
			must(e, look, err)
			free, err := e.FreeLookupLocks(e.ctx, &lmcachepb.FreeLookupLocksRequest{Key: key})
			must(e, free, err)
		})
	}
	// State that comes by the call itself is not taken; what lies behind the call is.
	e.prepare(ids, 0, 2)
	commit, err := e.CommitStore(e.ctx, &lmcachepb.CommitStoreRequest{Key: e.key(ids, 0, 2), InstanceId: 1, Data: []byte("pickle")})
	if must(e, commit, err).GetSuccess() {
		t.Error("pickled state is stored")
	}
	answer, err := e.RegisterKvCacheEngineDrivenContext(e.ctx, &lmcachepb.RegisterKvCacheEngineDrivenContextRequest{InstanceId: 5, DtypeStr: "quaternion"})
	if must(e, answer, err).GetShmName() != "" {
		t.Error("an engine with a type that is not known is registered")
	}
}

// TestWeightsUnknown: an engine whose weights are not known stores and finds nothing; once
// they are, it does. Another one of its name, whose are, is not served meanwhile, since a
// look-up does not say whose it is.
func TestWeightsUnknown(t *testing.T) {
	p := newPlace(t)
	p.stopServer()
	hash := make(chan string)
	byWay := p.cfg.Weights
	p.cfg.Weights = nil
	if _, err := New(p.cfg); err == nil {
		t.Error("a server without a way to know weights")
	}
	p.cfg.Weights = byWay
	p.startServer()
	ids := tokens(1, testChunk)
	first := p.newEngine(1).register()
	first.save(ids, 0, 1)
	p.srv.cfg.Weights = weightsFrom(hash)
	second := p.newEngine(2).register()
	if slots, _ := second.prepare(ids, 0, 1); len(slots) > 0 {
		t.Error("it stores under unknown weights")
	}
	if n := first.ask(ids); n != 0 {
		t.Errorf("%d chunks are found", n)
	}
	hash <- "new"
	await(t, "bound", func() bool { _, ok := p.srv.caller(t.Context(), 2); return ok })
	// Two kinds live: what is found, both must have.
	if n := first.ask(ids); n != 0 {
		t.Errorf("%d chunks are found that the other one does not have", n)
	}
	if _, ok := second.open(ids, 0, 1); ok {
		t.Error("it reads what other weights have computed")
	}
	if n := second.save(ids, 0, 1); n != 1 {
		t.Error("its own chunk is taken for the other's")
	}
	if n := second.ask(ids); n != 1 {
		t.Errorf("%d chunks are found that both have", n)
	}
	first.reads(ids, 0, 1)
	second.reads(ids, 0, 1)
}

// TestClear: after Clear nothing of before is found, not even what was being stored; and an
// engine that comes later does not find what one of before has computed since.
func TestClear(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	old, ids := tokens(1, testChunk), tokens(2, testChunk)
	e.save(old, 0, 1)
	slots, chunks := e.prepare(ids, 0, 1)
	e.fill(ids, 0, slots, chunks)
	answer, err := e.Clear(e.ctx, &lmcachepb.ClearRequest{})
	must(e, answer, err)
	if e.commit(ids, 0, 1) {
		t.Error("what was begun before is stored")
	}
	if e.ask(old) != 0 || e.ask(ids) != 0 {
		t.Error("something of before is found")
	}
	if err := p.store.Sweep(t.Context(), time.Now()); err != nil || p.store.Stats().Used > 4096 {
		m, _ := p.store.Models(t.Context())
		t.Errorf("%d bytes are still used: %v %+v", p.store.Stats().Used, err, m)
	}
	if e.save(ids, 0, 1) != 1 || e.ask(ids) != 1 {
		t.Error("nothing is stored after")
	}
	e.close()
	await(t, "gone", func() bool {
		p.srv.mu.Lock()
		defer p.srv.mu.Unlock()
		return p.srv.instances[1].conn == nil
	})
	p.srv.mu.Lock()
	p.srv.instances[1].seen = time.Now().Add(-time.Hour)
	p.srv.mu.Unlock()
	later := p.newEngine(2).register()
	if n := later.ask(ids); n != 0 {
		t.Errorf("%d chunks of an engine whose weights may have changed are found", n)
	}
}

// TestPoolIsTidied: names of arenas that are gone go, and other files stay.
func TestPoolIsTidied(t *testing.T) {
	dir := t.TempDir()
	for name, stays := range map[string]bool{poolPrefix + "0123456789abcdef": false, poolPrefix + "short": true, "kvmesh-other": true} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		Tidy(dir)
		if _, err := os.Stat(path); (err == nil) != stays {
			t.Errorf("%s: %v", name, err)
		}
	}
	linked := filepath.Join(dir, poolPrefix+"fedcba9876543210")
	if err := os.WriteFile(linked, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(linked, filepath.Join(dir, "arena")); err != nil {
		t.Fatal(err)
	}
	Tidy(dir)
	if _, err := os.Stat(linked); err != nil {
		t.Error("the name of an arena that is there is gone")
	}
}
