package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
	"github.com/kvmesh/kvmesh/internal/s3test"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// kvNode is one `kvmesh kvnode`.
type kvNode struct {
	testing.TB
	dir     string
	metrics string // URL
	cmd     *exec.Cmd
	log     *testmesh.Log
}

// startNode starts a node with a memory of its own and waits until it serves.
func startNode(t testing.TB, args ...string) *kvNode {
	t.Helper()
	return startNodeIn(t, kvDir(t), args...)
}

// startNodeIn starts a node on the memory in dir, if there is one.
func startNodeIn(t testing.TB, dir string, args ...string) *kvNode {
	t.Helper()
	return startNodeOn(t, nil, dir, args...)
}

// startNodeOn starts a node on a host; nil = this one.
func startNodeOn(t testing.TB, on *testmesh.Host, dir string, args ...string) *kvNode {
	t.Helper()
	addr := addrOn(t, on)
	n := &kvNode{TB: t, dir: dir, metrics: "http://" + addr + "/metrics", log: &testmesh.Log{}}
	n.cmd = commandOn(on, append([]string{"kvnode", "--dir", n.dir, "--limit", "536870912", "--metrics", addr}, args...))
	n.cmd.Env = append(os.Environ(), "AWS_ACCESS_KEY_ID="+s3test.AccessKey, "AWS_SECRET_ACCESS_KEY="+s3test.SecretKey, "AWS_REGION="+s3test.Region)
	n.cmd.Stderr = n.log
	if err := n.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reaper.Add(n.cmd.Process.Pid)
	t.Cleanup(func() {
		n.lose()
		if t.Failed() {
			t.Logf("node %s:\n%s", n.dir, n.log)
		}
	})
	testmesh.Eventually(t, "the KV node serves", time.Minute, func() bool {
		resp, err := http.Get("http://" + addr + "/health")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil
	})
	return n
}

// addrOn is an address of a host that nobody uses yet; nil = of this one.
func addrOn(t testing.TB, on *testmesh.Host) string {
	t.Helper()
	if on != nil {
		return on.Free()
	}
	return freeAddr(t)
}

// commandOn is one of kvmesh on a host; nil = on this one.
func commandOn(on *testmesh.Host, args []string) *exec.Cmd {
	if on != nil {
		return on.Command(bin, args...)
	}
	return exec.Command(bin, args...)
}

// kill kills the node, and its memory stays. It may be called again.
func (n *kvNode) kill() {
	if n.cmd.ProcessState == nil {
		_ = n.cmd.Process.Kill() // fails only when it is gone
		_ = n.cmd.Wait()
		reaper.Remove(n.cmd.Process.Pid)
	}
}

// lose kills the node, and its memory is gone. It may be called again.
func (n *kvNode) lose() {
	n.kill()
	if err := os.RemoveAll(n.dir); err != nil {
		n.Error(err)
	}
}

// metric is the sum of the samples whose name, with its labels, begins with prefix.
func (n *kvNode) metric(prefix string) float64 {
	n.Helper()
	return metricAt(n, n.metrics, prefix)
}

// settled waits until everything is written to all tiers.
func (n *kvNode) settled(limit time.Duration) {
	n.Helper()
	testmesh.Eventually(n, "everything is written behind", limit, func() bool {
		return n.metric("kvmesh_kv_stack_behind_blocks") == 0
	})
}

// longQuestion is a question whose prompt is long enough for its prefill to be worth a
// restore from anywhere, and the answer that nobody disturbs.
func longQuestion(t testing.TB, p *process) question {
	t.Helper()
	body := map[string]any{
		"prompt":     strings.Repeat(preface, 12) + "Once there was a lighthouse keeper who",
		"max_tokens": answerTokens, "temperature": 0, "repetition_penalty": 1.15, "ignore_eos": true,
	}
	q := question{body: body}
	q.want.rest(t, p.post(body, map[string]any{"token_ids": true, "salt": "undisturbed"}, "undisturbed"))
	if len(q.want.ids) != answerTokens || repeats(q.want.ids, repeatLength) {
		t.Fatalf("the answer has %d tokens, or repeats itself: %q", len(q.want.ids), q.want.text)
	}
	return q
}

// farTier starts what a tier needs and returns the flags of nodes that use it.
func farTier(t *testing.T, tier string) []string {
	t.Helper()
	switch tier {
	case "nvme":
		return []string{"--nvme", filepath.Join(t.TempDir(), "kv")}
	case "redis":
		return []string{"--redis", redistest.Start(t).URL(), "--redis-single"}
	}
	s := s3test.StartServer(t)
	s.MakeBucket("kvblocks")
	return []string{"--s3", "s3://kvblocks/host", "--s3-endpoint", s.Endpoint}
}

// starter starts a worker.
type starter func(t testing.TB, id string, args ...string) *process

// simProcess starts a worker of the simulated engine, which recognizes KV that is not
// that of its tokens.
func simProcess(t testing.TB, id string, args ...string) *process {
	t.Helper()
	return launch(t, id, append(simArgs(), args...)...)
}

// simArgs are the flags of a worker whose engine only waits for time to pass.
func simArgs() []string {
	return []string{"--engine", "sim", "--model", "gemma", "--sim-ttft", "50ms", "--sim-itl", "10ms", "--checkpoint-interval", "1"}
}

// TestTiersOutliveHost: a worker, its KV node and all of their host's memory are gone in
// the middle of an answer. A worker on a new node, which has nothing in common with the old
// one but a disk, a Redis or an S3, goes on from the blocks there, and the tokens are those
// of the undisturbed answer.
func TestTiersOutliveHost(t *testing.T) {
	tiers := []string{"nvme", "redis", "s3"}
	t.Run("sim", func(t *testing.T) { outliveHost(t, simProcess, tiers, true) })
	if !*fullResume {
		tiers = tiers[:1]
	}
	t.Run("model", func(t *testing.T) { outliveHost(t, startProcess, tiers, false) })
}

