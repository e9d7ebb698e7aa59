package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

func workersOf(t *testing.T, m *testmesh.Mesh) ([]fleet.WorkerView, error) {
	list, err := fleet.NewClient(m.API).Workers(t.Context())
	return list, err
}

// answer posts a request and returns the whole body.
func answer(t *testing.T, m *testmesh.Mesh, body string) (string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, m.OpenAI+"/completions", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	want := "application/json"
	if strings.Contains(body, `"stream":true`) {
		want = "text/event-stream"
	}
	named := strings.HasPrefix(resp.Header.Get(names.Worker), "worker-")
	if got := resp.Header.Get("Content-Type"); err == nil && (resp.StatusCode != http.StatusOK || !strings.HasPrefix(got, want) || !named) {
		err = fmt.Errorf("status %d, headers %v: %s", resp.StatusCode, resp.Header, text)
	}
	return string(text), err
}

// isWhole checks a completion that comes in one piece.
func isWhole(body string, tokens int) error {
	var c openai.Completion
	if err := json.Unmarshal([]byte(body), &c); err != nil {
		return err
	}
	if len(c.Choices) != 1 || c.Choices[0].FinishReason == nil || *c.Choices[0].FinishReason != "length" || c.Usage == nil || c.Usage.CompletionTokens != tokens {
		return fmt.Errorf("want %d tokens to the limit", tokens)
	}
	return nil
}

// An answer in one piece is JSON and nothing else, also when its worker is silent for so
// long in it that a stream would get a sign of life.
func TestSilentWhole(t *testing.T) {
	t.Parallel()
	m := testmesh.StartPolicy(t, bin, quick+`---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: sim}
spec:
  models: [sim-1]
  tiers: [{pool: sim}]
  stream: {stallMax: off} # such silence is never taken for that of a hung worker
`)
	whole, err := answer(t, m, `{"model":"sim-1","prompt":"b","max_tokens":3,"sim":{"itl_ms":17000}}`)
	if err := errors.Join(err, isWhole(whole, 3)); err != nil {
		t.Errorf("%v\n%s", err, whole)
	}
}

// A stream whose first token takes 180 s and an answer that takes 180 s both arrive, each
// with one attempt: nothing on the path times out or repeats.
func TestSlow(t *testing.T) {
	t.Parallel()
	m := testmesh.StartPolicy(t, bin, quick)
	const short = 30 // answers, by which the relay knows how fast the workers usually are
	each(short, func(int) {
		if _, err := answer(t, m, `{"model":"sim-1","prompt":"short","max_tokens":5}`); err != nil {
			t.Error(err)
		}
	})
	var wg sync.WaitGroup
	var stream, whole string
	var errStream, errWhole error
	start := time.Now()
	wg.Go(func() {
		stream, errStream = answer(t, m, `{"model":"sim-1","prompt":"a","max_tokens":2,"stream":true,"sim":{"ttft_ms":180000}}`)
	})
	wg.Go(func() {
		whole, errWhole = answer(t, m, `{"model":"sim-1","prompt":"b","max_tokens":4001,"ignore_eos":true,"sim":{"max":0,"ttft_ms":100000,"itl_ms":20}}`)
	})
	wg.Wait()
	if took := time.Since(start); took < 179*time.Second {
		t.Errorf("answers after %v: nothing was slow", took)
	}
	if errStream != nil || !strings.Contains(stream, "data: [DONE]") || !strings.Contains(stream, ": keep-alive") {
		t.Errorf("stream: %v\n%s", errStream, stream)
	}
	if err := errors.Join(errWhole, isWhole(whole, 4001)); err != nil {
		t.Errorf("whole answer: %v\n%.500s", err, whole)
	}
	answered := 0
	for _, w := range m.Workers(t) {
		answered += metric(t, "http://"+w.Address+"/metrics", "vllm:request_success_total")
	}
	if answered != short+2 {
		t.Errorf("workers answered %d requests for %d: an attempt was repeated", answered, short+2)
	}
	// Three minutes of pings on quiet connections: no server took them for abuse.
	stats, err := admin.NewClient(m.Admin).Stats(t.Context(), `^cluster\..*\.upstream_cx_close_notify$`)
	if err != nil || len(stats) < 3 {
		t.Fatalf("stats: %v, %v", stats, err)
	}
	for name, n := range stats {
		if n > 0 {
			t.Errorf("%s = %d: the server asked Envoy to go away", name, n)
		}
	}
}

// metric sums a counter over its labels.
func metric(t *testing.T, url, name string) int {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, name); ok && rest != "" && (rest[0] == '{' || rest[0] == ' ') {
			v, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndex(rest, " "):]), 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += v
		}
	}
	return int(sum)
}

// 32 concurrent streams for 60 s: no errors, and no process grows.
func TestManyStreams(t *testing.T) {
	t.Parallel()
	m := startSim(t)
	stop := time.Now().Add(60 * time.Second)
	var wg sync.WaitGroup
	var mu sync.Mutex
	done, failed := 0, []string{}
	for range 32 {
		wg.Go(func() {
			for time.Now().Before(stop) {
				text, err := answer(t, m, `{"model":"sim-1","prompt":"hello there","max_tokens":50,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true},"sim":{"itl_ms":10}}`)
				if err == nil && (!strings.Contains(text, `"completion_tokens":50,`) || !strings.HasSuffix(text, "data: [DONE]\n\n")) {
					err = fmt.Errorf("incomplete stream: %.300s", text)
				}
				mu.Lock()
				done++
				if err != nil {
					failed = append(failed, err.Error())
				}
				mu.Unlock()
			}
		})
	}
	time.Sleep(15 * time.Second)
	early := rss(t, m)
	wg.Wait()
	late := rss(t, m)
	if len(failed) > 0 {
		t.Errorf("%d of %d streams failed, the first: %s", len(failed), done, failed[0])
	}
	t.Logf("%d streams; resident memory in KiB after 15 s: %v, after 60 s: %v", done, early, late)
	if done < 500 {
		t.Errorf("only %d streams in 60 s: the load was not what it claims", done)
	}
	for part, kb := range late {
		// A garbage-collected heap breathes; what must not happen is growth
		// with the number of streams, which trebled in this time.
		if limit := early[part]*5/4 + 16<<10; kb > limit {
			t.Errorf("%s grew from %d to %d KiB", part, early[part], kb)
		}
	}
}

// rss returns each part's resident memory in KiB.
func rss(t *testing.T, m *testmesh.Mesh) map[string]int {
	t.Helper()
	out := map[string]int{}
	for part, pid := range m.Parts() {
		if out[part] = testmesh.Resident(pid); out[part] == 0 {
			t.Fatalf("memory of %s is not known", part)
		}
	}
	return out
}
