package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// heard is what a client was told in one streamed answer.
type heard struct {
	ids     []string // of events
	text    map[int]string
	args    map[int]string // of tool calls, joined
	finish  map[int]string
	usage   *openai.Usage
	head    map[string]bool // id, created, model and fingerprint of the events
	worker  string          // of the first byte
	done    bool
	failure string // error event
	events  int
	longest time.Duration // between two events
}

// streamed asks for a streamed answer on the mesh and reads it to its end; each is called
// after each event.
func streamed(ctx context.Context, m *testmesh.Mesh, path, body string, each func(t *heard)) (*heard, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.OpenAI+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		return nil, fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	t := &heard{text: map[int]string{}, args: map[int]string{}, finish: map[int]string{}, head: map[string]bool{}, worker: resp.Header.Get("x-kvmesh-worker")}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	last := time.Now()
	for lines.Scan() {
		if id, ok := strings.CutPrefix(lines.Text(), "id: "); ok {
			t.ids = append(t.ids, id)
		}
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		t.longest = max(t.longest, time.Since(last))
		last = time.Now()
		if err := t.take(data); err != nil {
			return t, err
		}
		if each != nil {
			each(t)
		}
	}
	return t, lines.Err()
}

// take reads the data of one event.
func (t *heard) take(data string) error {
	if data == openai.DoneData {
		if t.done {
			return errors.New("[DONE] twice")
		}
		t.done = true
		return nil
	}
	if t.done {
		return fmt.Errorf("after [DONE]: %s", data)
	}
	if strings.Contains(data, "token_ids") || strings.Contains(data, `"kvmesh"`) {
		return fmt.Errorf("what is the mesh's own reached the client: %s", data)
	}
	var c struct {
		openai.Chunk
		Error json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal([]byte(data), &c); err != nil {
		return fmt.Errorf("event %s: %w", data, err)
	}
	if c.Error != nil {
		t.failure = string(c.Error)
		return nil
	}
	t.events++
	t.head[fmt.Sprint(c.ID, c.Created, c.Model, c.SystemFingerprint)] = true
	if c.Usage != nil {
		if t.usage != nil {
			return errors.New("usage twice")
		}
		t.usage = c.Usage
	}
	for _, ch := range c.Choices {
		if t.finish[ch.Index] != "" {
			return fmt.Errorf("choice %d goes on after its end: %s", ch.Index, data)
		}
		t.text[ch.Index] += ch.Added()
		if ch.Delta != nil {
			for _, call := range ch.Delta.ToolCalls {
				t.args[ch.Index] += call.ID + call.Function.Name + call.Function.Arguments
			}
		}
		if ch.FinishReason != nil {
			t.finish[ch.Index] = *ch.FinishReason
		}
	}
	return nil
}

// same says how an answer differs from the undisturbed one, "" when it does not.
func (t *heard) same(want *heard) string {
	switch {
	case t.failure != "":
		return "it ended in " + t.failure
	case !t.done:
		return "no [DONE]"
	case fmt.Sprint(t.text) != fmt.Sprint(want.text):
		return fmt.Sprintf("text\n%v, want\n%v", t.text, want.text)
	case fmt.Sprint(t.args) != fmt.Sprint(want.args):
		return fmt.Sprintf("calls\n%v, want\n%v", t.args, want.args)
	case fmt.Sprint(t.finish) != fmt.Sprint(want.finish):
		return fmt.Sprintf("finish %v, want %v", t.finish, want.finish)
	case len(t.head) != 1:
		return fmt.Sprintf("events of %d answers: %v", len(t.head), t.head)
	case (t.usage == nil) != (want.usage == nil):
		return fmt.Sprintf("usage %v, want %v", t.usage, want.usage)
	case t.usage != nil && (t.usage.PromptTokens != want.usage.PromptTokens || t.usage.CompletionTokens != want.usage.CompletionTokens || t.usage.TotalTokens != want.usage.TotalTokens):
		return fmt.Sprintf("usage %+v, want %+v", *t.usage, *want.usage)
	}
	for i, id := range t.ids {
		if name, n, _ := strings.Cut(id, ":"); name == "" || n != fmt.Sprint(i+1) {
			return fmt.Sprintf("event %d has the id %q", i+1, id)
		}
	}
	return ""
}

// relayMetric is the sum of the gateway's samples whose name and labels begin so.
func relayMetric(t testing.TB, m *testmesh.Mesh, prefix string) float64 {
	t.Helper()
	return metricAt(t, m.Gateway(t)+"/metrics", prefix)
}

// quick is a mesh of three simulated workers.
const quick = `apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: sim}
spec:
  engine: sim
  model: sim-1
  local: [{id: worker-1}, {id: worker-2}, {id: worker-3}]
  worker: {maxNumSeqs: 256}
  sim: {ttft: 5ms, itl: 20ms}
`

// All answers of a worker that is killed go on at the others: nothing is lost and
// nothing repeated.
func TestStreamsOutliveWorker(t *testing.T) {
	m := testmesh.StartPolicy(t, bin, quick)
	const streams = 100
	ask := func(i, tokens int) string {
		return fmt.Sprintf(`{"model":"sim-1","prompt":"number %d","max_tokens":%d,"ignore_eos":true,"stream":true,"temperature":0,"stream_options":{"include_usage":true},"sim":{"max":0}}`, i, tokens)
	}
	want := make([]*heard, streams)
	each(streams, func(i int) {
		var err error
		if want[i], err = streamed(t.Context(), m, "/completions", ask(i, 150), nil); err != nil || !want[i].done {
			t.Errorf("undisturbed answer %d: %v %+v", i, err, want[i])
		}
	})
	if t.Failed() {
		return
	}
	var flowing sync.WaitGroup
	flowing.Add(streams)
	got := make([]*heard, streams)
	go func() {
		flowing.Wait() // every answer has 20 events
		m.Signal(t, "worker-1", syscall.SIGKILL)
	}()
	each(streams, func(i int) {
		var err error
		if got[i], err = streamed(t.Context(), m, "/completions", ask(i, 150), func(s *heard) {
			if s.events == 20 {
				flowing.Done()
			}
		}); err != nil {
			t.Errorf("answer %d: %v", i, err)
		}
	})
	hit := 0
	var gaps time.Duration
	for i := range got {
		if got[i] == nil {
			continue
		}
		if diff := got[i].same(want[i]); diff != "" {
			t.Errorf("answer %d, begun by %s: %s", i, got[i].worker, diff)
		}
		if got[i].worker == "worker-1" {
			hit++
			gaps = max(gaps, got[i].longest)
		}
	}
	moved := relayMetric(t, m, "kvmesh_relay_moves_total")
	if hit < streams/5 || int(moved) < hit {
		t.Errorf("%d answers were the killed worker's, %v moved", hit, moved)
	}
	t.Logf("%d answers moved, %d of them begun by the killed worker; longest silence %v", int(moved), hit, gaps)
}

// each runs f for 0 to n-1 at once and waits for all.
func each(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}
