//go:build unix

package lmcache

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
)

// churn has the node write more than it has room for, so that whatever may leave does.
func (p *place) churn(seed int64) {
	p.t.Helper()
	e := p.newEngine(seed, func(e *engine) { e.model, e.layers = "churn", 2000 }).register()
	for i := range int64(40) {
		e.save(tokens(seed+i, 2*testChunk), 0, 2)
	}
}

// TestNodeAway: while the node is away nothing is found and nothing stored, and no call
// fails; what a look-up has promised before is there to read.
func TestNodeAway(t *testing.T) {
	p := newPlace(t)
	e, other := p.newEngine(1).register(), p.newEngine(2).register()
	ids := tokens(1, 3*testChunk)
	e.save(ids, 0, 2)
	if n := e.ask(ids); n != 2 {
		t.Fatalf("%d chunks", n)
	}
	p.stopNode()
	e.reads(ids, 0, 2)
	if n := other.ask(ids); n != 0 {
		t.Errorf("%d chunks are found", n)
	}
	if _, ok := other.open(ids, 0, 1); ok {
		t.Error("a chunk is read that nobody has looked up before")
	}
	if slots, _ := e.prepare(ids, 2, 3); len(slots) > 0 {
		t.Error("there is room")
	}
	if !e.ping() {
		t.Error("the engine is told that all is not well")
	}
	p.startNode()
	if n := other.ask(ids); n != 2 {
		t.Errorf("%d chunks are found when it is back", n)
	}
	if n := e.save(ids, 2, 3); n != 1 {
		t.Errorf("%d chunks are stored when it is back", n)
	}
}

// TestNodeRestartWhileStoring: the node ends between the two halves of a store, and
// another one comes, before or after the second half.
func TestNodeRestartWhileStoring(t *testing.T) {
	for name, late := range map[string]bool{"back before the commit": false, "away at the commit": true} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			e := p.newEngine(1).register()
			ids := tokens(1, 2*testChunk)
			slots, chunks := e.prepare(ids, 0, 2)
			e.state(e.pool[slots[0].offset:slots[0].offset+slots[0].length], ids, 0)
			p.stopNode()
			if !late {
				p.startNode()
				p.churn(100) // nobody else gets the room
			}
			e.fill(ids, 0, slots, chunks)
			if e.commit(ids, 0, 2) == late {
				t.Errorf("committed is %v", late)
			}
			if late {
				p.startNode()
				await(t, "stored", func() bool { return p.srv.count.stored.Load() == 2 })
			}
			if n := e.ask(ids); n != 2 {
				t.Fatalf("%d chunks are found", n)
			}
			e.reads(ids, 0, 2)
		})
	}
}

// TestNodeRestartWhileReading: what an engine is reading does not change when the node
// ends and another one fills the memory with other things, until the engine has done.
func TestNodeRestartWhileReading(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, 2*testChunk)
	e.save(ids, 0, 2)
	slots, ok := e.open(ids, 0, 2)
	if !ok {
		t.Fatal("cannot be read")
	}
	p.churn(100)
	p.stopNode()
	p.startNode()
	p.churn(200)
	if !e.same(ids, 0, slots) {
		t.Error("it has changed under the reader")
	}
	e.shut(ids, 0, 2)
	p.churn(300)
	if e.same(ids, 0, slots) {
		t.Error("the memory is still not used again: this test shows nothing")
	}
}

