package xds_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

func TestAPIErrors(t *testing.T) {
	p := newPlane(t, onePool)
	w := startWorker(t, "w0")
	p.register(w)
	change := func(f func(*fleet.Registration)) fleet.Registration {
		r := w.reg
		f(&r)
		return r
	}
	for _, c := range []struct {
		name, method, path string
		body               any
		status             int
	}{
		{"renewal", "PUT", "/v1/workers/w0", w.reg, 200},
		{"zombie", "PUT", "/v1/workers/w0", change(func(r *fleet.Registration) { r.Incarnation-- }), 409},
		{"zombie at the address", "PUT", "/v1/workers/old", change(func(r *fleet.Registration) { r.ID = "old"; r.Incarnation-- }), 409},
		{"other id in the path", "PUT", "/v1/workers/w1", w.reg, 400},
		{"unknown pool", "PUT", "/v1/workers/w0", change(func(r *fleet.Registration) { r.Pool = "none" }), 400},
		{"bad address", "PUT", "/v1/workers/w0", change(func(r *fleet.Registration) { r.Address = "localhost:1" }), 400},
		{"no JSON object", "PUT", "/v1/workers/w0", 7, 400},
		{"too large", "PUT", "/v1/workers/w0", change(func(r *fleet.Registration) { r.Aliases = []string{strings.Repeat("x", 1<<17)} }), 413},
		{"drain of nobody", "POST", "/v1/workers/none/drain", nil, 404},
		{"undrain of nobody", "DELETE", "/v1/workers/none/drain", nil, 404},
		{"goodbye of nobody", "DELETE", "/v1/workers/none", nil, 404},
		{"goodbye of a zombie", "DELETE", "/v1/workers/w0?incarnation=1", nil, 409},
		{"goodbye in words", "DELETE", "/v1/workers/w0?incarnation=x", nil, 400},
		{"wrong path", "GET", "/v1/nothing", nil, 404},
		{"health", "GET", "/healthz", nil, 200},
	} {
		status, body := p.call(c.method, c.path, c.body)
		if status != c.status {
			t.Errorf("%s: %d %s, want %d", c.name, status, body, c.status)
		}
		var e struct{ Error struct{ Message string } }
		if c.status >= 400 && (json.Unmarshal([]byte(body), &e) != nil || e.Error.Message == "") {
			t.Errorf("%s: no error object: %s", c.name, body)
		}
	}
	if got := p.worker("w0"); got.Address != w.reg.Address {
		t.Errorf("w0 is %+v after all that", got)
	}
}

// The command line asks the control plane where Envoy and the gateway are.
func TestAPITellsTheMesh(t *testing.T) {
	p := newPlane(t, onePool)
	if m, err := p.client.Mesh(t.Context()); err != nil || m != (fleet.MeshView{PID: os.Getpid()}) {
		t.Errorf("nothing was told: %+v, %v", m, err)
	}
	p.stop()
	p.config.Mesh = fleet.MeshView{Admin: "http://127.0.0.1:1", Gateway: "http://127.0.0.1:2"}
	p.start()
	if m, err := p.client.Mesh(t.Context()); err != nil || m.Admin != "http://127.0.0.1:1" || m.Gateway != "http://127.0.0.1:2" {
		t.Errorf("mesh: %+v, %v", m, err)
	}
}

