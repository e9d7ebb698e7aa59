package e2e

import (
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// pair are the KV nodes of two hosts, a and b, each of which has copies of the other's blocks.
type pair struct {
	testing.TB
	a, b         *kvNode
	argsA, argsB []string
}

func twoNodes(t testing.TB) *pair {
	t.Helper()
	p := &pair{TB: t}
	onA, onB := freeAddr(t), freeAddr(t)
	all := "a=east@" + onA + ",b=west@" + onB
	p.argsA = []string{"--peer-listen", onA, "--id", "a", "--zone", "east", "--peers", all}
	p.argsB = []string{"--peer-listen", onB, "--id", "b", "--zone", "west", "--peers", all}
	p.a, p.b = startNode(t, p.argsA...), startNode(t, p.argsB...)
	return p
}

// client is one of a node, until the test ends.
func (p *pair) client(n *kvNode) *kvnode.Client {
	p.Helper()
	c, err := kvnode.Open(n.dir)
	if err != nil {
		p.Fatal(err)
	}
	p.Cleanup(func() { c.Close() })
	return c
}

// peers is what `kvmesh kv peers` on a says, and of b.
func (p *pair) peers() (all kvnode.Peers, b kvnode.PeerNode) {
	p.Helper()
	out, err := exec.Command(bin, "kv", "peers", "--kv-dir", p.a.dir, "-o", "json").Output()
	if err == nil {
		err = json.Unmarshal(out, &all)
	}
	if err != nil || len(all.Nodes) != 1 {
		p.Fatalf("%v: %s", err, out)
	}
	return all, all.Nodes[0]
}

// on is how many of the blocks a node's own memory has.
func (p *pair) on(n *kvNode, frames []*kvcache.Frame) (blocks int) {
	p.Helper()
	c, err := kvnode.Open(n.dir)
	if err != nil {
		p.Fatal(err)
	}
	defer c.Close()
	for _, f := range frames {
		l, err := c.Get(p.Context(), f.Ref)
		if err == nil {
			l.Release()
			blocks++
		} else if !errors.Is(err, kvcache.ErrNotFound) {
			p.Fatal(err)
		}
	}
	return blocks
}

// wait waits until so many tokens of a are on no other host, and b is up, or fails.
func (p *pair) wait(what string, tokens int, state string) {
	p.Helper()
	testmesh.Eventually(p, what, time.Minute, func() bool {
		all, b := p.peers()
		up := 0.0
		if state == "up" {
			up = 1
		}
		return unreplicated(p.a) == tokens && all.Behind.Tokens == int64(tokens) && b.State == state && p.a.metric("kvmesh_kv_peer_up") == up
	})
}

// blocksOf makes so many blocks of 32 tokens, each the first of a chain.
func blocksOf(t testing.TB, n int) (frames []*kvcache.Frame) {
	t.Helper()
	space := kvcache.NewSpace("model", []byte("tenant"))
	for i := range n {
		ids := make([]int32, 32)
		ids[0] = int32(i)
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: ids}, []kvcache.Part{{Size: 10_000}}, []byte(strings.Repeat("state of ", 1112))[:10_000])
		if err != nil {
			t.Fatal(err)
		}
		frames = append(frames, f)
	}
	return frames
}

// TestSecondHostLost: the host that has the copies dies, with its memory, and nobody calls it.
// What it had is said to be on no second host, and is copied again when it is back with an
// empty memory, however short it was away. Then the first host dies, and nothing is lost.
func TestSecondHostLost(t *testing.T) {
	t.Parallel()
	p := twoNodes(t)
	const blocks, tail = 100, 20
	frames := blocksOf(t, blocks)
	first := p.client(p.a)
	for _, f := range frames {
		if err := first.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	spec := kvcache.TailSpec{Space: frames[0].Space, Stream: "stream", Parent: frames[0].Key, First: 32}
	w, err := first.OpenTail(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	for i := range tail {
		if err := w.Append(kvcache.Range{First: 32 + i, IDs: []int32{int32(i)}, Data: []byte("state")}); err != nil {
			t.Fatal(err)
		}
	}
	p.wait("everything is on the second host", 0, "up")

	p.b.lose()
	p.wait("it is known that nothing is on a second host", 32*blocks+tail, "failing")
	if _, b := p.peers(); b.Answered.IsZero() || time.Since(b.Answered) < time.Second {
		t.Errorf("the dead host has answered at %v", b.Answered)
	}
	p.b = startNodeIn(t, p.b.dir, p.argsB...)
	p.wait("everything is on the second host again", 0, "up")
	if n := p.on(p.b, frames); n != blocks {
		t.Errorf("the second host, which came back empty, has %d of %d blocks", n, blocks)
	}

	p.b.kill()
	p.b = startNodeIn(t, p.b.dir, append(p.argsB[:len(p.argsB):len(p.argsB)], "--limit", "268435456")...)
	testmesh.Eventually(t, "everything is on the host that was away for a moment", time.Minute, func() bool { return p.on(p.b, frames) == blocks })
	p.wait("that is known", 0, "up")

	p.a.lose()
	if n := p.on(p.b, frames); n != blocks {
		t.Errorf("%d of %d blocks are lost, of which it was said that they are on the second host", blocks-n, blocks)
	}
	second := p.client(p.b)
	tails, err := second.ReadTail(t.Context(), spec.Space, spec.Stream, 0)
	if err != nil || len(tails) == 0 || len(tails[0].IDs()) != tail {
		t.Errorf("the second host has %d tails, not one of %d tokens: %v", len(tails), tail, err)
	}
}
