package xds_test

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	orcaservice "github.com/cncf/xds/go/xds/service/orca/v3"

	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/xds"
)

// A configuration that cannot work is refused before anything listens, and says
// what is wrong with it.
func TestNewRefuses(t *testing.T) {
	p := newPlane(t, onePool)
	p.stop()
	for _, c := range []struct {
		want string
		edit func(*xds.Config)
	}{
		{"ListenXDS", func(c *xds.Config) { c.ListenXDS = "" }},
		{"ListenAPI", func(c *xds.Config) { c.ListenAPI = nil }},
		{"StateDir", func(c *xds.Config) { c.StateDir = filepath.Join(c.StateDir, "none") }},
		{"edge", func(c *xds.Config) { c.Envoy.Edge = "" }},
		{"WorkerPool", func(c *xds.Config) { c.Envoy.Policy = &policy.Set{} }},
	} {
		config := p.config
		c.edit(&config)
		if _, err := xds.New(config); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("want %q, got %v", c.want, err)
		}
	}
}

// A reload that Envoy would refuse changes nothing.
func TestReloadRefuses(t *testing.T) {
	p := newPlane(t, onePool)
	w := startWorker(t, "w0")
	p.register(w)
	healthy := func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" }
	p.wants("w0", "healthy", healthy)
	bad := parse(t, strings.Replace(strings.Replace(onePool, "engine: sim\n  model: sim\n  local: [{id: w0}]",
		"engine: openai\n  static: [{url: \"https://example.test\"}]", 1), "main", "other", 1))
	if err := p.cp.Reload(bad); err == nil || !strings.Contains(err.Error(), "certificate authorities") {
		t.Errorf("Reload: %v", err)
	}
	p.wants("w0", "still healthy", healthy)
	clusters, err := p.client.Clusters(t.Context())
	if err != nil || len(clusters) != 1 || clusters[0].Name != "pool/main" {
		t.Errorf("%v, %v", clusters, err)
	}
}

// answers reports whether the control plane takes Envoys' connections.
func answers(p *plane) func() bool {
	return func() bool {
		c, err := net.Dial("unix", p.config.ListenXDS)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}
}

// xDS is answered when all workers have been heard, and at latest after Settle.
func TestSettle(t *testing.T) {
	t.Run("all heard", func(t *testing.T) {
		p := newPlane(t, onePool)
		p.register(startWorker(t, "w0"))
		envoytest.Eventually(t, 10*time.Second, "the first answer", answers(p))
		p.crash()
		p.config.Settle = time.Hour
		p.start()
		envoytest.Eventually(t, 10*time.Second, "the answer after the restart", answers(p))
		if v := p.worker("w0"); v.Status != "HEALTHY" || v.Weight != 200 {
			t.Errorf("w0 is %+v when the first Envoy is answered", v)
		}
	})
	t.Run("one hangs", func(t *testing.T) {
		p := newPlane(t, onePool)
		w0, w1 := startWorker(t, "w0"), startWorker(t, "w1")
		p.register(w0)
		p.register(w1)
		envoytest.Eventually(t, 10*time.Second, "the first answer", answers(p))
		p.crash()
		w1.hush(true)
		p.config.Settle = 200 * time.Millisecond
		p.start()
		envoytest.Eventually(t, 10*time.Second, "the answer after the restart", answers(p))
		if v := p.worker("w0"); v.Status != "HEALTHY" {
			t.Errorf("w0 is %+v", v)
		}
		if v := p.worker("w1"); v.Status == "HEALTHY" {
			t.Errorf("w1, which hangs, is %+v", v)
		}
	})
}

// A worker that serves no load reports is judged by its registrations.
func TestWorkerWithoutReports(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("content-type", "application/grpc")
		w.Header().Set("grpc-status", "12") // unimplemented
		w.WriteHeader(http.StatusOK)
	})}
	srv.Protocols.SetUnencryptedHTTP2(true)
	go func() { _ = srv.Serve(ln) }() // ends with Close
	t.Cleanup(func() { _ = srv.Close() })
	p := newPlane(t, onePool)
	p.register(&fakeWorker{reg: fleet.Registration{
		ID: "w0", Address: ln.Addr().String(), Pool: "main", Model: "m", Engine: "other", Incarnation: 1,
	}})
	p.wants("w0", "healthy by its registration", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" && v.Weight > 1 })
}

// flapping breaks each stream after its first report.
type flapping struct {
	fakeWorker
	streams atomic.Int32
}

// StreamCoreMetrics implements OpenRcaService.
func (f *flapping) StreamCoreMetrics(_ *orcaservice.OrcaLoadReportRequest, s orcaservice.OpenRcaService_StreamCoreMetricsServer) error {
	f.streams.Add(1)
	return s.Send(f.report)
}

// A stream that breaks is opened again, and the worker does not suffer.
func TestStreamsBreak(t *testing.T) {
	p := newPlane(t, onePool)
	f := &flapping{fakeWorker: fakeWorker{moved: make(chan struct{})}}
	f.load(0.5)
	f.serveAs(t, "w0", f)
	p.register(&f.fakeWorker)
	p.wants("w0", "healthy", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" })
	envoytest.Eventually(t, 10*time.Second, "twenty streams", func() bool { return f.streams.Load() >= 20 })
	if v := p.worker("w0"); v.Status != "HEALTHY" || v.Weight != 200 {
		t.Errorf("w0 is %+v", v)
	}
}

// Two replicas of the control plane come to the same endpoints.
func TestReplicas(t *testing.T) {
	one, two := newPlane(t, onePool), newPlane(t, onePool)
	var ids []string
	for i, utilization := range []float64{0.2, 0.5, 1} {
		w := startWorker(t, []string{"w0", "w1", "w2"}[i])
		w.load(utilization)
		one.register(w)
		two.register(w)
		ids = append(ids, w.reg.ID)
	}
	view := func(p *plane) []fleet.ClusterView {
		c, err := p.client.Clusters(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	var a, b []fleet.ClusterView
	envoytest.Eventually(t, 10*time.Second, "the replicas to agree", func() bool {
		a, b = view(one), view(two)
		return len(a[0].Endpoints) == len(ids) && a[0].Endpoints[0].Weight == 500 && slices.Equal(a[0].Endpoints, b[0].Endpoints)
	})
}

// A control plane without a writable state directory serves on.
func TestStateDirIsGone(t *testing.T) {
	p := newPlane(t, onePool)
	envoytest.Eventually(t, 10*time.Second, "the start", answers(p))
	// Renamed, not removed: the snapshot may be written meanwhile.
	if err := os.Rename(p.config.StateDir, p.config.StateDir+".away"); err != nil {
		t.Fatal(err)
	}
	p.register(startWorker(t, "w0"))
	p.wants("w0", "healthy", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" })
}

// An address has one form, whatever the worker writes.
func TestAddressesAreCanonical(t *testing.T) {
	p := newPlane(t, onePool)
	for written, want := range map[string]string{
		"[0:0::0:1]:7001":         "[::1]:7001",
		"[::ffff:127.0.0.1]:7002": "127.0.0.1:7002",
		"[2001:DB8::1]:7003":      "[2001:db8::1]:7003",
	} {
		reg := fleet.Registration{ID: "w" + want[len(want)-1:], Address: written, Pool: "main", Model: "m", Engine: "sim", Incarnation: 1}
		if err := p.cp.Register(reg); err != nil {
			t.Fatal(err)
		}
		if got := p.worker(reg.ID).Address; got != want {
			t.Errorf("%s became %s, want %s", written, got, want)
		}
	}
}
