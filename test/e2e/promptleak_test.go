package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// secretive is a mesh whose clients say what nobody but they and the workers may see.
type secretive struct {
	*testing.T
	m     *testmesh.Mesh
	leak  *leak
	spans *collector
	// word is in every prompt, and answers is what the answers were made of.
	word    string
	answers int
	// pages are those of parts that the mesh does not know of.
	pages []string
}

// collector takes in spans as OpenTelemetry's collectors do.
type collector struct {
	mu   sync.Mutex
	b    bytes.Buffer
	http *httptest.Server
}

// newCollector starts one, and has all processes that are started from now on export to it.
func newCollector(t *testing.T) *collector {
	c := &collector{}
	c.http = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		c.mu.Lock()
		defer c.mu.Unlock()
		_, _ = io.Copy(&c.b, r.Body) // what is cut is missed by whoever waits for it
	}))
	t.Cleanup(c.http.Close)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.http.URL)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
	return c
}

// got is what came so far.
func (c *collector) got() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytes.Clone(c.b.Bytes())
}

// leaky is a mesh with everything that handles prompts: a KV node, streams that gateways
// share, and a gateway that follows what a KV node tells of the tokens it holds.
func leaky(t *testing.T, redis *redistest.Server, events string) string {
	return strings.Replace(quick, "itl: 20ms", "itl: 10ms", 1) + impatient + fmt.Sprintf(`---
apiVersion: kvmesh.io/v1alpha1
kind: Mesh
metadata: {name: m}
spec:
  registry: {redis: %q}
  shareStreams: true
  shareWait: 5s
  kv:
    node: true
    limit: 64Mi
    events: [{address: %q, workers: [worker-1, worker-2, worker-3]}]
`, redis.URL(), events)
}

// body is a request for an answer to a prompt that holds the word, with more fields.
func (s *secretive) body(more map[string]any) string {
	all := map[string]any{
		"model": "sim-1", "prompt": strings.Repeat("So far nothing has happened here. ", 20) + "Tell nobody of " + s.word + ", and go on",
		"max_tokens": 60, "ignore_eos": true, "temperature": 0,
	}
	maps.Copy(all, more)
	if all["messages"] != nil {
		delete(all, "prompt")
	}
	text, err := json.Marshal(all)
	if err != nil {
		s.Fatal(err)
	}
	return string(text)
}

// plain asks without a stream, looks for the answer from then on, and returns the status and
// the request's id.
func (s *secretive) plain(path, body string) (status int, answer, id string) {
	s.Helper()
	resp, err := http.Post(s.m.OpenAI+path, "application/json", strings.NewReader(body))
	if err != nil {
		s.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		s.Logf("%s: %v", path, err) // a worker that fails in the middle
	}
	var got struct {
		Choices []struct {
			Text    string
			Message struct{ Content string }
		}
	}
	if json.Unmarshal(text, &got) == nil {
		for _, c := range got.Choices {
			s.leak.text("an answer", c.Text)
			s.leak.text("an answer", c.Message.Content)
			s.answers += len(c.Text) + len(c.Message.Content)
		}
	}
	return resp.StatusCode, string(text), resp.Header.Get(names.RequestID)
}

// stream asks for a stream, and looks for the answer and its tokens from then on. The error
// is of streams that do not end as they should.
func (s *secretive) stream(ctx context.Context, more map[string]any, each func(*heard)) (*heard, error) {
	s.Helper()
	all := map[string]any{"stream": true, "return_token_ids": true, "sim": map[string]any{"max": 0}}
	maps.Copy(all, more)
	h, err := streamed(ctx, s.m, ask{path: "/completions", body: s.body(all), ids: true}, each)
	if h != nil {
		s.leak.text("a streamed answer", h.text[0])
		s.leak.tokens("a streamed answer", h.tokens)
		s.answers += len(h.text[0])
	}
	return h, err
}

