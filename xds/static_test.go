package xds_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/fleet"
)

// vllm stands in for an OpenAI-compatible server that knows nothing of the mesh.
type vllm struct {
	*httptest.Server
	metrics atomic.Pointer[string] // nil = none
	sick    atomic.Bool
}

func startVLLM(t *testing.T) *vllm {
	t.Helper()
	v := &vllm{}
	v.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page := v.metrics.Load()
		switch {
		case r.URL.Path == "/health" && v.sick.Load():
			w.WriteHeader(http.StatusInternalServerError)
		case r.URL.Path == "/health":
		case r.URL.Path == "/v1/models":
			_, _ = io.WriteString(w, `{"data":[{"id":"big"},{"id":"big-alias"}]}`)
		case r.URL.Path == "/metrics" && page != nil:
			_, _ = io.WriteString(w, *page)
		case r.URL.Path == "/metrics":
			w.WriteHeader(http.StatusNotFound)
		default:
			_, _ = io.WriteString(w, r.Host)
		}
	}))
	t.Cleanup(v.Close)
	return v
}

func TestStaticServers(t *testing.T) {
	a, b := startVLLM(t), startVLLM(t)
	page := "vllm:num_requests_running{engine=\"0\"} 4\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"
	a.metrics.Store(&page)
	p := newPlane(t, fmt.Sprintf(`
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: main}
spec:
  engine: openai
  static: [{id: a, url: %q, zone: z}, {id: b, url: %q}]
`, a.URL, b.URL+"/v1"))
	// Utilization 0.5 + 2/4 is 1: weight 100. The server without metrics gets the
	// mean of those that have.
	p.wants("a", "known by its metrics", func(v fleet.WorkerView) bool {
		return v.Status == "HEALTHY" && v.Weight == 100 && v.Running == 4 && v.Waiting == 2 && v.KVUsage == 0.5 &&
			v.Model == "big" && slices.Equal(v.Aliases, []string{"big-alias"}) && v.Zone == "z" && v.Engine == "openai"
	})
	p.wants("b", "healthy", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" && v.Weight == 100 })

	b.sick.Store(true)
	p.wants("b", "sick", func(v fleet.WorkerView) bool { return v.Status == "UNHEALTHY" && v.Reason == "/health: status 500" })
	b.sick.Store(false)
	p.wants("b", "well again", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" })
	a.CloseClientConnections()
	a.Close()
	p.wants("a", "dead", func(v fleet.WorkerView) bool { return v.Status == "UNHEALTHY" && v.Reason == "connection refused" })

	if err := p.client.Drain(t.Context(), "b", true); err != nil {
		t.Fatal(err)
	}
	p.wants("b", "draining", func(v fleet.WorkerView) bool { return v.Status == "DRAINING" })
	p.crash()
	p.start()
	p.wants("b", "draining after the restart", func(v fleet.WorkerView) bool { return v.Status == "DRAINING" })
	if status, _ := p.call("PUT", "/v1/workers/b", fleet.Registration{ID: "b", Address: "127.0.0.1:1", Pool: "main", Incarnation: 9}); status != 409 {
		t.Errorf("registration under a static server's id: %d, want 409", status)
	}
}

func TestEnvoyServesStaticServers(t *testing.T) {
	envoytest.Binary(t)
	v := startVLLM(t)
	p := newPlane(t, fmt.Sprintf(`
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: main}
spec:
  engine: openai
  static: [{id: a, url: %q}]
`, v.URL))
	e := p.startEnvoy("")
	envoytest.Eventually(t, 10*time.Second, "the server behind Envoy", func() bool {
		for _, h := range e.hosts() {
			return h.EDSHealth == "HEALTHY" && !h.FailedActiveHealthCheck
		}
		return false
	})
	res, err := http.Get("http://" + p.config.Envoy.Edge + "/v1/x")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	host, err := io.ReadAll(res.Body)
	if err != nil || string(host) != v.Listener.Addr().String() || res.Header.Get("x-kvmesh-worker") != "a" {
		t.Errorf("%d, host %q, worker %q (%v)", res.StatusCode, host, res.Header.Get("x-kvmesh-worker"), err)
	}
}
