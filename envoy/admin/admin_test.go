package admin_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// The reader against the real Envoy.
func TestRealEnvoy(t *testing.T) {
	envoytest.Binary(t)
	set, err := policy.Parse(policy.File{Name: "t.yaml", Data: []byte(`
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: main}
spec:
  engine: sim
  model: sim
  health: {check: "off"}
`)})
	if err != nil {
		t.Fatal(err)
	}
	dir := envoytest.Dir(t)
	r, err := envoy.Build(envoy.Config{
		Policy: set, Edge: envoytest.FreePort(t), Egress: filepath.Join(dir, "eg"),
		Relay: filepath.Join(dir, "relay"), ExtProc: filepath.Join(dir, "ep"),
	})
	if err != nil {
		t.Fatal(err)
	}
	p := envoytest.Start(t, envoytest.Static(t, r, envoy.Endpoints("pool/main", []envoy.Endpoint{
		{Worker: "w0", Address: "127.0.0.1:1", Zone: "a", Status: health.Healthy, Weight: 250},
		{Worker: "w1", Address: "[::1]:2", Zone: "b", Status: health.Draining, Weight: 1},
	})))
	c := admin.NewClient("http://" + p.Admin + "/")
	envoytest.Eventually(t, 10*time.Second, "Envoy to be ready", func() bool { return c.Ready(t.Context()) == nil })

	clusters, err := c.Clusters(t.Context(), "^pool/")
	if err != nil || len(clusters) != 1 || clusters[0].Name != "pool/main" {
		t.Fatalf("%v, %v", clusters, err)
	}
	want := map[string]admin.Host{
		"w0": {Address: "127.0.0.1:1", WorkerID: "w0", Zone: "a", Weight: 250, EDSHealth: "HEALTHY"},
		"w1": {Address: "[::1]:2", WorkerID: "w1", Zone: "b", Weight: 1, EDSHealth: "DRAINING"},
	}
	for _, h := range clusters[0].Hosts {
		if h != want[h.WorkerID] {
			t.Errorf("got %+v, want %+v", h, want[h.WorkerID])
		}
		delete(want, h.WorkerID)
	}
	if len(want) != 0 {
		t.Errorf("missing: %v", want)
	}
	all, err := c.Clusters(t.Context(), "")
	if err != nil || len(all) != 4 { // pool, relay, ext_proc, xds
		t.Errorf("%d clusters, %v", len(all), err)
	}
	for _, cl := range all {
		if cl.Name == "relay" && (len(cl.Hosts) != 1 || cl.Hosts[0].Address != filepath.Join(dir, "relay")) {
			t.Errorf("relay: %+v", cl)
		}
	}
	stats, err := c.Stats(t.Context(), "^cluster_manager.(active_clusters|warming_clusters)$")
	if err != nil || len(stats) != 2 || stats["cluster_manager.active_clusters"] != 4 {
		t.Errorf("%v, %v", stats, err)
	}
	info, err := c.ServerInfo(t.Context())
	if err != nil || info.State != "LIVE" || info.Node.ID != "test" || !strings.Contains(info.Version, "1.40") {
		t.Errorf("%+v, %v", info, err)
	}
}

func TestErrors(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/ready" {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, "INITIALIZING\n")
			return
		}
		_, _ = io.WriteString(w, `{"cluster_statuses": 7`)
	}))
	defer srv.Close()
	c := admin.NewClient(srv.URL)
	if err := c.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "INITIALIZING") {
		t.Errorf("Ready: %v", err)
	}
	if _, err := c.Clusters(t.Context(), ""); err == nil {
		t.Error("half a page was taken")
	}
	if _, err := c.Stats(t.Context(), ""); err == nil {
		t.Error("half a page was taken")
	}
	if _, err := admin.NewClient("http://127.0.0.1:1").ServerInfo(t.Context()); err == nil {
		t.Error("nobody there, and no error")
	}
}

// page serves one body for every path.
func page(t *testing.T, body string) *admin.Client {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(srv.Close)
	return admin.NewClient(srv.URL)
}

// Envoy's own observations, and addresses of every kind.
func TestHosts(t *testing.T) {
	list, err := page(t, `{"cluster_statuses":[{"name":"c","host_statuses":[
		{"address":{"socket_address":{"address":"2001:db8::1","port_value":443}},"hostname":"w",
		 "health_status":{"eds_health_status":"UNHEALTHY","failed_active_health_check":true,"failed_outlier_check":true,"pending_dynamic_removal":true},
		 "stats":[{"name":"rq_active","value":"3"},{"name":"rq_total","value":"9"},{"name":"rq_error"}],"weight":5},
		{"address":{"pipe":{"path":"/run/x"}},"health_status":{}},
		{"address":{"socket_address":{"address":"not an ip","port_value":1}}},
		{}
	]},{"name":"empty"}]}`).Clusters(t.Context(), "")
	if err != nil || len(list) != 2 || len(list[0].Hosts) != 4 || len(list[1].Hosts) != 0 {
		t.Fatalf("%+v, %v", list, err)
	}
	h := list[0].Hosts
	if h[0].Address != "[2001:db8::1]:443" || h[0].WorkerID != "w" || h[0].Weight != 5 || h[0].ActiveRequests != 3 ||
		!h[0].FailedActiveHealthCheck || !h[0].FailedOutlierCheck || !h[0].PendingRemoval {
		t.Errorf("%+v", h[0])
	}
	if h[1].Address != "/run/x" || h[2].Address != "not an ip" || h[3].Address != "" {
		t.Errorf("%+v", h[1:])
	}
}

// Histograms and text among the statistics are left out.
func TestStatsOfOtherKinds(t *testing.T) {
	got, err := page(t, `{"stats":[{"name":"a","value":7},{"name":"text","value":"x"},{"name":"below","value":-1},
		{"histograms":{"supported_quantiles":[]}},{"name":"none"},{"value":3}]}`).Stats(t.Context(), "")
	if err != nil || len(got) != 1 || got["a"] != 7 {
		t.Errorf("%v, %v", got, err)
	}
}

// What Envoy 1.40 says of a listener that it refused ends with the reason, after all of
// the configuration.
func TestRefusal(t *testing.T) {
	for name, c := range map[string]struct{ details, want string }{
		"a port": {`cannot bind '127.0.0.1:19735': Address already in use`, "cannot bind '127.0.0.1:19735': Address already in use"},
		"a value": {
			`goo.gle/debugproto   \ngrpc_service {\n  envoy_grpc {\n    cluster_name: \"ext_proc\"\n  }\n}\nmessage_timeout {\n  seconds: 7200\n}\n` +
				`route_cache_action: CLEAR\n: Proto constraint validation failed (ExternalProcessorValidationError.MessageTimeout: value must be inside range [0s, 1h0m0s])`,
			"Proto constraint validation failed (ExternalProcessorValidationError.MessageTimeout: value must be inside range [0s, 1h0m0s])",
		},
		"nothing": {"", ""},
	} {
		got, err := page(t, `{"configs":[{"@type":"x","name":"egress","active_state":{}},{"name":"other","error_state":{"details":"not this one"}},
			{"name":"edge","error_state":{"failed_configuration":{},"details":"`+c.details+`"}},{"failed_configuration":{}}]}`).Refusal(t.Context(), "edge")
		if err != nil || got != c.want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, c.want)
		}
	}
}
