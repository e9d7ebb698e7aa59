package prompts

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// Config configures Prompts.
type Config struct {
	// Ask has the worker say the tokens of body, a request to openai.TokenizePath. Required.
	Ask func(ctx context.Context, to Worker, body []byte) ([]int32, error)
	// Registerer takes the metrics. Required.
	Registerer prometheus.Registerer
	// Log takes what an operator should know, never a prompt. Required.
	Log *slog.Logger
}

// Worker says who is asked.
type Worker struct{ Pool, ID, Address string }

const (
	// leastBytes is the shortest text that a worker is asked about: what is shorter is computed in no
	// time. mostBytes is the longest.
	leastBytes = 512
	mostBytes  = 1 << 20
	// enough is the share of a text whose tokens are known that makes asking needless.
	enough = 3. / 4
	// mostWaiting bounds the texts that wait for a worker to be asked, askers how many are asked at
	// once, and askTime how long each may take.
	mostWaiting = 32
	askers      = 2
	askTime     = 5 * time.Second
	// restTime is how long a pool is left alone where a worker did not say.
	restTime = 30 * time.Second
)

// Prompts knows the tokens of prompts, and asks for those that it does not know. It is safe for
// concurrent use.
type Prompts struct {
	cfg   Config
	table *Table
	queue chan job

	mu      sync.Mutex           // guards what follows
	waiting map[uint64]bool      // by the hash of all of the text
	resting map[string]time.Time // pools, until when
	looked  *prometheus.CounterVec
	asked   *prometheus.CounterVec
}

// job is a text to be asked about.
type job struct {
	text text
	to   Worker
	body []byte
}

// New makes one that knows nothing. Nobody is asked before Run.
func New(cfg Config) (*Prompts, error) {
	if cfg.Ask == nil || cfg.Registerer == nil || cfg.Log == nil {
		return nil, errors.New("prompts: Ask, Registerer or Log: missing")
	}
	p := &Prompts{
		cfg: cfg, table: NewTable(), queue: make(chan job, mostWaiting), waiting: map[uint64]bool{}, resting: map[string]time.Time{},
		looked: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvmesh_prompts_looked_total",
			Help: "Prompts of requests, by what is known of their tokens: all, part or none.",
		}, []string{"known"}),
		asked: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvmesh_prompts_asked_total",
			Help: "Prompts whose tokens a worker was asked for: told, failed, or dropped since too many waited.",
		}, []string{"result"}),
	}
	size := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvmesh_prompts_ids", Help: "Token ids that are known."}, func() float64 { return float64(p.table.size()) })
	for _, c := range []prometheus.Collector{p.looked, p.asked, size} {
		if err := cfg.Registerer.Register(c); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// Known returns what is known of a request's prompt. Where that is too little, learn is to be called
// with the decision that was made about the request, and never waits; else it is nil.
func (p *Prompts) Known(now time.Time, req *openai.Request) (known picker.Prompt, learn func(picker.Decision)) {
	known.Salt = saltOf(req)
	s, ids := read(req)
	if ids != nil {
		p.looked.WithLabelValues("all").Inc()
		known.IDs, known.Tokens = ids, len(ids)
		return known, nil
	}
	size := s.bytes()
	if size < leastBytes || size > mostBytes {
		return known, nil
	}
	x := p.table.hash(s.head, s.parts...)
	var whole bool
	known.IDs, known.Tokens, whole = p.table.find(now, x)
	switch {
	case whole:
		p.looked.WithLabelValues("all").Inc()
		return known, nil
	case len(known.IDs) > 0:
		p.looked.WithLabelValues("part").Inc()
	default:
		p.looked.WithLabelValues("none").Inc()
	}
	if float64(len(known.IDs)) >= enough*float64(known.Tokens) && known.Tokens > 0 {
		return known, nil
	}
	return known, func(d picker.Decision) { p.enqueue(now, x, req, d) }
}

// enqueue has the first of the chosen workers asked, unless too many wait or its pool rests.
func (p *Prompts) enqueue(now time.Time, x text, req *openai.Request, d picker.Decision) {
	if len(d.Candidates) == 0 {
		return
	}
	key := x.hashes[len(x.hashes)-1]
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waiting[key] || now.Before(p.resting[d.Pool]) {
		return
	}
	c := d.Candidates[0]
	if len(p.queue) == cap(p.queue) { // all who put something in hold the lock
		p.asked.WithLabelValues("dropped").Inc()
		return
	}
	p.waiting[key] = true
	p.queue <- job{x, Worker{d.Pool, c.ID, c.Address}, question(req, d.Model)}
}

// Run asks workers until ctx ends.
func (p *Prompts) Run(ctx context.Context) {
	var all sync.WaitGroup
	for range askers {
		all.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case j := <-p.queue:
					p.ask(ctx, j)
				}
			}
		})
	}
	all.Wait()
}

// ask asks for the tokens of one text. What is more than text is not asked about, for a worker might
// fetch a picture for it.
func (p *Prompts) ask(ctx context.Context, j job) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	var ids []int32
	err := plain(j.body)
	odd := err != nil
	if !odd {
		ids, err = p.cfg.Ask(ctx, j.to, j.body)
	}
	now := time.Now()
	p.mu.Lock()
	delete(p.waiting, j.text.hashes[len(j.text.hashes)-1])
	if err != nil && !odd {
		p.resting[j.to.Pool] = now.Add(restTime)
	}
	p.mu.Unlock()
	switch {
	case odd:
	case err != nil || len(ids) == 0:
		p.asked.WithLabelValues("failed").Inc()
		p.cfg.Log.Info("a worker does not tell the tokens of a prompt, so its requests go to no worker for what it holds", "worker", j.to.ID, "pool", j.to.Pool, "err", err, "again_in", restTime)
	default:
		p.asked.WithLabelValues("told").Inc()
		p.table.learn(now, j.text, ids)
	}
}
