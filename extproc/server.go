package extproc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"runtime/debug"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/kvmesh/kvmesh/internal/policy"
)

// Server is Envoy's external processor. It is safe for concurrent use.
type Server struct {
	extprocv3.UnimplementedExternalProcessorServer
	cfg     Config
	metrics *metrics
	models  *modelNames // nil when the workers are asked
	// arriving is the budget, in bytes, of large bodies that are on their way. Envoy
	// holds what came of them.
	arriving *semaphore.Weighted
}

// New returns a Server.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	m, err := newMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("register metrics of extproc: %w", err)
	}
	return &Server{
		cfg: cfg, metrics: m, models: policyModels(cfg.Policy),
		arriving: semaphore.NewWeighted(policy.Arriving * int64(cfg.Policy.Mesh.HeldBodies)),
	}, nil
}

// Limits of the gRPC server. A body comes in one message of what Envoy holds at most; the
// windows let a usual one through without waiting for updates.
const (
	messageSlack = 1 << 20 // beside the body: headers and framing
	streamWindow = 1 << 20
	connWindow   = 16 << 20
	readBuffer   = 128 << 10
	maxStreams   = 10_000
	stopWithin   = 2 * time.Second // a stream is one decision, so all end soon
	// replacedWithin is the same where nobody waits for the end.
	replacedWithin = time.Minute
)

// ErrReplaced is the cause of the end of Run's context when another gateway has taken
// the sockets over.
var ErrReplaced = errors.New("another gateway has taken over")

// Run serves gRPC on lis, with the standard health service, until ctx ends, then
// lets running exchanges finish. It closes lis.
func (s *Server) Run(ctx context.Context, lis net.Listener) error {
	gs := grpc.NewServer(
		grpc.MaxRecvMsgSize(policy.BufferTimes*int(s.cfg.Policy.Mesh.MaxBody)+messageSlack),
		grpc.MaxSendMsgSize(int(s.cfg.Policy.Mesh.MaxBody)+messageSlack),
		grpc.InitialWindowSize(streamWindow),
		grpc.InitialConnWindowSize(connWindow),
		grpc.ReadBufferSize(readBuffer),
		grpc.MaxConcurrentStreams(maxStreams),
		// Envoy pings to notice a gateway that hangs. By default gRPC takes frequent
		// pings for abuse and closes the connection, with every decision on it.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
		// Streams are short: without workers each would grow a new stack.
		grpc.NumStreamWorkers(uint32(4*runtime.GOMAXPROCS(0))),
	)
	extprocv3.RegisterExternalProcessorServer(gs, s)
	alive := health.NewServer()
	healthv1.RegisterHealthServer(gs, alive)
	stop := context.AfterFunc(ctx, func() {
		within := stopWithin
		if errors.Is(context.Cause(ctx), ErrReplaced) {
			within = replacedWithin
		} else { // where another gateway serves already, Envoy must not take us both for ill
			alive.Shutdown()
		}
		hard := time.AfterFunc(within, gs.Stop)
		defer hard.Stop()
		gs.GracefulStop()
	})
	defer stop()
	if err := gs.Serve(lis); err != nil && ctx.Err() == nil {
		return fmt.Errorf("serve ext_proc on %s: %w", lis.Addr(), err)
	}
	return nil
}

// Process handles one request of Envoy's: it receives, steps and sends, and
// whatever way it ends, Finish gives back what the exchange held.
func (s *Server) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	e := s.NewExchange()
	defer e.Finish()
	for {
		req, err := stream.Recv()
		if err != nil {
			return ended(err)
		}
		resp, err := s.step(e, req)
		if err != nil {
			return err
		}
		if resp == nil {
			continue
		}
		if err := stream.Send(resp); err != nil {
			return ended(err)
		}
		if e.Done() {
			return nil
		}
	}
}

// ended turns the usual ends of a stream into none: Envoy closes it when it needs
// us no more, and cancels it when its client left.
func ended(err error) error {
	if errors.Is(err, io.EOF) || status.Code(err) == codes.Canceled {
		return nil
	}
	return err
}

// step is Step with a clock and a safety net: a request that makes us panic is
// still one that Envoy can serve.
func (s *Server) step(e *Exchange, req *extprocv3.ProcessingRequest) (resp *extprocv3.ProcessingResponse, err error) {
	start := time.Now()
	defer func() {
		s.metrics.steps.Observe(time.Since(start).Seconds())
		v := recover()
		if v == nil {
			return
		}
		s.metrics.panics.Inc()
		s.metrics.requests.WithLabelValues(outcomeUndecided).Inc()
		s.cfg.Log.Error("deciding a request panicked; it passes unchanged", "panic", v, "stack", string(debug.Stack()))
		e.phase = settled
		resp, err = pass(req)
	}()
	return e.Step(start, req)
}
