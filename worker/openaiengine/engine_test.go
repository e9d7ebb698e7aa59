package openaiengine

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/worker"
)

// upstream is a server in the manner of vLLM that notes what it is asked.
type upstream struct {
	*httptest.Server
	release chan struct{} // each element lets a stream write one more event

	mu      sync.Mutex
	metrics string // file of testdata, "" = 404
	down    bool   // every answer is cut
	last    *http.Request
	body    map[string]any
}

func newUpstream(t *testing.T) *upstream {
	t.Helper()
	u := &upstream{metrics: "vllm.txt", release: make(chan struct{}, 16)}
	u.Server = httptest.NewServer(http.HandlerFunc(u.serve))
	t.Cleanup(u.Close)
	return u
}

func (u *upstream) set(change func(*upstream)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	change(u)
}

func (u *upstream) asked() (*http.Request, map[string]any) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.last, u.body
}

func (u *upstream) serve(w http.ResponseWriter, r *http.Request) {
	u.mu.Lock()
	metrics, down := u.metrics, u.down
	if r.Method == http.MethodPost {
		raw, _ := io.ReadAll(r.Body)
		u.last, u.body = r.Clone(context.Background()), nil
		_ = json.Unmarshal(raw, &u.body)
	}
	stream := u.body["stream"] == true
	u.mu.Unlock()
	switch {
	case down:
		panic(http.ErrAbortHandler)
	case r.URL.Path == "/v1/models":
		fmt.Fprint(w, `{"object":"list","data":[{"id":"vendor/model","created":7,"max_model_len":2048},{"id":"adapter"}]}`)
	case r.URL.Path == "/metrics" && metrics != "":
		raw, _ := os.ReadFile("testdata/" + metrics)
		_, _ = w.Write(raw)
	case r.URL.Path == "/v1/completions" && stream:
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set("X-Kvmesh-Worker", "impostor")
		for i := range 3 {
			<-u.release
			fmt.Fprintf(w, "data: {\"n\":%d}\n\n", i)
			_ = http.NewResponseController(w).Flush()
		}
		fmt.Fprint(w, "data: [DONE]\n\n")
	case r.URL.Path == "/v1/completions", r.URL.Path == "/v1/chat/completions":
		fmt.Fprint(w, `{"choices":[{"index":0,"text":"x","finish_reason":"length"}],"extra":{"kept":true}}`)
	case r.URL.Path == "/v1/rerank":
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprintf(w, `{"query":%q}`, r.URL.RawQuery)
	default:
		http.NotFound(w, r)
	}
}

// open opens an engine that looks often.
func open(t *testing.T, u *upstream, cfg Config) *Engine {
	t.Helper()
	cfg.Upstream, cfg.Every = u.URL+"/v1/", time.Millisecond
	e, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

// await polls until ok.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("waiting for " + what)
		}
	}
}

func TestLoadAndHealthFollowTheServer(t *testing.T) {
	u := newUpstream(t)
	e := open(t, u, Config{Patience: 50 * time.Millisecond, MaxRunning: 9})
	if l := e.Load(); l.Running != 5 || l.MaxRunning != 9 {
		t.Errorf("load is %+v", l)
	}
	if m := e.Model(); m.Name != "vendor/model" || m.ContextLen != 2048 || m.Created != 7 {
		t.Errorf("model is %+v", m)
	}
	u.set(func(u *upstream) { u.metrics = "triton.txt" })
	await(t, "another load", func() bool { return e.Load().MaxRunning == 512 })
	u.set(func(u *upstream) { u.metrics = "" })
	await(t, "the load of a server without metrics", func() bool { return e.Load() == worker.Load{MaxRunning: 9} })
	if err := e.Check(); err != nil {
		t.Errorf("a server without metrics: %v", err)
	}
	u.set(func(u *upstream) { u.down = true })
	await(t, "a fault", func() bool { return e.Check() != nil })
	u.set(func(u *upstream) { u.down = false })
	await(t, "recovery", func() bool { return e.Check() == nil })
}

func TestOpenWaitsAndEnds(t *testing.T) {
	u := newUpstream(t)
	u.set(func(u *upstream) { u.down = true })
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := Open(ctx, Config{Upstream: u.URL, Every: time.Millisecond})
		ended <- err
	}()
	cancel(errors.New("enough"))
	if err := <-ended; err == nil {
		t.Error("Open of a server that is not there succeeded")
	}
	for _, c := range []Config{{}, {Upstream: "localhost:8000"}, {Upstream: "http://x", Metrics: "y"}, {Upstream: "http://x", Patience: -1}} {
		if _, err := Open(t.Context(), c); err == nil {
			t.Errorf("%+v passed", c)
		}
	}
	u.set(func(u *upstream) { u.down = false })
	if e := open(t, u, Config{Model: "adapter", Name: "mine"}); e.Model().Name != "mine" || e.name != "adapter" {
		t.Errorf("model is %+v, the server's %q", e.Model(), e.name)
	}
}

