package envoy_test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/names"
)

// The egress listener does what the relay says: that worker, once, and tells where it
// was. Who it is, an engine of ours says itself.
func TestEgressObeys(t *testing.T) {
	m := newMesh(t, setup{})
	c := m.egressClient()
	post := func(header ...string) reply {
		return do(t, c, "POST", "http://egress/v1/x", strings.NewReader("{}"), header...)
	}
	if fi, err := os.Stat(m.cfg.Egress); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, mode %v; want 0600", err, fi.Mode().Perm())
	}
	for range 4 {
		for _, w := range m.workers {
			w.on(func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set(names.Worker, "someone else")
			})
			got := post(names.Pool, "main", names.Destination, w.addr)
			if got.status != 200 || got.header.Get(names.Worker) != "someone else" || got.header.Get(names.Upstream) != w.addr {
				t.Errorf("named %s (%s): %d from %q at %q", w.id, w.addr, got.status,
					got.header.Values(names.Worker), got.header.Values(names.Upstream))
			}
		}
	}
	if got := post(); got.status != 404 {
		t.Errorf("no pool named: %d, want 404", got.status)
	}
	if got := post(names.Pool, "other"); got.status != 404 {
		t.Errorf("unknown pool named: %d, want 404", got.status)
	}

	var calls atomic.Int32
	for _, w := range m.workers {
		w.on(func(rw http.ResponseWriter, _ *http.Request) {
			calls.Add(1)
			rw.WriteHeader(http.StatusServiceUnavailable)
		})
	}
	list := m.workers[0].addr + "," + m.workers[1].addr
	if got := post(names.Pool, "main", names.Destination, list, "x-kvmesh-attempt", "1"); got.status != 503 || calls.Load() != 1 {
		t.Errorf("busy: %d after %d calls, want 503 after one", got.status, calls.Load())
	}
}

// What Envoy makes up itself is marked with its reason, and nothing else is, whatever a
// server says.
func TestEgressMarksItsOwn(t *testing.T) {
	m := newMesh(t, setup{policy: strings.ReplaceAll(quickPolicy, "engine: sim\n  model: sim\n  local: [{id: w0}, {id: w1}]", "engine: openai")})
	c := m.egressClient()
	post := func(to string) reply {
		return do(t, c, "POST", "http://egress/v1/x", strings.NewReader("{}"), names.Pool, "main", names.Destination, to)
	}
	w := m.workers[0]
	for _, status := range []int{200, 400, 429, 500, 502, 503, 504} {
		w.on(func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set(names.Fault, "UF")
			rw.WriteHeader(status)
		})
		if got := post(w.addr); got.status != status || len(got.header.Values(names.Fault)) != 0 {
			t.Errorf("the server's %d: %d with %q", status, got.status, got.header.Values(names.Fault))
		}
	}
	for name, tt := range map[string]struct {
		do     http.HandlerFunc
		status int
		flags  string
	}{
		"cut":            {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 503, "UC"},
		"large header":   {func(rw http.ResponseWriter, _ *http.Request) { rw.Header().Set("X-Big", strings.Repeat("x", 200<<10)) }, 502, "UPE"},
		"many fields":    {func(rw http.ResponseWriter, _ *http.Request) { many(rw.Header(), 150) }, 502, "UPE"},
		"no HTTP at all": {func(rw http.ResponseWriter, _ *http.Request) { raw(t, rw, "SSH-2.0-x\r\n\r\n") }, 502, "UPE"},
	} {
		w.on(tt.do)
		if got := post(w.addr); got.status != tt.status || got.header.Get(names.Fault) != tt.flags {
			t.Errorf("%s: %d with %q, want %d with %q", name, got.status, got.header.Get(names.Fault), tt.status, tt.flags)
		}
	}
	for _, w := range m.workers {
		w.srv.CloseClientConnections()
		w.srv.Close()
	}
	if got := post(w.addr); got.status != 503 || !strings.HasPrefix(got.header.Get(names.Fault), "U") {
		t.Errorf("nobody there: %d with %q", got.status, got.header.Get(names.Fault))
	}
}

// many adds n fields to a header.
func many(h http.Header, n int) {
	for i := range n {
		h.Set(fmt.Sprintf("X-Many-%d", i), "v")
	}
}

// raw answers with bytes that are no HTTP.
func raw(t *testing.T, rw http.ResponseWriter, text string) {
	conn, _, err := http.NewResponseController(rw).Hijack()
	if err != nil {
		t.Error(err)
		return
	}
	_, _ = io.WriteString(conn, text) // Envoy sees what arrives
	_ = conn.Close()
}

