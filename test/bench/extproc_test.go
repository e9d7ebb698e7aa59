package bench

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvmesh/kvmesh/extproc"
	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/policy"
)

const policyYAML = `
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: pool}
spec: {engine: sim, model: model-of-the-workers}
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: route}
spec:
  models: [gpt-4o-mini]
  tiers: [{pool: pool}]
`

// parts are what a gateway shares between its two halves.
type parts struct {
	set  *policy.Set
	pick *picker.Picker
	held *semaphore.Weighted
}

func newParts(tb testing.TB, workers int) parts {
	tb.Helper()
	set, err := policy.Parse(policy.File{Name: "bench.yaml", Data: []byte(policyYAML)})
	if err != nil {
		tb.Fatal(err)
	}
	pick, err := picker.New(picker.Config{Policy: set})
	if err != nil {
		tb.Fatal(err)
	}
	ws := make([]*fleetpb.Worker, workers)
	for i := range ws {
		ws[i] = &fleetpb.Worker{
			Id: fmt.Sprintf("worker-%d", i), Address: fmt.Sprintf("10.0.%d.%d:8000", i/250, i%250), Pool: "pool", Incarnation: 1,
			Status: 1, Weight: 1000, Load: &fleetpb.Load{MaxRunning: 1 << 30},
			Engine: "sim", Fingerprint: "f", RelayMark: fleet.RelayMark(relaySecret),
		}
	}
	pick.Update(ws)
	return parts{set, pick, semaphore.NewWeighted(int64(set.Mesh.HeldBodies))}
}

func newExtProc(tb testing.TB, p parts) *extproc.Server {
	tb.Helper()
	s, err := extproc.New(extproc.Config{
		Policy: p.set, Picker: p.pick, Held: p.held, Registerer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// request is a chat request of about size bytes as Envoy sends it.
func request(size int) (head, body *extprocv3.ProcessingRequest) {
	text := `{"model":"gpt-4o-mini","stream":true,"messages":[{"role":"user","content":"` + strings.Repeat("lorem ipsum ", size/12) + `"}]}`
	header := func(k, v string) *corev3.HeaderValue { return &corev3.HeaderValue{Key: k, RawValue: []byte(v)} }
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
			Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
				header(":method", "POST"), header(":path", "/v1/chat/completions"), header("content-type", "application/json"),
				header("content-length", strconv.Itoa(len(text))), header("x-request-id", "e3a1c1f8-6f4b-4b8a-9d3c-1f2e3d4c5b6a"),
			}},
		}}},
		&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
			RequestBody: &extprocv3.HttpBody{Body: []byte(text), EndOfStream: true},
		}}
}

// BenchmarkStep is one request's whole decision, without gRPC.
func BenchmarkStep(b *testing.B) {
	s := newExtProc(b, newParts(b, 10))
	for _, size := range []int{2 << 10, 32 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dKB", size>>10), func(b *testing.B) {
			head, body := request(size)
			b.ReportAllocs()
			b.SetBytes(int64(size))
			for b.Loop() {
				e := s.NewExchange()
				now := time.Now()
				if _, err := e.Step(now, head); err != nil {
					b.Fatal(err)
				}
				resp, err := e.Step(now, body)
				if err != nil || resp.GetRequestBody().GetResponse().GetBodyMutation() == nil {
					b.Fatalf("%v, %v", resp, err)
				}
				e.Finish()
			}
		})
	}
}

// BenchmarkProcess is the same over gRPC on a Unix socket, client included.
func BenchmarkProcess(b *testing.B) {
	sock := filepath.Join(b.TempDir(), "s")
	lis, err := net.Listen("unix", sock)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = newExtProc(b, newParts(b, 10)).Run(ctx, lis) })
	defer wg.Wait()
	defer cancel()
	cc, err := grpc.NewClient("unix:"+sock, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	defer cc.Close()
	for _, size := range []int{2 << 10, 32 << 10} {
		b.Run(fmt.Sprintf("%dKB", size>>10), func(b *testing.B) {
			head, body := request(size)
			b.ReportAllocs()
			for b.Loop() {
				stream, err := extprocv3.NewExternalProcessorClient(cc).Process(ctx)
				if err != nil {
					b.Fatal(err)
				}
				for _, m := range []*extprocv3.ProcessingRequest{head, body} {
					if err := stream.Send(m); err != nil {
						b.Fatal(err)
					}
					if _, err := stream.Recv(); err != nil {
						b.Fatal(err)
					}
				}
				_ = stream.CloseSend()
			}
		})
	}
}
