package xds

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/xds/registry"
)

// maxRegistration bounds the body of a registration.
const maxRegistration = 64 << 10

// serveAPI serves the HTTP API until ctx ends.
func (cp *ControlPlane) serveAPI(ctx context.Context) error {
	srv := &http.Server{
		// Every limit is set: a stuck client must not pin a connection for good.
		Handler: cp.api(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
		WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
	}
	// The context is over by then, so the grace needs one of its own.
	stop := context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if srv.Shutdown(grace) != nil {
			_ = srv.Close() // whoever is left had a second
		}
	})
	defer stop()
	return srv.Serve(cp.config.ListenAPI)
}

// api is the handler of the HTTP API. A web page must not reach it through the
// operator's browser: cross-origin writes are refused, and so are host names that
// an attacker could point at us.
func (cp *ControlPlane) api() http.Handler {
	mux := http.NewServeMux()
	// For workers.
	mux.HandleFunc("PUT /v1/workers/{id}", cp.register)
	mux.HandleFunc("DELETE /v1/workers/{id}", cp.deregister)
	// For operators and the command line.
	mux.HandleFunc("GET /v1/workers", cp.listWorkers)
	mux.HandleFunc("GET /v1/clusters", cp.listClusters)
	mux.HandleFunc("PUT /v1/pools/{pool}/rollout", cp.leasePool)
	mux.HandleFunc("DELETE /v1/pools/{pool}/rollout", cp.releasePool)
	mux.HandleFunc("GET /v1/mesh", func(w http.ResponseWriter, _ *http.Request) {
		view := cp.config.Mesh
		view.PID = os.Getpid()
		writeJSON(w, view)
	})
	mux.HandleFunc("POST /v1/workers/{id}/drain", func(w http.ResponseWriter, r *http.Request) {
		cp.drain(w, r, registry.Drain{On: true, KeepStreams: r.URL.Query().Get(fleet.ParamStreams) == fleet.StreamsKeep})
	})
	mux.HandleFunc("DELETE /v1/workers/{id}/drain", func(w http.ResponseWriter, r *http.Request) { cp.drain(w, r, registry.Drain{}) })
	// For whoever watches the control plane.
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	mux.Handle("GET /metrics", promhttp.HandlerFor(cp.metrics.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		openai.Errorf(http.StatusNotFound, "There is no %s %s.", r.Method, r.URL.Path).Write(w)
	})
	// Browsers say where a request comes from; workers and curl say nothing and pass.
	guard := http.NewCrossOriginProtection()
	guard.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		openai.Errorf(http.StatusForbidden, "Cross-origin requests are refused.").Write(w)
	}))
	return localHost(guard.Handler(mux))
}

// localHost refuses requests under any other name than an IP address or localhost:
// a web page whose own name was pointed at this address would pass for same-origin.
func localHost(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil { // no port: the default one
			host = r.Host
		}
		if _, err := netip.ParseAddr(host); err != nil && host != "localhost" {
			openai.Errorf(http.StatusForbidden, "Use the API by its IP address or as localhost.").Write(w)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// register takes PUT /v1/workers/{id}. The answer says for how long it holds.
func (cp *ControlPlane) register(w http.ResponseWriter, r *http.Request) {
	var reg fleet.Registration
	if err := decodeRegistration(http.MaxBytesReader(w, r.Body, maxRegistration), &reg); err != nil {
		err.Write(w)
		return
	}
	// The path is what an operator sees in logs; the body is what is stored.
	if id := r.PathValue("id"); reg.ID != id {
		openai.Invalid("id", "The path names %q and the body %q.", id, reg.ID).Write(w)
		return
	}
	// A worker of a pool that no policy knows would never be sent anything.
	if !cp.state.hasPool(reg.Pool) {
		openai.Invalid("pool", "There is no WorkerPool %q.", reg.Pool).Write(w)
		return
	}
	if err := reg.Validate(); err != nil {
		openai.Errorf(http.StatusBadRequest, "%v", err).Write(w)
		return
	}
	reg.Via = "" // it came from the worker itself
	if err := cp.Register(reg); err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, fleet.Lease{TTLSeconds: fleet.TTL.Seconds()})
}

// decodeRegistration reads one registration and nothing else. A field that we do not
// know is refused, because it is more often a typing error than a later version of
// the worker: a control plane is updated before its workers.
func decodeRegistration(body io.Reader, reg *fleet.Registration) *openai.Error {
	raw, err := io.ReadAll(body)
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return openai.Errorf(http.StatusRequestEntityTooLarge, "The registration is too large: at most %d bytes are accepted.", maxRegistration)
	}
	if err != nil {
		return openai.Errorf(http.StatusBadRequest, "The registration could not be read to its end.")
	}
	return openai.DecodeStrict(raw, "", reg)
}

// Register takes a worker's registration or its renewal, as the HTTP API does.
// The error is registry.ErrStale when a later start of the worker is known, and
// registry.ErrTaken when another one is alive at its address.
func (cp *ControlPlane) Register(reg fleet.Registration) error {
	now := time.Now()
	if a, err := netip.ParseAddrPort(reg.Address); err == nil {
		// The gateway names endpoints by this text; Envoy knows only one form of it.
		reg.Address = netip.AddrPortFrom(a.Addr().Unmap(), a.Port()).String()
	}
	changed, err := cp.registry.Register(reg, now)
	if err != nil {
		return err
	}
	if !changed {
		// The usual case, every few seconds per worker: no lock of cp, no push.
		cp.state.heartbeat(reg.ID, reg.Incarnation, now)
		return nil
	}
	cp.log.Info("worker registered", "worker", reg.ID, "pool", reg.Pool, "address", reg.Address, "state", cmp.Or(reg.State, fleet.StateReady))
	cp.sync()
	return nil
}

