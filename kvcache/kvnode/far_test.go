//go:build unix

package kvnode

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/nvmetier"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// farChain is a chain of blocks and its tokens.
func farChain(t *testing.T, blocks int) (frames []*kvcache.Frame, ids []int32) {
	t.Helper()
	space := kvcache.NewSpace("m", []byte("t"))
	parent := space.Root
	for i := range blocks {
		own := make([]int32, 32)
		for j := range own {
			own[j] = int32(32*i + j)
		}
		payload := bytes.Repeat([]byte{byte(i + 1)}, 100_000)
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: 32 * i, IDs: own}, []kvcache.Part{{Size: int64(len(payload))}}, payload)
		if err != nil {
			t.Fatal(err)
		}
		frames, ids, parent = append(frames, f), append(ids, own...), f.Key
	}
	return frames, ids
}

// startFar starts a node with far tiers, which ends with the test at the latest.
func startFar(t *testing.T, far ...stack.Tier) (*node, *Client) {
	t.Helper()
	dir := nodeDir(t)
	n, err := startNode(arena.Config{Dir: dir, Limit: 8 << 20}, far...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.end)
	return n, newClient(t, dir)
}

// TestFarTiers: what one node's clients have put is found by those of another one that has
// nothing but the same disk, and a dropped model by nobody.
func TestFarTiers(t *testing.T) {
	disk := filepath.Join(t.TempDir(), "nvme")
	open := func() *nvmetier.Store {
		s, err := nvmetier.Open(nvmetier.Config{Dir: disk})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
	first := open()
	n, c := startFar(t, stack.Tier{Name: "nvme", Store: first})
	frames, ids := farChain(t, 12)
	for _, f := range frames {
		if err := c.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	for n.below.Behind() > 0 {
		<-time.After(time.Millisecond)
	}
	first.Close()

	second := open()
	_, c = startFar(t, stack.Tier{Name: "nvme", Store: second})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	q := kvcache.Query{Space: frames[0].Space, IDs: ids}
	m, err := c.Longest(ctx, q)
	if err != nil || len(m.Blocks) != len(frames) {
		t.Fatalf("%d of %d blocks: %v", len(m.Blocks), len(frames), err)
	}
	for i, b := range m.Blocks {
		l, err := c.Get(t.Context(), b.Ref)
		if err != nil || l.Verify() != nil || !bytes.Equal(l.Bytes(), frames[i].Bytes()) {
			t.Fatalf("block %d: %v", i, err)
		}
		l.Release()
	}
	if st := second.Stats(); st.Hits != uint64(len(frames)) || st.Puts != 0 {
		t.Errorf("the disk counted %+v", st)
	}
	if err := c.Drop(t.Context(), q.Fingerprint); err != nil {
		t.Fatal(err)
	}
	if m, err := c.Longest(ctx, q); err != nil || len(m.Blocks) != 0 || second.Stats().Used != 0 {
		t.Errorf("%d blocks of a dropped model: %v", len(m.Blocks), err)
	}
	if _, err := os.Stat(disk); err != nil {
		t.Error(err)
	}
}

// TestFarBounded: ten times the limit of both tiers goes through a node. Each keeps its
// limit, and the process holds no more of it than that.
func TestFarBounded(t *testing.T) {
	const arenaLimit, diskLimit, blocks = 8 << 20, 6 << 20, 800
	disk, err := nvmetier.Open(nvmetier.Config{Dir: filepath.Join(t.TempDir(), "nvme"), Limit: diskLimit})
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	n, c := startFar(t, stack.Tier{Name: "nvme", Store: disk})
	space := kvcache.NewSpace("m", nil)
	payload := make([]byte, 100_000)
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	for i := range int32(blocks) {
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{i}}, []kvcache.Part{{Size: int64(len(payload))}}, payload)
		if err == nil {
			err = c.Put(t.Context(), f)
		}
		if err != nil {
			t.Fatal(err)
		}
		if i%8 == 0 {
			// So that some of it is on the disk, which has to give room again, too.
			for n.below.Behind() > 16 {
				<-time.After(time.Millisecond)
			}
		}
	}
	for n.below.Behind() > 0 {
		<-time.After(time.Millisecond)
	}
	near, far := n.store.Stats(), disk.Stats()
	if near.Used > near.Limit || near.Limit > arenaLimit || far.Used > diskLimit || near.Evictions < blocks/2 || far.Evictions == 0 {
		t.Errorf("memory %+v\ndisk %+v", near, far)
	}
	// A hundredth of what went through, for indices and buffers.
	if more := heap() - before; more > blocks*int64(len(payload))/100*2 {
		t.Errorf("%d bytes of heap more than before", more)
	}
	t.Logf("%d bytes written; memory holds %d, the disk %d of %d puts", blocks*len(payload), near.Used, far.Used, far.Puts)
}

