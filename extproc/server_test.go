package extproc

import (
	"context"
	"encoding/json"
	"flag"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/test/bufconn"

	"github.com/kvmesh/kvmesh/internal/names"
)

var update = flag.Bool("update", false, "write the golden file anew")

// dial connects to a listener of bufconn.
func dial(t *testing.T, lis *bufconn.Listener) *grpc.ClientConn {
	t.Helper()
	cc, err := grpc.NewClient("passthrough:///gateway",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	return cc
}

// exchange sends messages one by one and returns the answers, until the server
// ends the stream or the messages are out.
func exchange(ctx context.Context, t *testing.T, cc *grpc.ClientConn, ms ...*extprocv3.ProcessingRequest) []*extprocv3.ProcessingResponse {
	t.Helper()
	stream, err := extprocv3.NewExternalProcessorClient(cc).Process(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var out []*extprocv3.ProcessingResponse
	for _, m := range ms {
		if stream.Send(m) != nil {
			break
		}
		resp, err := stream.Recv()
		if err != nil {
			break
		}
		out = append(out, resp)
	}
	_ = stream.CloseSend()
	return out
}

func TestServerInBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lis := bufconn.Listen(1 << 20)
		s := newServer(t, policyYAML, fleet())
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := s.Run(ctx, lis); err != nil {
				t.Errorf("Run: %v", err)
			}
		})
		cc := dial(t, lis)
		alive, err := healthv1.NewHealthClient(cc).Check(ctx, &healthv1.HealthCheckRequest{})
		if err != nil || alive.GetStatus() != healthv1.HealthCheckResponse_SERVING {
			t.Errorf("health: %v, %v", alive, err)
		}
		got := exchange(ctx, t, cc, headersMsg(false, "POST", "/v1/completions"), bodyMsg(`{"model":"chat","prompt":"p"}`))
		if len(got) != 2 || setHeaders(got[1].GetRequestBody().GetResponse().GetHeaderMutation())[names.Pool] != "big" {
			t.Errorf("answers %v", got)
		}
		got = exchange(ctx, t, cc, headersMsg(true, "GET", "/v1/completions"), bodyMsg("{}"))
		if len(got) != 1 || got[0].GetImmediateResponse() == nil {
			t.Errorf("after an immediate answer: %v", got)
		}
		if got = exchange(ctx, t, cc, &extprocv3.ProcessingRequest{}); len(got) != 0 {
			t.Errorf("answers to an empty message: %v", got)
		}
		// A stream that stays open does not keep the server from stopping.
		open, err := extprocv3.NewExternalProcessorClient(cc).Process(context.WithoutCancel(ctx))
		if err != nil {
			t.Fatal(err)
		}
		if err := open.Send(headersMsg(false, "POST", "/v1/completions", "content-length", "500")); err != nil {
			t.Fatal(err)
		}
		if _, err := open.Recv(); err != nil {
			t.Fatal(err)
		}
		cancel()
		wg.Wait()
		synctest.Wait()
		if !s.cfg.Held.TryAcquire(2000) {
			t.Error("a cut exchange keeps its share of the budget")
		}
		_ = cc.Close()
	})
}

// TestServerLargeBody sends a body over a real socket in one message, as Envoy
// does, of a size far above gRPC's defaults.
func TestServerLargeBody(t *testing.T) {
	lis, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	large := strings.Replace(policyYAML, "maxBody: 1000, heldBodies: 2000", "maxBody: 32Mi", 1)
	s := newServer(t, large, fleet())
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Run(ctx, lis) })
	defer wg.Wait()
	defer cancel()
	cc, err := grpc.NewClient("unix:"+lis.Addr().String(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.MaxCallSendMsgSize(64<<20)))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	for _, size := range []int{900 << 10, 20 << 20} {
		body := `{"model":"chat","prompt":"` + strings.Repeat("x", size) + `"}`
		got := exchange(ctx, t, cc, headersMsg(false, "POST", "/v1/completions"), bodyMsg(body))
		if len(got) != 2 || len(got[1].GetRequestBody().GetResponse().GetBodyMutation().GetBody()) < size {
			t.Errorf("%d bytes: %d answers", size, len(got))
		}
	}
}

func TestAdminHandler(t *testing.T) {
	s := newServer(t, policyYAML, nil)
	reg := prometheus.NewRegistry()
	reg.MustRegister(s.metrics.requests)
	s.metrics.requests.WithLabelValues(outcomeRelay).Inc()
	h := AdminHandler(s.cfg.Picker, reg)
	get := func(path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w
	}
	if w := get("/health"); w.Code != 503 || !strings.Contains(w.Body.String(), `"workers":[]`) {
		t.Errorf("before the first fleet: %d %s", w.Code, w.Body)
	}
	ws := fleet()
	ws[0].Zone, ws[1].Status = "eu-1a", 3
	s.cfg.Picker.Update(ws)
	w := get("/health")
	var got Health
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if w.Code != 200 || got.Status != "ok" || got.Active != 2 || len(got.Workers) != 3 || got.Workers[0].Running != 1 || got.Workers[1].Status != "DRAINING" {
		t.Errorf("%d %+v", w.Code, got)
	}
	if *update {
		if err := os.WriteFile("testdata/health.golden", w.Body.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("testdata/health.golden")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), w.Body.String()); diff != "" { // monitors read it
		t.Errorf("testdata/health.golden (-want +got):\n%s\n%s", diff, w.Body)
	}
	if w := get("/metrics"); !strings.Contains(w.Body.String(), `kvmesh_extproc_requests_total{outcome="relay"} 1`) {
		t.Errorf("metrics: %s", w.Body)
	}
}

func TestConfigValidate(t *testing.T) {
	good := newServer(t, policyYAML, nil).cfg
	for name, spoil := range map[string]func(*Config){
		"policy": func(c *Config) { c.Policy = nil }, "picker": func(c *Config) { c.Picker = nil },
		"budget": func(c *Config) { c.Held = nil }, "metrics": func(c *Config) { c.Registerer = nil }, "log": func(c *Config) { c.Log = nil },
	} {
		c := good
		spoil(&c)
		if _, err := New(c); err == nil {
			t.Errorf("New without %s: no error", name)
		}
	}
	if _, err := New(good); err == nil {
		t.Error("the same metrics twice: no error")
	}
	a, b := newStream(), newStream()
	if a == b || len(a) != 22 {
		t.Errorf("stream ids %q, %q", a, b)
	}
}
