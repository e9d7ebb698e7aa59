package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/test/bufconn"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/policy"
)

const policyYAML = `
apiVersion: kvmesh.io/v1alpha1
kind: Mesh
spec: {maxBody: 1Mi, heldBodies: 4Mi}
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: p}
spec: {engine: sim, model: m}
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: short}
spec:
  models: [m]
  tiers: [{pool: p}]
  priority: 7
  timeouts: {firstByte: 40s, streamIdle: 5s, request: 120s, kvLookup: 700ms}
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: long}
spec:
  models: [other-name]
  tiers: [{pool: p}]
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: q}
spec: {engine: sim, model: big}
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: tiers}
spec:
  models: [tiered]
  tiers: [{pool: p}, {pool: q, maxTokens: 7}]
`

// attempt is what a worker saw of one request.
type seen struct {
	worker, address string
	header          http.Header
	body            string
}

// mesh is a relay between a client and workers w1, w2, w3, all in memory. The
// workers are one handler behind a fake of Envoy's egress listener.
type mesh struct {
	t      testing.TB
	relay  *Relay
	picker *picker.Picker
	client *http.Client
	stop   func() // ends Run's context
	done   chan struct{}

	mu   sync.Mutex
	seen []seen
	// serve is the worker; n counts requests from 1.
	serve func(n int, w http.ResponseWriter, r *http.Request)
}

// inMesh runs f in a bubble of fake time and takes the mesh down after it.
func inMesh(t *testing.T, change func(*Config), serve func(n int, w http.ResponseWriter, r *http.Request), f func(t *testing.T, m *mesh)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		edge, egress := bufconn.Listen(64<<10), bufconn.Listen(64<<10)
		m := newMesh(t, change, func(ctx context.Context) (net.Conn, error) { return egress.DialContext(ctx) })
		m.serve = serve
		workers := &http.Server{Handler: m, Protocols: protocols(false), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
		go func() { _ = workers.Serve(egress) }()
		m.connect(edge, func(ctx context.Context) (net.Conn, error) { return edge.DialContext(ctx) })
		f(t, m)
		m.client.CloseIdleConnections()
		m.stop()
		<-m.done
		_ = workers.Close()
		synctest.Wait()
		m.checkIdle()
	})
}

// protocols are HTTP/2 by prior knowledge, and HTTP/1.1 beside it on request.
func protocols(http1 bool) *http.Protocols {
	p := &http.Protocols{}
	p.SetHTTP1(http1)
	p.SetUnencryptedHTTP2(true)
	return p
}

func newMesh(t testing.TB, change func(*Config), dial func(context.Context) (net.Conn, error)) *mesh {
	t.Helper()
	set, err := policy.Parse(policy.File{Name: "test.yaml", Data: []byte(policyYAML)})
	if err != nil {
		t.Fatal(err)
	}
	p, err := picker.New(picker.Config{Policy: set})
	if err != nil {
		t.Fatal(err)
	}
	var ws []*fleetpb.Worker
	for i := range 3 {
		ws = append(ws, &fleetpb.Worker{Id: fmt.Sprintf("w%d", i+1), Address: fmt.Sprintf("10.0.0.%d:80", i+1), Pool: "p", Incarnation: 1, Status: 1, Weight: 10})
	}
	p.Update(ws)
	cfg := Config{
		Policy: set, Picker: p, DialEgress: dial, Held: semaphore.NewWeighted(int64(set.Mesh.HeldBodies)),
		Registerer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&cfg)
	}
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &mesh{t: t, relay: r, picker: p, done: make(chan struct{})}
}

// connect runs the relay on lis with a client that speaks HTTP/2 like Envoy.
func (m *mesh) connect(lis net.Listener, dial func(context.Context) (net.Conn, error)) {
	ctx, cancel := context.WithCancel(context.Background())
	m.stop = cancel
	go func() {
		defer close(m.done)
		if err := m.relay.Run(ctx, lis); err != nil {
			m.t.Errorf("Run: %v", err)
		}
	}()
	m.client = &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		Protocols:   protocols(false), DisableCompression: true,
		HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: 64 << 10},
	}}
}

// ServeHTTP is egress and worker in one.
func (m *mesh) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // a cut body shows in what is compared
	m.mu.Lock()
	m.seen = append(m.seen, seen{r.Header.Get(names.ExpectWorker), r.Header.Get(names.Destination), r.Header.Clone(), string(body)})
	n := len(m.seen)
	m.mu.Unlock()
	w.Header().Set(names.Upstream, r.Header.Get(names.Destination))
	w.Header().Set(names.Worker, r.Header.Get(names.ExpectWorker))
	m.serve(n, w, r)
}