// fails are requests that go wrong in all ways: because of what they say, and because of
// their workers.
func (s *secretive) fails() {
	for _, body := range []string{
		`{"model":"sim-1","prompt":"` + s.word, `{"model":"sim-1","prompt":{"` + s.word + `":1}}`,
		s.body(map[string]any{"temperature": s.word}), s.body(map[string]any{"max_tokens": -1}), s.body(map[string]any{"model": "nobody"}),
		s.body(map[string]any{"prompt": strings.Repeat(s.word+" ", 3000)}), s.body(map[string]any{"stop": []string{s.word, "", "a", "b", "c"}}),
		s.body(map[string]any{"response_format": map[string]any{"type": s.word}}),
	} {
		if status, answer, _ := s.plain("/completions", body); status < 400 {
			s.Errorf("a request that cannot be answered was: %.300s", answer)
		}
	}
	for _, fault := range []map[string]any{
		{"status": 500}, {"status": 503}, {"cut_at": 5}, {"cut_at": 5, "cut_inside": true}, {"truncate_at": 5}, {"no_done": true}, {"malformed_at": 5}, {"error_at": 5}, {"wrong_at": 5}, {"corrupt_kv": true},
	} {
		fault["max"] = 0
		if _, err := s.stream(s.Context(), map[string]any{"sim": fault, "model": "impatient"}, nil); err != nil {
			s.Logf("%v: %v", fault, err) // as it should be, or it went on elsewhere
		}
		s.plain("/completions", s.body(map[string]any{"sim": fault, "model": "impatient"}))
	}
}

// succeeds are requests that are answered.
func (s *secretive) succeeds() {
	message := []any{map[string]any{"role": "system", "content": "You know " + s.word}, map[string]any{"role": "user", "name": "someone", "content": s.word + "?"}}
	for path, more := range map[string]map[string]any{
		"/completions":                {"echo": true},
		"/completions?several":        {"n": 3, "temperature": 0.9, "seed": 3, "logprobs": 2, "stop": []string{s.word}},
		"/chat/completions":           {"messages": message, "logprobs": true, "top_logprobs": 2},
		"/chat/completions?" + s.word: {"messages": message},
		"/embeddings":                 {"input": s.word},
	} {
		if status, answer, _ := s.plain(path, s.body(more)); status != http.StatusOK {
			s.Errorf("%.20s: %d %.300s", path, status, answer)
		}
	}
	for range 2 { // the second time its tokens are known, and its KV
		if h, err := s.stream(s.Context(), nil, nil); err != nil || !h.done || len(h.tokens) < 50 {
			s.Errorf("a stream: %v, %+v", err, h)
		}
	}
	ctx, cancel := context.WithCancel(s.Context())
	if _, err := s.stream(ctx, nil, func(h *heard) {
		if h.events == 5 {
			cancel()
		}
	}); err == nil {
		s.Error("the client did not leave")
	}
}

// moves are streams that change their worker, by its death and by a drain, or their gateway,
// and one whose client comes back.
func (s *secretive) moves() {
	for what, do := range map[string]func(worker string){
		"killed":  func(worker string) { s.m.Signal(s, worker, syscall.SIGKILL) },
		"drained": func(worker string) { s.command("drain", worker); s.command("undrain", worker) },
		"looked at": func(string) {
			for _, a := range s.artifacts() {
				s.check(a)
			}
		},
	} {
		var begun sync.Once
		h, err := s.stream(s.Context(), map[string]any{"max_tokens": 200, "sim": map[string]any{"max": 0, "itl_ms": 20}}, func(h *heard) {
			if h.events == 10 {
				begun.Do(func() { do(h.worker) })
			}
		})
		if err != nil || !h.done || h.failure != "" {
			s.Errorf("%s: %v %s", what, err, h.failure)
		}
		s.healthy()
	}
	if n := relayMetric(s, s.m, "kvmesh_relay_moves_total"); n < 2 {
		s.Errorf("%v moves: the test proves little", n)
	}
	body := s.body(map[string]any{"stream": true, "max_tokens": 200})
	ctx, cancel := context.WithCancel(s.Context())
	h := newHeard()
	if err := h.hear(&http.Client{Transport: &http.Transport{}}, resuming(ctx, s.m, http.MethodPost, body, ""), func(h *heard) {
		if h.events == 10 {
			cancel()
		}
	}); err == nil {
		s.Error("the client did not leave")
	}
	if err := restart(s.m, "gateway"); err != nil {
		s.Error(err)
	}
	if err := h.hear(http.DefaultClient, resuming(s.Context(), s.m, http.MethodPost, body, h.ids[len(h.ids)-1]), nil); err != nil || !h.done {
		s.Errorf("the client comes back: %v", err)
	}
	s.leak.text("an answer whose client came back", h.text[0])
}

