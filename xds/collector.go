package xds

import (
	"context"
	"errors"
	"io"
	"math"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	orcav3 "github.com/cncf/xds/go/xds/data/orca/v3"
	orcaservice "github.com/cncf/xds/go/xds/service/orca/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
)

// Pace of the streams of load reports.
const (
	// reportInterval is what workers are asked for. They report changes at once.
	reportInterval = 100 * time.Millisecond
	// reconnects are tried from at once up to this far apart.
	maxPause = 500 * time.Millisecond
	// unsupportedPause is how long a worker without load reports is left alone.
	unsupportedPause = 10 * time.Second
)

// collector holds the stream of load reports of one worker's incarnation.
type collector struct {
	state       *state
	metrics     *metrics
	id, address string
	incarnation uint64 // whose reports these are; state drops others'
	// refused says that the last connection was turned down: nothing listens.
	refused atomic.Bool
}

// run collects until ctx ends.
func (c *collector) run(ctx context.Context) {
	conn, err := grpc.NewClient("passthrough:///"+c.address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(), grpc.WithDisableServiceConfig(), grpc.WithContextDialer(c.dial),
		grpc.WithReadBufferSize(4<<10), grpc.WithWriteBufferSize(4<<10), // thousands of streams, small messages
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, MaxDelay: maxPause},
			MinConnectTimeout: time.Second,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
	)
	if err != nil { // the address was validated; only a wrong option can fail
		c.broken("load reports: " + err.Error())
		return
	}
	defer conn.Close()
	pause := time.Duration(0) // before the next try
	for {
		heard, err := c.follow(ctx, conn)
		switch {
		case ctx.Err() != nil:
			return
		case status.Code(err) == codes.Unimplemented:
			// Another engine's server, or an old worker. It may be updated one day.
			c.unsupported()
			pause = unsupportedPause
		case heard:
			pause = 0 // a stream that worked is reopened at once
		default:
			// Only a refusal is certain. A connection that fails otherwise may be the
			// network's fault, and silence will tell.
			if c.refused.Load() {
				c.broken("connection refused")
			}
			pause = min(max(2*pause, 20*time.Millisecond), maxPause)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		conn.ResetConnectBackoff() // gRPC's own pause comes on top otherwise
	}
}

// dial notes a refusal, which gRPC would hide in the text of its error.
func (c *collector) dial(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	c.refused.Store(errors.Is(err, syscall.ECONNREFUSED))
	return conn, err
}

// follow reads one stream until it breaks.
func (c *collector) follow(ctx context.Context, conn *grpc.ClientConn) (heard bool, err error) {
	ctx, cancel := context.WithCancel(ctx) // ends the stream however this returns
	defer cancel()
	stream, err := orcaservice.NewOpenRcaServiceClient(conn).StreamCoreMetrics(ctx, &orcaservice.OrcaLoadReportRequest{
		ReportInterval: durationpb.New(reportInterval),
	})
	for err == nil {
		var r *orcav3.OrcaLoadReport
		if r, err = stream.Recv(); err == nil {
			heard = true
			c.report(r)
		}
	}
	if errors.Is(err, io.EOF) {
		return heard, nil
	}
	return heard, err
}

// report takes one load report in.
func (c *collector) report(r *orcav3.OrcaLoadReport) {
	c.metrics.reports.Inc()
	// The time is that of arrival: workers' clocks are their own.
	now := time.Now()
	m := r.GetNamedMetrics()
	if started := m[fleet.MetricIncarn]; started > 0 && math.Abs(started-float64(c.incarnation/1e9)) > 1.5 {
		// The process at this address is not the one that registered: its load is
		// not this worker's, and the registered one is gone.
		c.broken("another process answers at its address")
		return
	}
	c.state.update(c.id, c.incarnation, now, func(w *worker) {
		// A report is proof of life, whatever was thought before.
		w.in.Failed, w.in.Heartbeat, w.in.Heard = "", false, now
		w.in.Report = health.Report{
			At: now, Utilization: r.GetApplicationUtilization(), RPS: r.GetRpsFractional(), EPS: r.GetEps(),
			GPU: gpuOf(m), SelfCheckFailed: m[fleet.MetricSelfCheck] > 0,
		}
		w.load = &fleetpb.Load{
			Running: count(m[fleet.MetricRunning]), Waiting: count(m[fleet.MetricWaiting]),
			MaxRunning: count(m[fleet.MetricMaxRunning]), KvUsage: finite(m[fleet.MetricKVUsage]),
			Utilization: finite(r.GetApplicationUtilization()), TokensPerSecond: finite(m[fleet.MetricTokensPerS]),
			RequestsPerSecond: finite(r.GetRpsFractional()), ErrorsPerSecond: finite(r.GetEps()),
		}
	})
}

// gpuOf reads what a report tells of the worker's GPUs.
func gpuOf(m map[string]float64) health.GPU {
	return health.GPU{
		Lost: m[fleet.MetricGPULost] > 0, XID: int(count(m[fleet.MetricGPUXID])), ECC: finite(m[fleet.MetricGPUECC]),
		RemapFailed: m[fleet.MetricGPURemapFailed] > 0, Throttled: finite(m[fleet.MetricGPUThrottled]),
	}
}

// count makes a number of requests of what a worker reported, whatever it is.
func count(v float64) uint32 {
	if !(v > 0) {
		return 0
	}
	return uint32(min(v, 1<<20))
}

// finite is v, or 0 where v is no number that could be shown.
func finite(v float64) float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	return v
}

// broken says that the worker certainly does not work, until it reports again.
func (c *collector) broken(why string) {
	c.state.update(c.id, c.incarnation, time.Now(), func(w *worker) { w.in.Failed = why })
}

// unsupported leaves a worker that reports no load to its registrations.
func (c *collector) unsupported() {
	c.state.update(c.id, c.incarnation, time.Now(), func(w *worker) { w.in.Failed, w.in.Heartbeat = "", true })
}
