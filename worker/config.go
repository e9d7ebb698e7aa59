package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/supervise"
)

// Config describes one worker process. Fields without a stated default are
// required.
type Config struct {
	ID        string       // unique in the mesh, see fleet.Registration
	Listen    string       // host:port, default 127.0.0.1:8001
	Listener  net.Listener // used in place of Listen when set; the worker closes it
	Advertise string       // ip:port at which the mesh reaches the worker, default the listener's address
	Pool      string
	Zone      string   // optional
	Model     string   // name of the model, default the engine's own
	Aliases   []string // further names that requests may use

	// EngineName is the kind of engine, as it is registered: llamacpp, sim, openai.
	EngineName string
	// Open loads the engine. It runs once, after the worker has begun to listen;
	// progress (0 to 100) shows at /ready while it runs. The worker closes the
	// engine at its end.
	Open func(ctx context.Context, progress func(percent float64)) (Engine, error)

	// RelaySecret is what the relay proves itself with (header names.Relay). Without
	// one nobody is believed to be the relay, so nothing is resumed here.
	RelaySecret string
	// TrustPriority lets everybody say how important a request is, by the header
	// names.Priority or vLLM's body field "priority". Otherwise the relay's header counts
	// alone.
	TrustPriority bool
	// SimHeader lets a request ask the simulator for faults by the header names.Sim, as
	// by the body field "sim". Others ignore it.
	SimHeader bool
	KV        KVKeeper // keeps the KV of generations outside of the engine, nil = nobody does
	CatchUp   CatchUp  // how continuations decode what was not restored

	GPU GPUProbe // reads the worker's GPUs, nil = nobody does

	// SelfCheck is how often an engine that is idle must generate a token, default
	// 30 s; negative = never, not at the start either.
	SelfCheck time.Duration

	// Redis is where the worker registers too, see redisreg; nil = not. The caller
	// closes it after Run.
	Redis *redis.Client

	ControlPlane string               // base URL, "" = do not register
	MaxBody      int64                // largest request body in bytes, default 32 MiB
	KeepAlive    time.Duration        // a stream silent for so long gets an SSE comment, default 15 s
	DrainTimeout time.Duration        // how long running requests may go on at the end, default 30 s
	BodyTimeout  time.Duration        // how long a request body may take to arrive, default 60 s
	Log          *slog.Logger         // default: nothing is logged
	Registry     *prometheus.Registry // for /metrics, default a new one
}

// setDefaults fills in what was left open; this is the one place of defaults.
func (c *Config) setDefaults() {
	if c.Listen == "" {
		c.Listen = "127.0.0.1:8001"
	}
	if c.MaxBody == 0 {
		c.MaxBody = 32 << 20
	}
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{{&c.KeepAlive, 15 * time.Second}, {&c.DrainTimeout, 30 * time.Second}, {&c.BodyTimeout, time.Minute}, {&c.SelfCheck, 30 * time.Second}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Registry == nil {
		c.Registry = prometheus.NewRegistry()
	}
}

// Validate reports the first field that is missing or malformed.
func (c Config) Validate() error {
	switch {
	case c.Open == nil:
		return errors.New("worker: Open is missing")
	case c.MaxBody < 0 || c.KeepAlive < 0 || c.DrainTimeout < 0 || c.BodyTimeout < 0:
		return errors.New("worker: a limit is negative")
	}
	if c.Advertise != "" {
		if _, err := netip.ParseAddrPort(c.Advertise); err != nil {
			return fmt.Errorf("worker: advertise %q: want ip:port", c.Advertise)
		}
	}
	if c.ControlPlane != "" {
		u, err := url.Parse(c.ControlPlane)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
			return fmt.Errorf("worker: control plane %q: want an http URL", c.ControlPlane)
		}
	}
	if err := policy.Zone(c.Zone); err != nil {
		return fmt.Errorf("worker: zone %.80q: %w", c.Zone, err)
	}
	reg := fleet.Registration{ID: c.ID, Pool: c.Pool, Incarnation: 1, Address: "127.0.0.1:1"}
	if err := reg.Validate(); err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	return nil
}

// listen opens the listener, or takes the given one, and settles the address to
// advertise.
func (c *Config) listen() error {
	if c.Listener == nil {
		l, err := net.Listen("tcp", c.Listen)
		if err != nil {
			return fmt.Errorf("worker: %w", err)
		}
		c.Listener = l
	}
	addr, err := netip.ParseAddrPort(c.Listener.Addr().String())
	switch {
	case c.Advertise == "" && (err != nil || addr.Addr().IsUnspecified()):
		if c.ControlPlane == "" && c.Redis == nil {
			return nil // nobody is told the address
		}
		return errors.Join(fmt.Errorf("worker: listening on %v, advertise is needed", c.Listener.Addr()), c.Listener.Close())
	case c.Advertise == "":
		c.Advertise = addr.String()
	case err == nil:
		if given := netip.MustParseAddrPort(c.Advertise); given.Port() == 0 {
			c.Advertise = netip.AddrPortFrom(given.Addr(), addr.Port()).String()
		}
	}
	return nil
}

// registration is what the worker says of itself, but for its state.
func (c *Config) registration(started time.Time) fleet.Registration {
	host, err := os.Hostname()
	if err != nil {
		host = "" // the field is for people
	}
	return fleet.Registration{
		ID: c.ID, Address: c.Advertise, Pool: c.Pool, Zone: c.Zone, Model: c.Model, Aliases: c.Aliases,
		Engine: c.EngineName, Incarnation: uint64(started.UnixNano()), PID: int64(os.Getpid()), Process: supervise.ProcessMark(os.Getpid()), Host: host,
		RelayMark: fleet.RelayMark(c.RelaySecret),
	}
}

// httpServer makes the server that speaks HTTP/1.1 and HTTP/2 without TLS.
func httpServer(base context.Context, h http.Handler, log *slog.Logger) *http.Server {
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler: h, Protocols: &p,
		ReadHeaderTimeout: 10 * time.Second,
		// Longer than Envoy keeps idle connections, so that it is never the worker
		// who closes one in the moment Envoy uses it.
		IdleTimeout: 75 * time.Minute,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: 10000,
			SendPingTimeout:      30 * time.Second,
			PingTimeout:          15 * time.Second,
		},
		BaseContext: func(net.Listener) context.Context { return base },
		ErrorLog:    slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}
