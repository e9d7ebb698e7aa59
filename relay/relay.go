package relay

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/singleflight"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/h2"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// Relay is the handler of generation requests. It is safe for concurrent use.
type Relay struct {
	cfg     Config
	metrics *metrics
	egress  *h2.Transport
	retries retryBudget
	live    live
	mark    string // of the secret, as workers register it
	paces   byWorker[pace]
	pacers  byWorker[gate] // how many answers at once begin to go on at each
	tallies byWorker[tally]
	fleet   watchedFleet
	kept    *retained
	seal    sealer
	name    string             // of this one among those that follow each other
	old     predecessors       // those before it
	fetches singleflight.Group // of streams from other gateways
	tracer  trace.Tracer
	inlined atomic.Int64 // events that went through in the goroutine that read them

	// cut ends when running answers must end with an error.
	cut    context.Context
	cutNow context.CancelFunc
}

// Causes for which the relay itself ends a request. They travel as the cause of
// the job's context, so whatever blocks at that moment ends, and whoever looks
// later still knows why.
var (
	errFirstByte = errors.New("no token within the route's firstByte time-out")
	errIdle      = errors.New("no token within the route's streamIdle time-out")
	errRequest   = errors.New("not complete within the route's request time-out")
	errStalled   = errors.New("the client does not take what is sent")
	errDraining  = errors.New("the gateway is stopping")
)

// Windows and limits of both HTTP/2 sides. The window of a stream is what an
// answer can pile up while its client does not read: Envoy stops reading from the
// worker when it is full. Streams share connections to Envoy, whose own windows are so
// large that a slow client cannot hold the others up. Envoy closes a connection, with all
// that it carries, on which 250 requests were given up within two seconds of their begin,
// or 1,000 at any time but for 33 a second: there never are so many on one.
const (
	answersWindow = 1 << 30
	bodiesWindow  = 4 << 20 // of all request bodies on a connection: they are read at once
	dialTimeout   = 10 * time.Second
	streamWindow  = 256 << 10 // most bytes of an answer held for a slow client
	bodyWindow    = 1 << 20   // of a request body, per stream
	maxStreams    = 10_000
	egressStreams = 128 // of a connection to Envoy; with egressResets less than Envoy's 250
	egressResets  = 100
	headerTimeout = 10 * time.Second
	pingAfter     = 30 * time.Second // a silent connection to Envoy is checked
	pingTimeout   = 15 * time.Second
	lastWords     = 2 * time.Second // for the error events of a drain that took too long
)

// New returns a Relay.
func New(cfg Config) (*Relay, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	m, err := newMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("register metrics of relay: %w", err)
	}
	kept, err := newRetained(int64(cfg.Policy.Mesh.HeldStreams), cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("register metrics of retained streams: %w", err)
	}
	seal, err := newSealer(cfg.Secret)
	if err != nil {
		return nil, err
	}
	if cfg.Streams != nil {
		if kept.shared, err = newSharer(&cfg, kept, seal); err != nil {
			return nil, fmt.Errorf("share streams: %w", err)
		}
	}
	r := &Relay{cfg: cfg, seal: seal, name: rand.Text(), metrics: m, kept: kept, mark: fleet.RelayMark(cfg.Secret)}
	r.tracer = cfg.Tracing.Tracer("github.com/kvmesh/kvmesh/relay")
	r.old.limit = listTime
	r.paces.make = func(string) *pace { return &pace{} }
	r.tallies.make = newTally
	r.pacers.make = func(id string) *gate { return &gate{most: func() int64 { return r.turns(id) }} }
	r.retries.init(cfg.RetryShare, cfg.MinRetries)
	r.cut, r.cutNow = context.WithCancel(context.Background())
	r.egress = &h2.Transport{
		Dial: cfg.DialEgress, DialTimeout: dialTimeout, Window: streamWindow, Share: answersWindow, PingAfter: pingAfter, PingTimeout: pingTimeout,
		MaxStreams: egressStreams, MaxResets: egressResets,
	}
	return r, nil
}

