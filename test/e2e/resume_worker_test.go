package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// relaySecret is what the tests, in the relay's place, prove themselves with.
const relaySecret = "secret of the tests"

// process is one `kvmesh worker`.
type process struct {
	testing.TB
	id   string
	base string
	cmd  *exec.Cmd
	log  *testmesh.Log
}

// modelFiles are the library and the model of the real engine; without both the test
// is skipped.
func modelFiles(t testing.TB) (lib, model string) {
	t.Helper()
	lib, model = filepath.Join(testmesh.Root(), ".tools", "llama"), filepath.Join(testmesh.Root(), ".tools", "model.gguf")
	for _, path := range []string{lib, model} {
		if _, err := os.Stat(path); err != nil {
			t.Skipf("no real model here (%v): run make tools", err)
		}
	}
	return lib, model
}

// startProcess starts a worker over the real model and waits until it can generate.
func startProcess(t testing.TB, id string, args ...string) *process {
	t.Helper()
	lib, model := modelFiles(t)
	return launch(t, id, append([]string{"--model", "gemma", "--llama-lib", lib, "--weights", model, "--context-length", "2048"}, args...)...)
}

// launch starts a worker and waits until it can generate.
func launch(t testing.TB, id string, args ...string) *process {
	t.Helper()
	return launchOn(t, nil, id, args...)
}

// launchOn starts one on a host; nil = this one.
func launchOn(t testing.TB, on *testmesh.Host, id string, args ...string) *process {
	t.Helper()
	addr := addrOn(t, on)
	p := &process{TB: t, id: id, base: "http://" + addr, log: &testmesh.Log{}}
	p.cmd = commandOn(on, append([]string{"worker", "--id", id, "--listen", addr, "--drain", "1s"}, args...))
	p.cmd.Env = append(os.Environ(), "KVMESH_RELAY_SECRET="+relaySecret)
	p.cmd.Stderr = p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reaper.Add(p.cmd.Process.Pid)
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("worker %s:\n%s", id, p.log)
		}
	})
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		resp, err := http.Get(p.base + "/ready")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return p
			}
		}
		if time.Now().After(deadline) || p.cmd.ProcessState != nil {
			t.Fatalf("worker %s is not ready: %v\n%s", id, err, p.log)
		}
	}
}

// kill ends the process at once. It may be called again.
func (p *process) kill() {
	if p.cmd.ProcessState == nil {
		_ = p.cmd.Process.Kill() // fails only when it is gone
		_ = p.cmd.Wait()
		reaper.Remove(p.cmd.Process.Pid)
	}
}

func (p *process) signal(s syscall.Signal) {
	p.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.Fatal(err)
	}
}

// metric is the sum of the samples whose name, with its labels, begins with prefix.
func (p *process) metric(prefix string) float64 {
	p.Helper()
	return metricAt(p, p.base+"/metrics", prefix)
}

// metricAt is the sum of such samples of a page of metrics.
func metricAt(t testing.TB, url, prefix string) float64 {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	sum := 0.0
	sc := bufio.NewScanner(resp.Body)
	for sc.Scan() {
		name, value, ok := strings.Cut(sc.Text(), "} ")
		if !ok {
			name, value, _ = strings.Cut(sc.Text(), " ")
		}
		if strings.HasPrefix(name, prefix) {
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				t.Fatalf("metric %s: %v", sc.Text(), err)
			}
			sum += v
		}
	}
	return sum
}

// ask posts JSON and reads JSON.
func (p *process) ask(path string, body, answer any) {
	p.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		p.Fatal(err)
	}
	resp, err := http.Post(p.base+path, "application/json", bytes.NewReader(raw))
	if err != nil {
		p.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(answer); err != nil || resp.StatusCode != http.StatusOK {
		p.Fatalf("%s: %s, %v", path, resp.Status, err)
	}
}

// prompt is the ids of a request's prompt, or of its messages.
func (p *process) prompt(body map[string]any) []int32 {
	p.Helper()
	ask := map[string]any{"model": "gemma"}
	for _, name := range []string{"prompt", "messages"} {
		if v := body[name]; v != nil {
			ask[name] = v
		}
	}
	var got struct{ Tokens []int32 }
	if p.ask("/tokenize", ask, &got); len(got.Tokens) == 0 {
		p.Fatal("no tokens")
	}
	return got.Tokens
}

