//go:build unix

package kvrpc

import (
	"os"
	"testing"
	"time"
)

// TestProbe: a peer that is killed does not answer; started again it names the memory that it
// had, and another one where that is gone or of another size.
func TestProbe(t *testing.T) {
	p := startPeer(t, childSpec{Limit: 8 << 20, Dir: shmDir(t)})
	c := newClient(t, Config{Addr: p.addr, Away: 10 * time.Millisecond})
	was, err := c.Probe(t.Context())
	if err != nil || len(was) != 16 {
		t.Fatalf("memory %x: %v", was, err)
	}
	again := func(change func()) string {
		t.Helper()
		p.kill()
		if id, err := c.Probe(t.Context()); err == nil {
			t.Errorf("a dead peer names %x", id)
		}
		change()
		p.start(t)
		for {
			id, err := c.Probe(t.Context())
			if err == nil {
				return id
			}
			select {
			case <-t.Context().Done():
				t.Fatal(err)
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	if id := again(func() {}); id != was {
		t.Errorf("memory %x is %x after a restart", was, id)
	}
	if id := again(func() { p.spec.Limit *= 2 }); id == was {
		t.Error("a memory of another size has the same name")
	} else {
		was = id
	}
	empty := func() {
		if err := os.RemoveAll(p.spec.Dir); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(p.spec.Dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if id := again(empty); id == was {
		t.Error("an empty memory has the name of the one before")
	}
}
