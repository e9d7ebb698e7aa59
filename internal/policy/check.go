package policy

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// pool checks one pool while its file and line are known.
func (p *parser) pool(w WorkerPool) {
	engines := []string{EngineLlamaCpp, EngineSim, EngineOpenAI}
	if !slices.Contains(engines, w.Engine) {
		p.fail(w.At, "WorkerPool %s: engine %q%s", w.Name, w.Engine, suggest(w.Engine, engines))
	}
	if w.Engine != EngineOpenAI && w.Model == "" {
		p.fail(w.At, "WorkerPool %s: model: missing", w.Name)
	}
	if len(w.Static) > 0 && w.Engine != EngineOpenAI {
		p.fail(w.At, "WorkerPool %s: static servers need engine %s", w.Name, EngineOpenAI)
	}
	if len(w.Local) > 0 && w.Engine == EngineOpenAI {
		p.fail(w.At, "WorkerPool %s: engine %s has no local workers; list servers under static", w.Name, EngineOpenAI)
	}
	for i, s := range w.Static {
		u, err := url.Parse(s.URL)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
			p.fail(w.At, "WorkerPool %s: static[%d].url %q: want http://HOST:PORT", w.Name, i, s.URL)
		} else if u.Path != "" && u.Path != "/" && u.Path != "/v1" && u.Path != "/v1/" {
			p.fail(w.At, "WorkerPool %s: static[%d].url %q: a path is not supported", w.Name, i, s.URL)
		}
	}
	for i, l := range w.Local {
		if l.ID == "" || !validName(l.ID) {
			p.fail(w.At, "WorkerPool %s: local[%d].id %q: want lower-case letters, digits, '-' and '.'", w.Name, i, l.ID)
		}
		if l.Port < 0 || l.Port > 65535 {
			p.fail(w.At, "WorkerPool %s: local[%d].port %d: want 0 to 65535", w.Name, i, l.Port)
		}
	}
	p.ranges(w)
}

func (p *parser) ranges(w WorkerPool) {
	for _, f := range []struct {
		name string
		v    *float64
		high float64
	}{
		{"hysteresis", w.Health.Hysteresis, 1},
		{"minShare", w.Health.MinShare, 1},
		{"errorUtilizationPenalty", w.Health.ErrorUtilizationPenalty, 100},
		{"throttleUtilizationPenalty", w.Health.ThrottleUtilizationPenalty, 100},
	} {
		if f.v != nil && (*f.v < 0 || *f.v > f.high) {
			p.fail(w.At, "WorkerPool %s: health.%s %g: want 0 to %g", w.Name, f.name, *f.v, f.high)
		}
	}
	for _, f := range []struct {
		name string
		v    int
	}{{"contextLength", w.Worker.ContextLength}, {"maxNumSeqs", w.Worker.MaxNumSeqs}, {"maxQueue", w.Worker.MaxQueue}, {"threads", w.Worker.Threads}} {
		if f.v < 0 {
			p.fail(w.At, "WorkerPool %s: worker.%s %d: want a positive number", w.Name, f.name, f.v)
		}
	}
}

// finish checks what spans documents and fills in defaults.
func (p *parser) finish() {
	s := p.set
	if len(s.Pools) == 0 {
		p.fail(p.line(1), "no %s: the mesh has nothing to send requests to", KindWorkerPool)
		return
	}
	p.mesh(&s.Mesh)
	ids := map[string]string{}
	for i := range s.Pools {
		w := &s.Pools[i]
		w.defaults()
		for _, id := range w.ids() {
			if other, ok := ids[id]; ok {
				p.fail(w.At, "WorkerPool %s: worker id %q is already used in %s", w.Name, id, other)
			}
			ids[id] = w.Name
		}
	}
	if len(s.Routes) == 0 {
		s.Routes = defaultRoutes(s.Pools)
	}
	models := map[string]string{}
	for i := range s.Routes {
		p.route(&s.Routes[i], models)
	}
}

