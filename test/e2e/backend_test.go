package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// backend is an OpenAI-compatible server that knows nothing of kvmesh.
type backend struct {
	*httptest.Server
	hits   atomic.Int64
	leaked atomic.Value // first mesh header that reached it
}

func newBackend(t *testing.T, model string, health bool) *backend {
	b := &backend{}
	mux := http.NewServeMux()
	if health {
		mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	}
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"object":"list","data":[{"id":%q,"object":"model","created":1,"owned_by":"them"}]}`, model)
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"llama\"} 1\n"+
			"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"llama\"} 0\n"+
			"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"llama\"} 0.25\n")
	})
	mux.HandleFunc("POST /", func(w http.ResponseWriter, r *http.Request) {
		b.hits.Add(1)
		for _, h := range names.Stripped() {
			if r.Header.Get(h) != "" {
				b.leaked.CompareAndSwap(nil, h)
			}
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{ // the client checks what arrives
			"path": r.URL.Path, "bytes": len(body), "body": string(body[:min(len(body), 200)]),
			"choices": []any{map[string]any{"index": 0, "text": "hi", "finish_reason": "stop"}},
		})
	})
	b.Server = httptest.NewServer(mux)
	t.Cleanup(b.Close)
	return b
}

// send posts a body and decodes the answer.
func send(t *testing.T, m *testmesh.Mesh, path, body string, header map[string]string) (*http.Response, map[string]any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, strings.TrimSuffix(m.OpenAI, "/v1")+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var out map[string]any
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return resp, out
}

// `kvmesh up --backend` fronts existing servers with no file: any model name
// passes as it is, every path works, and a server that goes away is avoided.
func TestBackends(t *testing.T) {
	a, b := newBackend(t, "llama", true), newBackend(t, "llama", true)
	m := testmesh.Start(t, bin, t.TempDir(), "--backend", a.URL, "--backend", b.URL+"/v1")

	body := `{"model":"llama", "prompt":"x"  ,"unknown":[1]}`
	resp, out := send(t, m, "/v1/completions", body, nil)
	if resp.StatusCode != http.StatusOK || out["body"] != body {
		t.Errorf("status %d, the server got %v, want the body as it was sent", resp.StatusCode, out["body"])
	}
	if id := resp.Header.Get(names.Worker); !strings.HasPrefix(id, "127.0.0.1:") {
		t.Errorf("%s = %q, want the server's id", names.Worker, id)
	}

	// Paths that are not parsed pass through, large and chunked bodies too, and
	// one session stays on one server.
	for _, path := range []string{"/v1/responses", "/v1/messages", "/v1/audio/transcriptions", "/v1/rerank", "/v1/messages/count_tokens"} {
		served := map[string]bool{}
		for range 6 {
			resp, out := send(t, m, path, strings.Repeat("z", 300_000), map[string]string{names.SessionID: "s-1"})
			if resp.StatusCode != http.StatusOK || out["path"] != path || out["bytes"] != 300_000.0 {
				t.Fatalf("%s: status %d, %v", path, resp.StatusCode, out)
			}
			served[resp.Header.Get(names.Worker)] = true
		}
		if len(served) != 1 {
			t.Errorf("%s: one session went to %v", path, served)
		}
	}
	if h := a.leaked.Load(); h != nil {
		t.Errorf("server saw %v", h)
	}
	if got := metric(t, m.Gateway(t)+"/metrics", "kvmesh_passthrough_requests_total"); got != 30 {
		t.Errorf("%d passthrough requests counted, want 30", got)
	}
	list := m.Workers(t)
	if len(list) != 2 || list[0].Running != 1 || list[0].KVUsage != 0.25 || list[0].Model != "llama" {
		t.Errorf("workers = %+v, want load and model from the servers themselves", list)
	}

	// One goes away: the other serves everything, at once.
	b.CloseClientConnections()
	b.Close()
	before := a.hits.Load()
	for range 10 {
		if resp, _ := send(t, m, "/v1/completions", body, nil); resp.StatusCode != http.StatusOK {
			t.Errorf("status %d with one server left", resp.StatusCode)
		}
	}
	if got := a.hits.Load() - before; got != 10 {
		t.Errorf("the server that is left got %d of 10", got)
	}
	testmesh.Eventually(t, "the lost server is marked", 20*time.Second, func() bool {
		for _, w := range m.Workers(t) {
			if w.Status != "HEALTHY" && w.Address == strings.TrimPrefix(b.URL, "http://") {
				return true
			}
		}
		return false
	})
}

// Servers with different models: each request goes to one that has its model, the
// list is that of all, and a server without a health path serves.
func TestBackendsByModel(t *testing.T) {
	a, b := newBackend(t, "org/a", true), newBackend(t, "b", false)
	m := testmesh.Start(t, bin, t.TempDir(), "--backend", a.URL, "--backend", b.URL)
	testmesh.Eventually(t, "both serve", 20*time.Second, func() bool {
		list := m.Workers(t)
		return len(list) == 2 && list[0].Status == "HEALTHY" && list[1].Status == "HEALTHY"
	})
	for range 5 {
		for model, want := range map[string]*backend{"org/a": a, "b": b} {
			before := want.hits.Load()
			resp, out := send(t, m, "/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":"x"}`, model), nil)
			if resp.StatusCode != http.StatusOK || want.hits.Load() != before+1 {
				t.Fatalf("model %s: status %d, %v, served by %s", model, resp.StatusCode, out, resp.Header.Get(names.Worker))
			}
		}
	}
	resp, err := http.Get(m.OpenAI + "/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || !strings.Contains(string(text), `"id":"org/a"`) || !strings.Contains(string(text), `"id":"b"`) {
		t.Errorf("models: %s, %v", text, err)
	}
	if resp, out := send(t, m, "/v1/completions", `{"model":"none","prompt":"x"}`, nil); resp.StatusCode != http.StatusNotFound {
		t.Errorf("unknown model: status %d, %v", resp.StatusCode, out)
	}
}

