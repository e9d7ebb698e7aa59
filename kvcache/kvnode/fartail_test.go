//go:build unix

package kvnode

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
)

// elsewhere is what other hosts have.
type elsewhere struct {
	mu      sync.Mutex
	ends    map[kvcache.TailSpec]int
	tails   []kvcache.Tail
	hangs   bool
	reads   int
	dropped chan string
}

func (e *elsewhere) Grew(spec kvcache.TailSpec, next int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ends[spec] = next
}

func (e *elsewhere) ReadTail(ctx context.Context, _ kvcache.Space, _ string, _ int) ([]kvcache.Tail, error) {
	e.mu.Lock()
	e.reads++
	tails, hangs := e.tails, e.hangs
	e.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return tails, nil
}

func (e *elsewhere) DropTail(_ context.Context, _ kvcache.Space, stream string) error {
	e.dropped <- stream
	return nil
}

// end is where a tail ends as far as was told, -1 = nothing was.
func (e *elsewhere) end(spec kvcache.TailSpec) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if end, ok := e.ends[spec]; ok {
		return end
	}
	return -1
}

// grow appends tokens one by one.
func grow(t *testing.T, w kvcache.TailWriter, first, n int) {
	t.Helper()
	for i := range n {
		if err := w.Append(kvcache.Range{First: first + i, IDs: []int32{int32(first + i)}, Data: []byte("state")}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestTailsTold: who copies tails is told where they end, by their names, also after the
// node has been replaced in the middle of a tail.
func TestTailsTold(t *testing.T) {
	dir := nodeDir(t)
	e := &elsewhere{ends: map[kvcache.TailSpec]int{}, dropped: make(chan string, 1)}
	n, err := startNodeWith(arena.Config{Dir: dir, Limit: 8 << 20}, e)
	if err != nil {
		t.Fatal(err)
	}
	c := newClient(t, dir)
	space := kvcache.NewSpace("m", nil)
	spec := kvcache.TailSpec{Space: space, Stream: "stream", Choice: 1, Attempt: 2, Parent: space.Root, First: 0}
	w, err := c.OpenTail(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	grow(t, w, 0, 5)
	if end := e.end(spec); end != 5 {
		t.Errorf("the tail ends at %d for who copies it, want 5", end)
	}
	spec.Parent, spec.First = kvcache.Key{1}, 64
	if err := w.Rotate(spec.Parent, 64); err != nil {
		t.Fatal(err)
	}
	if end := e.end(spec); end != 64 {
		t.Errorf("the tail that has begun anew ends at %d", end)
	}
	n.end()
	e.mu.Lock()
	clear(e.ends)
	e.mu.Unlock()
	n, err = startNodeWith(arena.Config{Dir: dir, Limit: 8 << 20}, e)
	if err != nil {
		t.Fatal(err)
	}
	defer n.end()
	grow(t, w, 64, 2)
	if end := e.end(spec); end != 66 {
		t.Errorf("the tail ends at %d after a restart, want 66", end)
	}
	if err := c.DropTail(t.Context(), space, "stream"); err != nil {
		t.Fatal(err)
	}
	if got := <-e.dropped; got != "stream" {
		t.Errorf("%q was dropped elsewhere", got)
	}
}

// TestTailsElsewhere: a reader gets the tails of other hosts, too, the highest attempt first,
// in its time; where they hang it gets what is here.
func TestTailsElsewhere(t *testing.T) {
	dir := nodeDir(t)
	space := kvcache.NewSpace("m", nil)
	spec := kvcache.TailSpec{Space: space, Stream: "stream", Attempt: 1, Parent: space.Root}
	theirs := kvcache.Tail{TailSpec: spec, Ranges: []kvcache.Range{{IDs: []int32{0, 1, 2}, Data: []byte("theirs")}}}
	theirs.Attempt = 2
	e := &elsewhere{ends: map[kvcache.TailSpec]int{}, tails: []kvcache.Tail{theirs}}
	n, err := startNodeWith(arena.Config{Dir: dir, Limit: 8 << 20}, e)
	if err != nil {
		t.Fatal(err)
	}
	defer n.end()
	c := newClient(t, dir)
	read := func(within time.Duration) []kvcache.Tail {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		tails, err := c.ReadTail(ctx, space, "stream", 0)
		if err != nil {
			t.Fatal(err)
		}
		return tails
	}
	if tails := read(time.Minute); len(tails) != 1 || tails[0].Attempt != 2 || string(tails[0].Ranges[0].Data) != "theirs" {
		t.Errorf("what others have reads as %+v", tails)
	}
	w, err := c.OpenTail(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	grow(t, w, 0, 3)
	if tails := read(time.Minute); len(tails) != 2 || tails[0].Attempt != 2 || tails[1].Attempt != 1 {
		t.Errorf("with one here it reads as %+v", tails)
	}
	e.mu.Lock()
	e.hangs = true
	e.mu.Unlock()
	// The stream was here last, so others are asked for a moment only.
	if tails := read(time.Hour); len(tails) != 1 || tails[0].Attempt != 1 {
		t.Errorf("while others hang it reads as %+v", tails)
	}
	other := spec
	other.Stream = "other"
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if tails, err := c.ReadTail(ctx, space, "other", 0); err != nil || len(tails) != 0 || ctx.Err() != nil {
		t.Errorf("a stream that is nowhere reads as %+v, %v", tails, err)
	}
	if e.reads != 4 {
		t.Errorf("others were asked %d times, want 4", e.reads)
	}
}
