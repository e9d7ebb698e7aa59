package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

var fullFailover = flag.Bool("failover-full", false, "50 streams of each kind in the failover tests with the real model, which takes half an hour")

// modelTokens is the length of their answers.
const modelTokens = 64

// gemmas is a mesh of three workers with the real model.
const gemmas = `apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: gemma}
spec:
  engine: llamacpp
  model: gemma
  worker: {contextLength: 2048, maxNumSeqs: 2}
  local: [{id: worker-1}, {id: worker-2}, {id: worker-3}]
`

// asked is a prompt with its undisturbed answer on a worker of its own, which keeps no KV
// and shares none.
type asked struct {
	ask
	want *heard
}

// modelAsks are n streams, half of them sampled with a seed. Each has a salt of its own,
// for KV of another's beginning would change the shape of its batches.
func modelAsks(t testing.TB, n int) []asked {
	t.Helper()
	alone := startProcess(t, "alone")
	defer alone.kill()
	raw, err := os.ReadFile("testdata/prompts.txt")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	var out []asked
	for i := 0; len(out) < n; i++ {
		if i > 3*n {
			t.Fatalf("%d of %d prompts have answers that do not repeat themselves", len(out), n)
		}
		body := map[string]any{
			"model": "gemma", "prompt": fmt.Sprintf("%s%s Take %d.\n", preface, lines[i%len(lines)], i/len(lines)), "max_tokens": modelTokens, "temperature": 0, "repetition_penalty": 1.15,
			"ignore_eos": true, "stream": true, "stream_options": map[string]any{"include_usage": true}, "return_token_ids": true, "cache_salt": fmt.Sprint("question ", i),
		}
		if len(out)%2 == 1 {
			maps.Copy(body, map[string]any{"temperature": 0.8, "repetition_penalty": 1, "seed": 1000 + i, "top_p": 0.95, "presence_penalty": 0.1})
		}
		var r run
		r.rest(t, alone.post(body, map[string]any{"token_ids": true, "salt": fmt.Sprint("question ", i)}, "undisturbed"))
		if len(r.ids) != modelTokens || repeats(r.ids, repeatLength) {
			continue // it could hide a wrong splice
		}
		text, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		want := &heard{text: map[int]string{0: r.text}, args: map[int]string{}, finish: map[int]string{0: r.finish}, tokens: r.ids}
		out = append(out, asked{ask{path: "/completions", body: string(text), ids: true}, want})
	}
	return out
}

// movesOf counts the moves of a kind. The cause of a death is what was noticed first: that
// the connection broke, or that the control plane says so.
func movesOf(t *testing.T, m *testmesh.Mesh, kind string) (n float64) {
	for _, cause := range []string{"lost", "unhealthy", "timeout", "stall", "draining"} {
		n += relayMetric(t, m, fmt.Sprintf(`kvmesh_relay_moves_total{cause="%s",kind="%s"`, cause, kind))
	}
	return n
}

// movesFromKV counts the moves that restored KV. A worker that checks itself at that
// moment is not alone with the stream, which is then told as restored, not as exact.
func movesFromKV(t *testing.T, m *testmesh.Mesh) float64 {
	return movesOf(t, m, "exact") + movesOf(t, m, "restored")
}

// TestModelOutlivesWorker kills, stops and drains the worker of a stream, one after the
// other, at random places: the answer is, token by token, that of an undisturbed run, and
// its KV is restored each time.
func TestModelOutlivesWorker(t *testing.T) {
	modelFiles(t)
	per := 4
	if *fullFailover {
		per = 50
	}
	asks := modelAsks(t, 3*per)
	m := testmesh.StartPolicy(t, bin, gemmas)
	f := failover{t, m}
	rnd := rand.New(rand.NewPCG(5, 6))
	kinds := []struct {
		name   string
		happen func(worker string)
		after  func(worker string)
	}{
		{"kill", func(w string) { m.Signal(t, w, syscall.SIGKILL) }, func(string) {}},
		{"stop", func(w string) { m.Signal(t, w, syscall.SIGSTOP) }, func(w string) { m.Signal(t, w, syscall.SIGCONT) }},
		{"drain", func(w string) {
			if err := fleet.NewClient(m.API).Drain(t.Context(), w, true); err != nil {
				t.Error(err)
			}
		}, func(w string) {
			if err := fleet.NewClient(m.API).Drain(t.Context(), w, false); err != nil {
				t.Error(err)
			}
		}},
	}
	for i, q := range asks {
		k := kinds[i%len(kinds)]
		at := 2 + rnd.IntN(modelTokens-10)
		f.ready()
		before := relayMetric(t, m, `kvmesh_relay_moves_total`)
		kept := movesFromKV(t, m)
		worker, left := "", 0
		start := time.Now()
		got := f.one(q.ask, at, func(h *heard) {
			worker, left = f.serving(h.stream()), modelTokens-len(h.tokens)
			k.happen(worker)
		})
		k.after(worker)
		q.want.usage = got.usage
		if why := got.same(q.want); why != "" {
			t.Errorf("stream %d, %s of %s after %d events: %s", i, k.name, worker, at, why)
		}
		if got.usage == nil || got.usage.CompletionTokens != modelTokens {
			t.Errorf("stream %d: usage %+v", i, got.usage)
		}
		moved := relayMetric(t, m, `kvmesh_relay_moves_total`) - before
		if now := movesFromKV(t, m); moved != 1 || now != kept+1 || left < 2 {
			t.Errorf("stream %d, %s with %d tokens left: %v moves, %v of them with KV", i, k.name, left, moved, now-kept)
		}
		t.Logf("stream %d: %s of %s with %d tokens left, longest silence %v, took %v", i, k.name, worker, left, got.longest, time.Since(start))
	}
	computed, all := relayMetric(t, m, "kvmesh_relay_replayed_tokens_total"), relayMetric(t, m, "kvmesh_relay_restored_tokens_total")
	t.Logf("%v tokens restored and %v computed again in %d moves, %v of them exact", all, computed, len(asks), movesOf(t, m, "exact"))
}