// deregister takes DELETE /v1/workers/{id}: the worker has finished. Whoever names
// an incarnation removes that one or an earlier, never its successor.
func (cp *ControlPlane) deregister(w http.ResponseWriter, r *http.Request) {
	var incarnation uint64
	if s := r.URL.Query().Get("incarnation"); s != "" {
		var err error
		if incarnation, err = strconv.ParseUint(s, 10, 64); err != nil {
			openai.Invalid("incarnation", "%q is no number.", s).Write(w)
			return
		}
	}
	id := r.PathValue("id")
	if err := cp.registry.Deregister(id, incarnation, time.Now()); err != nil {
		writeError(w, err)
		return
	}
	cp.log.Info("worker left", "worker", id)
	cp.sync()
	w.WriteHeader(http.StatusNoContent)
}

// drain takes POST and DELETE /v1/workers/{id}/drain. It answers when the drain is
// on disk; Envoys and gateways hear of it in the same moment.
func (cp *ControlPlane) drain(w http.ResponseWriter, r *http.Request, want registry.Drain) {
	id := r.PathValue("id")
	if s := r.URL.Query().Get(fleet.ParamStreams); s != "" && s != fleet.StreamsKeep {
		openai.Invalid(fleet.ParamStreams, "Unknown value %q: the only one is %q.", s, fleet.StreamsKeep).Write(w)
		return
	}
	if err := cp.registry.Drain(id, want, time.Now()); err != nil {
		writeError(w, err)
		return
	}
	cp.log.Info("drain", "worker", id, "on", want.On, "keep_streams", want.KeepStreams)
	cp.sync()
	w.WriteHeader(http.StatusNoContent)
}

// listWorkers answers GET /v1/workers.
func (cp *ControlPlane) listWorkers(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, fleet.WorkerList{Workers: cp.state.views()})
}

// listClusters answers GET /v1/clusters: what Envoy should have, to hold against
// what its admin interface says it has.
func (cp *ControlPlane) listClusters(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, fleet.ClusterList{Clusters: cp.state.clusters()})
}

// writeError answers with the status that belongs to a registry's error.
func writeError(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError // the disk, for instance
	switch {
	case errors.Is(err, registry.ErrStale), errors.Is(err, registry.ErrTaken):
		status = http.StatusConflict
	case errors.Is(err, registry.ErrUnknown):
		status = http.StatusNotFound
	}
	openai.Errorf(status, "%v", err).Write(w)
}

// writeJSON sends a 200 with a JSON body.
func writeJSON(w http.ResponseWriter, v any) {
	raw, err := json.Marshal(v)
	if err != nil { // for instance a NaN
		openai.Errorf(http.StatusInternalServerError, "answer: %v", err).Write(w)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(raw, '\n')) // the client may be gone
}

// views lists all workers, sorted by id.
func (s *state) views() []fleet.WorkerView {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]fleet.WorkerView, 0, len(s.workers)) // never null in JSON
	for _, w := range s.workers {
		m := w.member
		said := "" // a server that is probed says nothing
		if !w.origin.static {
			said = cmp.Or(m.State, fleet.StateReady)
		}
		out = append(out, fleet.WorkerView{
			ID: w.id, Address: m.Address, PID: m.PID, Pool: m.Pool, Zone: m.Zone, Model: m.Model, Aliases: m.Aliases,
			Engine: m.Engine, Status: w.shown.Status.String(), Weight: w.shown.Weight,
			Running: w.load.GetRunning(), Waiting: w.load.GetWaiting(), KVUsage: w.load.GetKvUsage(),
			Reason: w.shown.Reason, Incarnation: m.Incarnation, Fingerprint: m.Fingerprint, Drained: m.Drained,
			State: said, Host: m.Host, Process: m.Process,
			ErrorRate: failing(w.load.GetErrorsPerSecond(), w.load.GetRequestsPerSecond()),
		})
	}
	slices.SortFunc(out, func(a, b fleet.WorkerView) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// failing is the share of requests that fail, of those that end well or not per
// second.
func failing(bad, good float64) float64 {
	if bad <= 0 {
		return 0
	}
	return bad / (bad + max(good, 0))
}

// clusters lists the pools' clusters with the endpoints Envoy should have.
func (s *state) clusters() []fleet.ClusterView {
	out := []fleet.ClusterView{}
	for _, p := range s.all() {
		c := fleet.ClusterView{Name: names.PoolCluster(p.name), Endpoints: []fleet.EndpointView{}}
		s.mu.Lock()
		for _, w := range p.workers {
			if w.member.Address == "" { // a server whose name did not resolve yet
				continue
			}
			c.Endpoints = append(c.Endpoints, fleet.EndpointView{
				ID: w.id, Address: w.member.Address, Zone: w.member.Zone,
				Status: w.shown.Status.String(), Weight: w.shown.Weight,
			})
		}
		c.Minimum = p.health.Minimum(len(p.workers))
		s.mu.Unlock()
		slices.SortFunc(c.Endpoints, func(a, b fleet.EndpointView) int { return cmp.Compare(a.ID, b.ID) })
		out = append(out, c)
	}
	return out
}

// heartbeat notes the renewal of an unchanged registration.
func (s *state) heartbeat(id string, incarnation uint64, now time.Time) {
	s.update(id, incarnation, now, func(w *worker) { w.in.Heard = now })
}