func (p *parser) mesh(m *Mesh) {
	d := func(s *string, def string) { *s = cmp.Or(*s, def) }
	d(&m.Listen.OpenAI, "127.0.0.1:0")
	d(&m.Listen.Admin, "127.0.0.1:0")
	d(&m.Listen.API, "127.0.0.1:0")
	d(&m.Listen.Metrics, "127.0.0.1:0")
	d(&m.DefaultPool, p.set.Pools[0].Name)
	d(&m.Envoy.LogLevel, "warning")
	m.Envoy.Concurrency = cmp.Or(m.Envoy.Concurrency, 2)
	m.MaxBody = cmp.Or(m.MaxBody, 32<<20)
	m.HeldBodies = cmp.Or(m.HeldBodies, max(512<<20, 2*m.MaxBody))
	m.HeldStreams = cmp.Or(m.HeldStreams, 256<<20)
	m.ShareWait = cmp.Or(m.ShareWait, Duration(25*time.Millisecond))
	m.KV.Limit = cmp.Or(m.KV.Limit, 4<<30)
	m.BodyTimeout = cmp.Or(m.BodyTimeout, Duration(120*time.Second))
	m.Envoy.MaxHeap = cmp.Or(m.Envoy.MaxHeap, 1<<30+Arriving*m.HeldBodies)
	m.ExtProc.MessageTimeout = cmp.Or(m.ExtProc.MessageTimeout, Duration(time.Second))
	for _, f := range []struct {
		name string
		addr *string
	}{
		{"openai", &m.Listen.OpenAI}, {"admin", &m.Listen.Admin}, {"api", &m.Listen.API}, {"metrics", &m.Listen.Metrics},
	} {
		addr, err := ListenAddress(*f.addr)
		if err != nil {
			p.fail(m.At, "listen.%s %v", f.name, err)
			continue
		}
		*f.addr = addr
	}
	p.registry(&m.Registry, m.At)
	if m.ShareStreams && m.Registry.Redis == "" {
		p.fail(m.At, "shareStreams needs registry.redis")
	}
	if p.set.Pool(m.DefaultPool) == nil {
		p.fail(m.At, "defaultPool %q: no such WorkerPool%s", m.DefaultPool, suggest(m.DefaultPool, p.set.poolNames()))
	}
}

// registry checks where workers are found. Messages never repeat the URL: it may
// hold a password.
func (p *parser) registry(r *Registry, at Place) {
	if r.Redis != "" {
		u, err := url.Parse(r.Redis)
		known := err == nil && slices.Contains([]string{"redis", "rediss", "unix"}, u.Scheme)
		if !known || u.Host == "" && u.Scheme != "unix" || u.Path == "" && u.Scheme == "unix" {
			p.fail(at, "registry.redis: want redis://HOST:PORT, rediss://HOST:PORT for TLS, or unix:///PATH")
		}
	}
	if r.AddressTemplate != "" && r.Redis == "" {
		p.fail(at, "registry.addressTemplate needs registry.redis")
	}
	r.AddressTemplate = cmp.Or(r.AddressTemplate, "worker-{worker_id}:8000")
	host, port, err := net.SplitHostPort(r.AddressTemplate)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || !strings.Contains(host, "{worker_id}") {
		p.fail(at, "registry.addressTemplate %q: want host:port with {worker_id} in the host, for example worker-{worker_id}:8000", r.AddressTemplate)
	}
}

// ListenAddress checks an address to listen on: ip:port, with localhost for the
// loopback address and 0 for a free port. It returns it with the IP address.
func ListenAddress(addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if _, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil {
		return "", fmt.Errorf("%q: want ip:port, for example 127.0.0.1:8080", addr)
	}
	if host == "localhost" {
		host = "127.0.0.1"
	}
	if _, err := netip.ParseAddr(host); err != nil {
		return "", fmt.Errorf("%q: %q is no IP address", addr, host)
	}
	return net.JoinHostPort(host, port), nil
}

func (w *WorkerPool) defaults() {
	seqs := 4
	if w.Engine == EngineSim {
		seqs = 64
	}
	w.Worker.ContextLength = cmp.Or(w.Worker.ContextLength, 8192)
	w.Worker.MaxNumSeqs = cmp.Or(w.Worker.MaxNumSeqs, seqs)
	w.Worker.MaxQueue = cmp.Or(w.Worker.MaxQueue, 256)
	w.Worker.Threads = cmp.Or(w.Worker.Threads, 1)
	w.Sim.TTFT = cmp.Or(w.Sim.TTFT, Duration(20*time.Millisecond))
	w.Sim.ITL = cmp.Or(w.Sim.ITL, Duration(20*time.Millisecond))
	w.Connect = cmp.Or(w.Connect, Duration(time.Second))
	w.Drain = cmp.Or(w.Drain, Duration(30*time.Second))
	h := &w.Health
	h.BlackoutPeriod = cmp.Or(h.BlackoutPeriod, Duration(2*time.Second))
	h.WeightExpirationPeriod = cmp.Or(h.WeightExpirationPeriod, Duration(10*time.Second))
	h.SilenceTimeout = cmp.Or(h.SilenceTimeout, Duration(3*time.Second))
	h.CheckInterval = cmp.Or(h.CheckInterval, Duration(5*time.Second))
	path := "/ready"
	if w.Engine == EngineOpenAI {
		path = "/health"
	}
	h.Check = cmp.Or(h.Check, path)
	h.ErrorUtilizationPenalty = orFloat(h.ErrorUtilizationPenalty, 1)
	h.ThrottleUtilizationPenalty = orFloat(h.ThrottleUtilizationPenalty, 1)
	h.Hysteresis = orFloat(h.Hysteresis, 0.1)
	h.MinShare = orFloat(h.MinShare, 0.3)
	for i := range w.Static {
		if u, err := url.Parse(w.Static[i].URL); err == nil && w.Static[i].ID == "" {
			w.Static[i].ID = u.Host
		}
	}
}

