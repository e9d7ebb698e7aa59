package envoy_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/names"
)

// A client must not steer the mesh: neither its routes nor Envoy's retries.
func TestClientHeadersAreStripped(t *testing.T) {
	m := newMesh(t, setup{})
	spoofed := []string{names.Route, names.RouteRelay, "X-Unlisted", "kept"}
	for _, h := range names.Stripped() {
		if h != names.Route {
			spoofed = append(spoofed, h, "spoofed")
		}
	}
	got := m.send("GET", "/v1/models", nil, spoofed...)
	if got.status != 200 || len(m.gateway.relay.seen()) != 0 {
		t.Fatalf("status %d, relay saw %d requests; want a worker to answer", got.status, len(m.gateway.relay.seen()))
	}
	seen := append(m.workers[0].seen(), m.workers[1].seen()...)
	if len(seen) != 1 {
		t.Fatalf("workers saw %d requests, want 1", len(seen))
	}
	for _, h := range names.Stripped() {
		if v := seen[0].Header.Get(h); v != "" && !(h == names.Edge && v == "1") {
			t.Errorf("%s: %s reached the worker", h, v)
		}
	}
	if seen[0].Header.Get("X-Unlisted") != "kept" {
		t.Error("an ordinary header was removed")
	}
}

// The paths of workers' operators are not the clients', however they are spelled;
// Envoy answers for its own health.
func TestPrivatePaths(t *testing.T) {
	m := newMesh(t, setup{})
	for _, p := range names.PrivatePaths() {
		for _, path := range []string{p, p + "/", p + "/x", "/" + p, "/v1/.." + p, p + "?a=b"} {
			if got := m.send("GET", path, nil); got.status != 404 || !strings.Contains(string(got.body), `"error":{`) {
				t.Errorf("GET %s: status %d, body %s; want an OpenAI 404", path, got.status, got.body)
			}
		}
	}
	for _, path := range []string{"/health", "/healthz"} {
		if got := m.send("GET", path, nil); got.status != 200 {
			t.Errorf("GET %s: status %d", path, got.status)
		}
	}
	if n := len(m.workers[0].seen()) + len(m.workers[1].seen()); n != 0 {
		t.Errorf("workers saw %d requests", n)
	}
}

// The gateway reads the body, rewrites it and then chooses the relay.
func TestGatewayChoosesRelayAfterTheBody(t *testing.T) {
	m := newMesh(t, setup{decide: func(s stream) error {
		body, err := askBody(s)
		if err != nil {
			return err
		}
		out := []byte(strings.ReplaceAll(string(body), "client-name", "own"))
		return s.Send(bodyAnswer(out, "content-length", itoa(len(out)), names.Route, names.RouteRelay))
	}})
	var got string
	m.gateway.relay.on(func(w http.ResponseWriter, r *http.Request) {
		raw, err := io.ReadAll(r.Body)
		got = string(raw)
		if err != nil || r.ContentLength != int64(len(raw)) {
			t.Errorf("content-length %d for %d bytes (%v)", r.ContentLength, len(raw), err)
		}
	})
	if r := m.send("POST", "/v1/chat/completions", strings.NewReader(`{"model":"client-name"}`)); r.status != 200 {
		t.Fatalf("status %d", r.status)
	}
	if want := `{"model":"own"}`; got != want {
		t.Errorf("the relay got %q, want %q", got, want)
	}
	if r := m.send("GET", "/healthz", nil); r.status != 200 || r.body != "ok\n" {
		t.Errorf("/healthz: %d %q", r.status, r.body)
	}
}

// The gateway's ordered list of endpoints is obeyed, and the next one is tried
// when the first cannot take the request.
func TestDestinationList(t *testing.T) {
	var list string
	m := newMesh(t, setup{workers: 3, decide: func(s stream) error {
		if _, err := s.Recv(); err != nil {
			return err
		}
		return s.Send(destination(withHeaders(names.Pool, "main"), names.MetadataLB, names.Destination, list))
	}})
	w := m.workers
	for _, first := range []int{2, 0, 1} {
		list = w[first].addr + "," + w[(first+1)%3].addr
		got := m.send("POST", "/v1/x", strings.NewReader("{}"))
		if got.status != 200 || got.header.Get(names.Worker) != w[first].id {
			t.Errorf("first %s: %d from %q", w[first].id, got.status, got.header.Get(names.Worker))
		}
	}
	w[1].on(func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusServiceUnavailable) })
	list = w[1].addr + "," + w[2].addr
	got := m.send("POST", "/v1/x", strings.NewReader("{}"), "x-envoy-max-retries", "0")
	if got.status != 200 || got.header.Get(names.Worker) != "w2" {
		t.Errorf("busy first: %d from %q, want 200 from w2", got.status, got.header.Get(names.Worker))
	}
	for h := range got.header {
		if strings.HasPrefix(strings.ToLower(h), "x-envoy-") {
			t.Errorf("%s reached the client", h)
		}
	}
}