// text is the text of ids, U+FFFD in the place of a character's part.
func (p *process) text(ids []int32) string {
	p.Helper()
	var got struct{ Prompt string }
	p.ask("/detokenize", map[string]any{"model": "gemma", "tokens": ids}, &got)
	return got.Prompt
}

// idle waits until the worker generates nothing.
func (p *process) idle() {
	p.Helper()
	for deadline := time.Now().Add(time.Minute); p.metric("vllm:num_requests_running") > 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			p.Fatalf("worker %s does not become idle", p.id)
		}
	}
}

// chunk is what the relay reads of one event.
type chunk struct {
	ids    []int32
	text   string
	finish string
	mode   string // how the stream went on, in its first chunk
	// restored and computed are the tokens that a continuation found and had to decode.
	restored, computed int
	usage              *struct {
		CompletionTokens int `json:"completion_tokens"`
		PromptTokens     int `json:"prompt_tokens"`
	}
}

// reading is a streamed answer.
type reading struct {
	p    *process
	body io.ReadCloser
	sc   *bufio.Scanner
}

// post begins a streamed completion, or chat where there are messages, as the relay
// does; mesh is the body's field kvmesh.
func (p *process) post(body, mesh map[string]any, stream string) *reading {
	p.Helper()
	all := map[string]any{"model": "gemma", "stream": true, "stream_options": map[string]any{"include_usage": true}}
	maps.Copy(all, body)
	if mesh != nil {
		all["kvmesh"] = mesh
	}
	r, err := p.try(all, stream)
	if err != nil {
		p.Fatal(err)
	}
	return r
}

// try posts a whole body as the relay does. An error is an answer other than 200.
func (p *process) try(all map[string]any, stream string) (*reading, error) {
	p.Helper()
	raw, err := json.Marshal(all)
	if err != nil {
		p.Fatal(err)
	}
	path := "/v1/completions"
	if all["messages"] != nil {
		path = "/v1/chat/completions"
	}
	req, err := http.NewRequest(http.MethodPost, p.base+path, bytes.NewReader(raw))
	if err != nil {
		p.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(names.Relay, relaySecret)
	req.Header.Set(names.Stream, stream)
	req.Header.Set(names.Attempt, "1")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		p.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		return nil, fmt.Errorf("worker %s: %s: %s", p.id, resp.Status, text)
	}
	r := &reading{p: p, body: resp.Body, sc: bufio.NewScanner(resp.Body)}
	r.sc.Buffer(nil, 1<<20)
	return r, nil
}

// data reads what one event carries; io.EOF after [DONE].
func (r *reading) data() ([]byte, error) {
	for r.sc.Scan() {
		data, ok := strings.CutPrefix(r.sc.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return nil, io.EOF
		}
		return []byte(data), nil
	}
	return nil, errors.Join(r.sc.Err(), io.ErrUnexpectedEOF)
}

// next reads one event of a stream of one choice; io.EOF after [DONE].
func (r *reading) next() (chunk, error) {
	data, err := r.data()
	if err != nil {
		return chunk{}, err
	}
	var ev struct {
		Choices []struct {
			Text         string
			TokenIDs     []int32 `json:"token_ids"`
			FinishReason *string `json:"finish_reason"`
			Mesh         struct {
				KV                 string
				Restored, Computed int
			} `json:"kvmesh"`
		}
		Usage *struct {
			CompletionTokens int `json:"completion_tokens"`
			PromptTokens     int `json:"prompt_tokens"`
		}
		Error json.RawMessage
	}
	if err := json.Unmarshal(data, &ev); err != nil {
		return chunk{}, fmt.Errorf("event %s: %w", data, err)
	}
	if ev.Error != nil {
		return chunk{}, fmt.Errorf("error event %s", data)
	}
	c := chunk{usage: ev.Usage}
	if len(ev.Choices) > 0 {
		ch := ev.Choices[0]
		c.ids, c.text, c.mode, c.restored, c.computed = ch.TokenIDs, ch.Text, ch.Mesh.KV, ch.Mesh.Restored, ch.Mesh.Computed
		if ch.FinishReason != nil {
			c.finish = *ch.FinishReason
		}
	}
	return c, nil
}

// close leaves the stream.
func (r *reading) close() { r.body.Close() }
