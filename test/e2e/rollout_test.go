package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

// numbered is the request of a stream whose answer its number decides.
func numbered(i, tokens int) ask {
	return ask{path: "/completions", body: fmt.Sprintf(`{"model":"sim-1","prompt":"number %d","max_tokens":%d,"ignore_eos":true,"stream":true,"temperature":0,"sim":{"max":0}}`, i, tokens)}
}

// undisturbed are the answers to the first n numbered requests.
func undisturbed(t *testing.T, m *testmesh.Mesh, n, tokens int) []*heard {
	t.Helper()
	want := make([]*heard, n)
	var all sync.WaitGroup
	for i := range want {
		all.Go(func() {
			var err error
			if want[i], err = streamed(t.Context(), m, numbered(i, tokens), nil); err != nil || !want[i].done {
				t.Errorf("undisturbed answer %d: %v", i, err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return want
}

// steady asks numbered requests, so many at a time, until ctx ends, and holds each
// answer against the undisturbed one. It returns how many there were.
func steady(ctx context.Context, t *testing.T, m *testmesh.Mesh, want []*heard, tokens int) int {
	t.Helper()
	var all sync.WaitGroup
	var mu sync.Mutex
	n := 0
	for i := range want {
		all.Go(func() {
			for ctx.Err() == nil {
				got, err := streamed(context.WithoutCancel(ctx), m, numbered(i, tokens), nil)
				mu.Lock()
				n++
				mu.Unlock()
				if err != nil {
					t.Errorf("answer %d: %v", i, err)
				} else if diff := got.same(want[i]); diff != "" {
					t.Errorf("answer %d: %s", i, diff)
				}
			}
		})
	}
	all.Wait()
	return n
}

// All workers are restarted one after the other under a constant load: no request
// fails, and every answer has the tokens of an undisturbed one.
func TestRollingRestart(t *testing.T) {
	const tokens = 100
	m := testmesh.StartPolicy(t, bin, quick)
	want := undisturbed(t, m, 24, tokens)
	before := m.Parts()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		c := exec.Command(bin, "rollout", "--observe", "1s")
		c.Dir = m.Dir
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("rollout: %v: %s", err, out)
		}
	}()
	n := steady(ctx, t, m, want, tokens)
	after := m.Parts()
	for _, id := range []string{"worker-1", "worker-2", "worker-3"} {
		if after[id] == 0 || after[id] == before[id] {
			t.Errorf("%s is process %d, was %d: it was not restarted", id, after[id], before[id])
		}
	}
	if moved := relayMetric(t, m, `kvmesh_relay_moves_total{cause="draining"`); moved == 0 {
		t.Error("no answer moved: nothing was shown")
	} else {
		t.Logf("%d answers, %.0f moves", n, moved)
	}
	stopsAtBrokenStreams(t, m)
}

// stopsAtBrokenStreams rolls a worker out that cuts its streams: clients see nothing of
// it, since another goes on, and the rollout stops all the same.
func stopsAtBrokenStreams(t *testing.T, m *testmesh.Mesh) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for ctx.Err() == nil {
				cut := ask{path: "/completions", body: `{"model":"sim-1","prompt":"p","max_tokens":20,"ignore_eos":true,"stream":true,"sim":{"cut_at":4,"attempt":1}}`}
				if got, err := streamed(context.WithoutCancel(ctx), m, cut, nil); err != nil || !got.done {
					t.Errorf("a client saw the cut: %+v, %v", got, err)
				}
			}
		})
	}
	c := exec.Command(bin, "rollout", "worker-1", "--observe", "2m")
	c.Dir = m.Dir
	out, err := c.CombinedOutput()
	cancel()
	all.Wait()
	if err == nil || !strings.Contains(string(out), "worker-1: it broke ") {
		t.Errorf("rollout of a worker that cuts its streams: %v: %s", err, out)
	}
	for _, w := range m.Workers(t) {
		if w.Drained != (w.ID == "worker-1") {
			t.Errorf("%s is %s, drained %v; want worker-1 drained, which failed", w.ID, w.Status, w.Drained)
		}
	}
}

