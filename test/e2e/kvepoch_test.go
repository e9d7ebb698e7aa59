package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

// again kills the node (SIGKILL) and starts it with the memory that it leaves, and more flags.
func (n *kvNode) again(args ...string) {
	n.Helper()
	_ = n.cmd.Process.Kill() // fails only when it is gone
	_ = n.cmd.Wait()
	reaper.Remove(n.cmd.Process.Pid)
	old := n.cmd
	n.cmd = exec.Command(old.Path, append(slices.Clone(old.Args[1:]), args...)...)
	n.cmd.Env, n.cmd.Stderr = old.Env, old.Stderr
	if err := n.cmd.Start(); err != nil {
		n.Fatal(err)
	}
	reaper.Add(n.cmd.Process.Pid)
	testmesh.Eventually(n, "the KV node serves again", time.Minute, func() bool {
		resp, err := http.Get(n.metrics)
		if err == nil {
			resp.Body.Close()
		}
		return err == nil
	})
}

// epoch is what a node says of the only model's epoch.
type epoch struct {
	Number   int    `json:"epoch"`
	Weights  string `json:"weights"`
	Left     int64  `json:"left_bytes"`
	Versions int    `json:"left_versions"`
}

// epoch asks the node, which must know one model.
func (n *kvNode) epoch(args ...string) epoch {
	n.Helper()
	out, err := exec.Command(bin, append([]string{"kv", "epoch", "-o", "json", "--kv-dir", n.dir}, args...)...).Output()
	var got struct{ Epochs []epoch }
	if err == nil {
		err = json.Unmarshal(out, &got)
	}
	if err != nil || len(got.Epochs) != 1 {
		n.Fatalf("kv epoch: %v, %s", err, out)
	}
	return got.Epochs[0]
}

// TestEpochRollout: a worker with new weights joins two with the old ones on one KV node with
// a disk. New streams of an old worker find nothing from then on, also after the node was
// killed; a stream that one of them has begun goes on at the other from its KV, token by
// token as it would have. When it has ended, memory and disk have nothing of the old version
// any more, and a rollback makes it today's again.
func TestEpochRollout(t *testing.T) {
	t.Parallel()
	node := startNode(t, "--nvme", filepath.Join(t.TempDir(), "kv"))
	start := func(id, weights string) *process {
		// Two seconds are what a look-up may take, on a machine that is busy.
		return simProcess(t, id, "--kv-node", node.dir, "--sim-weights", weights, "--sim-ttft", "2s")
	}
	one, two := start("one", "v1"), start("two", "v1")
	q := longQuestion(t, one)
	prompt := len(one.prompt(q.body))
	first := node.epoch()
	if first.Number != 1 || first.Weights != "sim:v1" {
		t.Fatalf("the first epoch: %+v", first)
	}
	fresh := func(p *process, salt string) run {
		var r run
		r.rest(t, p.post(q.body, map[string]any{"token_ids": true, "salt": salt}, ""))
		if why := differs(r, q.want); why != "" {
			t.Errorf("worker %s: %s", p.id, why)
		}
		return r
	}
	hits := func(p *process) float64 { return p.metric(`kvmesh_kv_restores_total{result="restored`) }
	fresh(two, "undisturbed")
	if hits(two) == 0 {
		t.Fatal("the old version is not found before the new one is there")
	}
	delivered, s := cut(t, one, q.body, map[string]any{"token_ids": true, "salt": "undisturbed"}, "stream", cutting{at: 60, kill: true})
	s.close()

	three := start("three", "v2")
	fresh(three, "undisturbed")
	testmesh.Eventually(t, "the node knows the new weights", time.Minute, func() bool { return node.epoch().Number == 2 })
	before := hits(two)
	fresh(two, "undisturbed")
	if got := node.metric("kvmesh_kv_epoch_refused_total"); hits(two) != before || got == 0 {
		t.Errorf("a new stream finds blocks of the old version; %v look-ups refused", got)
	}
	node.again()
	fresh(two, "undisturbed")
	if got := node.metric("kvmesh_kv_epoch_refused_total"); hits(two) != before || got == 0 || node.epoch().Weights != "sim:v2" {
		t.Errorf("a new stream finds blocks of the old version when the node is back; %v look-ups refused", got)
	}
	mesh := resume(told{IDs: delivered.ids, Text: delivered.text}, "stream", "undisturbed")
	mesh["kv_within_ms"] = 60_000
	got := continued(t, two, q.body, delivered, mesh, "stream")
	if why := differs(got, q.want); why != "" || got.mode != "exact" || got.restored < prompt {
		t.Errorf("the old stream went on as %q with %d of %d tokens restored: %s", got.mode, got.restored, prompt, why)
	}
	fresh(three, "undisturbed")
	if hits(three) == 0 {
		t.Error("the new version's blocks are not found")
	}
	if e := node.epoch(); e.Versions == 0 || e.Left == 0 {
		t.Errorf("the old version has gone while its stream was open: %+v", e)
	}
	// What is left of the stream has no more than its time to live, which is now over.
	node.settled(time.Minute)
	used := node.metric(`kvmesh_kv_tier_used_bytes{tier="nvme"`)
	node.again("--tail-ttl", "1s")
	testmesh.Eventually(t, "the old version has gone from memory and disk", 2*time.Minute, func() bool {
		e := node.epoch()
		return e.Left == 0 && e.Versions == 0
	})
	if now := node.metric(`kvmesh_kv_tier_used_bytes{tier="nvme"`); now >= used || now == 0 {
		t.Errorf("%v bytes on the disk, %v with the old version", now, used)
	}
	if got := node.metric("kvmesh_kv_epoch_reclaimed_bytes_total"); got == 0 {
		t.Error("no bytes were reclaimed in memory")
	}
	if e := node.epoch("--model", "gemma", "--weights", "sim:v1"); e.Number != 3 || e.Weights != "sim:v1" {
		t.Errorf("a rollback: %+v", e)
	}
	fresh(two, "undisturbed")
	fresh(two, "undisturbed")
	if hits(two) != before+2 {
		t.Errorf("%v look-ups of the old version found something: one of the stream and one after the rollback were to", hits(two)-before)
	}
	if _, err := os.Stat(filepath.Join(node.dir, "epochs")); err != nil {
		t.Error(err)
	}
}