// The relay owns every time-out: Envoy waits for a silent worker.
func TestEgressWaits(t *testing.T) {
	m := newMesh(t, setup{policy: strings.ReplaceAll(quickPolicy, "models: [quick]", `models: ["*"]`)})
	for _, w := range m.workers {
		w.on(func(rw http.ResponseWriter, _ *http.Request) {
			<-time.After(time.Second)
			_, _ = io.WriteString(rw, "late")
		})
	}
	got := do(t, m.egressClient(), "POST", "http://egress/v1/x", strings.NewReader("{}"), names.Pool, "main")
	if got.body != "late" {
		t.Errorf("%d %q, want the late answer", got.status, got.body)
	}
}

// Only faults eject: a full worker says 503 and a client's error is 4xx, and both
// keep the worker in.
func TestEjection(t *testing.T) {
	for _, c := range []struct {
		status int
		ejects bool
	}{{500, true}, {502, true}, {503, false}, {404, false}, {429, false}} {
		t.Run(http.StatusText(c.status), func(t *testing.T) {
			m := newMesh(t, setup{})
			for i, w := range m.workers {
				w.on(func(rw http.ResponseWriter, _ *http.Request) {
					if i == 0 {
						rw.WriteHeader(c.status)
					}
				})
			}
			eg := m.egressClient()
			for range 10 {
				do(t, eg, "POST", "http://egress/v1/x", strings.NewReader("{}"), names.Pool, "main", names.Destination, m.workers[0].addr)
			}
			if got := m.stat("cluster.pool/main.outlier_detection.ejections_active"); (got == "1") != c.ejects {
				t.Errorf("%d × 10: %s ejected", c.status, got)
			}
		})
	}
}

// stat reads one of Envoy's counters or gauges.
func (m *mesh) stat(name string) string {
	m.t.Helper()
	got := do(m.t, m.client, "GET", "http://"+m.envoy.Admin+"/stats?filter=^"+name+"$", nil)
	_, v, _ := strings.Cut(strings.TrimSpace(got.body), ": ")
	return v
}

// A foreign server that dies or talks nonsense is a 502 or 503 in OpenAI's
// shape, and https servers are checked against their own names.
func TestForeignServers(t *testing.T) {
	m := newMesh(t, setup{policy: `
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: main}
spec:
  engine: openai
  health: {check: "off"}
  static: [{url: "http://127.0.0.1:1"}]
`})
	for _, w := range m.workers {
		w.on(func(rw http.ResponseWriter, r *http.Request) {
			conn, _, err := rw.(http.Hijacker).Hijack()
			if err != nil {
				t.Errorf("hijack (%s): %v", r.Proto, err)
				return
			}
			defer conn.Close()
			_, _ = io.WriteString(conn, "no HTTP at all\r\n\r\n")
		})
	}
	openAIError(t, m.send("POST", "/v1/x", strings.NewReader("{}")), 502)
}

func TestTLSServers(t *testing.T) {
	ca := newAuthority(t)
	m := &mesh{t: t, dir: envoytest.Dir(t), client: &http.Client{}}
	m.cfg = envoy.Config{
		Policy: parse(t, `
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: main}
spec:
  engine: openai
  static: [{url: "https://good.test"}]
`),
		Edge: envoytest.FreePort(t), Egress: m.path("eg.sock"), Relay: m.path("r.sock"), ExtProc: m.path("e.sock"),
		TrustedCA: filepath.Join(m.dir, "ca.pem"),
	}
	envoytest.Binary(t)
	if err := os.WriteFile(m.cfg.TrustedCA, ca.pem, 0o600); err != nil {
		t.Fatal(err)
	}
	m.url = "http://" + m.cfg.Edge
	b := &backend{id: "good.test"}
	b.on(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.TLS.ServerName+" "+r.Host) })
	addr := serveTLS(t, b, ca.server(t, "good.test"))
	ep := envoy.Endpoint{Worker: "good", Address: addr, Status: health.Healthy, Weight: 1, Hostname: "good.test", TLS: true}
	wrong := envoy.Endpoint{Worker: "wrong", Address: addr, Status: health.Healthy, Weight: 1, Hostname: "other.test", TLS: true}

	m.start(setup{}, envoy.Endpoints("pool/main", []envoy.Endpoint{ep}))
	envoytest.Eventually(t, 5*time.Second, "the https server's answer", func() bool {
		return m.send("GET", "/v1/models", nil).body == "good.test good.test"
	})
	m.envoy.Kill()

	m.start(setup{}, envoy.Endpoints("pool/main", []envoy.Endpoint{wrong}))
	if got := m.send("GET", "/v1/models", nil); got.status != 503 {
		t.Errorf("certificate of another host: %d %q, want 503", got.status, got.body)
	}
}
