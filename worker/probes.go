package worker

import (
	"math"
	"net/http"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker/gpu"
)

// Words of /ready and /health.
const (
	wordOK       = "ok"
	wordFailed   = "failed"
	wordReady    = "ready"
	wordNotReady = "not_ready"
	wordLoading  = "loading"
	wordStopping = "shutting_down"
)

// Words of /drain.
const (
	wordServing  = "serving"
	wordDraining = "draining" // requests are still running
	wordDrained  = "drained"  // none is
)

// readiness is the body of /ready.
type readiness struct {
	Status  string   `json:"status"`
	Worker  string   `json:"worker"`
	Percent *float64 `json:"percent,omitempty"` // of loading
	Reason  string   `json:"reason,omitempty"`
	// Degraded says what the worker does without. It serves all the same.
	Degraded string `json:"degraded,omitempty"`
}

// vitals is the body of /health: what Redis is told, and each GPU.
type vitals struct {
	Status   string       `json:"status"`
	Worker   string       `json:"worker"`
	Reason   string       `json:"reason,omitempty"`
	Model    string       `json:"model"`
	Zone     string       `json:"zone"`
	Pool     string       `json:"pool"`
	Engine   string       `json:"engine"`
	Running  int          `json:"num_running_requests"`
	Waiting  int          `json:"num_waiting_requests"`
	KVUsage  float64      `json:"kv_cache_usage"` // 0..1, to three places
	GPUs     []gpu.Device `json:"gpus,omitempty"`
	Draining bool         `json:"draining,omitempty"`
	Degraded string       `json:"degraded,omitempty"` // as in readiness
}

// drainage is the body of /drain.
type drainage struct {
	Status  string `json:"status"`
	Worker  string `json:"worker"`
	Running int    `json:"num_running_requests"` // admitted and not yet answered
}

// GPUProbe tells how the worker's GPUs are; *gpu.Probe is one.
type GPUProbe interface {
	// Devices returns the last reading of each. It is called often and must not wait.
	Devices() []gpu.Device
}

// health answers whether the process should live: 503 only where a new start may
// help. What a Proxy says of the server behind it is for /ready: that server is a
// process of its own.
func (l *lifecycle) health() (status int, word, reason string) {
	_, remote := l.current().(Proxy)
	if err := l.broken(); err != nil && !remote {
		return http.StatusServiceUnavailable, wordFailed, err.Error()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failures >= hopeless {
		return http.StatusServiceUnavailable, wordFailed, l.sick.Error()
	}
	return http.StatusOK, wordOK, ""
}

// ready answers whether it should get requests.
func (l *lifecycle) ready() (int, readiness) {
	fault := l.fault()
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.stopping:
		return http.StatusServiceUnavailable, readiness{Status: wordStopping, Reason: fault}
	case fault != "":
		return http.StatusServiceUnavailable, readiness{Status: wordNotReady, Reason: fault}
	case l.drained:
		return http.StatusServiceUnavailable, readiness{Status: wordNotReady, Reason: "drained by request"}
	case l.engine == nil:
		return http.StatusServiceUnavailable, readiness{Status: wordLoading, Percent: new(l.percent)}
	}
	return http.StatusOK, readiness{Status: wordReady}
}

// drainage tells how far a drain is.
func (l *lifecycle) drainage() drainage {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := drainage{Status: wordServing, Running: l.inflight}
	if l.stopping || l.drained {
		d.Status = wordDrained
		if l.inflight > 0 {
			d.Status = wordDraining
		}
	}
	return d
}

// answerReady serves /ready.
func (s *Server) answerReady(w http.ResponseWriter, _ *http.Request) {
	status, body := s.life.ready()
	body.Worker, body.Degraded = s.cfg.ID, s.degraded()
	writeJSON(w, status, body)
}

// degraded says what the worker does without, "" for nothing.
func (s *Server) degraded() string {
	if d, ok := s.cfg.KV.(Degrader); ok {
		return d.Degraded()
	}
	return ""
}

// answerHealth serves /health.
func (s *Server) answerHealth(w http.ResponseWriter, _ *http.Request) {
	load := s.life.load()
	status, word, reason := s.life.health()
	writeJSON(w, status, vitals{
		Status: word, Reason: reason, Worker: s.cfg.ID, Model: s.modelName(), Zone: s.cfg.Zone, Pool: s.cfg.Pool,
		Engine: s.cfg.EngineName, Running: load.Running, Waiting: load.Waiting, KVUsage: math.Round(load.KVUsage*1000) / 1000,
		GPUs: s.devices(), Draining: s.life.drainage().Status != wordServing, Degraded: s.degraded(),
	})
}

// devices are the GPUs, none where nothing reads them.
func (s *Server) devices() []gpu.Device {
	if s.cfg.GPU == nil {
		return nil
	}
	return s.cfg.GPU.Devices()
}

// answerDrain serves /drain: POST takes no new requests from now on, DELETE takes
// them again, GET tells how far it is.
func (s *Server) answerDrain(w http.ResponseWriter, r *http.Request) {
	switch r.Method {
	case http.MethodGet, http.MethodHead:
	case http.MethodPost, http.MethodDelete:
		on := r.Method == http.MethodPost
		if !byOperator(r) {
			openai.Errorf(http.StatusForbidden, "A drain is asked for at the worker itself, not through a proxy or a web page.").Write(w)
			return
		}
		if !s.life.setDrained(on) {
			openai.Errorf(http.StatusConflict, "This worker is shutting down; that cannot be taken back.").Write(w)
			return
		}
		s.cfg.Log.Info("drain asked for at the worker", "on", on)
		s.tellHealth()
	default:
		w.Header().Set("Allow", "GET, HEAD, POST, DELETE")
		openai.MethodNotAllowed(r.Method, r.URL.Path, http.MethodPost).Write(w)
		return
	}
	body := s.life.drainage()
	body.Worker = s.cfg.ID
	writeJSON(w, http.StatusOK, body)
}

// byOperator tells a request that was made to the worker from one that a proxy
// passed on or a browser made: clients of the mesh reach every path of a worker,
// and must not take it out of service.
func byOperator(r *http.Request) bool {
	for _, h := range []string{"X-Forwarded-For", "X-Forwarded-Proto", "Forwarded", "Via", "Origin"} {
		if len(r.Header.Values(h)) > 0 {
			return false
		}
	}
	return true
}
