package e2e

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// spoofed are headers that only the mesh may set; sent by a client they must
// change nothing.
func spoofed() map[string]string {
	return map[string]string{
		names.Route: names.RouteRelay, names.Pool: "none", names.Destination: "127.0.0.1:1",
		names.ExpectWorker: "nobody", names.Model: "none", "x-envoy-upstream-rq-timeout-ms": "1", "x-envoy-max-retries": "0",
	}
}

// mixed alternates the model's name and its alias, streams and whole answers,
// honest and spoofed headers.
func mixed(n int) testmesh.Request {
	r := testmesh.Request{Model: simModel, Stream: n%2 == 0}
	if n%3 == 0 {
		r.Model = alias
	}
	if n%5 == 1 { // no factor in common with the others: of each kind some are spoofed
		r.Header = spoofed()
	}
	return r
}

// expectServed fails for every failed request that started in [from, to).
func expectServed(t *testing.T, results []testmesh.Result, from, to time.Time) {
	t.Helper()
	failed, total := testmesh.Failures(results, from, to)
	if total < 20 {
		t.Errorf("only %d requests in the time that counts: the test proves nothing", total)
	}
	for i, f := range failed {
		if i == 5 {
			break
		}
		t.Errorf("request at +%v failed after %v: %v", f.Start.Sub(from).Round(time.Millisecond), f.Took.Round(time.Millisecond), f.Err)
	}
	if len(failed) > 0 {
		t.Errorf("%d of %d failed", len(failed), total)
	}
}

// holdDown kills a part whenever it comes up again, until the time is over.
func holdDown(t *testing.T, m *testmesh.Mesh, part string, d time.Duration) {
	t.Helper()
	kills := 0
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if pid := m.PID(part); pid != 0 && syscall.Kill(pid, syscall.SIGKILL) == nil {
			kills++
		}
	}
	if kills == 0 {
		t.Fatalf("%s was never up to be killed", part)
	}
}

// Design §9, the control plane: with all replicas dead everything goes on with
// the last config, and an Envoy started meanwhile serves from the snapshot.
func TestControlPlaneKilled(t *testing.T) {
	m := startSim(t)
	load := m.StartLoad(20, mixed)
	start := time.Now()
	holdDown(t, m, "controlplane", 4*time.Second)
	before := clusterNames(t, m)
	expectServed(t, finish(t, load), start, time.Now().Add(-100*time.Millisecond))
	if !slices.Contains(before, "pool/sim") {
		t.Fatalf("Envoy lost its clusters: %v", before)
	}

	// The control plane is still held down by its back-off when Envoy dies.
	m.Signal(t, "envoy", syscall.SIGKILL)
	done := make(chan struct{})
	go func() { defer close(done); holdDown(t, m, "controlplane", 6*time.Second) }()
	testmesh.Eventually(t, "the new Envoy serves from the snapshot", 5*time.Second, func() bool { return serves(t, m) })
	load = m.StartLoad(20, mixed)
	start = time.Now()
	<-done
	expectServed(t, finish(t, load), start, time.Now().Add(-100*time.Millisecond))

	// Back again: the workers are known, and a new death reaches Envoy.
	testmesh.Eventually(t, "the control plane lists the workers again", 20*time.Second, func() bool {
		list, err := workersOf(t, m)
		return err == nil && len(list) == 3 && list[0].Status == "HEALTHY"
	})
	m.Signal(t, "worker-1", syscall.SIGSTOP)
	testmesh.Eventually(t, "Envoy hears of a hung worker", 20*time.Second, func() bool {
		return envoyHealth(t, m, "worker-1") == "UNHEALTHY" && m.Workers(t)[0].Status == "TIMEOUT"
	})
	m.Signal(t, "worker-1", syscall.SIGCONT)
	testmesh.Eventually(t, "and of its return", 20*time.Second, func() bool {
		return envoyHealth(t, m, "worker-1") == "HEALTHY"
	})
}

// The same with a control plane that hangs and holds its socket: nobody refuses the
// new Envoy's connection, and it must not wait for an answer.
func TestControlPlaneStopped(t *testing.T) {
	m := startSim(t)
	m.Signal(t, "controlplane", syscall.SIGSTOP)
	m.Signal(t, "envoy", syscall.SIGKILL)
	start := time.Now()
	testmesh.Eventually(t, "the new Envoy serves from the snapshot", 10*time.Second, func() bool { return serves(t, m) })
	t.Logf("served after %v", time.Since(start).Round(time.Millisecond))
	m.Signal(t, "controlplane", syscall.SIGCONT)
	// Back again: Envoy follows it.
	m.Signal(t, "worker-1", syscall.SIGSTOP)
	testmesh.Eventually(t, "Envoy hears of a hung worker", 20*time.Second, func() bool {
		return envoyHealth(t, m, "worker-1") == "UNHEALTHY" && m.Workers(t)[0].Status == "TIMEOUT"
	})
	m.Signal(t, "worker-1", syscall.SIGCONT)
}