// TestServerRestart: a server that comes after one that was lost knows the engines and
// their weights, and they go on without registering again.
func TestServerRestart(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, 2*testChunk)
	e.save(ids, 0, 1)
	p.stopServer()
	p.cfg.Weights = weightsFrom(nil)
	p.startServer()
	if !e.ping() {
		t.Error("it has to register again")
	}
	if n := e.save(ids, 0, 2); n != 1 {
		t.Errorf("%d chunks of 2 are new", n)
	}
	if n := e.ask(ids); n != 2 {
		t.Errorf("%d chunks are found", n)
	}
	e.reads(ids, 0, 2)
	p.stopServer()
	if err := os.WriteFile(p.srv.cfg.State, []byte(`{"version":1,"instances":[{"id":1}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	p.startServer()
	if e.ping() || !e.ping() {
		t.Error("with a spoiled list it does not have to register again")
	}
}

// TestAnotherPool: when the node has begun anew with another memory, engines get nothing
// until they have registered again, and their writes into the old one harm nobody.
func TestAnotherPool(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, 2*testChunk)
	e.save(ids, 0, 1)
	slots, chunks := e.prepare(ids, 1, 2)
	p.stopNode()
	p.node.Limit *= 2
	p.startNode()
	p.srv.watchPool()
	e.fill(ids, 1, slots, chunks)
	if e.commit(ids, 1, 2) {
		t.Error("a chunk in the old memory is stored")
	}
	if _, ok := e.open(ids, 0, 1); ok || e.ask(ids) != 0 {
		t.Error("something of the old memory is found")
	}
	if e.ping() || !e.ping() {
		t.Error("it does not have to register again")
	}
	e.register()
	if e.save(ids, 0, 2) != 2 || e.ask(ids) != 2 {
		t.Error("nothing is stored after it has")
	}
	e.reads(ids, 0, 2)
}

// TestAnotherPoolWhileStoring: an engine that asks for room again after it has mapped another
// memory gets room in that, and not the offsets of the old one.
func TestAnotherPoolWhileStoring(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	p.newEngine(2).register().save(tokens(3, testChunk), 0, 1)
	ids := tokens(1, 2*testChunk)
	e.prepare(ids, 0, 2)
	p.stopNode()
	p.node.Limit *= 2
	p.startNode()
	p.srv.watchPool()
	e.register()
	slots, chunks := e.prepare(ids, 0, 2)
	e.fill(ids, 0, slots, chunks)
	if !e.commit(ids, 0, 2) || len(slots) != 2 {
		t.Errorf("%d chunks written, and they are not stored", len(slots))
	}
	e.reads(ids, 0, 2)
}

// TestChangedWhileAsking: an engine that becomes another one while it is given room may not
// write there.
func TestChangedWhileAsking(t *testing.T) {
	for name, change := range map[string]func(*Server, *instance){
		"cleared":        func(s *Server, _ *instance) { _, _ = s.Clear(t.Context(), nil) },
		"weights":        func(_ *Server, i *instance) { i.Weights = "other" },
		"registered off": func(s *Server, i *instance) { delete(s.instances, i.ID) },
		"another memory": func(_ *Server, i *instance) { i.Pool = "other" },
		"nothing":        func(*Server, *instance) {},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			e := p.newEngine(1).register()
			i, _ := p.srv.caller(e.ctx, 1)
			ids := tokens(1, testChunk)
			req, space, ok := p.srv.ranked(e.key(ids, 0, 1), i)
			if !ok {
				t.Fatal("refused")
			}
			w := &write{layout: i.Layout}
			p.srv.reserve(w, &req, req.refs(space, testChunk), 1<<20)
			change(p.srv, p.srv.instances[1])
			if may := p.srv.begin(keyOf(1, &req), w, i); len(w.chunks) != 1 || may != (name == "nothing") {
				t.Errorf("room for %d chunks, and it may write: %v", len(w.chunks), may)
			}
		})
	}
}

// TestNodeLate: an engine that registers before the node has ever been there gets its pool
// as soon as it is.
func TestNodeLate(t *testing.T) {
	p := newPlace(t)
	p.stopServer()
	p.stopNode()
	p.cfg.State = p.dir + "/state"
	p.startServer()
	e := p.newEngine(1)
	slots := int64(testChunk)
	answer, err := e.RegisterKvCacheEngineDrivenContext(e.ctx, &lmcachepb.RegisterKvCacheEngineDrivenContextRequest{
		InstanceId: 1, ModelName: "m", WorldSize: 1, NumLayers: 2, HiddenDimSize: 8, DtypeStr: "float32", NumPhysicalSlots: &slots,
	})
	if must(e, answer, err).GetShmName() != "" {
		t.Error("a pool that nobody has made")
	}
	p.startNode()
	p.srv.watchPool()
	if e.ping() || !e.ping() {
		t.Error("it does not have to register again")
	}
	ids := tokens(1, testChunk)
	if e.register().save(ids, 0, 1) != 1 || e.ask(ids) != 1 {
		t.Error("nothing is stored")
	}
}

// TestEngineDies: what an engine was writing and reading is given up some time after its
// connection, and not before.
func TestEngineDies(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, 3*testChunk)
	e.save(ids, 0, 1)
	if _, ok := e.open(ids, 0, 1); !ok {
		t.Fatal("cannot be read")
	}
	e.prepare(ids, 1, 3)
	if n := e.ask(ids); n != 1 {
		t.Fatalf("%d chunks", n)
	}
	held := func() (writes, reads, jobs int) {
		p.srv.mu.Lock()
		defer p.srv.mu.Unlock()
		return len(p.srv.writes), len(p.srv.reads), len(p.srv.jobs)
	}
	p.srv.sweep(time.Now().Add(5 * time.Minute))
	if w, r, j := held(); w != 1 || r != 1 || j != 1 {
		t.Errorf("an engine that lives and is slow has %d writes, %d reads and %d look-ups left", w, r, j)
	}
	e.close()
	await(t, "gone", func() bool {
		p.srv.mu.Lock()
		defer p.srv.mu.Unlock()
		return p.srv.instances[1].conn == nil
	})
	p.srv.sweep(time.Now())
	if w, r, j := held(); w != 1 || r != 1 || j != 1 {
		t.Errorf("at once %d writes, %d reads and %d look-ups are left", w, r, j)
	}
	p.srv.sweep(time.Now().Add(p.srv.cfg.Grace))
	if w, r, j := held(); w != 0 || r != 0 || j != 0 {
		t.Errorf("%d writes, %d reads and %d look-ups are left", w, r, j)
	}
	// The key is not blocked, and the room is free.
	again := p.newEngine(2).register()
	if n := again.save(ids, 0, 3); n != 2 {
		t.Errorf("%d chunks of 3 are new", n)
	}
	if n := again.ask(ids); n != 3 {
		t.Errorf("%d chunks are found", n)
	}
}

// TestTwoWriters: two engines that store the same chunk at once both write; the first one
// counts, and its bytes stay.
func TestTwoWriters(t *testing.T) {
	p := newPlace(t)
	one, two := p.newEngine(1).register(), p.newEngine(2).register()
	ids := tokens(1, testChunk)
	first, _ := one.prepare(ids, 0, 1)
	second, _ := two.prepare(ids, 0, 1)
	if len(first) != 1 || len(second) != 1 || first[0].offset == second[0].offset {
		t.Fatalf("room at %v and %v", first, second)
	}
	one.fill(ids, 0, first, []int{0})
	two.fill(ids, 0, second, []int{0})
	if !one.commit(ids, 0, 1) || !two.commit(ids, 0, 1) {
		t.Error("not committed")
	}
	two.reads(ids, 0, 1)
	if models, err := p.store.Models(t.Context()); err != nil || models[0].Blocks != 1 {
		t.Errorf("%+v, %v", models, err)
	}
}

// TestDamage: a chunk that is wrong is not found, and not handed out if it goes wrong after
// it was found.
func TestDamage(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, 4*testChunk)
	slots, chunks := e.prepare(ids, 0, 4)
	e.fill(ids, 0, slots, chunks)
	if !e.commit(ids, 0, 4) {
		t.Fatal("not committed")
	}
	e.pool[slots[2].offset+slots[2].length-1] ^= 1
	if n := e.ask(ids); n != 2 {
		t.Errorf("%d chunks are found, of which the third is wrong", n)
	}
	e.pool[slots[1].offset] ^= 1
	if _, ok := e.open(ids, 0, 2); ok {
		t.Error("a chunk that has changed since it was found is handed out")
	}
	e.over()
	if n := e.ask(ids); n != 1 {
		t.Errorf("%d chunks are found", n)
	}
	if n := e.save(ids, 0, 4); n != 2 {
		t.Errorf("%d chunks are stored again, want the 2 that were wrong", n)
	}
}

// TestLookupHolds: what was found stays until it is read, freed, or the request is over.
func TestLookupHolds(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, 3*testChunk)
	e.save(ids, 0, 3)
	if n := e.ask(ids); n != 3 {
		t.Fatalf("%d chunks", n)
	}
	answer, err := e.FreeLookupLocks(e.ctx, &lmcachepb.FreeLookupLocksRequest{Key: e.key(ids, 2, 3)})
	must(e, answer, err)
	if err := p.store.MakeRoom(t.Context(), 1); err != nil { // whatever may leave does
		t.Fatal(err)
	}
	e.reads(ids, 0, 2)
	if _, ok := e.open(ids, 2, 3); ok {
		t.Error("a chunk that was freed is still there: this test shows nothing")
	}
	e.over()
	if len(p.srv.jobs) != 0 || len(p.srv.byRequest) != 0 {
		t.Error("a look-up is left")
	}
}

// TestRequestsOfOneName: two engines may call two requests the same.
func TestRequestsOfOneName(t *testing.T) {
	p := newPlace(t)
	one, two := p.newEngine(1).register(), p.newEngine(2).register()
	a, b := tokens(1, 2*testChunk), tokens(2, testChunk)
	one.save(a, 0, 2)
	two.save(b, 0, 1)
	if n, m := one.ask(a), two.ask(b); n != 2 || m != 1 {
		t.Errorf("%d and %d chunks", n, m)
	}
	two.over()
	one.reads(a, 0, 2)
}

// TestBudget: at its end a look-up counts what it has, and finds no more.
func TestBudget(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1).register()
	ids := tokens(1, 2*testChunk)
	e.save(ids, 0, 2)
	if n := e.ask(ids); n != 2 {
		t.Fatalf("%d chunks", n)
	}
	found := p.srv.jobs[jobKey{"b", "r"}]
	j := &job{key: jobKey{"b", "slow"}, begun: time.Now(), done: make(chan struct{}), loans: map[int][]*loan{}}
	p.srv.mu.Lock()
	first, second := found.loans[0], found.loans[1]
	first[0].uses++
	second[0].uses++
	p.srv.mu.Unlock()
	if !p.srv.add(j, 0, first, true) {
		t.Error("it does not look on")
	}
	if n := p.srv.answer(j, j.begun); n != nil {
		t.Errorf("before its time is over the answer is %d", *n)
	}
	if n := p.srv.answer(j, j.begun.Add(p.srv.cfg.Budget)); n == nil || *n != 1 {
		t.Errorf("when its time is over the answer is %v, want 1", n)
	}
	if p.srv.add(j, 1, second, true) {
		t.Error("it looks on, and what the engine knows changes")
	}
	if len(j.loans) != 1 {
		t.Errorf("%d chunks are held", len(j.loans))
	}
	p.srv.mu.Lock()
	p.srv.endLocked(j)
	p.srv.mu.Unlock()
}

// TestTooMuch: an engine that never commits does not get the whole memory.
func TestTooMuch(t *testing.T) {
	p := newPlace(t)
	e := p.newEngine(1, func(e *engine) { e.layers = 500 }).register() // 172 KiB a frame
	room := 0
	for i := range int64(20) {
		slots, _ := e.prepare(tokens(i, testChunk), 0, 1)
		room += len(slots)
	}
	if room < 8 || room > 12 {
		t.Errorf("room for %d frames of 172 KiB in half of 4 MiB", room)
	}
	other := p.newEngine(2).register()
	if other.save(tokens(1, testChunk), 0, 1) != 1 {
		t.Error("another engine has no room")
	}
	answer, err := e.UnregisterKvCacheEngineDrivenContext(e.ctx, &lmcachepb.UnregisterKvCacheEngineDrivenContextRequest{InstanceId: 1})
	must(e, answer, err)
	if len(p.srv.writes) != 0 {
		t.Error("it has registered off and still holds room")
	}
}

// FuzzKey: whatever an engine sends in a key is read or refused; what is read is a run of
// whole chunks.
func FuzzKey(f *testing.F) {
	rank := int64(0)
	whole, err := proto.Marshal(&lmcachepb.IpcCacheServerKey{
		ModelName: "m", WorldSize: 1, WorkerId: &rank, TokenIds: tokens(1, 9), Start: 4, End: 8, RequestId: "r",
		CacheSalt: "s", EncodedRequestConfigs: []byte{0x81, 0xa1, 'a', 0xa1, 'b'}, NumKvReaders: 1,
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var k lmcachepb.IpcCacheServerKey
		if proto.Unmarshal(b, &k) != nil {
			return
		}
		r, err := runOf(&k, testChunk)
		if err != nil {
			return
		}
		if r.first < 0 || r.first > r.end || len(r.ids) != r.end*testChunk || r.readers < 1 || r.rank >= r.world {
			t.Fatalf("run %+v", r)
		}
		again, err := runOf(&k, testChunk)
		if diff := cmp.Diff(r.salt, again.salt); err != nil || diff != "" {
			t.Errorf("read twice it differs: %v\n%s", err, diff)
		}
	})
}

// FuzzState: a list of registrations from a file is read or refused.
func FuzzState(f *testing.F) {
	f.Add([]byte(`{"version":1,"instances":[{"id":1,"model":"m","world":1,"layout":{"planes":2,"layers":2,"slots":4,"hidden":8,"dtype":"float32"}}]}`))
	f.Add([]byte(`{"version":1,"instances":[null]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := parseState(b)
		if err != nil {
			return
		}
		if slices.ContainsFunc(list, func(i *instance) bool { return i.Layout.check() != nil || i.Layout.size() <= 0 || i.World < 1 }) {
			t.Errorf("%s is a list", b)
		}
	})
}
