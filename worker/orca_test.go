package worker_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	orcapb "github.com/cncf/xds/go/xds/data/orca/v3"
	orcasvc "github.com/cncf/xds/go/xds/service/orca/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

func dial(t *testing.T, r *running) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(r.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func reports(t *testing.T, r *running, interval time.Duration) grpc.ServerStreamingClient[orcapb.OrcaLoadReport] {
	t.Helper()
	stream, err := orcasvc.NewOpenRcaServiceClient(dial(t, r)).StreamCoreMetrics(t.Context(),
		&orcasvc.OrcaLoadReportRequest{ReportInterval: durationpb.New(interval)})
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

func next(t *testing.T, stream grpc.ServerStreamingClient[orcapb.OrcaLoadReport]) *orcapb.OrcaLoadReport {
	t.Helper()
	rep, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

func TestLoadReports(t *testing.T) {
	r := start(t, sim.Config{MaxSeqs: 8}, worker.Config{})
	stream := reports(t, r, time.Hour) // so that only changes are reported
	first := next(t, stream)
	if first.ApplicationUtilization != 0 || first.NamedMetrics[fleet.MetricMaxRunning] != 8 || first.NamedMetrics[fleet.MetricIncarn] == 0 {
		t.Errorf("%v", first)
	}
	r.engine.SetLoad(new(6), new(10))
	rep := next(t, stream)
	if rep.ApplicationUtilization != 2 || rep.NamedMetrics[fleet.MetricRunning] != 6 || rep.NamedMetrics[fleet.MetricWaiting] != 10 {
		t.Errorf("%v", rep)
	}
	if resp := r.post(t, "/sim", `{"kv_usage":0.9,"running":1,"waiting":0}`); resp.StatusCode != 200 {
		t.Fatalf("status %d", resp.StatusCode)
	}
	if rep = next(t, stream); rep.ApplicationUtilization != 0.9 || rep.NamedMetrics[fleet.MetricKVUsage] != 0.9 {
		t.Errorf("%v", rep)
	}
}

// Reports come at the interval too, and carry the rates.
func TestLoadReportsAtIntervals(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	stream := reports(t, r, time.Nanosecond) // raised to the floor
	next(t, stream)
	decode[any](t, r.post(t, textPath, `{"model":"sim","prompt":"x","max_tokens":50}`), 200)
	decode[apiError](t, r.post(t, textPath, `{"model":"sim","prompt":"x","sim":{"status":500}}`), 500)
	for {
		rep := next(t, stream)
		if rep.RpsFractional > 0 && rep.Eps > 0 && rep.NamedMetrics[fleet.MetricTokensPerS] > 0 {
			break
		}
	}
}

func TestLoadReportsRefuseABadInterval(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	stream, err := orcasvc.NewOpenRcaServiceClient(dial(t, r)).StreamCoreMetrics(t.Context(),
		&orcasvc.OrcaLoadReportRequest{ReportInterval: &durationpb.Duration{Seconds: 1, Nanos: -1}})
	if err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("%v", err)
	}
}

// An open load stream does not hold up the worker's end.
func TestLoadStreamEndsWithTheWorker(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	stream := reports(t, r, time.Hour)
	next(t, stream)
	r.stop()
	for {
		if _, err := stream.Recv(); err != nil {
			break
		}
	}
	if err := <-r.ended; err != nil {
		t.Error(err)
	}
}

func TestGRPCHealth(t *testing.T) {
	release := make(chan struct{})
	r := &running{engine: newSim(t, sim.Config{})}
	r.run(t, worker.Config{DrainTimeout: time.Hour, Open: func(context.Context, func(float64)) (worker.Engine, error) {
		<-release
		return r.engine, nil
	}})
	watch, err := healthpb.NewHealthClient(dial(t, r)).Watch(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := func(s healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		if got, err := watch.Recv(); err != nil || got.Status != s {
			t.Fatalf("%v, %v; want %v", got, err, s)
		}
	}
	want(healthpb.HealthCheckResponse_NOT_SERVING)
	close(release)
	want(healthpb.HealthCheckResponse_SERVING)
	running := r.post(t, textPath, `{"model":"sim","prompt":"x","stream":true,"sim":{"stall_at":5}}`)
	r.stop()
	want(healthpb.HealthCheckResponse_NOT_SERVING)
	running.Body.Close()
}

func TestMetrics(t *testing.T) {
	r := start(t, sim.Config{Name: "m", MaxSeqs: 4}, worker.Config{})
	decode[any](t, r.post(t, textPath, `{"model":"m","prompt":["x","y"],"max_tokens":5}`), 200)
	readStream(r.post(t, chatPath, `{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true,"sim":{"max":3}}`).Body)
	r.engine.SetLoad(new(2), new(1))
	body, err := io.ReadAll(r.do(t, http.MethodGet, "/metrics", "").Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		`vllm:num_requests_running{model_name="m"} 2`,
		`vllm:num_requests_waiting{model_name="m"} 1`,
		`vllm:kv_cache_usage_perc{model_name="m"} 0`,
		`vllm:generation_tokens_total{model_name="m"} 14`,
		`vllm:request_success_total{finished_reason="length",model_name="m"} 2`,
		`vllm:request_success_total{finished_reason="stop",model_name="m"} 1`,
		`vllm:time_to_first_token_seconds_count{model_name="m"} 2`,
		`vllm:e2e_request_latency_seconds_count{model_name="m"} 2`,
		`go_goroutines `,
		`process_resident_memory_bytes `,
	} {
		if !strings.Contains(string(body), line) {
			t.Errorf("no %q", line)
		}
	}
}
