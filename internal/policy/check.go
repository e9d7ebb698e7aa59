package policy

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"time"
)

// pool checks one pool while its file and line are known.
func (p *parser) pool(w WorkerPool) {
	engines := []string{EngineLlamaCpp, EngineSim, EngineOpenAI}
	if !slices.Contains(engines, w.Engine) {
		p.wrong(w.At, "engine", "WorkerPool %s: engine %q%s", w.Name, w.Engine, suggest(w.Engine, engines))
	}
	if w.Engine != EngineOpenAI && w.Model == "" {
		p.wrong(w.At, "model", "WorkerPool %s: model: missing", w.Name)
	}
	if len(w.Static) > 0 && w.Engine != EngineOpenAI {
		p.wrong(w.At, "static", "WorkerPool %s: static servers need engine %s", w.Name, EngineOpenAI)
	}
	if len(w.Local) > 0 && w.Engine == EngineOpenAI {
		p.wrong(w.At, "local", "WorkerPool %s: engine %s has no local workers; list servers under static", w.Name, EngineOpenAI)
	}
	for i, s := range w.Static {
		at := fmt.Sprintf("static[%d].", i)
		if _, err := ServerURL(s.URL); err != nil {
			p.wrong(w.At, at+"url", "WorkerPool %s: %surl %v", w.Name, at, err)
		}
		if s.ID != "" && !validServer(s.ID) {
			p.wrong(w.At, at+"id", "WorkerPool %s: %sid %q: want visible ASCII characters without '/', at most 253", w.Name, at, s.ID)
		}
	}
	for i, l := range w.Local {
		at := fmt.Sprintf("local[%d].", i)
		if !validName(l.ID) || WorkerID(l.ID) != nil {
			p.wrong(w.At, at+"id", "WorkerPool %s: %sid %q: want lower-case letters, digits, '-' and '.', at most 63, a letter or digit at both ends", w.Name, at, l.ID)
		}
		if l.Port < 0 || l.Port > 65535 {
			p.wrong(w.At, at+"port", "WorkerPool %s: %sport %d: want 0 to 65535", w.Name, at, l.Port)
		}
	}
	if c := w.Health.Check; c != "" && c != "off" && (c[0] != '/' || !visible(c)) {
		p.wrong(w.At, "health.check", "WorkerPool %s: health.check %q: want a path such as /health, or off", w.Name, c)
	}
	p.ranges(w)
	p.zones(w)
}

// ranges checks the numbers of a pool.
func (p *parser) ranges(w WorkerPool) {
	p.floats(w)
	seqs := MostSeqs
	if w.Engine == EngineLlamaCpp {
		seqs = 256
	}
	p.whole(w, "worker.contextLength", w.Worker.ContextLength, LeastContext, MostNumber)
	p.whole(w, "worker.maxNumSeqs", w.Worker.MaxNumSeqs, 1, seqs)
	p.whole(w, "worker.maxQueue", w.Worker.MaxQueue, 1, MostNumber)
	p.whole(w, "worker.threads", w.Worker.Threads, 1, MostThreads)
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
			if other, ok := ids[id.name]; ok {
				p.wrong(w.At, id.path, "WorkerPool %s: worker id %q is already used in %s", w.Name, id.name, other)
			}
			ids[id.name] = w.Name
		}
	}
	for _, two := range s.portsTwice() {
		a, b := two[0], two[1]
		p.wrong(b.doc, b.path, "%s: port %d is %s's already", b.name, b.addr.Port(), a.name)
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
	if !p.given(m.At, "envoy.concurrency") {
		m.Envoy.Concurrency = 2
	}
	m.MaxBody = cmp.Or(m.MaxBody, 32<<20)
	m.HeldBodies = cmp.Or(m.HeldBodies, max(512<<20, 2*m.MaxBody))
	m.HeldStreams = cmp.Or(m.HeldStreams, 256<<20)
	m.ShareWait = cmp.Or(m.ShareWait, Duration(25*time.Millisecond))
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
			p.wrong(m.At, "listen."+f.name, "listen.%s %v", f.name, err)
			continue
		}
		*f.addr = addr
	}
	p.limits(m)
	p.registry(&m.Registry, m.At)
	if err := Zone(m.Zone); err != nil {
		p.wrong(m.At, "zone", "zone %.80q: %v", m.Zone, err)
	}
	p.kv(&m.KV, m.At)
	p.kvPeers(m)
	if m.ShareStreams && m.Registry.Redis == "" {
		p.wrong(m.At, "shareStreams", "shareStreams needs registry.redis")
	}
	if p.set.Pool(m.DefaultPool) == nil {
		p.wrong(m.At, "defaultPool", "defaultPool %q: no such WorkerPool%s", m.DefaultPool, suggest(m.DefaultPool, p.set.poolNames()))
	}
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

// workerID is an id with its path in the document.
type workerID struct{ name, path string }

func (w *WorkerPool) ids() []workerID {
	var out []workerID
	for i, l := range w.Local {
		out = append(out, workerID{l.ID, fmt.Sprintf("local[%d].id", i)})
	}
	for i, s := range w.Static {
		out = append(out, workerID{s.ID, fmt.Sprintf("static[%d].id", i)})
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
		empty := "models"
		if len(r.Models) > 0 {
			empty = "tiers"
		}
		p.wrong(r.At, empty, "ModelRoute %s: needs models and tiers", r.Name)
	}
	for i, m := range r.Models {
		if other, ok := models[m]; ok {
			p.wrong(r.At, fmt.Sprintf("models[%d]", i), "ModelRoute %s: model %q is already routed by %s", r.Name, m, other)
		}
		models[m] = r.Name
	}
	for i := range r.Tiers {
		t, at := &r.Tiers[i], fmt.Sprintf("tiers[%d].", i)
		pool := p.set.Pool(t.Pool)
		if pool == nil {
			p.wrong(r.At, at+"pool", "ModelRoute %s: %spool %q: no such WorkerPool%s", r.Name, at, t.Pool, suggest(t.Pool, p.set.poolNames()))
			continue
		}
		t.Model = cmp.Or(t.Model, pool.Model)
		if t.MaxTokens < 0 || t.MaxTokens == 0 && p.given(r.At, at+"maxTokens") {
			p.wrong(r.At, at+"maxTokens", "ModelRoute %s: %smaxTokens %d: want a positive number; leave it out for no limit", r.Name, at, t.MaxTokens)
		}
	}
	if r.Retries == nil {
		two := 2
		r.Retries = &two
	}
	if *r.Retries < 0 || *r.Retries > 10 {
		p.wrong(r.At, "retries", "ModelRoute %s: retries %d: want 0 to 10", r.Name, *r.Retries)
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
		p.wrong(r.At, "stream.moves", "ModelRoute %s: stream.moves %d: want 0 to 1000", r.Name, *s.Moves)
	}
	s.Wait = cmp.Or(s.Wait, Duration(10*time.Second))
	second := Duration(time.Second)
	if s.StallMax > 0 {
		second = min(second, s.StallMax)
	}
	s.StallMin = cmp.Or(s.StallMin, second)
	s.StallMax = cmp.Or(s.StallMax, max(s.StallMin, Duration(30*time.Second)))
	s.Retain = cmp.Or(s.Retain, Duration(60*time.Second))
	s.RetainSize = cmp.Or(s.RetainSize, 4<<20)
	if s.StallMin != Off && s.StallMax != Off && s.StallMax < s.StallMin {
		p.wrong(r.At, "stream.stallMin", "ModelRoute %s: stream.stallMin %v: want a duration up to stallMax", r.Name, s.StallMin.D())
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
