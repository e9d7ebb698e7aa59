package bench

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	orcav3 "github.com/cncf/xds/go/xds/data/orca/v3"
	orcaservice "github.com/cncf/xds/go/xds/service/orca/v3"
	"google.golang.org/grpc"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/xds"
)

const weightPolicy = `
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: main}
spec:
  engine: sim
  model: sim
  local: [{id: w0}]
  health: {blackoutPeriod: 1ms}
`

// BenchmarkWeight measures the way from a load report to Envoy: a worker doubles or
// halves its load, and the clock runs until Envoy counts an endpoint update
// (update_success) and then until /clusters shows the new weight. Both ends include
// the poll of the admin interface. The control plane runs in this process. On a machine
// that has nothing else to do, an update later than weightBound at p50 fails it.
func BenchmarkWeight(b *testing.B) {
	w := newReporter(b)
	edge := weightMesh(b, w)
	const stat = "cluster.pool/main.update_success"
	updates := func() uint64 {
		all, err := edge.Stats(b.Context(), "^"+stat+"$")
		if err != nil {
			b.Fatal(err)
		}
		return all[stat]
	}
	busy, known := hostLoad()
	// At utilization 0.25 the weight is 400, at 0.5 it is 200.
	loads, weights := []float64{0.25, 0.5}, []uint32{400, 200}
	w.send(loads[1])
	awaitWeight(b, edge, weights[1])

	var updated, shown []time.Duration
	for i := 0; b.Loop(); i++ {
		before := updates()
		start := w.send(loads[i%2])
		for updates() == before {
			if time.Since(start) > 10*time.Second {
				b.Fatal("no update within 10 s")
			}
		}
		updated = append(updated, time.Since(start))
		awaitWeight(b, edge, weights[i%2])
		shown = append(shown, time.Since(start))
	}
	for name, ds := range map[string][]time.Duration{"update": updated, "clusters": shown} {
		slices.Sort(ds)
		b.ReportMetric(ms(ds[len(ds)/2]), name+"-p50-ms")
		b.ReportMetric(ms(ds[len(ds)*9/10]), name+"-p90-ms")
	}
	b.ReportMetric(0, "ns/op") // the mean says less than the quantiles
	b.ReportMetric(busy, "load-avg")
	b.Logf("load average before: %.2f on %d CPUs", busy, runtime.NumCPU())
	idle := known && busy < float64(runtime.NumCPU())
	if p50 := updated[len(updated)/2]; idle && len(updated) >= fewUpdates && p50 > weightBound {
		b.Errorf("p50 of %d updates is %v, want at most %v on a machine with a load average of %.2f", len(updated), p50, weightBound, busy)
	}
}

// weightBound is the promise: a doubled load has changed the weight in Envoy by then, at
// p50, on a machine without other load.
const weightBound = 50 * time.Millisecond

// fewUpdates is how many updates make a median.
const fewUpdates = 15

// hostLoad returns the load average of the last minute, where the system tells.
func hostLoad() (load float64, ok bool) {
	raw, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, false
	}
	_, err = fmt.Sscan(string(raw), &load)
	return load, err == nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// awaitWeight polls /clusters until the worker has a weight.
func awaitWeight(b *testing.B, edge *admin.Client, weight uint32) {
	b.Helper()
	for start := time.Now(); ; {
		list, err := edge.Clusters(b.Context(), "^pool/main$")
		if err != nil {
			b.Fatal(err)
		}
		for _, c := range list {
			for _, h := range c.Hosts {
				if h.Weight == weight {
					return
				}
			}
		}
		if time.Since(start) > 10*time.Second {
			b.Fatalf("no weight %d within 10 s: %+v", weight, list)
		}
	}
}

// weightMesh runs a control plane and an Envoy, and registers the worker.
func weightMesh(b *testing.B, w *reporter) *admin.Client {
	b.Helper()
	envoytest.Binary(b)
	set, err := policy.Parse(policy.File{Name: "bench.yaml", Data: []byte(weightPolicy)})
	if err != nil {
		b.Fatal(err)
	}
	api, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	dir := envoytest.Dir(b)
	sock := filepath.Join(dir, "xds.sock")
	cp, err := xds.New(xds.Config{
		Envoy: envoy.Config{
			Policy: set, Edge: envoytest.FreePort(b), Egress: filepath.Join(dir, "egress"),
			Relay: filepath.Join(dir, "relay"), ExtProc: filepath.Join(dir, "extproc"),
		},
		ListenXDS: sock, ListenAPI: api, StateDir: dir, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- cp.Run(ctx) }()
	b.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			b.Error(err)
		}
	})
	if err := cp.Register(w.registration()); err != nil {
		b.Fatal(err)
	}
	boot, err := envoy.Bootstrap(envoy.BootstrapConfig{Node: "bench", Admin: "127.0.0.1:0", XDS: sock})
	if err != nil {
		b.Fatal(err)
	}
	edge := admin.NewClient("http://" + envoytest.Start(b, boot).Admin)
	envoytest.Eventually(b, 20*time.Second, "Envoy to be ready", func() bool { return edge.Ready(b.Context()) == nil })
	return edge
}

// reporter is a worker that only reports load, when told to.
type reporter struct {
	orcaservice.UnimplementedOpenRcaServiceServer
	addr    string
	reports chan float64
	sent    chan time.Time
}

func newReporter(b *testing.B) *reporter {
	b.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	w := &reporter{addr: ln.Addr().String(), reports: make(chan float64), sent: make(chan time.Time)}
	g := grpc.NewServer()
	orcaservice.RegisterOpenRcaServiceServer(g, w)
	srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/ready" {
			g.ServeHTTP(rw, r)
		}
	}), Protocols: new(http.Protocols)}
	srv.Protocols.SetUnencryptedHTTP2(true)
	go func() { _ = srv.Serve(ln) }() // ends with Close
	b.Cleanup(func() { _ = srv.Close() })
	return w
}

func (w *reporter) registration() fleet.Registration {
	return fleet.Registration{
		ID: "w0", Address: w.addr, Pool: "main", Model: "sim", Engine: policy.EngineSim, Incarnation: 1,
	}
}

// send reports a utilization and returns when the report left.
func (w *reporter) send(utilization float64) time.Time {
	w.reports <- utilization
	return <-w.sent
}

// StreamCoreMetrics implements OpenRcaService. Between two changes it repeats the
// last report, as workers do.
func (w *reporter) StreamCoreMetrics(_ *orcaservice.OrcaLoadReportRequest, s orcaservice.OpenRcaService_StreamCoreMetricsServer) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	utilization, changed := 0.5, false
	for {
		now := time.Now()
		if err := s.Send(&orcav3.OrcaLoadReport{ApplicationUtilization: utilization, RpsFractional: 1}); err != nil {
			return err
		}
		if changed {
			w.sent <- now
		}
		select {
		case <-s.Context().Done():
			return nil
		case utilization = <-w.reports:
			changed = true
		case <-tick.C:
			changed = false
		}
	}
}