func orFloat(v *float64, def float64) *float64 {
	if v != nil {
		return v
	}
	return &def
}

func (w *WorkerPool) ids() []string {
	var out []string
	for _, l := range w.Local {
		out = append(out, l.ID)
	}
	for _, s := range w.Static {
		out = append(out, s.ID)
	}
	return out
}

// defaultRoutes gives every pool a route by its own model name, and the first
// pool without a model every other name.
func defaultRoutes(pools []WorkerPool) []ModelRoute {
	var out []ModelRoute
	seen := map[string]bool{}
	for _, w := range pools {
		name := cmp.Or(w.Model, "*")
		if !seen[name] {
			seen[name] = true
			out = append(out, ModelRoute{Name: w.Name, At: w.At, Models: []string{name}, Tiers: []Tier{{Pool: w.Name}}})
		}
	}
	return out
}

func (p *parser) route(r *ModelRoute, models map[string]string) {
	if len(r.Models) == 0 || len(r.Tiers) == 0 {
		p.fail(r.At, "ModelRoute %s: needs models and tiers", r.Name)
	}
	for _, m := range r.Models {
		if other, ok := models[m]; ok {
			p.fail(r.At, "ModelRoute %s: model %q is already routed by %s", r.Name, m, other)
		}
		models[m] = r.Name
	}
	for i := range r.Tiers {
		t := &r.Tiers[i]
		pool := p.set.Pool(t.Pool)
		if pool == nil {
			p.fail(r.At, "ModelRoute %s: tiers[%d].pool %q: no such WorkerPool%s", r.Name, i, t.Pool, suggest(t.Pool, p.set.poolNames()))
			continue
		}
		t.Model = cmp.Or(t.Model, pool.Model)
		if t.MaxTokens < 0 {
			p.fail(r.At, "ModelRoute %s: tiers[%d].maxTokens %d: want a positive number", r.Name, i, t.MaxTokens)
		}
	}
	if r.Retries == nil {
		two := 2
		r.Retries = &two
	}
	if *r.Retries < 0 || *r.Retries > 10 {
		p.fail(r.At, "ModelRoute %s: retries %d: want 0 to 10", r.Name, *r.Retries)
	}
	if r.Relay == nil {
		yes := true
		r.Relay = &yes
	}
	r.Timeouts.defaults()
	s := &r.Stream
	if s.Moves == nil {
		eight := 8
		s.Moves = &eight
	}
	if *s.Moves < 0 || *s.Moves > 1000 {
		p.fail(r.At, "ModelRoute %s: stream.moves %d: want 0 to 1000", r.Name, *s.Moves)
	}
	s.Wait = cmp.Or(s.Wait, Duration(10*time.Second))
	s.StallMin = cmp.Or(s.StallMin, Duration(time.Second))
	s.StallMax = cmp.Or(s.StallMax, max(s.StallMin, Duration(30*time.Second)))
	s.Retain = cmp.Or(s.Retain, Duration(60*time.Second))
	s.RetainSize = cmp.Or(s.RetainSize, 4<<20)
	if s.StallMin == Off || s.StallMax != Off && s.StallMax < s.StallMin {
		p.fail(r.At, "ModelRoute %s: stream.stallMin %v: want a duration up to stallMax", r.Name, s.StallMin.D())
	}
}

func (t *Timeouts) defaults() {
	t.FirstByte = cmp.Or(t.FirstByte, Duration(600*time.Second))
	t.StreamIdle = cmp.Or(t.StreamIdle, Duration(300*time.Second))
	t.Request = cmp.Or(t.Request, Off)
}

// Pool returns the pool of that name, nil when there is none.
func (s *Set) Pool(name string) *WorkerPool {
	for i := range s.Pools {
		if s.Pools[i].Name == name {
			return &s.Pools[i]
		}
	}
	return nil
}

func (s *Set) poolNames() []string {
	var out []string
	for _, w := range s.Pools {
		out = append(out, w.Name)
	}
	return out
}

// Route returns the route that serves a client's model name: the one that lists
// it, else the one with "*", else nil.
func (s *Set) Route(model string) *ModelRoute {
	var star *ModelRoute
	for i := range s.Routes {
		for _, m := range s.Routes[i].Models {
			if m == model {
				return &s.Routes[i]
			}
			if m == "*" {
				star = &s.Routes[i]
			}
		}
	}
	return star
}

// Aliases returns the other names under which a pool's workers are reached, in
// order of the routes. Workers accept them, so that requests are served by alias
// while the gateway is away.
func (s *Set) Aliases(pool string) []string {
	var out []string
	w := s.Pool(pool)
	for _, r := range s.Routes {
		for _, t := range r.Tiers {
			if t.Pool != pool {
				continue
			}
			for _, m := range append(slices.Clone(r.Models), t.Model) {
				if m != "*" && m != "" && (w == nil || m != w.Model) && !slices.Contains(out, m) {
					out = append(out, m)
				}
			}
		}
	}
	return out
}
