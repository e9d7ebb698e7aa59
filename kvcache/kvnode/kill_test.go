//go:build unix

package kvnode

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// startProcess starts a node as a process of its own and waits until it is ready.
func startProcess(t testing.TB, dir string, limit int64) *exec.Cmd {
	t.Helper()
	c := exec.Command(os.Args[0], "-test.run=^$")
	c.Env = append(c.Environ(), fmt.Sprintf("%s=%d %s", nodeEnv, limit, dir))
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()
	})
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the node says %q", line)
	}
	return c
}

// TestNodeKilled kills a node over and over while its clients write, read in place and
// append: what was acknowledged is there, what is being read does not change, and tails
// go on where they were.
func TestNodeKilled(t *testing.T) {
	rounds := 20
	if *kills > 0 {
		rounds = *kills
	}
	const limit = 8 << 20
	dir := nodeDir(t)
	p := startProcess(t, dir, limit)
	reading := newClient(t, dir)
	first := sealed(t, 1<<20, 300_000)
	if err := reading.Put(context.Background(), first); err != nil {
		t.Fatal(err)
	}
	lent, err := reading.Get(context.Background(), first.Ref)
	if err != nil {
		t.Fatal(err)
	}
	defer lent.Release()
	w := newWriting(t, dir)
	for round := range rounds {
		r := rand.New(rand.NewPCG(uint64(round), 6))
		stop := w.start(t)
		<-time.After(time.Duration(r.IntN(20_000)) * time.Microsecond)
		if err := p.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = p.Wait()
		stop()
		p = startProcess(t, dir, limit)
		w.check(t)
		if err := lent.Verify(); err != nil || !bytes.Equal(lent.Bytes(), first.Bytes()) {
			t.Fatalf("round %d: a block has changed while it was read: %v", round, err)
		}
	}
	if w.acked == 0 || w.appended == 0 {
		t.Errorf("%d blocks and %d ranges were acknowledged: the test proves nothing", w.acked, w.appended)
	}
	t.Logf("%d kills, %d blocks and %d ranges acknowledged", rounds, w.acked, w.appended)
}

// writing is a client that writes until it is told to stop.
type writing struct {
	c    *Client
	next int32
	// recent are the blocks that were acknowledged last: so few that none has to go.
	recent []*kvcache.Frame
	acked  int

	tail     kvcache.TailWriter
	at       int // position of the next token
	appended int
}

// writingSpec names its tail.
func writingSpec() kvcache.TailSpec {
	space := kvcache.NewSpace("m", nil)
	return kvcache.TailSpec{Space: space, Stream: "s", Parent: space.Root}
}

func newWriting(t *testing.T, dir string) *writing {
	t.Helper()
	w := &writing{c: newClient(t, dir)}
	var err error
	if w.tail, err = w.c.OpenTail(context.Background(), writingSpec()); err != nil {
		t.Fatal(err)
	}
	return w
}

// start writes on a goroutine of its own until stop.
func (w *writing) start(t *testing.T) (stop func()) {
	ctx, end := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			w.next++
			f := sealed(t, w.next, 200_000)
			if w.c.Put(context.Background(), f) == nil {
				w.acked++
				if w.recent = append(w.recent, f); len(w.recent) > 3 {
					w.recent = w.recent[1:]
				}
			}
			r := kvcache.Range{First: w.at, IDs: []int32{int32(w.at)}, Data: bytes.Repeat([]byte{byte(w.at)}, 5000)}
			if err := w.tail.Append(r); err == nil {
				w.at++
				w.appended++
			} else if errors.Is(err, kvcache.ErrStale) {
				t.Errorf("append: %v", err)
				return
			}
		}
	})
	return func() { end(); wg.Wait() }
}

// check looks for what was acknowledged.
func (w *writing) check(t *testing.T) {
	t.Helper()
	for _, f := range w.recent {
		if !has(t, w.c, f) {
			t.Fatalf("block %d of %d that were acknowledged is missing", f.IDs[0], w.acked)
		}
	}
	tails, err := w.c.ReadTail(context.Background(), writingSpec().Space, "s", 0)
	if err != nil || len(tails) != 1 {
		t.Fatalf("%d tails, %v", len(tails), err)
	}
	if n := len(tails[0].Ranges); n < w.at-tails[0].First || n > w.at-tails[0].First+1 {
		t.Fatalf("%d ranges from %d on, %d were acknowledged", n, tails[0].First, w.at)
	}
	for _, r := range tails[0].Ranges {
		if len(r.Data) != 5000 || r.Data[0] != byte(r.First) {
			t.Fatalf("the range at %d is another one", r.First)
		}
	}
	// So that it does not fill the arena.
	if w.at-tails[0].First > 100 {
		if err := w.tail.Rotate(writingSpec().Space.Root, w.at); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNodeHangs: a node that does not answer costs one call its time, and the next ones
// nothing.
func TestNodeHangs(t *testing.T) {
	dir := nodeDir(t)
	p := startProcess(t, dir, 1<<20)
	c := newClient(t, dir)
	f := sealed(t, 1, 10_000)
	if err := c.Put(context.Background(), f); err != nil {
		t.Fatal(err)
	}
	if err := p.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	q := kvcache.Query{Space: f.Space, IDs: f.IDs}
	look := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		_, err := c.Longest(ctx, q)
		return err
	}
	err := look()
	for ; err == nil; err = look() { // the signal takes a moment
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a look-up: %v", err)
	}
	if err := look(); !errors.Is(err, errDown) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the next one: %v", err)
	}
	if st := c.Stats(); st.Late < 2 || st.Failed != 0 {
		t.Errorf("counted %+v", st)
	}
	if err := p.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for err := look(); err != nil; err = look() {
		if !errors.Is(err, errDown) && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("after it woke up: %v", err)
		}
		<-time.After(10 * time.Millisecond)
	}
	if !has(t, c, f) {
		t.Error("the block is gone after it woke up")
	}
}

// TestNodeAway: without a node every call fails at once, and when there is one they work.
func TestNodeAway(t *testing.T) {
	dir := nodeDir(t)
	c := newClient(t, dir)
	ctx := context.Background()
	f := sealed(t, 1, 10_000)
	if err := c.Put(ctx, f); err == nil {
		t.Error("put without a node")
	}
	if m, err := c.Longest(ctx, kvcache.Query{Space: f.Space, IDs: f.IDs}); err == nil || len(m.Blocks) != 0 {
		t.Errorf("a look-up without a node: %v", err)
	}
	if _, err := c.Get(ctx, f.Ref); err == nil {
		t.Error("a block without a node")
	}
	if _, err := c.OpenTail(ctx, writingSpec()); err == nil {
		t.Error("a tail without a node")
	}
	startProcess(t, dir, 1<<20)
	if err := c.Put(ctx, f); err != nil || !has(t, c, f) {
		t.Errorf("put with a node: %v", err)
	}
	if st := c.Stats(); st.Failed == 0 || st.Puts != 1 || st.Limit != 1<<20 {
		t.Errorf("counted %+v", st)
	}
}
