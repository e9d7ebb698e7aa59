package registry

import (
	"context"
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/policy"
)

func TestServers(t *testing.T) {
	set, err := policy.Parse(policy.File{Name: "t.yaml", Data: []byte(`
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: p}
spec:
  engine: openai
  health: {check: /ping}
  static:
  - {url: "http://10.0.0.1:8000/v1", zone: a}
  - {url: "https://api.example.test"}
  - {id: six, url: "http://[2001:db8::1]"}
`)})
	if err != nil {
		t.Fatal(err)
	}
	got, err := Servers(set)
	if err != nil {
		t.Fatal(err)
	}
	want := []Server{
		{ID: "10.0.0.1:8000", Pool: "p", Zone: "a", Host: "10.0.0.1", Port: "8000", Check: "/ping"},
		{ID: "api.example.test", Pool: "p", TLS: true, Host: "api.example.test", Port: "443", Check: "/ping"},
		{ID: "six", Pool: "p", Host: "2001:db8::1", Port: "80", Check: "/ping"},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	for i, host := range []string{"10.0.0.1:8000", "api.example.test", "[2001:db8::1]"} {
		if h := got[i].Hostname(); h != host {
			t.Errorf("host name %q, want %q", h, host)
		}
	}
}

// probe looks once at a server with these answers by path.
func probe(t *testing.T, check string, pages map[string]string) (Observation, *httptest.Server) {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page, ok := pages[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusUnauthorized)
		}
		_, _ = io.WriteString(w, page)
	}))
	t.Cleanup(srv.Close)
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	p, err := NewProber(Server{ID: "s", Host: u.Hostname(), Port: u.Port(), Check: check}, "")
	if err != nil {
		t.Fatal(err)
	}
	return p.Probe(t.Context()), srv
}

func TestProbe(t *testing.T) {
	models := `{"data":[{"id":"m"},{"id":""},{"id":"m"},{"id":"n"}]}`
	for _, c := range []struct {
		name, check string
		pages       map[string]string
		failed      string
		models      []string
		load        bool
	}{
		{name: "all there", check: "/health", pages: map[string]string{"/health": "", "/v1/models": models, "/metrics": "vllm:num_requests_running 1\n"}, models: []string{"m", "n"}, load: true},
		{name: "models behind a key", check: "/health", pages: map[string]string{"/health": ""}},
		{name: "no health path", check: "off", pages: map[string]string{"/v1/models": models}, models: []string{"m", "n"}},
		{name: "no health path, all behind a key", check: "off", pages: nil},
		{name: "sick", check: "/health", pages: nil, failed: "/health: status 401"},
		{name: "models in another shape", check: "/health", pages: map[string]string{"/health": "", "/v1/models": "[1]"}},
		{name: "metrics of something else", check: "/health", pages: map[string]string{"/health": "", "/metrics": "go_goroutines 4\n"}},
	} {
		o, _ := probe(t, c.check, c.pages)
		if o.Failed != c.failed || !slices.Equal(o.Models, c.models) || (o.Load != nil) != c.load || o.Silent || o.At.IsZero() {
			t.Errorf("%s: %+v", c.name, o)
		}
	}
}

func TestProbeOfNobody(t *testing.T) {
	_, srv := probe(t, "off", nil)
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	srv.Close()
	p, err := NewProber(Server{Host: u.Hostname(), Port: u.Port(), Check: "off"}, "")
	if err != nil {
		t.Fatal(err)
	}
	if o := p.Probe(t.Context()); o.Failed != "connection refused" {
		t.Errorf("%+v", o)
	}
	p, err = NewProber(Server{Host: "no-such-host.invalid", Port: "1", Check: "off"}, "")
	if err != nil {
		t.Fatal(err)
	}
	if o := p.Probe(t.Context()); o.Failed == "" || o.Address != "" {
		t.Errorf("name that does not resolve: %+v", o)
	}
	if _, err := NewProber(Server{TLS: true}, "/no/such/file"); err == nil {
		t.Error("a missing file of authorities went unseen")
	}
}