// A web page in the operator's browser must not drain workers.
func TestAPIRefusesWebPages(t *testing.T) {
	p := newPlane(t, onePool)
	base := "http://" + p.config.ListenAPI.Addr().String()
	for _, c := range []struct {
		name, method string
		edit         func(*http.Request)
	}{
		{"cross-origin write", "POST", func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") }},
		{"other origin", "POST", func(r *http.Request) { r.Header.Set("Origin", "http://evil.test") }},
		{"rebound name", "GET", func(r *http.Request) { r.Host = "evil.test" }},
	} {
		req, err := http.NewRequestWithContext(t.Context(), c.method, base+"/v1/workers", nil)
		if err != nil {
			t.Fatal(err)
		}
		c.edit(req)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != http.StatusForbidden {
			t.Errorf("%s: %d", c.name, res.StatusCode)
		}
	}
}

func TestViews(t *testing.T) {
	p := newPlane(t, onePool)
	w := startWorker(t, "w0")
	w.reg.PID, w.reg.Host, w.reg.Process, w.reg.Aliases = 77, "box", "mark", []string{"alias"}
	p.register(w)
	want := fleet.WorkerView{
		ID: "w0", Address: w.reg.Address, PID: 77, Pool: "main", Zone: "a", Model: "sim", Engine: "sim",
		Status: "HEALTHY", Weight: 200, Running: 3, Waiting: 1, KVUsage: 0.25,
		Incarnation: w.reg.Incarnation, State: fleet.StateReady, Host: "box", Process: "mark",
	}
	p.wants("w0", "as reported", func(v fleet.WorkerView) bool {
		alias := len(v.Aliases) == 1 && v.Aliases[0] == "alias"
		v.Aliases = nil
		return alias && equalView(v, want)
	})
	clusters, err := p.client.Clusters(t.Context())
	if err != nil || len(clusters) != 1 || len(clusters[0].Endpoints) != 1 {
		t.Fatalf("%v, %v", clusters, err)
	}
	if e := clusters[0].Endpoints[0]; clusters[0].Name != "pool/main" || e.ID != "w0" || e.Weight != 200 || e.Status != "HEALTHY" {
		t.Errorf("%+v", clusters)
	}
	_, metrics := p.call("GET", "/metrics", nil)
	for _, line := range []string{`kvmesh_workers{pool="main",status="HEALTHY"} 1`, "kvmesh_xds_load_reports_total"} {
		if !strings.Contains(metrics, line) {
			t.Errorf("metrics lack %s", line)
		}
	}
	err = p.client.Drain(t.Context(), "nobody", true)
	if ae, ok := errors.AsType[*fleet.APIError](err); !ok || ae.Status != 404 || ae.Message == "" {
		t.Errorf("Drain of nobody: %v", err)
	}
}

func equalView(a, b fleet.WorkerView) bool {
	x, errx := json.Marshal(a)
	y, erry := json.Marshal(b)
	return errx == nil && erry == nil && string(x) == string(y)
}

// A drain is stored before it is acknowledged; when it cannot be, it is refused.
func TestDrainIsStoredOrRefused(t *testing.T) {
	p := newPlane(t, onePool)
	p.register(startWorker(t, "w0"))
	if err := p.client.Drain(t.Context(), "w0", true); err != nil {
		t.Fatal(err)
	}
	p.crash()
	p.start()
	p.wants("w0", "draining", func(v fleet.WorkerView) bool { return v.Status == "DRAINING" && v.Drained })
	if err := p.client.Drain(t.Context(), "w0", false); err != nil {
		t.Fatal(err)
	}
	p.wants("w0", "healthy", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" })

	// Renamed, not removed: the snapshot may be written meanwhile.
	if err := os.Rename(p.config.StateDir, p.config.StateDir+".away"); err != nil {
		t.Fatal(err)
	}
	if err := p.client.Drain(t.Context(), "w0", true); err == nil {
		t.Error("a drain was acknowledged that could not be stored")
	}
	if v := p.worker("w0"); v.Status != "HEALTHY" {
		t.Errorf("w0 is %s after a refused drain", v.Status)
	}
}

// Workers come and go, fall silent, die and come back.
func TestCollector(t *testing.T) {
	p := newPlane(t, onePool)
	w0, w1, w2 := startWorker(t, "w0"), startWorker(t, "w1"), startWorker(t, "w2")
	for _, w := range []*fakeWorker{w0, w1, w2} {
		p.register(w)
	}
	healthy := func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" }
	p.wants("w0", "healthy", healthy)

	w0.hush(true)
	p.wants("w0", "silent", func(v fleet.WorkerView) bool { return v.Status == "TIMEOUT" })
	w0.hush(false)
	p.wants("w0", "healthy again", healthy)

	_ = w1.srv.Close()
	p.wants("w1", "dead", func(v fleet.WorkerView) bool { return v.Status == "UNHEALTHY" && v.Reason == "connection refused" })
	again := startWorker(t, "w1") // a new incarnation, at another port
	p.register(again)
	p.wants("w1", "healthy at its new address", func(v fleet.WorkerView) bool { return healthy(v) && v.Address == again.reg.Address })

	w2.reg.State = fleet.StateDraining
	p.register(w2)
	p.wants("w2", "draining", func(v fleet.WorkerView) bool { return v.Status == "DRAINING" })
	w2.reg.State = fleet.StateLoading
	p.register(w2)
	p.wants("w2", "loading", func(v fleet.WorkerView) bool { return v.Status == "UNHEALTHY" && v.Reason == "loading" })
}

// Another process at a registered worker's address does not pass for it.
func TestStrangerAtTheAddress(t *testing.T) {
	p := newPlane(t, onePool)
	w := startWorker(t, "w0")
	w.mu.Lock()
	w.report.NamedMetrics[fleet.MetricIncarn] = float64(time.Now().Add(-time.Hour).Unix())
	w.mu.Unlock()
	p.register(w)
	p.wants("w0", "unhealthy", func(v fleet.WorkerView) bool {
		return v.Status == "UNHEALTHY" && strings.Contains(v.Reason, "another process")
	})
}

// Whoever is alive at an address keeps it, however late another one says that it
// has the same; a dead one's is free at once.
func TestAddressOfAnother(t *testing.T) {
	p := newPlane(t, onePool)
	w := startWorker(t, "w0")
	p.register(w)
	p.wants("w0", "healthy", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" })
	thief := w.reg
	thief.ID, thief.Incarnation = "w1", w.reg.Incarnation+uint64(time.Hour)
	if code, body := p.call("PUT", "/v1/workers/w1", thief); code != 409 || !strings.Contains(body, "alive at this address") {
		t.Errorf("%d %s", code, body)
	}
	if v := p.worker("w0"); v.Status != "HEALTHY" {
		t.Errorf("w0 is %s", v.Status)
	}
	_ = w.srv.Close()
	p.wants("w0", "dead", func(v fleet.WorkerView) bool { return v.Status == "UNHEALTHY" })
	if code, body := p.call("PUT", "/v1/workers/w1", thief); code != 200 {
		t.Errorf("after its death: %d %s", code, body)
	}
}

// A registration is one JSON object of known fields, and mistakes are told in words.
func TestRegistrationsAreStrict(t *testing.T) {
	p := newPlane(t, onePool)
	good := `{"id":"w0","address":"127.0.0.1:1","pool":"main","model":"m","engine":"sim","incarnation":1`
	for body, want := range map[string]string{
		good + `} trailing`:            "data after",
		good + `}{}`:                   "data after",
		good + `,"adress":"x"}`:        "Unknown field 'adress'",
		good + `,"pid":"seven"}`:       "Invalid type for 'pid'",
		`[]`:                           "must be an object",
		good:                           "it is no JSON",
		`{"id":"w0","incarnation":-1}`: "Invalid type for 'incarnation'",
	} {
		code, got := p.call("PUT", "/v1/workers/w0", json.RawMessage(body))
		if code != 400 || !strings.Contains(got, want) || strings.Contains(got, "Go ") || strings.Contains(got, "json:") {
			t.Errorf("%s: %d %s, want %q", body, code, got, want)
		}
	}
}