// Whatever a server's errors look like, clients get OpenAI's.
func TestBackendErrors(t *testing.T) {
	var status atomic.Int64
	var kind, text atomic.Value
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
	})
	mux.HandleFunc("POST /", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", kind.Load().(string))
		w.WriteHeader(int(status.Load()))
		_, _ = io.WriteString(w, text.Load().(string))
	})
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	m := testmesh.Start(t, bin, t.TempDir(), "--backend", srv.URL)
	for _, c := range []struct {
		status     int
		kind, text string
	}{
		{422, "application/json", `{"detail":[{"loc":["body","x"],"msg":"field required"}]}`},
		{404, "application/json", `{"detail":"Not Found"}`},
		{400, "application/json", `{"object":"error","message":"too long"}`},
		{429, "text/plain", "slow down"},
		{503, "text/html", "<h1>Service Unavailable</h1>"},
		{413, "text/html", "<h1>Request Entity Too Large</h1>"},
	} {
		status.Store(int64(c.status))
		kind.Store(c.kind)
		text.Store(c.text)
		for _, path := range []string{"/v1/completions", "/v1/rerank"} {
			resp, out := send(t, m, path, `{"model":"m","prompt":"x"}`, nil)
			e, _ := out["error"].(map[string]any)
			if resp.StatusCode != c.status || e["message"] == nil || e["type"] == nil {
				t.Errorf("%s, %d %s: status %d, %v", path, c.status, c.text, resp.StatusCode, out)
			}
			if busy := c.status == 429 || c.status == 503; busy != (resp.Header.Get("Retry-After") != "") {
				t.Errorf("%s, %d: Retry-After %q", path, c.status, resp.Header.Get("Retry-After"))
			}
		}
	}
}