// Without gateway Envoy serves alone; a hung gateway is found out by its health
// check, so that only the first requests pay the message time-out.
func TestServesWithoutGateway(t *testing.T) {
	m := newMesh(t, setup{decide: func(s stream) error {
		if _, err := s.Recv(); err != nil {
			return err
		}
		return s.Send(withHeaders("x-gateway", "here"))
	}})
	envoytest.Eventually(t, 5*time.Second, "the gateway to be asked", func() bool {
		if got := m.send("POST", "/v1/chat/completions", strings.NewReader("{}")); got.status != 200 {
			t.Fatalf("status %d", got.status)
		}
		return anyGateway(m)
	})

	hang := make(chan struct{})
	defer close(hang)
	m.gateway.frozen.Store(&hang)
	if got := m.send("POST", "/v1/chat/completions", strings.NewReader("{}")); got.status != 200 {
		t.Fatalf("gateway hung: status %d", got.status)
	}
	envoytest.Eventually(t, 10*time.Second, "Envoy to stop asking the hung gateway", func() bool {
		start := time.Now()
		got := m.send("POST", "/v1/chat/completions", strings.NewReader("{}"))
		return got.status == 200 && time.Since(start) < m.cfg.Policy.Mesh.ExtProc.MessageTimeout.D()
	})

	m.gateway.server.Stop()
	for _, method := range []string{"POST", "GET"} { // nobody has the stream, and a new one would be wrong
		got := m.send(method, "/v1/chat/completions?x=1", strings.NewReader("{}"), names.LastEventID, "stream:3")
		if got.status != 503 || !strings.Contains(got.body, `"error"`) {
			t.Errorf("gateway dead: %s with Last-Event-ID: %d %s", method, got.status, got.body)
		}
	}
	for path, want := range map[string]int{"/a%zz": 400, "/v1/models%": 400, "/%4?x=1": 400, "/%e4%2Fb?x=%zz": 200} {
		if status, body := m.sendRaw(path); status != want || status == 400 && !strings.Contains(body, `"invalid_request_error"`) {
			t.Errorf("gateway dead: GET %s: %d %s, want %d", path, status, body, want)
		}
	}
	for range 20 {
		if got := m.send("POST", "/v1/chat/completions", strings.NewReader("{}")); got.status != 200 {
			t.Fatalf("gateway dead: status %d", got.status)
		}
	}
}

// sendRaw sends a GET for a target that Go's client would refuse.
func (m *mesh) sendRaw(target string) (status int, body string) {
	m.t.Helper()
	conn, err := net.Dial("tcp", m.cfg.Edge)
	if err != nil {
		m.t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", target)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		m.t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		m.t.Fatal(err)
	}
	return res.StatusCode, string(text)
}

func anyGateway(m *mesh) bool {
	for _, w := range m.workers {
		for _, r := range w.seen() {
			if r.Header.Get("x-gateway") != "" {
				return true
			}
		}
	}
	return false
}

