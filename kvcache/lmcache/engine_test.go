//go:build unix

package lmcache

import (
	"context"
	"hash/fnv"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// testChunk is the tokens of a chunk here.
const testChunk = 4

// place is a host: a node and a server, each of which may be away.
type place struct {
	t    testing.TB
	dir  string
	cfg  Config
	node arena.Config

	far []stack.Tier // of the node that starts next

	store   *arena.Store
	srv     *Server
	endNode func()
	endSrv  func()
}

// newPlace starts both, until the test ends.
func newPlace(t testing.TB) *place {
	t.Helper()
	dir, err := os.MkdirTemp("", "lmc") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p := &place{
		t: t, dir: dir, node: arena.Config{Dir: filepath.Join(dir, "node"), Limit: 4 << 20},
		cfg: Config{
			Dir: filepath.Join(dir, "node"), ShmDir: dir, Chunk: testChunk, NodeTime: 30 * time.Second, Budget: 30 * time.Second,
			Weights: func(_ context.Context, model string) (string, error) { return "of " + model, nil },
		},
	}
	p.startNode()
	p.startServer()
	t.Cleanup(func() {
		p.stopServer()
		p.stopNode()
	})
	return p
}

func (p *place) startNode() {
	p.t.Helper()
	var err error
	if p.store, err = arena.Open(p.node); err != nil {
		p.t.Fatal(err)
	}
	l, err := kvnode.Listen(p.node.Dir)
	if err != nil {
		p.t.Fatal(err)
	}
	var below *stack.Stack
	if len(p.far) > 0 {
		if below, err = stack.New(stack.Config{Near: p.store, Far: p.far}); err != nil {
			p.t.Fatal(err)
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- kvnode.NewServer(kvnode.ServerConfig{Store: p.store, Below: below}).Serve(ctx, l) }()
	p.endNode = func() {
		stop()
		if err := <-ended; err != nil {
			p.t.Error(err)
		}
		if below != nil {
			below.Close()
		}
		p.store.Close()
	}
}

func (p *place) stopNode() {
	if p.endNode != nil {
		p.endNode()
		p.endNode = nil
	}
}

func (p *place) startServer() {
	p.t.Helper()
	var err error
	if p.srv, err = New(p.cfg); err != nil {
		p.t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(p.dir, "s"))
	if err != nil {
		p.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.srv.Serve(ctx, l) }()
	p.endSrv = func() {
		stop()
		if err := <-ended; err != nil {
			p.t.Error(err)
		}
		if err := p.srv.Close(); err != nil {
			p.t.Error(err)
		}
	}
}

func (p *place) stopServer() {
	if p.endSrv != nil {
		p.endSrv()
		p.endSrv = nil
	}
}

// engine is one rank of an engine, as LMCache's client behaves.
type engine struct {
	t    testing.TB
	p    *place
	conn *grpc.ClientConn
	ctx  context.Context
	lmcachepb.ControllerServiceClient
	lmcachepb.EngineDrivenServiceClient
	lmcachepb.LookupServiceClient

	id      int64
	model   string
	world   int64
	rank    int64
	readers int64
	salt    string
	configs []byte
	layers  int64
	pool    []byte
}

// newEngine connects an engine, which is not registered yet.
func (p *place) newEngine(id int64, change ...func(*engine)) *engine {
	p.t.Helper()
	conn, err := grpc.NewClient("unix:"+filepath.Join(p.dir, "s"), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		p.t.Fatal(err)
	}
	e := &engine{
		t: p.t, p: p, conn: conn, id: id, model: "m", world: 1, layers: 2, readers: 1,
		ControllerServiceClient: lmcachepb.NewControllerServiceClient(conn), EngineDrivenServiceClient: lmcachepb.NewEngineDrivenServiceClient(conn),
		LookupServiceClient: lmcachepb.NewLookupServiceClient(conn),
	}
	e.ctx = metadata.AppendToOutgoingContext(context.Background(), "lmcache-client-id-bin", string(rune('a'+id)))
	for _, f := range change {
		f(e)
	}
	p.t.Cleanup(e.close)
	return e
}

// close ends the engine's process, as far as others notice.
func (e *engine) close() {
	e.conn.Close()
	if e.pool != nil {
		_ = unix.Munmap(e.pool)
		e.pool = nil
	}
}

// must takes an answer, which is never an error.
func must[T any](e *engine, answer T, err error) T {
	e.t.Helper()
	if err != nil {
		e.t.Fatalf("a call has failed, of which an engine would die: %v", err)
	}
	return answer
}

// register registers the engine and maps the pool.
func (e *engine) register() *engine {
	e.t.Helper()
	slots := int64(testChunk)
	call := &lmcachepb.RegisterKvCacheEngineDrivenContextRequest{
		InstanceId: e.id, ModelName: e.model, WorldSize: e.world, BlockSize: 2, NumLayers: e.layers, HiddenDimSize: 8, DtypeStr: "float32", NumPhysicalSlots: &slots,
	}
	answer, err := e.RegisterKvCacheEngineDrivenContext(e.ctx, call)
	must(e, answer, err)
	if answer.GetShmName() == "" {
		e.t.Fatal("no pool")
	}
	f, err := os.OpenFile(filepath.Join(e.p.dir, answer.GetShmName()), os.O_RDWR, 0)
	if err != nil {
		e.t.Fatal(err)
	}
	defer f.Close()
	if e.pool != nil {
		_ = unix.Munmap(e.pool)
	}
	if e.pool, err = unix.Mmap(int(f.Fd()), 0, int(answer.GetPoolSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		e.t.Fatal(err)
	}
	return e
}

// key is the key of a call for some chunks of a sequence.
func (e *engine) key(ids []int64, first, end int) *lmcachepb.IpcCacheServerKey {
	return &lmcachepb.IpcCacheServerKey{
		ModelName: e.model, WorldSize: e.world, WorkerId: &e.rank, TokenIds: ids, Start: int64(first * testChunk), End: int64(end * testChunk),
		RequestId: "r", CacheSalt: e.salt, EncodedRequestConfigs: e.configs, NumKvReaders: e.readers,
	}
}

// gap is one slot as an engine sees it.
type gap struct {
	offset, length int
	shape          []int
	dtype          string
}

// slotsOf reads what is in a context. absent says that it has no slots at all, from which
// engines go over to another protocol.
func slotsOf(t testing.TB, b []byte) (slots []gap, chunks []int, absent bool) {
	t.Helper()
	if len(b) == 0 {
		return nil, nil, true
	}
	m, rest, err := msgp.ReadMapStrIntfBytes(b, nil)
	if err != nil || len(rest) > 0 {
		t.Fatalf("context % x: %v", b, err)
	}
	number := func(v any) int {
		if n, ok := v.(uint64); ok {
			return int(n)
		}
		return int(v.(int64))
	}
	list, ok := m["slots"].([]any)
	for _, v := range list {
		s := v.(map[string]any)
		g := gap{number(s["offset"]), number(s["length"]), nil, s["dtype"].(string)}
		for _, n := range s["shape"].([]any) {
			g.shape = append(g.shape, number(n))
		}
		slots = append(slots, g)
	}
	places, _ := m["chunk_indices"].([]any)
	for _, v := range places {
		chunks = append(chunks, number(v))
	}
	return slots, chunks, !ok
}

// prepare asks for room.
func (e *engine) prepare(ids []int64, first, end int) (slots []gap, chunks []int) {
	e.t.Helper()
	answer, err := e.PrepareStore(e.ctx, &lmcachepb.PrepareStoreRequest{Key: e.key(ids, first, end), InstanceId: e.id})
	must(e, answer, err)
	slots, chunks, absent := slotsOf(e.t, answer.GetEncodedContext())
	if absent {
		e.t.Fatal("no list of slots")
	}
	return slots, chunks
}

// commit says that the room is filled.
func (e *engine) commit(ids []int64, first, end int) bool {
	e.t.Helper()
	answer, err := e.CommitStore(e.ctx, &lmcachepb.CommitStoreRequest{Key: e.key(ids, first, end), InstanceId: e.id})
	return must(e, answer, err).GetSuccess()
}

// state fills b with what the engine computes for a chunk: by what it is, and all tokens
// up to its end.
func (e *engine) state(b []byte, ids []int64, chunk int) {
	h := fnv.New64a()
	for _, id := range ids[:(chunk+1)*testChunk] {
		h.Write([]byte{byte(id), byte(id >> 8), byte(e.rank)})
	}
	h.Write([]byte(e.model + "\x00" + e.salt + "\x00" + string(e.configs)))
	r := rand.New(rand.NewPCG(h.Sum64(), 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

// fill writes chunks where it was told.
func (e *engine) fill(ids []int64, first int, slots []gap, chunks []int) {
	for i, g := range slots {
		e.state(e.pool[g.offset:g.offset+g.length], ids, first+chunks[i])
	}
}

// save stores chunks and returns how many were not there yet.
func (e *engine) save(ids []int64, first, end int) int {
	e.t.Helper()
	slots, chunks := e.prepare(ids, first, end)
	if len(slots) == 0 {
		return 0
	}
	e.fill(ids, first, slots, chunks)
	if !e.commit(ids, first, end) {
		e.t.Errorf("chunks %d to %d are not stored", first, end)
	}
	return len(slots)
}

// ask looks up a sequence and returns how many chunks there are.
func (e *engine) ask(ids []int64) int {
	e.t.Helper()
	key := e.key(ids, 0, len(ids)/testChunk)
	key.WorkerId = nil
	answer, err := e.Lookup(e.ctx, &lmcachepb.LookupRequest{Key: key, TpSize: e.world})
	must(e, answer, err)
	return e.found()
}

// found is the outcome of a look-up.
func (e *engine) found() int {
	e.t.Helper()
	for {
		answer, err := e.WaitPrefetchStatus(e.ctx, &lmcachepb.WaitPrefetchStatusRequest{RequestId: "r", Timeout: 60})
		if must(e, answer, err).ChunkCount != nil {
			return int(answer.GetChunkCount())
		}
	}
}

// open asks where chunks are; false: they are not to be had.
func (e *engine) open(ids []int64, first, end int) ([]gap, bool) {
	e.t.Helper()
	answer, err := e.PrepareRetrieve(e.ctx, &lmcachepb.PrepareRetrieveRequest{Key: e.key(ids, first, end), InstanceId: e.id})
	if !must(e, answer, err).GetSuccess() {
		return nil, false
	}
	slots, _, _ := slotsOf(e.t, answer.GetEncodedContext())
	if len(slots) != end-first {
		e.t.Fatalf("%d slots of %d chunks", len(slots), end-first)
	}
	return slots, true
}

// same says whether the slots hold what the engine would compute.
func (e *engine) same(ids []int64, first int, slots []gap) bool {
	for i, g := range slots {
		want := make([]byte, g.length)
		e.state(want, ids, first+i)
		if string(want) != string(e.pool[g.offset:g.offset+g.length]) {
			return false
		}
	}
	return true
}

// shut says that the chunks were read.
func (e *engine) shut(ids []int64, first, end int) {
	e.t.Helper()
	answer, err := e.CommitRetrieve(e.ctx, &lmcachepb.CommitRetrieveRequest{Key: e.key(ids, first, end), InstanceId: e.id})
	must(e, answer, err)
}

// reads checks that chunks are there and right.
func (e *engine) reads(ids []int64, first, end int) {
	e.t.Helper()
	slots, ok := e.open(ids, first, end)
	if !ok {
		e.t.Fatalf("chunks %d to %d cannot be read", first, end)
	}
	if !e.same(ids, first, slots) {
		e.t.Errorf("chunks %d to %d are not what was stored", first, end)
	}
	e.shut(ids, first, end)
}

// over ends the request.
func (e *engine) over() {
	e.t.Helper()
	answer, err := e.EndSession(e.ctx, &lmcachepb.EndSessionRequest{RequestId: "r"})
	must(e, answer, err)
}

// ping is a heart-beat.
func (e *engine) ping() bool {
	e.t.Helper()
	answer, err := e.Ping(e.ctx, &lmcachepb.PingRequest{InstanceId: &e.id})
	return must(e, answer, err).GetOk()
}

// tokens are n of them, which begin with those of the same seed.
func tokens(seed int64, n int) []int64 {
	ids := make([]int64, n)
	for i := range ids {
		ids[i] = seed*1000 + int64(i)
	}
	return ids
}

// await polls until something is so.
func await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("a minute, and not %s", what)
		}
		<-time.After(5 * time.Millisecond)
	}
}

// weightsFrom tells hashes as they come.
func weightsFrom(hash <-chan string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, _ string) (string, error) {
		select {
		case h := <-hash:
			return h, nil
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}
