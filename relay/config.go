package relay

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sync/semaphore"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// Config configures a Relay. Zero durations and sizes take the default named at
// the field.
type Config struct {
	// Policy holds the routes' time-outs and retries, and the largest request body.
	// Required, read-only.
	Policy *policy.Set
	// Picker names workers and counts what they carry. It is shared with ext_proc,
	// whose choices it has already counted. Required.
	Picker *picker.Picker
	// DialEgress connects to Envoy's egress listener, which speaks HTTP/2 without
	// TLS. Required.
	DialEgress func(ctx context.Context) (net.Conn, error)
	// Held is the budget, in bytes, of bodies that the gateway holds at once,
	// shared with ext_proc. Required.
	Held *semaphore.Weighted
	// Registerer takes the metrics. Required.
	Registerer prometheus.Registerer
	// Log takes what an operator should know. Required.
	Log *slog.Logger
	// Secret proves to workers that a request is the relay's; "" leaves answers with
	// the worker that began them.
	Secret string
	// Streams is a store in which streams are kept for clients that come back to another
	// gateway; nil keeps them here only. It needs a Secret, the same at all gateways.
	Streams *redis.Client
	// Socket is the Unix socket that Run serves on. Gateways that follow each other on it
	// show and steer each other's streams, and with a Secret hand on what clients may come
	// back for; "" keeps all of it to itself.
	Socket string

	// Tracing takes a span per attempt; nil records none and passes the trace on.
	Tracing trace.TracerProvider

	// KeepAlive is the silence after which a stream gets a comment; 15 s.
	KeepAlive time.Duration
	// ClientStall is how long a client may leave one event untaken; 5 min.
	ClientStall time.Duration
	// BodyTimeout is how long a request body may take to arrive; 1 min. Envoy has
	// the whole body before it sends any of it.
	BodyTimeout time.Duration
	// Drain is how long running answers may go on once Run's context ended; 30 s.
	Drain time.Duration
	// BackOff is the pause before the first further attempt; 10 ms. It doubles
	// with each, up to 25 times that.
	BackOff time.Duration
	// MaxEvent is the largest event of a stream in bytes; 4 MiB.
	MaxEvent int
	// MaxAnswer is the largest answer without streaming in bytes; 64 MiB.
	MaxAnswer int64
	// RetryShare and MinRetries are the gateway's retry budget. Without one, a pool
	// that fails under load would get three times the load.
	//
	// RetryShare is the largest share of running requests that may be further
	// attempts; 0.2. MinRetries are allowed however few requests run; 10.
	RetryShare float64
	MinRetries int64
	// MovesAtOnce is how many answers at a time may begin to go on at a worker that does
	// not tell how many requests it runs at once; 32. One that does takes as many.
	MovesAtOnce int64
}

func (c *Config) setDefaults() {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&c.KeepAlive, 15 * time.Second},
		{&c.ClientStall, 5 * time.Minute},
		{&c.BodyTimeout, time.Minute},
		{&c.Drain, 30 * time.Second},
		{&c.BackOff, 10 * time.Millisecond},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.Tracing == nil {
		c.Tracing = noop.NewTracerProvider()
	}
	if c.MaxEvent == 0 {
		c.MaxEvent = 4 << 20
	}
	if c.MaxAnswer == 0 {
		c.MaxAnswer = 64 << 20
	}
	if c.RetryShare == 0 {
		c.RetryShare = 0.2
	}
	if c.MinRetries == 0 {
		c.MinRetries = 10
	}
	if c.MovesAtOnce == 0 {
		c.MovesAtOnce = 32
	}
}

// Validate fills in defaults and reports the first field that is missing.
func (c *Config) Validate() error {
	c.setDefaults()
	switch {
	case c.Policy == nil:
		return errors.New("relay: Policy: missing")
	case c.Policy.Mesh.MaxBody <= 0:
		return errors.New("relay: Policy.Mesh.MaxBody: want a positive number of bytes")
	case c.Picker == nil:
		return errors.New("relay: Picker: missing")
	case c.Streams != nil && c.Secret == "":
		return errors.New("relay: Secret: missing, and Streams needs it")
	case c.DialEgress == nil:
		return errors.New("relay: DialEgress: missing")
	case c.Held == nil:
		return errors.New("relay: Held: missing")
	case c.Registerer == nil:
		return errors.New("relay: Registerer: missing")
	case c.Log == nil:
		return errors.New("relay: Log: missing")
	}
	return nil
}
