package picker

import (
	"fmt"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// Request is what a choice depends on.
type Request struct {
	Model   string   // the client's name of the model; routed by policy
	Pool    string   // when set, the pool; Model then only leaves out workers that lack it
	Session string   // key of affinity, "" for none
	Exclude []string // ids of workers that must not be chosen

	// Prompt is what is known of the prompt's tokens; the zero Prompt prefers nobody for what
	// it holds of it.
	Prompt Prompt

	// For a stream that goes on elsewhere: only workers that know the relay by a secret
	// of that mark, with those weights, and only the one of an id where it is given. Then
	// free KV counts, too. Room leaves out those where it would have to wait, or that fail now.
	// AnyWeights is for one that has not begun, which any of them can.
	RelayMark, Fingerprint, Only string
	Room, AnyWeights             bool

	named bool // the policy names the model: workers need not list it
}

// Prompt is the beginning of a prompt as workers compute it.
type Prompt struct {
	// IDs are its tokens from the first on, as far as they are known. Read-only.
	IDs []int32
	// Tokens is about how many it has in all, at least len(IDs).
	Tokens int
	// Salt is the request's cache_salt, without which KV is not shared.
	Salt string
}

// Decision is the outcome of a Pick, with its reasons.
type Decision struct {
	// Known is false while no fleet was ever received: then nothing is decided.
	Known bool `json:"known"`
	// Route is the route that serves the model, nil when none does or when
	// Request.Pool was set.
	Route *policy.ModelRoute `json:"-"`
	// Tier is the index of the chosen tier in Route.
	Tier int `json:"tier"`
	// Pool is the chosen pool; the first tier's when no tier has a worker.
	Pool string `json:"pool"`
	// Model is the model's name at the workers of the tier.
	Model string `json:"model,omitempty"`
	// MaxTokens is the tier's limit of tokens, 0 for none.
	MaxTokens int `json:"max_tokens,omitempty"`
	// Candidates are the workers to try, in order.
	Candidates []Candidate `json:"candidates"`
	// Affinity says that the session decided the first candidate.
	Affinity bool `json:"affinity,omitempty"`
	// Unserved says that the pool has workers and none of them has the model.
	Unserved bool `json:"unserved,omitempty"`
	// Why says why there are no candidates, "" when there are.
	Why string `json:"why,omitempty"`
}

// Candidate is one worker with the reasons for its place.
type Candidate struct {
	ID      string `json:"id"`
	Address string `json:"address"`
	Zone    string `json:"zone"`
	// Order is the line of the order in the package comment, 0 first.
	Order int `json:"order"`
	// Score decides within a line, the smallest first: requests over capacity
	// times weight.
	Score float64 `json:"score"`
	// Load is the estimated number of requests at the worker.
	Load int64 `json:"load"`
	// Utilization is the share of the worker in use, 1 is full.
	Utilization float64 `json:"utilization"`
	// Held is how many tokens of the prompt, from its beginning on, need not be computed there.
	Held int `json:"held,omitempty"`
}

// Lines of the order of candidates.
const (
	orderNear = iota
	orderHealthy
	orderDegraded
	orderFull
	orderBroken
)

// Pick routes a request to the first tier that has a worker and orders that
// pool's workers. It has no side effects.
func (p *Picker) Pick(now time.Time, r Request) Decision {
	s := p.snap.Load()
	if s == nil {
		return Decision{Pool: r.Pool, Why: "no fleet received yet"}
	}
	if r.Pool != "" {
		return p.fill(now, s, r, Decision{Known: true, Pool: r.Pool})
	}
	route := p.cfg.Policy.Route(r.Model)
	if route == nil {
		return Decision{Known: true, Why: "no route serves this model"}
	}
	client := r.Model
	var first Decision
	for i, t := range route.Tiers {
		d := Decision{Known: true, Route: route, Tier: i, Pool: t.Pool, Model: t.Model, MaxTokens: t.MaxTokens}
		if d.Model == "" {
			d.Model = client
		}
		// A tier that names its model is taken at its word, since a server need not
		// list every name it accepts; with the client's own name, only those count
		// that have it.
		r.Model, r.named = d.Model, t.Model != ""
		d = p.fill(now, s, r, d)
		if len(d.Candidates) > 0 {
			return d
		}
		if i == 0 {
			first = d
		}
	}
	return first
}

// fill adds the candidates of d.Pool.
func (p *Picker) fill(now time.Time, s *snapshot, r Request, d Decision) Decision {
	takers := s.takers[d.Pool]
	ranking := ranking{most: min(p.cfg.MaxCandidates, len(takers))}
	ranking.top = make([]ranked, 0, ranking.most+1)
	var session uint64
	if r.Session != "" {
		session = xxhash.Sum64String(r.Session)
	}
	var held map[string]int
	if len(r.Prompt.IDs) > 0 && p.cfg.Held != nil {
		held = p.cfg.Held(r.Prompt)
	}
	strangers, panics := 0, panics(now, takers)
	for _, w := range takers {
		if !r.named && !w.serves(r.Model) {
			strangers++
			continue
		}
		if len(r.Exclude) > 0 && slices.Contains(r.Exclude, w.ID) {
			continue
		}
		c := p.weigh(now, w, panics)
		if r.Room && c.order >= orderFull {
			continue
		}
		if r.RelayMark != "" {
			if !r.takesOver(w) {
				continue
			}
			c.score /= max(1-w.kvUsage, 0.02)
		}
		c.holds(held[w.ID], r.Prompt.Tokens)
		ranking.add(c)
		if r.Session != "" {
			ranking.affine(c, mix(session^w.hash))
		}
	}
	ranking.spread()
	d.Affinity = ranking.stick()
	if len(ranking.top) == 0 && strangers > 0 && strangers == len(takers) {
		d.Unserved = true
		d.Why = fmt.Sprintf("none of the %d workers of pool %s has this model", len(takers), d.Pool)
		return d
	}
	if len(ranking.top) == 0 {
		d.Why = fmt.Sprintf("pool %s has no worker that takes requests (%d listed, %d excluded)", d.Pool, len(takers), len(r.Exclude))
		return d
	}
	d.Candidates = make([]Candidate, len(ranking.top))
	for i, c := range ranking.top {
		d.Candidates[i] = Candidate{
			ID: c.w.ID, Address: c.w.Address, Zone: c.w.Zone,
			Order: c.order, Score: c.score, Load: c.load, Utilization: c.utilization, Held: c.held,
		}
	}
	return d
}

// takesOver reports whether a worker can go on with the stream.
func (r *Request) takesOver(w *worker) bool {
	return w.relayMark == r.RelayMark && (r.AnyWeights || w.fingerprint == r.Fingerprint) && (r.Only == "" || r.Only == w.ID)
}

// panics reports whether breakers would leave out more than half of a pool.
func panics(now time.Time, takers []*worker) bool {
	out := 0
	for _, w := range takers {
		if w.c.open(now) {
			out++
		}
	}
	return 2*out > len(takers)
}

// weigh puts a worker's present state in numbers. panics says that breakers which opened by
// failures alone do not count.
func (p *Picker) weigh(now time.Time, w *worker, panics bool) ranked {
	c := ranked{w: w, chosen: w.c.chosen.Load()}
	c.load = w.c.load(now, int64(w.load.running)+int64(w.load.waiting))
	c.utilization = w.load.utilization
	if w.load.maxRunning > 0 {
		c.utilization = max(c.utilization, float64(c.load)/float64(w.load.maxRunning))
	}
	c.score = float64(c.load+1) / (w.capacity * w.weight)
	switch {
	case w.c.open(now) && (w.c.gone.Load() || !panics):
		c.order = orderBroken
	case c.full():
		c.order = orderFull
	case w.status == health.Degraded:
		c.order = orderDegraded
	case p.cfg.Zone == "" || w.Zone != p.cfg.Zone || c.utilization >= p.cfg.RoomBelow:
		c.order = orderHealthy
	}
	return c
}