// outliveHost tries tiers, all at once where the engine only waits for time to pass.
func outliveHost(t *testing.T, start starter, tiers []string, atOnce bool) {
	alone := start(t, "alone")
	q := longQuestion(t, alone)
	prompt := len(alone.prompt(q.body))
	alone.kill()
	for _, tier := range tiers {
		t.Run(tier, func(t *testing.T) {
			if atOnce {
				t.Parallel()
			}
			args := farTier(t, tier)
			node := startNode(t, args...)
			one := start(t, "one", "--kv-node", node.dir)
			delivered, s := cut(t, one, q.body, map[string]any{"token_ids": true, "salt": "s"}, "stream", cutting{at: 60, kill: true})
			s.close()
			node.settled(time.Minute)
			node.lose()

			// On a machine where the budget is over before the first block has come, another
			// host is as good as new: only what is in the tier can help it.
			for try := 1; ; try++ {
				node = startNode(t, args...)
				two := start(t, "two", "--kv-node", node.dir)
				mesh := resume(told{IDs: delivered.ids, Text: delivered.text}, "stream", "s")
				mesh["kv_within_ms"] = 60_000 // as a route may say, and then the estimated prefill counts
				got := continued(t, two, q.body, delivered, mesh, "stream")
				t.Logf("%d of %d tokens restored, %d computed, %s", got.restored, prompt+len(delivered.ids), got.computed, got.mode)
				if got.restored < prompt && try < 3 {
					two.kill()
					node.lose()
					continue
				}
				if why := differs(got, q.want); why != "" {
					t.Error(why)
				}
				if got.mode != "exact" || got.restored < prompt || got.restored%64 != 0 {
					t.Errorf("went on as %q with %d tokens restored of a prompt of %d", got.mode, got.restored, prompt)
				}
				if n := node.metric(fmt.Sprintf("kvmesh_kv_stack_promoted_tokens_total{tier=%q", tier)); int(n) < got.restored {
					t.Errorf("%v tokens came from the tier, %d were restored", n, got.restored)
				}
				return
			}
		})
	}
}

// timed reads an answer, and says how long its first token took and what the longest gap
// between two others was. With each token it calls at.
func timed(t testing.TB, p *process, body map[string]any, salt string, at func(tokens int)) (r run, first, gap time.Duration) {
	t.Helper()
	last := time.Now()
	s := p.post(body, map[string]any{"token_ids": true, "salt": salt}, "stream-"+salt)
	defer s.close()
	for {
		c, err := s.next()
		if errors.Is(err, io.EOF) {
			return r, first, gap
		}
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(last); len(r.ids) == 0 {
			first = took
		} else if len(c.ids) > 0 {
			gap = max(gap, took)
		}
		last = time.Now()
		r.add(c)
		at(len(r.ids))
	}
}

// TestTiersStop: Redis and S3 stop (SIGSTOP) in the middle of an answer, and stay so for the
// next ones. No token waits for them longer than the budget of a look-up, and all answers
// are right; when they go on, they get what was computed meanwhile. Then they die.
func TestTiersStop(t *testing.T) {
	redis, s3 := redistest.Start(t), s3test.StartServer(t)
	s3.MakeBucket("kvblocks")
	node := startNode(t, "--nvme", filepath.Join(t.TempDir(), "kv"), "--redis", redis.URL(), "--redis-single", "--s3", "s3://kvblocks/stop", "--s3-endpoint", s3.Endpoint)
	p := simProcess(t, "p", "--kv-node", node.dir)
	q := longQuestion(t, p)
	node.settled(time.Minute)

	pause := func(tokens int) {
		if tokens == 20 {
			redis.Pause()
			s3.Pause()
		}
	}
	// A look-up may take 2 s, which are over before those of the servers' calls: 2 s for
	// Redis's and 5 s for S3's, one after the other, and 10 s and more for a write.
	const budget = 2 * time.Second
	var normal time.Duration
	answer := func(name string) {
		got, first, gap := timed(t, p, q.body, name, pause)
		t.Logf("%s: first token after %v, longest gap %v", name, first.Round(time.Millisecond), gap.Round(time.Millisecond))
		if why := differs(got, q.want); why != "" {
			t.Errorf("%s: %s", name, why)
		}
		normal = cmp.Or(normal, first)
		// Twice and thrice for a machine that is busy with something else.
		if first > 2*budget+3*normal || gap > budget+3*normal {
			t.Errorf("%s: first token after %v, longest gap %v; undisturbed the first took %v", name, first, gap, normal)
		}
		pause = func(int) {}
	}
	answer("they stop")
	for i := range 3 {
		answer(fmt.Sprint("stopped ", i))
	}
	if cuts := node.metric("kvmesh_kv_stack_cuts_total"); cuts == 0 {
		t.Error("no look-up was cut: nobody has met the servers that had stopped")
	}
	if n := node.metric("kvmesh_kv_stack_behind_tokens"); n == 0 {
		t.Error("nothing waits for the servers that have stopped")
	}
	redis.Resume()
	s3.Resume()
	node.settled(2 * time.Minute)
	if n := node.metric("kvmesh_kv_stack_dropped_total"); n != 0 {
		t.Errorf("%v blocks were dropped", n)
	}
	redis.Kill()
	s3.Kill()
	for i := range 2 {
		answer(fmt.Sprint("dead ", i))
	}
	if err := node.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if err := node.cmd.Wait(); err != nil {
		t.Errorf("the node's end: %v", err)
	}
}
