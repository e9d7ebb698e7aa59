package worker

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/worker/redisreg"
)

// Server is one worker: its HTTP and gRPC service, its registration and its
// engine. Make it with New and call Run once.
type Server struct {
	cfg     Config
	life    *lifecycle
	metrics *metrics
	routes  map[string]route
	grpc    *grpc.Server
	health  *health.Server
	started time.Time
}

// errShutdown ends what is still running when the drain time is over.
var errShutdown = errors.New("the worker is shutting down")

// Run makes a worker from cfg and runs it until ctx ends.
func Run(ctx context.Context, cfg Config) error {
	s, err := New(cfg)
	if err != nil {
		return err
	}
	return s.Run(ctx)
}

// New checks the configuration and opens the listener, which Run closes.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.setDefaults()
	if err := cfg.listen(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, life: newLifecycle(), health: health.NewServer(), started: time.Now()}
	s.life.hardware = s.hardware
	s.metrics = newMetrics(cfg.Registry, s.modelName, s.life.load)
	if cfg.GPU != nil {
		cfg.Registry.MustRegister(gpuCollector{s.devices})
	}
	s.routes = s.table()
	s.grpc = newGRPC(&orcaService{life: s.life, metrics: s.metrics, started: s.started, devices: s.devices}, s.health)
	s.health.SetServingStatus("", healthpb.HealthCheckResponse_NOT_SERVING)
	return s, nil
}

// Addr is the address on which the worker listens.
func (s *Server) Addr() string { return s.cfg.Listener.Addr().String() }

// Run loads the engine and serves until ctx ends; then it drains: new requests
// are refused, running ones may finish within DrainTimeout, and the worker signs
// off. It returns nil after a drain and an error when the engine does not load or
// the listener breaks.
func (s *Server) Run(ctx context.Context) error {
	base, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(errShutdown)
	srv := httpServer(base, s.handler(), s.cfg.Log)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(s.cfg.Listener) }()
	defer srv.Close()

	var reg *registrar
	if s.cfg.ControlPlane != "" {
		reg = s.newRegistrar()
		go reg.run(base)
	}
	var announcing sync.WaitGroup
	if s.cfg.Redis != nil {
		w := s.newRedisWriter()
		announcing.Go(func() { w.Run(base) })
	}
	engine, err := s.open(ctx, served)
	if engine != nil {
		defer engine.Close()
	}
	if err == nil && engine != nil {
		checks, end := context.WithCancel(ctx)
		var checking sync.WaitGroup
		checking.Go(func() { s.keepChecking(checks, engine) })
		defer func() { // before the engine is closed
			end()
			checking.Wait()
		}()
		select {
		case <-ctx.Done():
		case err = <-served:
			err = fmt.Errorf("serve: %w", err)
		}
	}
	s.drain()
	stop(errShutdown)
	if reg != nil {
		reg.signOff()
	}
	announcing.Wait() // it signs off too
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if e := srv.Shutdown(last); e != nil {
		s.cfg.Log.Warn("connections were still open at the end", "err", e)
	}
	s.grpc.Stop()
	return err
}

// open loads the engine. It returns no engine and no error when ctx ends first.
func (s *Server) open(ctx context.Context, served chan error) (Engine, error) {
	type opened struct {
		engine Engine
		err    error
	}
	loading, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan opened, 1)
	go func() {
		e, err := s.cfg.Open(loading, s.life.progress)
		done <- opened{e, err}
	}()
	select {
	case o := <-done:
		if o.err != nil && ctx.Err() != nil {
			return nil, nil
		}
		if o.err != nil {
			return nil, fmt.Errorf("open engine %s: %w", s.cfg.EngineName, o.err)
		}
		return o.engine, nil
	case err := <-served:
		cancel()
		o := <-done
		return o.engine, fmt.Errorf("serve: %w", err)
	}
}

// tellHealth sets what the gRPC health service answers.
func (s *Server) tellHealth() {
	word := healthpb.HealthCheckResponse_NOT_SERVING
	if status, _ := s.life.ready(); status == http.StatusOK {
		word = healthpb.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus("", word)
}

// hardware says what is wrong with the worker's GPUs, "" for nothing.
func (s *Server) hardware() string { return worstGPU(s.devices()).Fault() }

// drain refuses new requests and waits for the running ones.
func (s *Server) drain() {
	s.health.Shutdown()
	idle := s.life.stop()
	timer := time.NewTimer(s.cfg.DrainTimeout)
	defer timer.Stop()
	select {
	case <-idle:
	case <-timer.C:
		s.cfg.Log.Warn("requests were cut at the end of the drain time", "after", s.cfg.DrainTimeout)
	}
}

// modelName is the model's own name, "" until it is known.
func (s *Server) modelName() string {
	if s.cfg.Model != "" {
		return s.cfg.Model
	}
	if e := s.life.current(); e != nil {
		return e.Model().Name
	}
	return ""
}

// newRegistrar binds the registrar to the worker's state.
func (s *Server) newRegistrar() *registrar {
	return &registrar{
		url:     s.cfg.ControlPlane,
		log:     s.cfg.Log,
		changed: s.life.changed,
		ended:   make(chan struct{}),
		client:  &http.Client{Timeout: 2 * time.Second},
		current: s.registration(),
	}
}

// registration returns what tells the worker's state, as it is when it is called.
func (s *Server) registration() func() fleet.Registration {
	fixed := s.cfg.registration(s.started)
	return func() fleet.Registration {
		r := fixed
		r.State, r.Reason = s.life.state()
		r.Model = s.modelName()
		if e := s.life.current(); e != nil {
			r.Fingerprint = e.Model().Fingerprint
		}
		return r
	}
}

// newRedisWriter makes what registers in Redis.
func (s *Server) newRedisWriter() *redisreg.Writer {
	registration := s.registration()
	return redisreg.New(redisreg.Config{
		Client: s.cfg.Redis, Changed: s.life.watch(), Log: s.cfg.Log, Registry: s.cfg.Registry,
		Current: func() fleet.RedisHealth {
			h := fleet.RedisHealthOf(registration(), time.Now())
			load := s.life.load()
			h.Running, h.Waiting, h.KVUsage = load.Running, load.Waiting, load.KVUsage
			h.AvgLatencyMS = 1000 * s.metrics.pace.latency.value()
			for _, d := range s.devices() {
				h.GPUMemoryUsedMB += float64(d.MemoryUsedMB)
				h.GPUMemoryTotalMB += float64(d.MemoryTotalMB)
			}
			return h
		},
		Drain: func(on bool) {
			s.life.setDrained(on)
			s.tellHealth()
		},
	})
}