// Run serves on lis (HTTP/1.1, and HTTP/2 without TLS) until ctx ends. Then it
// takes no new requests and lets running answers finish; those that run longer
// than Config.Drain end with an error event. It closes lis.
func (r *Relay) Run(ctx context.Context, lis net.Listener) error {
	srv := &h2.Server{Handler: r, MaxStreams: maxStreams, Window: bodyWindow, Share: bodiesWindow, Hello: headerTimeout, Log: r.cfg.Log}
	defer r.kept.share(context.WithoutCancel(ctx))()
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		r.shutdown(context.WithoutCancel(ctx), srv)
	})
	err := srv.Serve(lis)
	if stop() { // ctx is still alive: Serve failed by itself
		r.Cut()
		r.kept.close()
		_ = srv.Close() // the error to report is Serve's
		return fmt.Errorf("serve relay on %s: %w", lis.Addr(), err)
	}
	<-stopped
	r.kept.running.Wait()
	if r.kept.closeOld != nil {
		r.lastWord(context.WithoutCancel(ctx))
		r.kept.closeOld()
	}
	return nil
}

// Cut ends the answers that run, each with an error event, once Run is to end.
func (r *Relay) Cut() {
	r.kept.giveAll()
	r.kept.freeze()
	r.cutNow()
}

// shutdown gives running answers time to end, then the time to say that they
// were cut, then none.
func (r *Relay) shutdown(ctx context.Context, srv *h2.Server) {
	defer r.egress.CloseIdleConnections()
	drain, cancel := context.WithTimeout(ctx, r.cfg.Drain)
	defer cancel()
	r.kept.close()
	err := srv.Shutdown(drain)
	r.Cut()
	if err == nil {
		return
	}
	r.cfg.Log.Warn("answers still run at the end of the drain time; they end with an error", "drain", r.cfg.Drain)
	last, cancel := context.WithTimeout(ctx, lastWords)
	defer cancel()
	if srv.Shutdown(last) != nil {
		_ = srv.Close() // nothing is left to wait for
	}
}

// ServeHTTP carries one request.
func (r *Relay) ServeHTTP(w http.ResponseWriter, in *http.Request) {
	start := time.Now()
	ep, ok := openai.EndpointOf(in.URL.Path)
	switch {
	case in.URL.Path == handoverPath && in.Method == http.MethodPost:
		r.takeOver(w, in)
		return
	case in.URL.Path == lastWordPath && in.Method == http.MethodPost:
		r.hearLastWord(w, in)
		return
	case !ok:
		openai.Errorf(http.StatusNotFound, "The relay serves %s and %s only.", openai.Chat, openai.Completions).Write(w)
		return
	case in.Header.Get(names.LastEventID) != "" && (in.Method == http.MethodPost || in.Method == http.MethodGet):
		r.resume(w, in)
		return
	case in.Method != http.MethodPost:
		w.Header().Set("Allow", http.MethodPost)
		openai.MethodNotAllowed(in.Method, in.URL.Path, http.MethodPost).Write(w)
		return
	case in.Header.Get(names.Pool) == "":
		openai.Errorf(http.StatusBadRequest, "The relay serves requests of the mesh's edge only.").Write(w)
		return
	}
	b, apiErr := r.readBody(w, in)
	if apiErr != nil {
		apiErr.Write(w)
		return
	}
	req, apiErr := openai.Parse(ep, b.data)
	if apiErr != nil {
		b.release()
		apiErr.Write(w)
		return
	}
	if limits := r.keeps(in, req); limits.Retain.D() > 0 {
		r.keep(w, in, b, req, limits)
		return
	}
	j := r.newJob(w, in, req, start)
	j.body = b
	defer j.finish()
	j.run()
	if j.left() {
		panic(http.ErrAbortHandler) // returning would end the answer as if it were whole
	}
}
