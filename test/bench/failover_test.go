package bench

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// failoverITL is the time per token of the engine in BenchmarkFailover.
var failoverITL = flag.Duration("failover-itl", 20*time.Millisecond, "time per token of the streams of BenchmarkFailover")

// failoverTTFT is the time before the first token, of a continuation too.
const failoverTTFT = 5 * time.Millisecond

// failoverYAML wants the time before the first token and the time per token.
const failoverYAML = `apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: sim}
spec:
  engine: sim
  model: sim-1
  local: [{id: worker-1}, {id: worker-2}, {id: worker-3}]
  worker: {maxNumSeqs: 256}
  sim: {ttft: %v, itl: %v}
`

// startMesh runs a mesh of three simulated workers behind a real Envoy.
func startMesh(b *testing.B) *testmesh.Mesh {
	b.Helper()
	bin, err := testmesh.Build(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	return testmesh.StartPolicy(b, bin, fmt.Sprintf(failoverYAML, failoverTTFT, *failoverITL))
}

// splicer is a client of simulated streams: of the mesh, or of the workers themselves,
// which it then splices in the simplest way.
type splicer struct {
	b      *testing.B
	secret string   // "" asks the mesh
	urls   []string // of the mesh, or of the workers in order
	tokens int
	step   int    // ms from one token of all streams to the next, 0 gives each its own pace
	ready  func() // called once the stream has 20 tokens
	events atomic.Int64
	died   atomic.Pointer[time.Time] // when the worker was killed
}

// gap reads stream i and returns the longest time from the failure, or from an event
// after it, to the next event.
func (s *splicer) gap(i int) time.Duration {
	var longest time.Duration
	var ids []int32
	text := 0
	last := time.Now()
	for attempt := 1; ; attempt++ {
		if attempt > 2 {
			s.b.Errorf("stream %d ended after %d of %d tokens", i, len(ids), s.tokens)
			return longest
		}
		resp, err := s.post(i, attempt, ids, text)
		if err != nil {
			continue
		}
		lines := bufio.NewScanner(resp.Body)
		for lines.Scan() {
			data, ok := strings.CutPrefix(lines.Text(), "data: ")
			if !ok {
				continue
			}
			if data == "[DONE]" {
				resp.Body.Close()
				return longest
			}
			var c struct {
				Choices []struct {
					Text string
					IDs  []int32 `json:"token_ids"`
				}
			}
			if json.Unmarshal([]byte(data), &c) != nil || len(c.Choices) != 1 {
				break
			}
			s.events.Add(1)
			now := time.Now()
			if died := s.died.Load(); died != nil {
				longest = max(longest, min(now.Sub(last), now.Sub(*died)))
			}
			last = now
			ids, text = append(ids, c.Choices[0].IDs...), text+len(c.Choices[0].Text)
			if len(ids) == 20 && attempt == 1 {
				s.ready()
			}
		}
		resp.Body.Close()
	}
}

// post asks for stream i, or for its rest.
func (s *splicer) post(i, attempt int, ids []int32, text int) (*http.Response, error) {
	body := map[string]any{"model": "sim-1", "prompt": fmt.Sprint("number ", i), "max_tokens": s.tokens, "ignore_eos": true, "stream": true, "temperature": 0, "return_token_ids": true, "sim": map[string]any{"max": 0, "step_ms": s.step}}
	stream := fmt.Sprint("bench-", i)
	if s.secret != "" {
		field := map[string]any{"token_ids": true}
		if len(ids) > 0 {
			field["resume"] = map[string]any{"stream": stream, "attempt": attempt, "choices": []any{map[string]any{"index": 0, "token_ids": ids, "text_bytes": text}}}
		}
		body["kvmesh"] = field
	}
	raw, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	url := s.urls[min(attempt, len(s.urls))-1]
	req, err := http.NewRequest(http.MethodPost, url+"/completions", bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("x-session-id", "bench")
	if s.secret != "" {
		req.Header.Set(names.Relay, s.secret)
		req.Header.Set(names.Stream, stream)
		req.Header.Set(names.Attempt, strconv.Itoa(attempt))
	}
	return http.DefaultClient.Do(req)
}

// killed runs streams and kills a worker once all flow; it returns the sorted gaps.
func (s *splicer) killed(m *testmesh.Mesh, streams int, worker string) []time.Duration {
	var flowing sync.WaitGroup
	flowing.Add(streams)
	s.ready = flowing.Done
	go func() {
		flowing.Wait()
		now := time.Now()
		s.died.Store(&now)
		m.Signal(s.b, worker, syscall.SIGKILL)
	}()
	out := make([]time.Duration, streams)
	var wg sync.WaitGroup
	for i := range streams {
		wg.Go(func() { out[i] = s.gap(i) })
	}
	wg.Wait()
	slices.Sort(out)
	return out
}

// BenchmarkFailover kills the worker of 100 streams and measures how long each client waits
// for the next token from then on: through the whole mesh, and by the simplest splice there
// is, straight from worker to worker. Both include what the workers themselves take: the
// time before the first token of a continuation, and to restore the KV of all of them on
// the cores that there are. What the mesh takes beyond that is the difference.
func BenchmarkFailover(b *testing.B) {
	const streams, tokens = 100, 100
	busy, known := hostLoad()
	m := startMesh(b)
	ready := func() (list []fleet.WorkerView) {
		testmesh.Eventually(b, "all workers are well", time.Minute, func() bool {
			list = m.Workers(b)
			return !slices.ContainsFunc(list, func(w fleet.WorkerView) bool { return w.Status != "HEALTHY" })
		})
		return list
	}
	secret, err := os.ReadFile(filepath.Join(m.RunDir(b), "relay.secret"))
	if err != nil {
		b.Fatal(err)
	}
	var mesh, bare []time.Duration
	for b.Loop() {
		ready()
		mesh = append(mesh, (&splicer{b: b, urls: []string{m.OpenAI}, tokens: tokens}).killed(m, streams, home(b, m))...)
		list := ready()
		urls := []string{"http://" + list[0].Address + "/v1", "http://" + list[1].Address + "/v1"}
		bare = append(bare, (&splicer{b: b, secret: strings.TrimSpace(string(secret)), urls: urls, tokens: tokens}).killed(m, streams, list[0].ID)...)
	}
	slices.Sort(mesh)
	slices.Sort(bare)
	at := func(d []time.Duration, share float64) float64 {
		return d[int(share*float64(len(d)-1))].Seconds() * 1000
	}
	b.ReportMetric(at(mesh, .5), "mesh-p50-ms")
	b.ReportMetric(at(mesh, .99), "mesh-p99-ms")
	b.ReportMetric(at(bare, .5), "bare-p50-ms")
	b.ReportMetric(at(bare, .99), "bare-p99-ms")
	beyond, ratio := at(mesh, .99)-at(bare, .99), at(mesh, .99)/at(bare, .99)
	b.ReportMetric(beyond, "beyond-p99-ms")
	b.ReportMetric(ratio, "ratio-p99")
	b.ReportMetric(busy, "load-avg")
	b.ReportMetric(0, "ns/op")
	if idle := known && busy < float64(runtime.NumCPU()); idle && len(mesh) > streams && (beyond > 100 || ratio > 3) {
		b.Errorf("p99 of the gaps is %.0f ms beyond the bare splice's and %.1f times it, want at most 100 ms and 3 times", beyond, ratio)
	}
}

// home is the worker of the benchmark's session.
func home(b *testing.B, m *testmesh.Mesh) string {
	b.Helper()
	resp, err := (&splicer{b: b, urls: []string{m.OpenAI}, tokens: 1}).post(0, 1, nil, 0)
	if err != nil {
		b.Fatal(err)
	}
	defer resp.Body.Close()
	return resp.Header.Get(names.Worker)
}