// healthy waits until all workers take requests.
func (s *secretive) healthy() {
	testmesh.Eventually(s, "all workers are healthy", time.Minute, func() bool {
		list := s.m.Workers(s)
		return len(list) == 3 && !slices.ContainsFunc(list, func(w fleet.WorkerView) bool { return w.Status != "HEALTHY" })
	})
}

// command runs a command beside the mesh and returns what it says.
func (s *secretive) command(args ...string) string {
	c := exec.Command(bin, args...)
	c.Dir = s.m.Dir
	out, err := c.CombinedOutput()
	if err != nil {
		s.Errorf("kvmesh %v: %v, %s", args, err, out)
	}
	return string(out)
}

// artifact is what a part shows of itself.
type artifact struct {
	name string
	data []byte
}

// artifacts are all logs, files, pages, answers and spans that there are.
func (s *secretive) artifacts() (list []artifact) {
	add := func(name string, data []byte) { list = append(list, artifact{name, data}) }
	add("log of kvmesh up", []byte(s.m.Log.String()))
	for _, dir := range []string{filepath.Join(s.m.Dir, ".kvmesh"), s.m.RunDir(s)} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return nil // what has gone meanwhile
			}
			if data, err := os.ReadFile(path); err == nil {
				add(path, data)
			}
			return nil
		})
		if err != nil {
			s.Error(err)
		}
	}
	pages := slices.Clone(s.pages)
	for _, w := range s.m.Workers(s) {
		for _, page := range []string{"/metrics", "/health", "/ready", "/version", "/v1/models", "/load"} {
			pages = append(pages, "http://"+w.Address+page)
		}
	}
	for _, page := range []string{"/v1/workers", "/v1/clusters", "/v1/mesh", "/metrics", "/healthz"} {
		pages = append(pages, s.m.API+page)
	}
	for _, page := range []string{"/metrics", "/health", "/v1/streams"} {
		pages = append(pages, s.m.Gateway(s)+page)
	}
	for _, page := range []string{"/stats/prometheus", "/config_dump?include_eds", "/clusters?format=json", "/listeners", "/memory", "/contention", "/runtime"} {
		pages = append(pages, s.m.Admin+page)
	}
	for _, page := range pages {
		if resp, err := http.Get(page); err == nil { // it may be restarting
			data, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			add(page, data)
		}
	}
	for _, args := range [][]string{{"workers", "-o", "json"}, {"streams", "-o", "json"}, {"inspect"}, {"kv", "ls", "-o", "json"}, {"kv", "stat", "-o", "json"}, {"kv", "epoch", "-o", "json"}, {"kv", "verify", "--remove", "-o", "json"}} {
		add("kvmesh "+strings.Join(args, " "), []byte(s.command(args...)))
	}
	add("spans", s.spans.got())
	return list
}

// check looks for secrets in what a part shows.
func (s *secretive) check(a artifact) {
	if found := s.leak.find(a.data); len(found) > 0 {
		slices.Sort(found)
		s.Errorf("%s shows %d secrets, the first is %s", a.name, len(found), found[0])
	}
}