// attempts lists the workers that were asked, in order.
func (m *mesh) attempts() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for _, s := range m.seen {
		out = append(out, s.worker)
	}
	return out
}

// post sends a request as the edge would, with candidates w1, w2.
func (m *mesh) post(ctx context.Context, body string, h ...string) (*http.Response, error) {
	m.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://mesh/v1/completions", strings.NewReader(body))
	if err != nil {
		m.t.Fatal(err)
	}
	req.Header.Set(names.Pool, "p")
	req.Header.Set(names.ModelRoute, "short")
	req.Header.Set(names.Destination, "10.0.0.1:80,10.0.0.2:80")
	req.Header.Set(names.Stream, "stream-1")
	req.Header.Set(names.Route, names.RouteRelay)
	for i := 0; i < len(h); i += 2 {
		req.Header.Set(h[i], h[i+1])
	}
	return m.client.Do(req)
}

// reply is a response that was read to its end.
type reply struct {
	status int
	header http.Header
	body   string
	took   time.Duration
}

// ask posts and reads the whole response.
func (m *mesh) ask(body string, h ...string) reply {
	m.t.Helper()
	start := time.Now()
	resp, err := m.post(context.Background(), body, h...)
	if err != nil {
		m.t.Fatalf("post: %v", err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		m.t.Errorf("read answer: %v after %q", err, got)
	}
	return reply{resp.StatusCode, resp.Header, m.numbered(string(got)), time.Since(start)}
}

// numbered checks the ids of a stream's events and returns the stream without them.
func (m *mesh) numbered(body string) string {
	m.t.Helper()
	var out strings.Builder
	n := 0
	for line := range strings.Lines(body) {
		if !strings.HasPrefix(line, "id: ") {
			out.WriteString(line)
			continue
		}
		if n++; line != fmt.Sprintf("id: stream-1:%d\n", n) {
			m.t.Errorf("event %d has the %s", n, line)
		}
	}
	return out.String()
}

// result is the count of attempts with that result.
func (m *mesh) result(name string) int {
	return int(testutil.ToFloat64(m.relay.metrics.attempts.WithLabelValues(name)))
}

// checkIdle checks that nothing is held once all is over.
func (m *mesh) checkIdle() {
	m.t.Helper()
	for _, v := range m.picker.Workers(time.Now()) {
		if v.InFlight != 0 {
			m.t.Errorf("%s still carries %d requests", v.ID, v.InFlight)
		}
	}
	if !m.relay.cfg.Held.TryAcquire(int64(m.relay.cfg.Policy.Mesh.HeldBodies)) {
		m.t.Error("part of the budget of held bodies is still taken")
	}
	if n := testutil.ToFloat64(m.relay.metrics.streams); n != 0 {
		m.t.Errorf("%v streams are still counted", n)
	}
	if b := &m.relay.retries; b.running.Load() != 0 || b.in != 0 || len(b.queue) != 0 {
		m.t.Errorf("retry budget counts %d running, %d further, %d waiting", b.running.Load(), b.in, len(b.queue))
	}
}

const (
	askStream = `{"model":"m","prompt":"p","stream":true}`
	askWhole  = `{"model":"m","prompt":"p"}`
	done      = "data: [DONE]\n\n"
)

// token is one event of a stream; finish closes the choice.
func token(text, finish string) string {
	reason := "null"
	if finish != "" {
		reason = `"` + finish + `"`
	}
	return fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"text\":%q,\"finish_reason\":%s}],\"odd\": 1 }\n\n", text, reason)
}

// send writes parts of a stream, flushing each.
func send(w http.ResponseWriter, parts ...string) {
	if w.Header().Get("Content-Type") == "" {
		w.Header().Set("Content-Type", "text/event-stream")
	}
	for _, p := range parts {
		_, _ = io.WriteString(w, p)
		_ = http.NewResponseController(w).Flush()
	}
}

// sendJSON writes a whole answer.
func sendJSON(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

// unreachableBy is Envoy's answer where nobody takes a connection.
func unreachableBy(w http.ResponseWriter, flags string) {
	w.Header().Set(names.Fault, flags)
	http.Error(w, "upstream connect error or disconnect/reset before headers", http.StatusServiceUnavailable)
}

// cut ends the response without its end, as the death of a worker does.
func cut() { panic(http.ErrAbortHandler) }

// noEgress is an egress that cannot be reached.
func noEgress(context.Context) (net.Conn, error) { return nil, errors.New("no such file") }

// recorder is a ResponseWriter without a connection.
type recorder struct {
	header http.Header
	status int
	body   strings.Builder
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(p []byte) (int, error) { return r.body.Write(p) }
