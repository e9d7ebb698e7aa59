package envoy_test

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	grpchealth "google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/names"
)

// quickPolicy is one pool with short time-outs.
const quickPolicy = `
apiVersion: kvmesh.io/v1alpha1
kind: Mesh
metadata: {name: ""}
spec:
  maxBody: 24Mi
  extProc: {messageTimeout: 300ms}
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: main}
spec:
  engine: sim
  model: sim
  local: [{id: w0}, {id: w1}]
  health: {checkInterval: 200ms}
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: quick}
spec:
  models: [quick]
  tiers: [{pool: main}]
  timeouts: {streamIdle: 300ms}
`

// mesh is a real Envoy between a client and stand-ins for all other parts.
type mesh struct {
	t       *testing.T
	dir     string
	url     string // of the edge listener
	cfg     envoy.Config
	envoy   *envoytest.Process
	gateway *gateway
	workers []*backend
	client  *http.Client
}

// setup says what a test wants otherwise than usual.
type setup struct {
	policy  string
	workers int // stand-ins for workers, default 2
	// pools says which worker is in which pool; by default all are in the first.
	pools map[string][]int
	// change edits the configuration before Envoy gets it.
	change func(*bootstrapv3.Bootstrap)
	// decide answers ext_proc; nil lets every request pass.
	decide func(stream) error
}

type stream = grpc.BidiStreamingServer[extprocv3.ProcessingRequest, extprocv3.ProcessingResponse]

func newMesh(t *testing.T, s setup) *mesh {
	t.Helper()
	envoytest.Binary(t)
	m := &mesh{t: t, dir: envoytest.Dir(t), client: &http.Client{Transport: &http.Transport{DisableCompression: true}}}
	t.Cleanup(m.client.CloseIdleConnections)
	if s.policy == "" {
		s.policy = quickPolicy
	}
	if s.workers == 0 {
		s.workers = 2
	}
	m.cfg = envoy.Config{
		Policy: parse(t, s.policy), Edge: envoytest.FreePort(t),
		Egress: m.path("egress.sock"), Relay: m.path("relay.sock"), ExtProc: m.path("ep.sock"),
		AccessLog: m.path("access.log"),
	}
	m.url = "http://" + m.cfg.Edge
	m.gateway = startGateway(t, m.cfg, s.decide)
	for i := range s.workers {
		m.workers = append(m.workers, startBackend(t, i))
	}
	eds := []*endpointv3.ClusterLoadAssignment{envoy.Endpoints(names.PoolCluster(m.cfg.Policy.Pools[0].Name), healthy(m.workers...))}
	if s.pools != nil {
		eds = nil
	}
	for pool, ids := range s.pools {
		var ws []*backend
		for _, i := range ids {
			ws = append(ws, m.workers[i])
		}
		eds = append(eds, envoy.Endpoints(names.PoolCluster(pool), healthy(ws...)))
	}
	m.start(s, eds...)
	return m
}

// healthy are the endpoints of stand-ins for workers.
func healthy(ws ...*backend) []envoy.Endpoint {
	var out []envoy.Endpoint
	for _, w := range ws {
		out = append(out, envoy.Endpoint{Worker: w.id, Address: w.addr, Status: health.Healthy, Weight: 100})
	}
	return out
}

func (m *mesh) start(s setup, eds ...*endpointv3.ClusterLoadAssignment) {
	m.t.Helper()
	r, err := envoy.Build(m.cfg)
	if err != nil {
		m.t.Fatal(err)
	}
	b := envoytest.Static(m.t, r, eds...)
	if s.change != nil {
		s.change(b)
	}
	m.envoy = envoytest.Start(m.t, b)
	envoytest.Eventually(m.t, 10*time.Second, "Envoy to be ready", func() bool {
		res, err := m.client.Get("http://" + m.envoy.Admin + "/ready")
		if err != nil {
			return false
		}
		defer res.Body.Close()
		return res.StatusCode == http.StatusOK
	})
}

func (m *mesh) path(name string) string { return filepath.Join(m.dir, name) }

// reply is a whole answer.
type reply struct {
	status int
	header http.Header
	body   string
}