// What servers do that are not quite well: another one answers where that can be, and else
// clients are told what it was.
func TestBackendFaults(t *testing.T) {
	var here, there atomic.Value // what the servers do
	var hits [2]atomic.Int64
	m := testmesh.Start(t, bin, t.TempDir(), "--backend", faulty(t, &here, &hits[0]), "--backend", faulty(t, &there, &hits[1]))
	do := func(a, b string) { here.Store(a); there.Store(b) }
	ask := func(stream bool) (int, string) {
		resp, err := http.Post(m.OpenAI+"/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"model":"m","prompt":"x","stream":%v}`, stream)))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text)
	}
	do("well", "well")
	testmesh.Eventually(t, "both serve", 20*time.Second, func() bool {
		_, _ = ask(false)
		return hits[0].Load() > 0 && hits[1].Load() > 0
	})

	do("busy", "busy")
	for range 6 {
		if status, text := ask(true); status != 503 || !strings.Contains(text, "All workers are busy") {
			t.Errorf("busy in HTML: %d %s", status, text)
		}
	}
	do("well", "well")
	before := [2]int64{hits[0].Load(), hits[1].Load()}
	testmesh.Eventually(t, "who had been busy is asked again", 20*time.Second, func() bool {
		if status, text := ask(true); status != 200 {
			t.Errorf("no longer busy: %d %s", status, text)
		}
		return hits[0].Load() > before[0] && hits[1].Load() > before[1]
	})

	do("silent", "silent")
	if status, text := ask(true); status != 200 || !strings.Contains(text, `"stop"`) || !strings.HasSuffix(text, "data: [DONE]\n\n") {
		t.Errorf("only the end is missing: %d %s", status, text)
	}
	do("header 55", "header 55")
	if status, text := ask(true); status != 200 || !strings.Contains(text, "[DONE]") {
		t.Errorf("a header that the edge takes: %d %s", status, text)
	}
	do("well", "header 70")
	for range 8 {
		if status, text := ask(true); status != 200 || !strings.Contains(text, "[DONE]") {
			t.Errorf("a header too large, and another server: %d %s", status, text)
		}
	}
	do("header 70", "header 70")
	if status, text := ask(true); status != 502 || !strings.Contains(text, "header of the worker's answer is too large") {
		t.Errorf("a header too large: %d %s", status, text)
	}
}

// faulty is a server that does what it is told.
func faulty(t *testing.T, what *atomic.Value, hits *atomic.Int64) string {
	what.Store("well")
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
	})
	const answer = `{"id":"x","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"hi","finish_reason":"stop"}]}`
	mux.HandleFunc("POST /", func(w http.ResponseWriter, r *http.Request) {
		hits.Add(1)
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		do, size, _ := strings.Cut(what.Load().(string), " ")
		if n, err := strconv.Atoi(size); err == nil {
			w.Header().Set("X-Big", strings.Repeat("x", n<<10))
		}
		if do == "busy" {
			http.Error(w, "<h1>Service Unavailable</h1>", http.StatusServiceUnavailable)
			return
		}
		if !strings.Contains(string(body), `"stream":true`) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, answer) // the client checks what arrives
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: "+answer+"\n\n")
		_ = http.NewResponseController(w).Flush()
		if do == "silent" {
			<-r.Context().Done()
			return
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	})
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return srv.URL
}

// A worker of ours may stand behind another mesh as a server like any.
func TestBackendIsAWorker(t *testing.T) {
	inner := startSim(t)
	addr := inner.Workers(t)[0].Address
	m := testmesh.Start(t, bin, t.TempDir(), "--backend", addr)
	for n := range 4 {
		body := fmt.Sprintf(`{"model":"sim-1","prompt":"x","max_tokens":2,"stream":%v}`, n%2 == 0)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, m.OpenAI+"/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close() // read to its end
		if err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(text), `"finish_reason":"length"`) {
			t.Errorf("%s: status %d, %s, %v", body, resp.StatusCode, text, err)
		}
	}
	if resp, out := send(t, m, "/v1/embeddings", `{"model":"sim-1","input":"x"}`, nil); resp.StatusCode == http.StatusMisdirectedRequest {
		t.Errorf("embeddings: %v", out)
	}
}