// TestFarAfterKill: what waits to be written when a node dies is written by the next one.
func TestFarAfterKill(t *testing.T) {
	s := stuck{until: make(chan struct{})}
	defer close(s.until)
	dir := nodeDir(t)
	n, err := startNode(arena.Config{Dir: dir, Limit: 8 << 20}, stack.Tier{Name: "far", Store: s})
	if err != nil {
		t.Fatal(err)
	}
	c := newClient(t, dir)
	frames, _ := farChain(t, 10)
	for _, f := range frames {
		if err := c.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	n.stop() // and the stack is left as it is, with everything in its queue
	<-n.ended
	n.store.Close()

	disk, err := nvmetier.Open(nvmetier.Config{Dir: filepath.Join(t.TempDir(), "nvme")})
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	next, err := startNode(arena.Config{Dir: dir, Limit: 8 << 20}, stack.Tier{Name: "nvme", Store: disk})
	if err != nil {
		t.Fatal(err)
	}
	defer next.end()
	for next.below.Behind() > 0 {
		<-time.After(time.Millisecond)
	}
	for i, f := range frames {
		l, err := disk.Get(t.Context(), f.Ref)
		if err != nil || l.Verify() != nil {
			t.Fatalf("block %d is not on the disk: %v", i, err)
		}
		l.Release()
	}
}

// stuck is a tier whose calls hang.
type stuck struct {
	kvcache.Store
	until    chan struct{}
	dropping chan struct{} // closed when Drop begins
}

// Longest implements kvcache.Store.
func (s stuck) Longest(context.Context, kvcache.Query) (kvcache.Match, error) {
	<-s.until
	return kvcache.Match{}, errors.New("at last")
}

// Put implements kvcache.Store.
func (s stuck) Put(context.Context, *kvcache.Frame) error {
	<-s.until
	return nil
}

// TestFarHangs: with a tier that hangs, an answer is what the arena has.
func TestFarHangs(t *testing.T) {
	s := stuck{until: make(chan struct{})}
	_, c := startFar(t, stack.Tier{Name: "far", Store: s})
	defer close(s.until)
	frames, ids := farChain(t, 3)
	for _, f := range frames[:2] {
		if err := c.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		m, err := c.Longest(ctx, kvcache.Query{Space: frames[0].Space, IDs: ids})
		cancel()
		if err != nil || len(m.Blocks) != 2 {
			t.Errorf("%d blocks: %v", len(m.Blocks), err)
		}
	}
}

// Drop implements kvcache.Store.
func (s stuck) Drop(context.Context, kvcache.Fingerprint) error {
	close(s.dropping)
	<-s.until
	return nil
}

// TestEndHangs: a node ends while a request waits for a tier that hangs.
func TestEndHangs(t *testing.T) {
	s := stuck{until: make(chan struct{}), dropping: make(chan struct{})}
	store, err := arena.Open(arena.Config{Dir: nodeDir(t), Limit: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	below, err := stack.New(stack.Config{Near: store, Far: []stack.Tier{{Name: "far", Store: s}}})
	if err != nil {
		t.Fatal(err)
	}
	defer below.Close()
	defer close(s.until)
	server := NewServer(ServerConfig{Store: store, Below: below})
	server.patience = 10 * time.Millisecond
	server.done.Go(func() { _ = server.drop(t.Context(), kvcache.Fingerprint{}) })
	<-s.dropping
	server.end() // or the test hangs
}

// TestFarHangsInPart: a look-up that shares its time with others ends with its part of it.
func TestFarHangsInPart(t *testing.T) {
	s := stuck{until: make(chan struct{})}
	_, c := startFar(t, stack.Tier{Name: "far", Store: s})
	defer close(s.until)
	frames, ids := farChain(t, 3)
	for _, f := range frames[:2] {
		if err := c.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	m, err := c.LongestWithin(ctx, 100*time.Millisecond, kvcache.Query{Space: frames[0].Space, IDs: ids})
	if err != nil || len(m.Blocks) != 2 {
		t.Errorf("%d blocks: %v", len(m.Blocks), err)
	}
	if end, _ := ctx.Deadline(); time.Until(end) < 10*time.Second {
		t.Error("it has taken the time of others")
	}
}

// TestFetchNeedsTiers: a node without them refuses a fetch, and its clients do not ask.
func TestFetchNeedsTiers(t *testing.T) {
	_, c := startFar(t)
	frames, ids := farChain(t, 1)
	q := kvcache.Query{Space: frames[0].Space, IDs: ids}
	if _, _, err := c.longest(t.Context(), opFetch, time.Second, q); err == nil {
		t.Error("fetched from nowhere")
	}
	if _, far, err := c.longest(t.Context(), opLongest, 0, q); far || err != nil {
		t.Errorf("far tiers %v: %v", far, err)
	}
}
