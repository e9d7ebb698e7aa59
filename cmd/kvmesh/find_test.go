package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/supervise"
)

func TestBaseURL(t *testing.T) {
	for text, want := range map[string]string{
		"":                       "",
		"127.0.0.1:9000":         "http://127.0.0.1:9000",
		"localhost:9000/":        "http://localhost:9000",
		"http://[::1]:9000":      "http://[::1]:9000",
		"https://mesh.example/":  "https://mesh.example",
		"mesh.example":           "http://mesh.example",
		"http://h:1/v1":          "error",
		"ftp://h:1":              "error",
		"http://":                "error",
		"http://127.0.0.1:90 00": "error",
	} {
		got, err := baseURL("--api", text)
		if want == "error" {
			h, ok := err.(hinter)
			if !ok || !strings.Contains(err.Error(), "--api") || !strings.Contains(h.Hint(), "http://") {
				t.Errorf("%q: %q, %v", text, got, err)
			}
			continue
		}
		if err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
}

// parts plays a control plane that knows where the rest is, Envoy's admin port and
// a gateway.
func parts(t *testing.T, view fleet.MeshView) (api string) {
	t.Helper()
	mux := http.NewServeMux()
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	if view.Admin == "here" {
		view = fleet.MeshView{Admin: srv.URL, Gateway: srv.URL, PID: view.PID}
	}
	answer := func(path string, v any) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(v) // the test checks what arrives
		})
	}
	answer("/v1/mesh", view)
	answer("/v1/workers", fleet.WorkerList{Workers: []fleet.WorkerView{{ID: "w-1"}}})
	answer("/v1/clusters", fleet.ClusterList{Clusters: []fleet.ClusterView{{Name: "pool/p", Endpoints: []fleet.EndpointView{{ID: "w-1", Address: "a"}}}}})
	answer("/v1/streams", fleet.StreamList{Streams: []fleet.StreamView{{ID: "s", Worker: "w-1"}}})
	answer("/clusters", map[string]any{})
	return strings.TrimPrefix(srv.URL, "http://")
}

// --api alone is enough for every command that looks at a mesh, with or without a
// scheme.
func TestAPIAlone(t *testing.T) {
	t.Chdir(t.TempDir())
	api := parts(t, fleet.MeshView{Admin: "here"})
	for _, name := range []string{"workers", "inspect", "streams"} {
		code, out, stderr := command(t, t.Context(), name, "--api", api)
		if code != 0 || !strings.Contains(out, "w-1") {
			t.Errorf("%s: exit %d, %s%s", name, code, out, stderr)
		}
	}
	// A control plane that was started by hand may not know.
	api = parts(t, fleet.MeshView{})
	for name, flag := range map[string]string{"inspect": "--admin URL", "streams": "--gateway URL"} {
		code, _, stderr := command(t, t.Context(), name, "--api", api)
		if code != 1 || !strings.Contains(stderr, "does not know") || !strings.Contains(stderr, flag) {
			t.Errorf("%s: exit %d, %s", name, code, stderr)
		}
		code, out, stderr := command(t, t.Context(), name, "--api", api, strings.Fields(flag)[0], api)
		if code != 0 || !strings.Contains(out, "w-1") {
			t.Errorf("%s with %s: exit %d, %s%s", name, flag, code, out, stderr)
		}
	}
	// The gateway needs nobody else.
	if code, out, _ := command(t, t.Context(), "streams", "--gateway", api); code != 0 || !strings.Contains(out, "w-1") {
		t.Errorf("streams --gateway: exit %d, %s", code, out)
	}
	if code, _, stderr := command(t, t.Context(), "workers", "--api", "http://x/v1"); code != 2 || !strings.Contains(stderr, "hint: write it like http://") {
		t.Errorf("exit %d, %s", code, stderr)
	}
}

// The addresses of the last `up` are never mixed with those of another mesh.
func TestAPIOfAnotherMesh(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	upJSON(t, dir, runningMesh{readyLine: readyLine{API: "http://127.0.0.1:1", Admin: "http://127.0.0.1:1"}, Gateway: "http://127.0.0.1:1", PID: os.Getpid()})
	api := parts(t, fleet.MeshView{Admin: "here"})
	for _, name := range []string{"inspect", "streams"} {
		if code, out, stderr := command(t, t.Context(), name, "--api", api); code != 0 || !strings.Contains(out, "w-1") {
			t.Errorf("%s: exit %d, %s%s", name, code, out, stderr)
		}
	}
}

func upJSON(t *testing.T, dir string, m runningMesh) {
	t.Helper()
	data, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, stateFolder), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, stateFolder, upFile), data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestLastUp(t *testing.T) {
	dir := t.TempDir()
	sub := filepath.Join(dir, "a", "b")
	if err := os.MkdirAll(sub, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := lastUp(sub); err == nil || !strings.Contains(err.Error(), "no mesh is running") {
		t.Errorf("nothing there: %v", err)
	}
	lock, err := supervise.Take(filepath.Join(dir, stateFolder, lockFile))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if _, err := lastUp(sub); err == nil || !strings.Contains(err.Error(), "not ready yet") {
		t.Errorf("starting: %v", err)
	}
	upJSON(t, dir, runningMesh{readyLine: readyLine{API: "http://x"}, PID: os.Getpid()})
	if m, err := lastUp(sub); err != nil || m.API != "http://x" {
		t.Errorf("from a folder below: %+v, %v", m, err)
	}
	upJSON(t, dir, runningMesh{PID: 1 << 22}) // more than any process has
	if _, err := lastUp(sub); err == nil || !strings.Contains(err.Error(), "not running any more") {
		t.Errorf("gone: %v", err)
	}
}

// A list of many streams is read whole, and says who is asked to go on with one.
func TestManyStreams(t *testing.T) {
	const n = 20_000
	list := fleet.StreamList{Streams: make([]fleet.StreamView, n)}
	for i := range list.Streams {
		list.Streams[i] = fleet.StreamView{ID: strings.Repeat("s", 26), Request: strings.Repeat("r", 36), Worker: "w-1", Next: "w-2"}
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(list) // the test checks what arrives
	}))
	defer srv.Close()
	code, out, stderr := command(t, t.Context(), "streams", "--gateway", srv.URL)
	if got := strings.Count(out, "w-1 → w-2"); code != 0 || got != n {
		t.Errorf("exit %d, %d lines, %s; want %d", code, got, stderr, n)
	}
}