// send makes one request at the edge; a reply with status 0 means that the
// connection failed.
func (m *mesh) send(method, path string, body io.Reader, header ...string) reply {
	m.t.Helper()
	return do(m.t, m.client, method, m.url+path, body, header...)
}

func do(t *testing.T, c *http.Client, method, url string, body io.Reader, header ...string) reply {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	res, err := c.Do(req)
	if err != nil {
		t.Logf("%s %s: %v", method, url, err)
		return reply{}
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		t.Logf("%s %s: body: %v", method, url, err)
		return reply{}
	}
	return reply{res.StatusCode, res.Header, string(raw)}
}

// egressClient speaks to the egress listener as the relay does.
func (m *mesh) egressClient() *http.Client {
	tr := h2c()
	tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", m.cfg.Egress)
	}
	m.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func h2c() *http.Transport {
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	return tr
}

// backend stands in for a worker.
type backend struct {
	id, addr string
	srv      *httptest.Server

	mu       sync.Mutex
	handle   http.HandlerFunc // nil answers 200 with the body's length
	requests []*http.Request
}

func startBackend(t *testing.T, i int) *backend {
	t.Helper()
	b := &backend{id: []string{"w0", "w1", "w2", "w3"}[i]}
	b.srv = serve(t, listen(t, "tcp", "127.0.0.1:0"), b)
	b.addr = b.srv.Listener.Addr().String()
	return b
}

func listen(t *testing.T, network, addr string) net.Listener {
	t.Helper()
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

func serve(t *testing.T, ln net.Listener, h http.Handler) *httptest.Server {
	t.Helper()
	srv := &httptest.Server{Listener: ln, Config: &http.Server{
		Handler: h, Protocols: new(http.Protocols), ErrorLog: log.New(io.Discard, "", 0),
	}}
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
	})
	return srv
}

func (b *backend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/ready" || r.URL.Path == "/health" {
		return
	}
	b.mu.Lock()
	b.requests = append(b.requests, r)
	h := b.handle
	b.mu.Unlock()
	if h != nil {
		h(w, r)
		return
	}
	n, err := io.Copy(io.Discard, r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("x-length", strconv.FormatInt(n, 10))
}

// on sets how the backend answers from now on.
func (b *backend) on(h http.HandlerFunc) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.handle = h
}

// seen returns the requests so far.
func (b *backend) seen() []*http.Request {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]*http.Request(nil), b.requests...)
}

// gateway stands in for ext_proc and relay.
type gateway struct {
	extprocv3.UnimplementedExternalProcessorServer
	relay  *backend
	server *grpc.Server
	health *grpchealth.Server
	decide func(stream) error
	// frozen makes the gateway hang, like a stopped process, until it is closed.
	frozen atomic.Pointer[chan struct{}]
}

func startGateway(t *testing.T, c envoy.Config, decide func(stream) error) *gateway {
	t.Helper()
	g := &gateway{relay: &backend{id: "relay"}, decide: decide, health: grpchealth.NewServer()}
	serve(t, listen(t, "unix", c.Relay), g.relay)
	g.server = grpc.NewServer(grpc.MaxRecvMsgSize(64<<20), grpc.UnaryInterceptor(g.check))
	extprocv3.RegisterExternalProcessorServer(g.server, g)
	grpc_health_v1.RegisterHealthServer(g.server, g.health)
	ln := listen(t, "unix", c.ExtProc)
	go func() { _ = g.server.Serve(ln) }() // its error is the Stop below
	t.Cleanup(g.server.Stop)
	return g
}

func (g *gateway) check(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
	g.thaw()
	return h(ctx, req)
}

func (g *gateway) thaw() {
	if c := g.frozen.Load(); c != nil {
		<-*c
	}
}

// Process lets each request pass unless the test decides.
func (g *gateway) Process(s extprocv3.ExternalProcessor_ProcessServer) error {
	g.thaw()
	if g.decide != nil {
		return g.decide(s)
	}
	if _, err := s.Recv(); err != nil {
		return err
	}
	return s.Send(proceed())
}
