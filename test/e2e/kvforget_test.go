package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
	"github.com/kvmesh/kvmesh/kvcache/nvmetier"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// three are the KV nodes of three hosts, each of which has copies of everything. The second
// has a disk, too.
type three struct {
	testing.TB
	nodes [3]*kvNode
	args  [3][]string
	disk  string
}

func threeHosts(t testing.TB) *three {
	t.Helper()
	h := &three{TB: t, disk: filepath.Join(t.TempDir(), "disk")}
	var at, all []string
	for _, id := range []string{"a", "b", "c"} {
		at = append(at, freeAddr(t))
		all = append(all, id+"="+at[len(at)-1])
	}
	for i, id := range []string{"a", "b", "c"} {
		h.args[i] = []string{"--peer-listen", at[i], "--id", id, "--replicas", "3", "--peers", strings.Join(all, ",")}
	}
	h.args[1] = append(h.args[1], "--nvme", h.disk)
	for i := range h.nodes {
		h.nodes[i] = startNode(t, h.args[i]...)
	}
	return h
}

// again starts a node again that was killed.
func (h *three) again(i int) {
	h.Helper()
	h.nodes[i] = startNodeIn(h, h.nodes[i].dir, h.args[i]...)
}

// client is one of a node.
func (h *three) client(i int) *kvnode.Client {
	h.Helper()
	c, err := kvnode.Open(h.nodes[i].dir)
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() { c.Close() })
	return c
}

// has says whether a store has a block.
func (h *three) has(s kvcache.Store, ref kvcache.Ref) bool {
	h.Helper()
	l, err := s.Get(h.Context(), ref)
	if err == nil {
		l.Release()
	} else if !errors.Is(err, kvcache.ErrNotFound) {
		h.Fatal(err)
	}
	return err == nil
}

// onDisk says whether the disk of the second host, whose node is dead, has a block.
func (h *three) onDisk(ref kvcache.Ref) bool {
	h.Helper()
	disk, err := nvmetier.Open(nvmetier.Config{Dir: h.disk})
	if err != nil {
		h.Fatal(err)
	}
	defer disk.Close()
	return h.has(disk, ref)
}

// invalidate runs the command on the first host. It has to name who is away, and to fail if
// somebody is.
func (h *three) invalidate(away string, what ...string) {
	h.Helper()
	c := exec.Command(bin, append([]string{"kv", "invalidate", "--kv-dir", h.nodes[0].dir, "-o", "json"}, what...)...)
	out, err := c.CombinedOutput()
	if (err != nil) != (away != "") {
		h.Fatalf("%v, with %q away: %s", err, away, out)
	}
	for _, id := range []string{"b", "c"} {
		if strings.Contains(string(out), fmt.Sprintf("KV peer %s: not done yet", id)) != (id == away) {
			h.Errorf("with %q away, host %s is named, or not:\n%s", away, id, out)
		}
	}
}

// state is what `kvmesh kv peers` on the first host says of another one.
func (h *three) state(id string) (n kvnode.PeerNode) {
	h.Helper()
	out, err := exec.Command(bin, "kv", "peers", "--kv-dir", h.nodes[0].dir, "-o", "json").Output()
	if err != nil {
		h.Fatal(err)
	}
	var p kvnode.Peers
	if err := json.Unmarshal(out, &p); err != nil || p.ID != "a" || p.Replicas != 3 || len(p.Nodes) != 2 {
		h.Fatalf("%v: %s", err, out)
	}
	for _, n = range p.Nodes {
		if n.ID == id {
			break
		}
	}
	return n
}

// frameOf makes a block of a model and a tenant.
func frameOf(t testing.TB, model, tenant string) *kvcache.Frame {
	t.Helper()
	space := kvcache.NewSpace(model, []byte(tenant))
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{1, 2, 3}}, []kvcache.Part{{Size: 5}}, []byte("state"))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestPeersForget: `kvmesh kv invalidate` on one host erases a tenant, and drops a model, in
// the memory and on the disk of the others. A host that is stopped, or dead, is named, and has
// forgotten it when it is back, also where the host that was asked has been killed since.
func TestPeersForget(t *testing.T) {
	h := threeHosts(t)
	acme, other, old := frameOf(t, "model", "acme"), frameOf(t, "model", "other"), frameOf(t, "old model", "other")
	for _, f := range []*kvcache.Frame{acme, other, old} {
		if err := h.client(1).Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	clients := []*kvnode.Client{h.client(0), h.client(1), h.client(2)}
	there := func(f *kvcache.Frame) (on string) {
		for i, c := range clients {
			if h.has(c, f.Ref) {
				on += string(rune('a' + i))
			}
		}
		return on
	}
	testmesh.Eventually(t, "the first host has met the others", time.Minute, func() bool {
		b, c := h.state("b"), h.state("c")
		return b.State == "up" && c.State == "up" && !b.Answered.IsZero() && !c.Answered.IsZero()
	})
	testmesh.Eventually(t, "all hosts have everything", time.Minute, func() bool {
		return unreplicated(h.nodes[1]) == 0 && h.nodes[1].metric("kvmesh_kv_stack_behind_blocks") == 0 && there(acme)+there(other)+there(old) == "abcabcabc"
	})

	stopped := h.nodes[2].cmd.Process
	if err := stopped.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	testmesh.Eventually(t, "it to stand still", time.Minute, func() bool { // on a busy machine one of its threads may still answer
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", stopped.Pid))
		return err == nil && strings.Contains(string(stat), ") T ")
	})
	h.invalidate("c", "--tenant", "acme")
	clients = clients[:2]
	if there(acme)+there(other) != "ab" {
		t.Errorf("the tenant is on %q, another one on %q", there(acme), there(other))
	}
	if err := stopped.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	clients = append(clients, h.client(2))
	testmesh.Eventually(t, "the host that goes on has erased the tenant", 2*time.Minute, func() bool { return there(acme) == "" })
	if there(other) != "abc" {
		t.Errorf("another tenant is on %q", there(other))
	}

	h.nodes[2].kill()
	testmesh.Eventually(t, "the dead host fails", time.Minute, func() bool { return h.state("c").State == "failing" })
	h.invalidate("c", "--fingerprint", old.Fingerprint.String())
	h.nodes[0].kill()
	h.again(0)
	h.again(2)
	testmesh.Eventually(t, "the host that is back has dropped the model", 2*time.Minute, func() bool { // who asks for it meanwhile might bring it back
		c := h.state("c")
		return c.Owed == 0 && c.State == "up" && c.Limit > 0
	})
	if there(old) != "" {
		t.Errorf("the model is on %q", there(old))
	}
	if there(other) != "abc" {
		t.Errorf("another model is on %q", there(other))
	}
	h.invalidate("", "--tenant", "acme")
	h.nodes[1].kill()
	if h.onDisk(acme.Ref) || h.onDisk(old.Ref) || !h.onDisk(other.Ref) {
		t.Errorf("on the disk: tenant %v, model %v; and what stays: %v", h.onDisk(acme.Ref), h.onDisk(old.Ref), h.onDisk(other.Ref))
	}
}