// Design §9, the gateway: killed or hung, Envoy serves alone.
func TestGatewayKilled(t *testing.T) {
	m := startSim(t)
	load := m.StartLoad(20, mixed)
	start := time.Now()
	holdDown(t, m, "gateway", 8*time.Second)
	// Nor may its return cost a request.
	testmesh.Eventually(t, "the gateway is back", 20*time.Second, func() bool { return viaRelay(t, m) })
	time.Sleep(afterReturn)
	expectServed(t, finish(t, load), start.Add(2*time.Second), time.Now())
}

// afterReturn is how long the load goes on behind a gateway that is back.
const afterReturn = 3 * time.Second

func TestGatewayStopped(t *testing.T) {
	m := startSim(t)
	load := m.StartLoad(20, mixed)
	time.Sleep(time.Second)
	start := time.Now()
	m.Signal(t, "gateway", syscall.SIGSTOP)
	time.Sleep(8 * time.Second)
	m.Signal(t, "gateway", syscall.SIGCONT)
	testmesh.Eventually(t, "the gateway is used again", 20*time.Second, func() bool { return viaRelay(t, m) })
	time.Sleep(afterReturn)
	expectServed(t, finish(t, load), start.Add(2*time.Second), time.Now())
}

// Design §9, Envoy: it is started again, and its clients reconnect.
func TestEnvoyKilled(t *testing.T) {
	m := startSim(t)
	load := m.StartLoad(20, mixed)
	time.Sleep(time.Second)
	old := m.PID("envoy")
	m.Signal(t, "envoy", syscall.SIGKILL)
	testmesh.Eventually(t, "a new Envoy serves", 15*time.Second, func() bool { return m.PID("envoy") != old && serves(t, m) })
	from := time.Now()
	time.Sleep(4 * time.Second)
	results := finish(t, load)
	expectServed(t, results, from, time.Now().Add(-time.Second))
}

func finish(t *testing.T, l *testmesh.Load) []testmesh.Result {
	t.Helper()
	results := l.Stop()
	if len(results) == 0 {
		t.Fatal("no request was sent")
	}
	return results
}

func clusterNames(t *testing.T, m *testmesh.Mesh) []string {
	t.Helper()
	list, err := admin.NewClient(m.Admin).Clusters(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, c := range list {
		out = append(out, c.Name)
	}
	return out
}

func envoyHealth(t *testing.T, m *testmesh.Mesh, id string) string {
	t.Helper()
	list, err := admin.NewClient(m.Admin).Clusters(t.Context(), "^"+names.PoolPrefix)
	if err != nil {
		return ""
	}
	for _, c := range list {
		for _, h := range c.Hosts {
			if h.WorkerID == id {
				return h.EDSHealth
			}
		}
	}
	return ""
}

// serves reports whether one request is answered.
func serves(t *testing.T, m *testmesh.Mesh) bool {
	t.Helper()
	resp, ok := post(t, m)
	return ok && resp.StatusCode == http.StatusOK
}

// viaRelay reports whether one request was answered through ext_proc: only the
// relay reports attempts, and only ext_proc selects it.
func viaRelay(t *testing.T, m *testmesh.Mesh) bool {
	t.Helper()
	before := relayRequests(t, m)
	return serves(t, m) && relayRequests(t, m) > before
}

func relayRequests(t *testing.T, m *testmesh.Mesh) float64 {
	t.Helper()
	stats, err := admin.NewClient(m.Admin).Stats(t.Context(), `^cluster\.relay\.upstream_rq_total$`)
	if err != nil {
		return 0
	}
	return float64(stats["cluster.relay.upstream_rq_total"])
}

func post(t *testing.T, m *testmesh.Mesh) (*http.Response, bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.OpenAI+"/completions", strings.NewReader(`{"model":"sim-1","prompt":"x","max_tokens":1}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, false
	}
	_ = resp.Body.Close() // only the status counts
	return resp, true
}

// A worker that dies while it is busy: requests that it had not begun to answer
// are served by the others.
func TestWorkerKilled(t *testing.T) {
	m := startSim(t)
	load := m.StartLoad(20, func(n int) testmesh.Request { return testmesh.Request{Model: simModel} })
	time.Sleep(time.Second)
	from := time.Now()
	m.Signal(t, "worker-1", syscall.SIGKILL)
	time.Sleep(3 * time.Second)
	results := finish(t, load)
	expectServed(t, results, from, time.Now().Add(-100*time.Millisecond))
}