// With only Envoy left, the model's name (set by the filter at the edge) still
// finds its pool. Here ext_proc plays that filter.
func TestModelHeaderRoutes(t *testing.T) {
	m := newMesh(t, setup{decide: func(s stream) error {
		if _, err := s.Recv(); err != nil {
			return err
		}
		return s.Send(withHeaders(names.Model, "quick"))
	}})
	for _, w := range m.workers {
		w.on(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	}
	// The route of model "quick" has an idle time-out of 300 ms, the default 300 s.
	if got := m.send("POST", "/v1/x", strings.NewReader("{}")); got.status != 504 {
		t.Errorf("status %d, want the route's own idle time-out", got.status)
	}
}

// A silent stream through the relay lives: the idle time-out of the route that
// matched before ext_proc must not go on counting.
func TestRelayRouteHasNoIdleTimeout(t *testing.T) {
	release := make(chan struct{})
	m := newMesh(t, setup{decide: func(s stream) error {
		if _, err := s.Recv(); err != nil {
			return err
		}
		return s.Send(withHeaders(names.Route, names.RouteRelay))
	}, policy: strings.ReplaceAll(quickPolicy, "models: [quick]", `models: ["*"]`)})
	m.gateway.relay.on(func(w http.ResponseWriter, _ *http.Request) {
		<-release
		_, _ = io.WriteString(w, "late")
	})
	time.AfterFunc(time.Second, func() { close(release) })
	if got := m.send("POST", "/v1/x", strings.NewReader("{}")); got.body != "late" {
		t.Errorf("%d %q, want the late answer", got.status, got.body)
	}
}

func TestBodiesOfAllSizesPass(t *testing.T) {
	m := newMesh(t, setup{decide: func(s stream) error {
		msg, err := s.Recv()
		if err != nil {
			return err
		}
		if path(msg) == "/unparsed" {
			return s.Send(proceed())
		}
		return buffered(s)
	}})
	for _, size := range []int{900 << 10, 4 << 20, 20 << 20} {
		for _, p := range []string{"/unparsed", "/parsed"} {
			got := m.send("POST", p, strings.NewReader(strings.Repeat("x", size)))
			if got.status != 200 || got.header.Get("x-length") != itoa(size) {
				t.Errorf("%s of %d bytes: %d, worker read %s", p, size, got.status, got.header.Get("x-length"))
			}
		}
	}
	// Past max_body only the parsed paths are bounded: Envoy streams the others.
	if got := m.send("POST", "/unparsed", strings.NewReader(strings.Repeat("x", 30<<20))); got.status != 200 {
		t.Errorf("30 MiB streamed: %d", got.status)
	}
}

// A client that reads slowly gets its whole answer, also when the connection is
// to be closed after it.
func TestSlowReaderIsNotCut(t *testing.T) {
	const size = 16 << 20
	m := newMesh(t, setup{})
	for _, w := range m.workers {
		w.on(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, size)) })
	}
	conn, err := net.Dial("tcp", m.cfg.Edge)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	// Envoy has all of the answer when its last part still waits in its buffers.
	var n int64
	for err == nil {
		var part int64
		part, err = io.CopyN(io.Discard, conn, 512<<10)
		if n += part; n > size/2 {
			<-time.After(150 * time.Millisecond)
		}
	}
	if err != io.EOF || n < size {
		t.Errorf("read %d of %d bytes: %v", n, size, err)
	}
}

func TestAccessLog(t *testing.T) {
	m := newMesh(t, setup{decide: func(s stream) error {
		if _, err := s.Recv(); err != nil {
			return err
		}
		return s.Send(destination(proceed(), names.MetadataMesh, "model", "m1"))
	}})
	m.send("POST", "/v1/x?key=secret", strings.NewReader(`{"prompt":"secret"}`), "authorization", "Bearer secret")
	var raw []byte
	envoytest.Eventually(t, 5*time.Second, "the access log", func() bool {
		raw, _ = os.ReadFile(m.cfg.AccessLog)
		return len(raw) > 0
	})
	if strings.Contains(string(raw), "secret") {
		t.Errorf("the log holds what it must not: %s", raw)
	}
	var line map[string]any
	if err := json.Unmarshal(raw, &line); err != nil {
		t.Fatalf("%v in %s", err, raw)
	}
	for k, want := range map[string]any{"code": 200.0, "path": "/v1/x", "model": "m1", "attempts": 1.0, "cluster": "pool/main"} {
		if line[k] != want {
			t.Errorf("%s is %v, want %v", k, line[k], want)
		}
	}
	if s, _ := line["ext_proc"].(string); !strings.HasPrefix(s, "rh:") {
		t.Errorf("ext_proc is %v", line["ext_proc"])
	}
}

// What ext_proc is shown: only what it needs, no credentials.
func TestForwardedHeaders(t *testing.T) {
	var got *extprocv3.ProcessingRequest
	m := newMesh(t, setup{decide: func(s stream) error {
		var err error
		if got, err = s.Recv(); err != nil {
			return err
		}
		return s.Send(refuse(typev3.StatusCode_OK, "", ""))
	}})
	m.send("POST", "/v1/x", strings.NewReader("{}"), "authorization", "Bearer s", "cookie", "s", "content-type", "application/json", "x-session-id", "7")
	seen := map[string]string{}
	for _, h := range got.GetRequestHeaders().GetHeaders().GetHeaders() {
		seen[h.GetKey()] = string(h.GetRawValue())
	}
	for _, h := range []string{":path", ":method", "content-type", "content-length", "x-session-id", "x-request-id"} {
		if seen[h] == "" {
			t.Errorf("%s is missing", h)
		}
	}
	for _, h := range []string{"authorization", "cookie", "user-agent"} {
		if seen[h] != "" {
			t.Errorf("%s was forwarded", h)
		}
	}
}
