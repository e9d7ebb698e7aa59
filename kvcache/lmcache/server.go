//go:build unix

package lmcache

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
)

// Server serves engines of this host. It is safe for concurrent use.
type Server struct {
	lmcachepb.UnimplementedControllerServiceServer
	lmcachepb.UnimplementedEngineDrivenServiceServer
	lmcachepb.UnimplementedLookupServiceServer
	lmcachepb.UnimplementedObservabilityServiceServer
	lmcachepb.UnimplementedDebugServiceServer

	cfg   Config
	node  kvnode.Writer
	count counters

	mu        sync.Mutex // guards everything below; never held while the node is asked
	pool      *pool      // nil before the node was reached
	instances map[int64]*instance
	strangers map[int64]*stranger
	looking   int // tokens of look-ups that still look
	jobs      map[jobKey]*job
	byRequest map[string][]*job
	writes    map[opKey]*write
	reads     map[opKey]*read
	late      []*write // chunks that wait for the node to come back
	clears    uint64   // how often everything was cleared
	drops     dropping

	clearing sync.RWMutex   // held while a chunk is published, or the number of clears changes
	saving   sync.Mutex     // guards the file of registrations
	work     sync.WaitGroup // goroutines
	ctx      context.Context
	stop     context.CancelFunc
}

// New makes a server, which may start before its node. Close ends it.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	node, err := kvnode.OpenWriter(cfg.Dir)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, node: node, instances: map[int64]*instance{}, strangers: map[int64]*stranger{}, jobs: map[jobKey]*job{},
		byRequest: map[string][]*job{}, writes: map[opKey]*write{}, reads: map[opKey]*read{},
		drops: dropping{list: map[kvcache.Fingerprint]bool{}},
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	ctx, cancel := context.WithTimeout(s.ctx, cfg.NodeTime)
	defer cancel()
	if err := s.findPool(ctx); err != nil {
		if _, wrong := errors.AsType[*PoolError](err); wrong {
			s.stop()
			node.Close()
			return nil, err
		}
		cfg.Log.Info("the KV node is not there yet", "dir", cfg.Dir, "err", err)
	}
	s.load(time.Now())
	return s, nil
}

// Close ends the server. Serve must have ended. What engines were told to read or write, or
// that it is there, they may be reading and writing still: that is not released, so that the
// node keeps it after the end of this process as long as after its death.
func (s *Server) Close() error {
	s.stop()
	s.work.Wait()
	s.mu.Lock()
	for _, j := range s.jobs {
		if !j.answered {
			s.endLocked(j)
		}
	}
	for _, w := range s.late {
		w.cancel()
	}
	s.late = nil
	s.unlinkLocked()
	s.mu.Unlock()
	return s.node.Close()
}

// mostCalls is how many calls of one connection are answered at once; the others wait.
const mostCalls = 1024

// stopTime is how long running calls have when a server is stopped.
const stopTime = 2 * time.Second

// Serve serves on all listeners until ctx ends, and closes them. The error is nil when ctx
// has ended.
func (s *Server) Serve(ctx context.Context, listeners ...net.Listener) error {
	g := grpc.NewServer(
		// Where an engine cannot open the pool it sends its state here, which is refused; but
		// a message that is too large for the transport would be an error, and end it.
		grpc.MaxRecvMsgSize(math.MaxInt32),
		grpc.MaxConcurrentStreams(mostCalls),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
		grpc.StatsHandler(connections{s}),
		grpc.UnknownServiceHandler(unknown),
	)
	lmcachepb.RegisterControllerServiceServer(g, s)
	lmcachepb.RegisterEngineDrivenServiceServer(g, s)
	lmcachepb.RegisterLookupServiceServer(g, s)
	lmcachepb.RegisterObservabilityServiceServer(g, s)
	lmcachepb.RegisterDebugServiceServer(g, s)
	ended := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() { ended <- g.Serve(l) }()
	}
	s.work.Go(func() { s.keepHouse(ctx) })
	var err error
	select {
	case <-ctx.Done():
		hard := time.AfterFunc(stopTime, g.Stop)
		g.GracefulStop()
		hard.Stop()
	case err = <-ended:
		g.Stop()
		err = fmt.Errorf("serve: %w", err)
	}
	return err
}

// unknown answers calls that belong to other modes of LMCache.
func unknown(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	return status.Errorf(codes.Unimplemented, "%s is not served here: set lmcache.mp.mp_transfer_mode to engine_driven", method)
}

// keepHouse does what time brings, until ctx or the server ends.
func (s *Server) keepHouse(ctx context.Context) {
	const often = 100 * time.Millisecond
	tick := time.NewTicker(often)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-s.ctx.Done():
			return
		case now := <-tick.C:
			s.publishLate(now)
			if n%10 == 0 {
				s.sweep(now)
				s.watchPool()
				s.drop(now)
			}
		}
	}
}

// nodeContext bounds what an engine's call asks of the node. The call may be given up
// meanwhile; what was begun is ended all the same.
func (s *Server) nodeContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(s.ctx, s.cfg.NodeTime)
}

// GetChunkSize implements the service.
func (s *Server) GetChunkSize(context.Context, *lmcachepb.GetChunkSizeRequest) (*lmcachepb.GetChunkSizeResponse, error) {
	return &lmcachepb.GetChunkSizeResponse{ChunkSize: int64(s.cfg.Chunk)}, nil
}

// GetExperimental implements the service: there is nothing experimental.
func (s *Server) GetExperimental(context.Context, *lmcachepb.GetExperimentalRequest) (*lmcachepb.GetExperimentalResponse, error) {
	return &lmcachepb.GetExperimentalResponse{}, nil
}

// Noop implements the service.
func (s *Server) Noop(context.Context, *lmcachepb.NoopRequest) (*lmcachepb.NoopResponse, error) {
	return &lmcachepb.NoopResponse{Message: "kvmesh"}, nil
}

// ReportBlockAllocation implements the service: it is of no use here.
func (s *Server) ReportBlockAllocation(context.Context, *lmcachepb.ReportBlockAllocationRequest) (*lmcachepb.ReportBlockAllocationResponse, error) {
	return &lmcachepb.ReportBlockAllocationResponse{}, nil
}

// Clear implements the service. Engines call it when what they have computed is of no use
// any more, which may be because their weights are not those of the files any more: so
// from here on no engine that is registered now uses what was stored before, or what one
// stores that registers later.
func (s *Server) Clear(context.Context, *lmcachepb.ClearRequest) (*lmcachepb.ClearResponse, error) {
	s.clearing.Lock()
	s.mu.Lock()
	s.clears++
	epoch := newEpoch()
	for _, i := range s.instances {
		for rank := range i.World {
			if i.Weights != "" {
				s.drops.list[kvcache.FingerprintOf(i.text(s.cfg, rank))] = true
			}
		}
		i.Epoch = epoch
	}
	for _, j := range s.jobs {
		s.endLocked(j)
	}
	s.mu.Unlock()
	s.clearing.Unlock()
	s.cfg.Log.Info("an engine has cleared everything")
	s.save()
	wait, cancel := s.nodeContext()
	defer cancel()
	select {
	case <-s.drop(time.Time{}):
	case <-wait.Done(): // it is dropped all the same, and not used meanwhile
	}
	return &lmcachepb.ClearResponse{}, nil
}
