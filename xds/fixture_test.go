package xds_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	orcav3 "github.com/cncf/xds/go/xds/data/orca/v3"
	orcaservice "github.com/cncf/xds/go/xds/service/orca/v3"
	"google.golang.org/grpc"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/xds"
)

const onePool = `
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: main}
spec:
  engine: sim
  model: sim
  local: [{id: w0}]
  health: {blackoutPeriod: 1ms, silenceTimeout: 600ms}
`

func parse(t testing.TB, doc string) *policy.Set {
	t.Helper()
	set, err := policy.Parse(policy.File{Name: "test.yaml", Data: []byte(doc)})
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// plane is a control plane under test.
type plane struct {
	t      testing.TB
	config xds.Config
	client *fleet.Client
	cp     *xds.ControlPlane
	stop   func()
}

// newPlane prepares a control plane in its own directory and starts it.
func newPlane(t testing.TB, doc string) *plane {
	t.Helper()
	dir := envoytest.Dir(t)
	p := &plane{t: t, config: xds.Config{
		Envoy: envoy.Config{
			Policy: parse(t, doc), Edge: envoytest.FreePort(t),
			Egress:  filepath.Join(dir, "egress.sock"),
			Relay:   filepath.Join(dir, "relay.sock"),
			ExtProc: filepath.Join(dir, "ep.sock"),
		},
		ListenXDS: filepath.Join(dir, "xds.sock"),
		StateDir:  dir,
		Log:       slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
	}}
	p.start()
	return p
}

// start runs the control plane in the state its directory is in, as a new
// process would.
func (p *plane) start() {
	p.t.Helper()
	addr := "127.0.0.1:0"
	if p.config.ListenAPI != nil { // a restart keeps its port
		addr = p.config.ListenAPI.Addr().String()
	}
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		p.t.Fatal(err)
	}
	p.config.ListenAPI = ln
	cp, err := xds.New(p.config)
	if err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- cp.Run(ctx) }()
	p.client = fleet.NewClient("http://" + ln.Addr().String())
	p.cp = cp
	p.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			p.t.Errorf("Run: %v", err)
		}
	})
	p.t.Cleanup(p.stop)
}

// call makes one API request and returns status and body.
func (p *plane) call(method, path string, body any) (int, string) {
	p.t.Helper()
	raw, ok := body.(json.RawMessage) // as it is, valid or not
	if !ok {
		var err error
		if raw, err = json.Marshal(body); err != nil {
			p.t.Fatal(err)
		}
	}
	req, err := http.NewRequest(method, "http://"+p.config.ListenAPI.Addr().String()+path, bytes.NewReader(raw))
	if err != nil {
		p.t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer res.Body.Close()
	out, err := io.ReadAll(res.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	return res.StatusCode, string(out)
}

// worker returns the control plane's view of one worker, zero when it has none.
func (p *plane) worker(id string) fleet.WorkerView {
	p.t.Helper()
	list, err := p.client.Workers(context.Background())
	if err != nil {
		p.t.Fatal(err)
	}
	for _, w := range list {
		if w.ID == id {
			return w
		}
	}
	return fleet.WorkerView{}
}

// envoy starts an Envoy of this control plane.
func (p *plane) envoy(snapshot string) *envoytest.Process {
	p.t.Helper()
	b, err := envoy.Bootstrap(envoy.BootstrapConfig{Node: "test", Admin: "127.0.0.1:0", XDS: p.config.ListenXDS, Snapshot: snapshot})
	if err != nil {
		p.t.Fatal(err)
	}
	return envoytest.Start(p.t, b)
}

// fakeWorker answers HTTP and reports load like a worker.
type fakeWorker struct {
	orcaservice.UnimplementedOpenRcaServiceServer
	reg    fleet.Registration
	answer http.HandlerFunc // of /v1/x; set before the first request

	mu     sync.Mutex
	report *orcav3.OrcaLoadReport
	moved  chan struct{} // closed and replaced when report changed
	silent bool
	srv    *http.Server
}

func startWorker(t testing.TB, id string) *fakeWorker {
	t.Helper()
	w := &fakeWorker{moved: make(chan struct{})}
	w.load(0.5)
	w.serveAs(t, id, w)
	return w
}

// serveAs starts a worker whose load reports come from somewhere.
func (w *fakeWorker) serveAs(t testing.TB, id string, reports orcaservice.OpenRcaServiceServer) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.reg = fleet.Registration{
		ID: id, Address: ln.Addr().String(), Pool: "main", Zone: "a", Model: "sim", Engine: "sim",
		Incarnation: uint64(time.Now().UnixNano()),
	}
	w.serve(t, ln, reports)
}

func (w *fakeWorker) serve(t testing.TB, ln net.Listener, reports orcaservice.OpenRcaServiceServer) {
	g := grpc.NewServer()
	orcaservice.RegisterOpenRcaServiceServer(g, reports)
	w.srv = &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.Header.Get("content-type"), "application/grpc") {
			g.ServeHTTP(rw, r)
			return
		}
		if w.answer != nil && r.URL.Path == "/v1/x" {
			w.answer(rw, r)
			return
		}
		_, _ = io.WriteString(rw, w.reg.ID)
	})}
	w.srv.Protocols.SetHTTP1(true)
	w.srv.Protocols.SetUnencryptedHTTP2(true)
	go func() {
		if err := w.srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("worker %s: %v", w.reg.ID, err)
		}
	}()
	t.Cleanup(func() { _ = w.srv.Close() })
}

// load sets the utilization and reports it at once.
func (w *fakeWorker) load(utilization float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.report = &orcav3.OrcaLoadReport{
		ApplicationUtilization: utilization, RpsFractional: 1,
		NamedMetrics: map[string]float64{fleet.MetricRunning: 3, fleet.MetricWaiting: 1, fleet.MetricKVUsage: 0.25},
	}
	close(w.moved)
	w.moved = make(chan struct{})
}

// hush stops the reports while the connection stays, like a stopped process.
func (w *fakeWorker) hush(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.silent = on
}

func (w *fakeWorker) StreamCoreMetrics(req *orcaservice.OrcaLoadReportRequest, s orcaservice.OpenRcaService_StreamCoreMetricsServer) error {
	tick := time.NewTicker(req.GetReportInterval().AsDuration())
	defer tick.Stop()
	for {
		w.mu.Lock()
		report, moved, silent := w.report, w.moved, w.silent
		w.mu.Unlock()
		if !silent {
			if err := s.Send(report); err != nil {
				return err
			}
		}
		select {
		case <-s.Context().Done():
			return nil
		case <-moved:
		case <-tick.C:
		}
	}
}

// register tells the control plane of a worker.
func (p *plane) register(w *fakeWorker) {
	p.t.Helper()
	if status, body := p.call("PUT", "/v1/workers/"+w.reg.ID, w.reg); status != 200 {
		p.t.Fatalf("register %s: %d %s", w.reg.ID, status, body)
	}
}

// wants waits until the control plane's view of a worker satisfies ok.
func (p *plane) wants(id, what string, ok func(fleet.WorkerView) bool) {
	p.t.Helper()
	var last fleet.WorkerView
	defer func() {
		if p.t.Failed() {
			p.t.Logf("%s is %+v", id, last)
		}
	}()
	envoytest.Eventually(p.t, 10*time.Second, id+" "+what, func() bool {
		last = p.worker(id)
		return ok(last)
	})
}