// startWorker runs a worker in front of the server and returns its URL.
func startWorker(t *testing.T, u *upstream, cfg Config) string {
	t.Helper()
	s, err := worker.New(worker.Config{
		ID: "w1", Pool: "p", Listen: "127.0.0.1:0", Aliases: []string{"alias"}, EngineName: "openai", RelaySecret: "secret",
		Open: func(context.Context, func(float64)) (worker.Engine, error) { return open(t, u, cfg), nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		<-ended
	})
	base := "http://" + s.Addr()
	await(t, "the worker", func() bool {
		resp, err := http.Get(base + "/ready")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == 200
	})
	return base
}

// do sends a request and returns the answer's status and body.
func do(t *testing.T, method, url, body string, header ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(raw)
}

func TestRequestsPassThrough(t *testing.T) {
	u := newUpstream(t)
	base := startWorker(t, u, Config{APIKey: "upstream-key"})
	resp, body := do(t, "POST", base+"/v1/chat/completions",
		`{"model":"alias","messages":[],"guided_json":{"a":1},"messages2":1,"kvmesh":{"token_ids":true}}`,
		"X-Kvmesh-Relay", "secret", "X-Kvmesh-Stream", "s", "Authorization", "Bearer client", "X-Request-Id", "r1")
	if resp.StatusCode != 400 {
		t.Errorf("no messages: %d %s", resp.StatusCode, body)
	}
	resp, body = do(t, "POST", base+"/v1/chat/completions",
		`{"model":"alias","messages":[{"role":"user","content":"x"}],"guided_json":{"a":1},"kvmesh":{"token_ids":true}}`,
		"X-Kvmesh-Relay", "secret", "X-Kvmesh-Stream", "s", "Authorization", "Bearer client", "X-Request-Id", "r1")
	if resp.StatusCode != 200 || !strings.Contains(body, `"kept":true`) || resp.Header.Get("X-Kvmesh-Worker") != "w1" {
		t.Fatalf("%d %s %v", resp.StatusCode, body, resp.Header)
	}
	req, sent := u.asked()
	if sent["model"] != "vendor/model" || sent["kvmesh"] != nil || sent["guided_json"] == nil {
		t.Errorf("the server got %v", sent)
	}
	if h := req.Header; h.Get("X-Kvmesh-Relay") != "" || h.Get("X-Kvmesh-Stream") != "" || h.Get("Authorization") != "Bearer upstream-key" || h.Get("X-Request-Id") != "r1" {
		t.Errorf("the server got the headers %v", h)
	}
	resp, body = do(t, "POST", base+"/v1/rerank?a=b", `{}`)
	if resp.StatusCode != http.StatusTeapot || body != `{"query":"a=b"}` {
		t.Errorf("a path of the server: %d %s", resp.StatusCode, body)
	}
	for path, want := range map[string]string{"/health": "worker", "/metrics": "vllm:num_requests_running", "/v1/models": `"alias"`} {
		if resp, body := do(t, "GET", base+path, ""); resp.StatusCode != 200 || !strings.Contains(body, want) {
			t.Errorf("%s is the worker's own: %d %s", path, resp.StatusCode, body)
		}
	}
	for body, want := range map[string]int{
		`{"model":"no","prompt":"x"}`:                    404,
		`{"model":"alias","prompt":"x","kvmesh":{}}`:     403,
		`{"model":"alias","prompt":"x","temperature":9}`: 400,
		`{"model":"alias","prompt":"x"}{`:                400,
	} {
		resp, got := do(t, "POST", base+"/v1/completions", body)
		if resp.StatusCode != want || !strings.Contains(got, `"error"`) || want == 403 && !strings.Contains(got, `"param":"kvmesh"`) {
			t.Errorf("%s: %d %s, want %d", body, resp.StatusCode, got, want)
		}
	}
	resp, body = do(t, "POST", base+"/v1/completions", `{"model":"alias","prompt":"x","kvmesh":{"resume":{"choices":[{"index":0,"text_bytes":1}]}}}`, "X-Kvmesh-Relay", "secret")
	if resp.StatusCode != 400 || !strings.Contains(body, "cannot continue") {
		t.Errorf("a continuation: %d %s", resp.StatusCode, body)
	}
}

// TestStreamsAreNotHeldBack reads each event before the server may write the next.
func TestStreamsAreNotHeldBack(t *testing.T) {
	u := newUpstream(t)
	base := startWorker(t, u, Config{})
	u.release <- struct{}{}
	resp, err := http.Post(base+"/v1/completions", "application/json", strings.NewReader(`{"model":"alias","prompt":"x","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got := resp.Header["X-Kvmesh-Worker"]; len(got) != 1 || got[0] != "w1" {
		t.Errorf("the answer says it is from %v", got)
	}
	next := readEvents(resp.Body)
	for i := range 3 {
		if got := next(); got != fmt.Sprintf(`data: {"n":%d}`, i) {
			t.Fatalf("event %d is %q", i, got)
		}
		u.release <- struct{}{}
	}
	if got := next(); got != "data: [DONE]" {
		t.Errorf("the last event is %q", got)
	}
}

func TestServerGoneIsUnavailable(t *testing.T) {
	u := newUpstream(t)
	base := startWorker(t, u, Config{})
	u.set(func(u *upstream) { u.down = true })
	resp, body := do(t, "POST", base+"/v1/completions", `{"model":"alias","prompt":"x"}`)
	if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, "cannot be reached") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

// readEvents returns a function that reads the next event.
func readEvents(r io.Reader) func() string {
	sc := bufio.NewScanner(r)
	return func() string {
		for sc.Scan() {
			if sc.Text() != "" {
				return sc.Text()
			}
		}
		return ""
	}
}