// The script of docs/rollout.md replaces a worker under load over HTTP, and keeps out a
// rollout of the same pool meanwhile.
func TestRolloutByHTTP(t *testing.T) {
	const tokens = 60
	doc, err := os.ReadFile(filepath.Join(testmesh.Root(), "docs", "rollout.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, script, _ := strings.Cut(string(doc), "```sh\n")
	script, _, ok := strings.Cut(script, "```")
	if !ok {
		t.Fatal("docs/rollout.md has no script")
	}
	m := testmesh.StartPolicy(t, bin, quick)
	if err := os.WriteFile(filepath.Join(m.Dir, "replace.sh"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	want := undisturbed(t, m, 12, tokens)
	before := m.Parts()
	ctx, cancel := context.WithCancel(t.Context())
	env := append(curlPath(t), "API="+m.API, "GATEWAY="+m.Gateway(t))
	replace := func(args ...string) *exec.Cmd {
		limit, done := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Minute)
		t.Cleanup(done)
		c := exec.CommandContext(limit, "sh", append([]string{"replace.sh", "sim", "worker-2", "sh", "-c"}, args...)...)
		c.Dir, c.Env, c.WaitDelay = m.Dir, env, 5*time.Second
		c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		return c
	}
	go func() {
		defer cancel()
		// The restart command tries a rollout of its own while the pool is the script's.
		c := replace(`"$0" rollout --journal other.json worker-1 2>refused && exit 1; kill -TERM $KVMESH_WORKER_PID`, bin)
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("replace.sh: %v: %s", err, out)
		}
	}()
	steady(ctx, t, m, want, tokens)
	after := m.Parts()
	for id, pid := range before {
		if replaced := after[id] != pid; replaced != (id == "worker-2") {
			t.Errorf("%s is process %d, was %d; want only worker-2 replaced", id, after[id], pid)
		}
	}
	if refused, err := os.ReadFile(filepath.Join(m.Dir, "refused")); err != nil || !strings.Contains(string(refused), "another rollout of this pool is under way: replace.sh-") {
		t.Errorf("a second rollout of the pool: %q, %v", refused, err)
	}
	if out, err := exec.Command("sh", "-c", `cd "$0" && "$1" rollout --dry-run`, m.Dir, bin).CombinedOutput(); err != nil {
		t.Errorf("afterwards: %v: %s", err, out)
	}
	for _, w := range m.Workers(t) {
		if w.Drained {
			t.Errorf("%s is still drained", w.ID)
		}
	}
	// Nothing of a script that is killed goes on to renew its lease.
	killed := replace(`kill -KILL $PPID`)
	if err := killed.Run(); err == nil || killed.ProcessState.Exited() {
		t.Fatalf("the script was to be killed: %v", err)
	}
	testmesh.Eventually(t, "the end of the killed script's renewal", time.Minute, func() bool {
		return errors.Is(syscall.Kill(-killed.Process.Pid, 0), syscall.ESRCH)
	})
}

// curlPath is the environment, with a stand-in for curl where the machine has none.
func curlPath(t *testing.T) []string {
	t.Helper()
	if _, err := exec.LookPath("curl"); err == nil {
		return os.Environ()
	}
	self, err := os.Executable()
	if err != nil {
		t.Error(err)
	}
	dir := t.TempDir()
	if err := os.Symlink(self, filepath.Join(dir, "curl")); err != nil {
		t.Error(err)
	}
	return append(os.Environ(), "PATH="+dir+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// A worker with at least 100 live streams is emptied, and none of them broke. How long that
// takes is BenchmarkDrainOf100's.
func TestDrainOfManyStreams(t *testing.T) {
	const tokens, streams, least = 300, 130, 100
	m := testmesh.StartPolicy(t, bin, quick)
	want := undisturbed(t, m, streams, tokens)
	home, err := streamed(t.Context(), m, ask{path: "/completions", body: `{"model":"sim-1","prompt":"where","max_tokens":1,"stream":true}`, session: "many"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range want {
		all.Go(func() {
			q := numbered(i, tokens)
			q.session = "many" // all at one worker
			if got, err := streamed(t.Context(), m, q, nil); err != nil {
				t.Errorf("answer %d: %v", i, err)
			} else if diff := got.same(want[i]); diff != "" {
				t.Errorf("answer %d: %s", i, diff)
			}
		})
	}
	testmesh.Eventually(t, "100 streams at a worker", 30*time.Second, func() bool { return most(t, m, home.worker) >= streams-5 })
	c := exec.Command(bin, "drain", home.worker, "-o", "json")
	var words strings.Builder
	c.Dir, c.Stderr = m.Dir, &words
	out, err := c.Output()
	all.Wait()
	var d struct {
		Streams int
		Seconds float64
	}
	if err != nil || json.Unmarshal(out, &d) != nil || d.Streams < least {
		t.Fatalf("drain: %v: %s%s; want %d streams", err, out, &words, least)
	}
	moved := relayMetric(t, m, `kvmesh_relay_moves_total{cause="draining"`)
	if moved < least/2 {
		t.Errorf("%.0f moves: the others ended where they were", moved)
	}
	t.Logf("%d streams left %s in %.2f s, %.0f by moving; all whole", d.Streams, home.worker, d.Seconds, moved)
}

// most is the number of streams at a worker that have a token.
func most(t *testing.T, m *testmesh.Mesh, worker string) int {
	t.Helper()
	n := 0
	for _, s := range streamList(m).Streams {
		if s.Worker == worker && s.Events > 0 {
			n++
		}
	}
	return n
}

// One of three full workers dies with its streams: the two that take them are not
// declared sick for it, and no answer is lost.
func TestDeathAmongFullWorkers(t *testing.T) {
	const tokens, streams = 120, 256
	m := testmesh.StartPolicy(t, bin, strings.Replace(quick, "256", "86", 1))
	want := undisturbed(t, m, streams, tokens)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan int)
	go func() { done <- steady(ctx, t, m, want, tokens) }()
	testmesh.Eventually(t, "the workers to be full", 30*time.Second, func() bool { return most(t, m, "worker-1") >= 70 })
	m.Signal(t, "worker-1", syscall.SIGKILL)
	sick := map[string]string{}
	for end := time.Now().Add(8 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		for _, w := range m.Workers(t) {
			if w.ID != "worker-1" && w.Status != "HEALTHY" && w.Status != "DEGRADED" {
				sick[w.ID] = w.Status + ", " + w.Reason
			}
		}
	}
	cancel()
	n := <-done
	if len(sick) > 0 {
		t.Errorf("declared sick beside the dead one: %v", sick)
	}
	if moved := relayMetric(t, m, "kvmesh_relay_moves_total{"); moved < 50 {
		t.Errorf("%.0f moves: the worker was not full", moved)
	}
	t.Logf("%d answers", n)
}