func TestParseLoad(t *testing.T) {
	for _, c := range []struct {
		name, page string
		want       Load
		ok         bool
	}{
		{"vLLM", "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{e=\"0\"} 2\nvllm:num_requests_running{e=\"1\"} 3\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc{e=\"0\"} 0.25\nvllm:kv_cache_usage_perc{e=\"1\"} 0.75\n", Load{5, 1, 0.75}, true},
		{"vLLM of old", "vllm:num_requests_running 2\nvllm:gpu_cache_usage_perc 0.5\n", Load{2, 0, 0.5}, true},
		{"SGLang", "sglang:num_running_reqs 2\nsglang:num_queue_reqs 3\nsglang:token_usage 0.5\n", Load{2, 3, 0.5}, true},
		{"llama-server", "llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n", Load{1, 2, 0}, true},
		{"TGI", "tgi_batch_current_size 1\ntgi_queue_size 2\n", Load{1, 2, 0}, true},
		{"nonsense values", "vllm:num_requests_running -1\nvllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc 1e9\n", Load{0, 0, 1}, true},
		{"huge", "vllm:num_requests_running 1e300\nvllm:num_requests_waiting +Inf\n", Load{1 << 20, 0, 0}, true},
		{"another program", "go_goroutines 7\n", Load{}, false},
		{"a web page", "<html>", Load{}, false},
		{"nothing", "", Load{}, false},
	} {
		got, ok := ParseLoad([]byte(c.page))
		if got != c.want || ok != c.ok {
			t.Errorf("%s: %+v, %v; want %+v, %v", c.name, got, ok, c.want, c.ok)
		}
	}
}

func FuzzParseLoad(f *testing.F) {
	f.Add([]byte("vllm:num_requests_running{e=\"0\"} 2\nvllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc 0.5\n"))
	f.Add([]byte("# TYPE tgi_queue_size counter\ntgi_queue_size 1 2\n"))
	f.Fuzz(func(t *testing.T, page []byte) {
		l, ok := ParseLoad(page)
		if l.KVUsage < 0 || l.KVUsage > 1 || !ok && l != (Load{}) || !(l.Utilization() >= 0) {
			t.Errorf("%+v, %v", l, ok)
		}
	})
}

// An https server is checked against the authorities it is given.
func TestProbeTLS(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer srv.Close()
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	ca := filepath.Join(t.TempDir(), "ca.pem")
	block := &pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}
	if err := os.WriteFile(ca, pem.EncodeToMemory(block), 0o600); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{ca: "", "": "certificate"} {
		p, err := NewProber(Server{TLS: true, Host: u.Hostname(), Port: u.Port(), Check: "/health"}, file)
		if err != nil {
			t.Fatal(err)
		}
		if o := p.Probe(t.Context()); (o.Failed == "") != (want == "") || !strings.Contains(o.Failed, want) {
			t.Errorf("authorities %q: failed %q, want %q", file, o.Failed, want)
		}
	}
	empty := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := NewProber(Server{TLS: true}, empty); err == nil {
		t.Error("an empty file of authorities went unseen")
	}
}

// A server that does not answer in time is silent, not broken; one that redirects
// is not followed.
func TestProbeSlowAndRedirect(t *testing.T) {
	var elsewhere atomic.Bool
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/slow":
			<-r.Context().Done()
		case "/moved":
			http.Redirect(w, r, "/elsewhere", http.StatusFound)
		case "/elsewhere":
			elsewhere.Store(true)
		}
	}))
	defer srv.Close()
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	look := func(check string) Observation {
		p, err := NewProber(Server{Host: u.Hostname(), Port: u.Port(), Check: check}, "")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		return p.Probe(ctx)
	}
	if o := look("/slow"); !o.Silent || o.Failed != "" {
		t.Errorf("slow: %+v", o)
	}
	if o := look("/moved"); o.Failed != "/moved: status 302" || elsewhere.Load() {
		t.Errorf("moved: %+v, followed %v", o, elsewhere.Load())
	}
}

// Run looks at once, and ends with its context without a last, false observation.
func TestProberRun(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer srv.Close()
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	p, err := NewProber(Server{Host: u.Hostname(), Port: u.Port(), Check: "/health"}, "")
	if err != nil {
		t.Fatal(err)
	}
	var all []Observation
	p.Run(ctx, func(o Observation) {
		all = append(all, o)
		cancel()
	})
	if len(all) != 1 || all[0].Failed != "" || all[0].Address != u.Host {
		t.Errorf("%+v", all)
	}
}

// All replicas must take the same of several addresses.
func TestResolve(t *testing.T) {
	for host, want := range map[string]string{
		"127.0.0.1": "127.0.0.1:80", "::1": "[::1]:80", "::ffff:10.0.0.1": "10.0.0.1:80",
	} {
		if got, err := resolve(t.Context(), host, "80"); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", host, got, err, want)
		}
	}
	got, err := resolve(t.Context(), "localhost", "80")
	if err != nil || got != "127.0.0.1:80" && got != "[::1]:80" {
		t.Errorf("localhost: %s, %v", got, err)
	}
}
