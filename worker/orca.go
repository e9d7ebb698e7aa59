package worker

import (
	"math"
	"time"

	orcapb "github.com/cncf/xds/go/xds/data/orca/v3"
	orcasvc "github.com/cncf/xds/go/xds/service/orca/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpchealth "google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/worker/gpu"
)

// Pace of load reports on one stream.
const (
	reportDefault  = time.Second            // when the client asks for no interval
	reportFloor    = 100 * time.Millisecond // least interval a client can ask for
	reportSpacing  = 10 * time.Millisecond  // least time between two reports of changes
	reportPoll     = 5 * time.Millisecond   // how often the load is looked at
	kvUsageChanged = 0.01                   // a change of KV use worth a report
)

// orcaService serves Envoy's out-of-band load reports: one at once, then one at
// every change of the load and at least one per interval. It replaces grpc-go's
// own, which refuses intervals under 30 s.
type orcaService struct {
	orcasvc.UnimplementedOpenRcaServiceServer
	life    *lifecycle
	metrics *metrics
	started time.Time
	devices func() []gpu.Device // nil = nobody reads GPUs
}

// newGRPC makes the gRPC half of the port. It is only used through ServeHTTP.
func newGRPC(orca *orcaService, h *grpchealth.Server) *grpc.Server {
	g := grpc.NewServer()
	orcasvc.RegisterOpenRcaServiceServer(g, orca)
	healthpb.RegisterHealthServer(g, h)
	return g
}

// StreamCoreMetrics implements OpenRcaService.
func (o *orcaService) StreamCoreMetrics(req *orcasvc.OrcaLoadReportRequest, stream orcasvc.OpenRcaService_StreamCoreMetricsServer) error {
	every := reportDefault
	if d := req.GetReportInterval(); d != nil {
		if err := d.CheckValid(); err != nil {
			return status.Errorf(codes.InvalidArgument, "report_interval: %v", err)
		}
		every = max(d.AsDuration(), reportFloor)
	}
	ticker := time.NewTicker(reportPoll)
	defer ticker.Stop()
	var last facts
	var sent time.Time
	for now := time.Now(); ; {
		f := o.facts()
		since := now.Sub(sent)
		if sent.IsZero() || since >= every || (since >= reportSpacing && differ(last, f)) {
			if err := stream.Send(report(f, o.metrics.rates(now, f.Load), o.started)); err != nil {
				return err
			}
			last, sent = f, now
		}
		select {
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case now = <-ticker.C:
		}
	}
}

// facts is everything of a report but the rates.
type facts struct {
	Load
	interToken float64
	sick       bool
	hasGPU     bool
	gpu        health.GPU
	memory     float64 // of the fullest GPU, 0..1
	busy       float64 // of the busiest GPU, 0..1
}

// facts gathers them.
func (o *orcaService) facts() facts {
	f := facts{Load: o.life.load(), interToken: o.metrics.pace.interToken.value(), sick: !o.life.healthy()}
	if o.devices == nil {
		return f
	}
	devices := o.devices()
	f.hasGPU, f.gpu = len(devices) > 0, worstGPU(devices)
	for _, d := range devices {
		if d.MemoryTotalMB > 0 {
			f.memory = max(f.memory, float64(d.MemoryUsedMB)/float64(d.MemoryTotalMB))
		}
		f.busy = max(f.busy, d.Utilization)
	}
	return f
}

// differ tells whether something changed that matters for balancing.
func differ(a, b facts) bool {
	return a.Running != b.Running || a.Waiting != b.Waiting || a.MaxRunning != b.MaxRunning ||
		math.Abs(a.KVUsage-b.KVUsage) >= kvUsageChanged || a.sick != b.sick || a.gpu != b.gpu
}

// report words facts in ORCA's terms.
func report(f facts, r rates, started time.Time) *orcapb.OrcaLoadReport {
	utilization := f.KVUsage
	if f.MaxRunning > 0 {
		utilization = max(utilization, float64(f.Running+f.Waiting)/float64(f.MaxRunning))
	}
	named := map[string]float64{
		fleet.MetricRunning:     float64(f.Running),
		fleet.MetricWaiting:     float64(f.Waiting),
		fleet.MetricMaxRunning:  float64(f.MaxRunning),
		fleet.MetricKVUsage:     f.KVUsage,
		fleet.MetricTokensPerS:  r.tokens,
		fleet.MetricInterTokenS: f.interToken,
		fleet.MetricErrorRate:   r.failing(),
		fleet.MetricSelfCheck:   number(f.sick),
		fleet.MetricIncarn:      float64(started.Unix()),
	}
	if f.hasGPU {
		named[fleet.MetricGPULost] = number(f.gpu.Lost)
		named[fleet.MetricGPUXID] = float64(f.gpu.XID)
		named[fleet.MetricGPUECC] = f.gpu.ECC
		named[fleet.MetricGPURemapFailed] = number(f.gpu.RemapFailed)
		named[fleet.MetricGPUThrottled] = f.gpu.Throttled
		named[fleet.MetricGPUMemory] = f.memory
		named[fleet.MetricGPUUtilization] = f.busy
	}
	return &orcapb.OrcaLoadReport{
		ApplicationUtilization: utilization,
		RpsFractional:          r.requests,
		Eps:                    r.errors,
		NamedMetrics:           named,
	}
}

// number is 1 for true.
func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
