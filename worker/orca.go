package worker

import (
	"math"
	"time"

	orcapb "github.com/cncf/xds/go/xds/data/orca/v3"
	orcasvc "github.com/cncf/xds/go/xds/service/orca/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/kvmesh/kvmesh/internal/fleet"
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
}

// newGRPC makes the gRPC half of the port. It is only used through ServeHTTP.
func newGRPC(orca *orcaService, h *health.Server) *grpc.Server {
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
	var last Load
	var sent time.Time
	for now := time.Now(); ; {
		load := o.life.load()
		since := now.Sub(sent)
		if sent.IsZero() || since >= every || (since >= reportSpacing && differ(last, load)) {
			if err := stream.Send(report(load, o.metrics.rates(now, load), o.started)); err != nil {
				return err
			}
			last, sent = load, now
		}
		select {
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case now = <-ticker.C:
		}
	}
}

// differ tells whether the load changed by something that matters for balancing.
func differ(a, b Load) bool {
	return a.Running != b.Running || a.Waiting != b.Waiting || a.MaxRunning != b.MaxRunning ||
		math.Abs(a.KVUsage-b.KVUsage) >= kvUsageChanged
}

// report words a load in ORCA's terms.
func report(l Load, r rates, started time.Time) *orcapb.OrcaLoadReport {
	utilization := l.KVUsage
	if l.MaxRunning > 0 {
		utilization = max(utilization, float64(l.Running+l.Waiting)/float64(l.MaxRunning))
	}
	return &orcapb.OrcaLoadReport{
		ApplicationUtilization: utilization,
		RpsFractional:          r.requests,
		Eps:                    r.errors,
		NamedMetrics: map[string]float64{
			fleet.MetricRunning:    float64(l.Running),
			fleet.MetricWaiting:    float64(l.Waiting),
			fleet.MetricMaxRunning: float64(l.MaxRunning),
			fleet.MetricKVUsage:    l.KVUsage,
			fleet.MetricTokensPerS: r.tokens,
			fleet.MetricIncarn:     float64(started.Unix()),
		},
	}
}