// TestNothingLeaks: prompts and answers go through a mesh in all ways, well and badly, with
// all parts at their most talkative. No log, no page, no answer of a part and no span has any
// of them, as text or as tokens; what is not secret of the same requests is there.
func TestNothingLeaks(t *testing.T) {
	l := newLeak()
	s := &secretive{T: t, leak: l, spans: newCollector(t), word: l.word("what every prompt holds")}
	told, silent := s.followed("--events-token-ids"), s.followed()
	redis := redistest.Start(t)
	t.Setenv("REDIS_URL", redis.URL())
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "mesh.yaml"), []byte(leaky(t, redis, told.address)), 0o600); err != nil {
		t.Fatal(err)
	}
	s.m = testmesh.Start(t, bin, dir, "-f", "mesh.yaml", "--log-level", "debug")
	s.healthy()
	workers := s.m.Workers(t)
	direct := &process{TB: t, id: "worker", base: "http://" + workers[0].Address}
	var asked struct{ Tokens []int32 }
	direct.ask("/tokenize", map[string]any{"model": "sim-1", "prompt": "Tell nobody of " + s.word + ", and go on", "add_special_tokens": false}, &asked)
	l.tokens("a prompt", asked.Tokens)
	if len(l.ids) == 0 {
		t.Fatalf("no tokens of the prompt: %v", asked.Tokens)
	}

	s.succeeds()
	s.fails()
	s.moves()
	path := "control-" + strings.ToLower(s.word[6:14])
	s.plain("/"+path, s.body(nil))
	_, _, id := s.plain("/completions", s.body(nil))
	testmesh.Eventually(t, "the last request's span", time.Minute, func() bool { return bytes.Contains(s.spans.got(), []byte(id)) })
	log := filepath.Join(s.m.Dir, ".kvmesh", "logs", "access.log")
	testmesh.Eventually(t, "the last request's line in Envoy's log", time.Minute, func() bool {
		data, err := os.ReadFile(log)
		return err == nil && bytes.Contains(data, []byte(id))
	})
	testmesh.Eventually(t, "no stream is left", time.Minute, func() bool { return live(t, s.m) == 0 })
	all := s.artifacts()
	all = append(all, artifact{"log of a KV node that tells tokens", []byte(told.node.log.String())}, artifact{"log of its worker", []byte(told.worker.log.String())},
		artifact{"log of a KV node that tells none", []byte(silent.node.log.String())}, artifact{"events without tokens", silent.events()})
	for _, a := range all {
		s.check(a)
	}
	s.controls(all, told, path, id)
}

// controls shows that what was looked through is what it is taken for, and that a secret in
// it would have been found.
func (s *secretive) controls(all []artifact, told *telling, path, id string) {
	if s.answers < 3000 {
		s.Errorf("answers of %d bytes: the test proves nothing", s.answers)
	}
	where := func(name string) (data []byte) {
		for _, a := range all {
			if strings.HasSuffix(a.name, name) {
				data = append(data, a.data...)
			}
		}
		return data
	}
	for name, want := range map[string][]string{
		"log of kvmesh up": {"level=DEBUG", "worker-1", "KV node is ready", "part=gateway", "part=controlplane"}, "access.log": {path, id, "sim-1"}, "spans": {id, "worker-2", "gen_ai.request.model"},
		"/metrics": {"kvmesh_relay_moves_total", "vllm:num_requests_running", "kvmesh_kv_tier_used_bytes", `model="sim-1"`}, "/v1/workers": {"worker-3"},
		"/config_dump?include_eds": {"ext_proc"}, "kvmesh kv stat -o json": {`"model": "sim-1"`}, "events without tokens": {"BlockStored"},
	} {
		data := where(name)
		for _, text := range want {
			if !bytes.Contains(data, []byte(text)) {
				s.Errorf("%s (%d bytes) does not have %q, so nothing in it proves anything", name, len(data), text)
			}
		}
	}
	// The switch that has a KV node tell tokens, and only that, makes them visible.
	if found := s.leak.find(told.events()); len(found) == 0 || !strings.Contains(strings.Join(found, "\n"), "tokens") {
		s.Errorf("the tokens that a node was to tell are not found: %v", found)
	}
	// A word that is not secret is found where it is known to be.
	s.leak.texts[path] = "a path"
	if found := s.leak.find(where("access.log")); len(found) != 1 {
		s.Errorf("a path in the log of requests: %v", found)
	}
}
