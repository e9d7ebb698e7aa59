//go:build unix

package kvnode

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
)

// lendNode starts a node with some blocks.
func lendNode(t *testing.T, blocks int) (dir string, frames []*kvcache.Frame, refs []kvcache.Ref) {
	t.Helper()
	dir = nodeDir(t)
	n, err := startNode(arena.Config{Dir: dir, Limit: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.end)
	c := newClient(t, dir)
	for i := range blocks {
		f := sealed(t, int32(i+1), 10_000+i)
		if err := c.Put(context.Background(), f); err != nil {
			t.Fatal(err)
		}
		frames, refs = append(frames, f), append(refs, f.Ref)
	}
	return dir, frames, refs
}

// all reads blocks by GetEach and checks each.
func all(t *testing.T, c *Client, frames []*kvcache.Frame, refs []kvcache.Ref) {
	t.Helper()
	n := 0
	for l, err := range c.GetEach(context.Background(), refs) {
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Verify(); err != nil || !bytes.Equal(l.Bytes(), frames[n].Bytes()) {
			t.Fatalf("block %d: %v, or other bytes", n, err)
		}
		l.Release()
		n++
	}
	if n != len(frames) {
		t.Fatalf("%d blocks of %d", n, len(frames))
	}
}

// TestGetEach: many blocks with few requests, counted as hits, and a caller that ends early
// gives every slot back.
func TestGetEach(t *testing.T) {
	dir, frames, refs := lendNode(t, 300)
	c := newClient(t, dir)
	all(t, c, frames, refs)
	if st := c.count.Stats(); st.Hits != 300 || st.HitBytes < 3_000_000 {
		t.Errorf("counted %+v", st)
	}
	for range 3 * arena.Slots / 300 {
		n := 0
		for l, err := range c.GetEach(context.Background(), refs) {
			if err != nil {
				t.Fatal(err)
			}
			l.Release()
			if n++; n == 40 {
				break
			}
		}
	}
	// What was asked for ahead is given back a moment later.
	deadline := time.Now().Add(time.Minute)
	for taken := arena.Slots; taken > 0; {
		taken = 0
		var slots []int
		for range arena.Slots {
			slot, _, err := c.reader.Ask()
			if err != nil {
				taken++
				break
			}
			slots = append(slots, slot)
		}
		for _, slot := range slots {
			c.reader.Abandon(slot)
		}
		if time.Now().After(deadline) {
			t.Fatal("slots are not given back")
		}
	}
	all(t, c, frames, refs)
}

// TestGetEachOlderNode: a node that does not know how to lend several is asked for each.
func TestGetEachOlderNode(t *testing.T) {
	dir, frames, refs := lendNode(t, 30)
	name := filepath.Join(dir, SocketName)
	if err := os.Rename(name, name+".real"); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	refused := make(chan bool, 100)
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", name+".real")
			if err != nil {
				in.Close()
				return
			}
			go beforeLend(in, out, refused)
		}
	}()
	c := newClient(t, dir)
	all(t, c, frames, refs)
	if len(refused) == 0 {
		t.Error("it was never asked: the test proves nothing")
	}
}

// beforeLend passes requests without data on, but for those that an older node refuses.
func beforeLend(in, out net.Conn, refused chan<- bool) {
	defer in.Close()
	defer out.Close()
	message := func(from io.Reader) (raw []byte, h head, err error) {
		raw = make([]byte, headLen)
		if _, err = io.ReadFull(from, raw); err != nil {
			return nil, h, err
		}
		if h, err = parseHead(raw, mostAnswer); err != nil {
			return nil, h, err
		}
		body, err := readBody(from, h.body, nil)
		return append(raw, body...), h, err
	}
	for {
		raw, h, err := message(in)
		if err != nil {
			return
		}
		if op(h.what) == opLend {
			refused <- true
			text := "operation 27 is not known"
			raw = make([]byte, headLen)
			head{what: uint8(statusFailed), body: uint32(len(text))}.put(raw)
			raw = append(raw, text...)
		} else if _, err = out.Write(raw); err == nil {
			raw, _, err = message(out)
		}
		if err == nil {
			_, err = in.Write(raw)
		}
		if err != nil {
			return
		}
	}
}

// TestFill maps the memory of a node, and says where it is away.
func TestFill(t *testing.T) {
	dir, frames, refs := lendNode(t, 3)
	c := newClient(t, dir)
	if err := c.Fill(context.Background()); err != nil {
		t.Fatal(err)
	}
	all(t, c, frames, refs)
	if err := newClient(t, nodeDir(t)).Fill(context.Background()); err == nil {
		t.Error("a node that is away was mapped")
	}
}
