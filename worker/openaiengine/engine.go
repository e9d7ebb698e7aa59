package openaiengine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// Config says where the server is. Zero fields take the defaults named beside them.
type Config struct {
	Upstream   string        // base URL of the server, without /v1; required
	Metrics    string        // URL of its metrics; default: Upstream's /metrics, then /prometheus/metrics
	Name       string        // worker's own name of the model; default: the server's
	Model      string        // the server's name of the model; default: the first it lists
	APIKey     string        // sent in place of what clients send, "" = pass theirs on
	MaxRunning int           // requests it runs at once, where it does not say; default 256
	Every      time.Duration // between two looks at the metrics; default 500 ms
	Patience   time.Duration // without an answer before the engine counts as broken; default 5 s
	Transport  http.RoundTripper
	Log        *slog.Logger // default: discard
}

// setDefaults fills in what was left open.
func (c *Config) setDefaults() {
	if c.MaxRunning == 0 {
		c.MaxRunning = 256
	}
	if c.Every == 0 {
		c.Every = 500 * time.Millisecond
	}
	if c.Patience == 0 {
		c.Patience = 5 * time.Second
	}
	if c.Transport == nil {
		t := http.DefaultTransport.(*http.Transport).Clone()
		t.MaxIdleConnsPerHost = 256
		t.Proxy = nil // the server is a neighbour
		c.Transport = t
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

// Validate reports the first field that cannot work.
func (c Config) Validate() error {
	for _, s := range []string{c.Upstream, c.Metrics} {
		u, err := url.Parse(s)
		if s == "" && c.Upstream != "" {
			continue
		}
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return fmt.Errorf("openai engine: %q: want http://HOST:PORT", s)
		}
	}
	if c.MaxRunning < 0 || c.Every < 0 || c.Patience < 0 {
		return errors.New("openai engine: a limit is negative")
	}
	return nil
}

// Engine is the server in front of which the worker stands. It implements
// worker.Engine, worker.Checker and worker.Proxy, and is safe for concurrent use.
type Engine struct {
	cfg      Config
	upstream *url.URL
	client   *http.Client
	model    worker.Model
	name     string // the server's name of the model
	passing  atomic.Int64

	stop  context.CancelFunc
	ended chan struct{}

	mu   sync.Mutex
	kind Kind
	load worker.Load
	last time.Time // of the server's last answer
	err  error     // of the last look, nil = it answered
}

var (
	_ worker.Engine  = (*Engine)(nil)
	_ worker.Checker = (*Engine)(nil)
	_ worker.Proxy   = (*Engine)(nil)
)

// Open waits until the server lists its models, or ctx ends: servers take minutes to
// load, and are often started together with their worker.
func Open(ctx context.Context, cfg Config) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.setDefaults()
	u, err := url.Parse(strings.TrimSuffix(strings.TrimSuffix(cfg.Upstream, "/"), "/v1"))
	if err != nil {
		return nil, fmt.Errorf("openai engine: %w", err)
	}
	e := &Engine{cfg: cfg, upstream: u, client: &http.Client{Transport: cfg.Transport}, ended: make(chan struct{})}
	for said := ""; ; {
		if err = e.findModel(ctx); err == nil {
			break
		}
		if text := err.Error(); text != said {
			said = text
			cfg.Log.Info("waiting for the server", "upstream", u.Redacted(), "err", err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("openai engine: %w", err)
		case <-time.After(cfg.Every):
		}
	}
	watching, stop := context.WithCancel(context.WithoutCancel(ctx))
	e.stop = stop
	e.look(watching)
	go e.watch(watching)
	return e, nil
}

// modelCard is a model as servers list it; llama-server has its context elsewhere.
type modelCard struct {
	openai.ModelCard
	Meta struct {
		Context int `json:"n_ctx"`
	} `json:"meta"`
}

// findModel asks the server for its models.
func (e *Engine) findModel(ctx context.Context) error {
	var list struct {
		Data []modelCard `json:"data"`
	}
	if err := e.getJSON(ctx, "/v1/models", &list); err != nil {
		return err
	}
	if len(list.Data) == 0 {
		return errors.New("the server lists no models")
	}
	card := list.Data[0]
	if e.cfg.Model != "" {
		card = modelCard{}
		for _, c := range list.Data {
			if c.ID == e.cfg.Model {
				card = c
			}
		}
		if card.ID == "" {
			return fmt.Errorf("the server has no model %q; its first is %q", e.cfg.Model, list.Data[0].ID)
		}
	}
	e.name = card.ID
	e.model = worker.Model{Name: e.cfg.Name, Created: card.Created, ContextLen: cmp.Or(card.MaxModelLen, card.Meta.Context), ToolMark: -1, Fingerprint: "openai:" + card.ID}
	if e.model.Name == "" {
		e.model.Name = card.ID
	}
	return nil
}

// getJSON reads a small answer.
func (e *Engine) getJSON(ctx context.Context, path string, v any) error {
	body, err := e.get(ctx, e.upstream.JoinPath(path).String())
	if err != nil {
		return err
	}
	defer body.Close()
	if err := json.NewDecoder(io.LimitReader(body, most)).Decode(v); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// get asks for a page that must be 200.
func (e *Engine) get(ctx context.Context, page string) (io.ReadCloser, error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.Patience)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, page, nil)
	if err != nil {
		cancel()
		return nil, err
	}
	e.authorize(req.Header)
	resp, err := e.client.Do(req)
	if err != nil {
		cancel()
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		cancel()
		return nil, &statusError{req.URL.Path, resp.StatusCode}
	}
	return &cancelBody{resp.Body, cancel}, nil
}

// cancelBody ends its request's context when it is closed.
type cancelBody struct {
	io.ReadCloser
	cancel func()
}

// Close implements io.Closer.
func (b *cancelBody) Close() error {
	b.cancel()
	return b.ReadCloser.Close()
}

// statusError is an answer other than 200.
type statusError struct {
	path   string
	status int
}

// Error implements error.
func (e *statusError) Error() string { return fmt.Sprintf("%s answered %d", e.path, e.status) }

// authorize sets the server's own key, where there is one.
func (e *Engine) authorize(h http.Header) {
	if e.cfg.APIKey != "" {
		h.Set("Authorization", "Bearer "+e.cfg.APIKey)
	}
}

// watch looks at the metrics until ctx ends.
func (e *Engine) watch(ctx context.Context) {
	defer close(e.ended)
	tick := time.NewTicker(e.cfg.Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			e.look(ctx)
		}
	}
}

// look reads the metrics once. A server without metrics is alive when it lists its
// models.
func (e *Engine) look(ctx context.Context) {
	kind, load, err := e.readMetrics(ctx)
	if _, answered := errors.AsType[*statusError](err); answered || err == nil && kind == Unknown {
		var list json.RawMessage
		err = e.getJSON(ctx, "/v1/models", &list)
		load = worker.Load{Running: int(e.passing.Load())}
	}
	if kind == LlamaCP {
		e.readSlots(ctx, &load)
	}
	if load.MaxRunning == 0 {
		load.MaxRunning = e.cfg.MaxRunning
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err = err; err != nil {
		return // the load is the last one known
	}
	if e.kind != kind {
		e.cfg.Log.Info("server's metrics", "kind", kind)
	}
	e.kind, e.load, e.last = kind, load, time.Now()
}

// readSlots adds what llama-server has on no page of metrics: how many requests it runs
// at once, and how much of their contexts is in use. With --kv-unified they share one,
// so that the share is a lower bound. A server may have the page switched off.
func (e *Engine) readSlots(ctx context.Context, l *worker.Load) {
	var slots []struct {
		Context int  `json:"n_ctx"`
		Busy    bool `json:"is_processing"`
		Tokens  int  `json:"n_prompt_tokens"` // prompt and answer
	}
	if err := e.getJSON(ctx, "/slots", &slots); err != nil {
		return
	}
	room, used := 0, 0
	for _, s := range slots {
		if room += max(s.Context, 0); s.Busy {
			used += max(s.Tokens, 0)
		}
	}
	l.MaxRunning = len(slots)
	if room > 0 {
		l.KVUsage = min(float64(used)/float64(room), 1)
	}
}

// readMetrics reads the page of metrics, wherever it is.
func (e *Engine) readMetrics(ctx context.Context) (Kind, worker.Load, error) {
	pages := []string{e.cfg.Metrics}
	if e.cfg.Metrics == "" {
		pages = []string{e.upstream.JoinPath("/metrics").String(), e.upstream.JoinPath("/prometheus/metrics").String()}
	}
	var first error
	for _, page := range pages {
		kind, load, err := e.readPage(ctx, page)
		if err == nil && kind != Unknown {
			return kind, load, nil
		}
		if first == nil {
			first = err
		}
	}
	return Unknown, worker.Load{}, first
}

// readPage reads one page. One that is no page of metrics, as trtllm-serve has under
// /metrics, is none.
func (e *Engine) readPage(ctx context.Context, page string) (Kind, worker.Load, error) {
	body, err := e.get(ctx, page)
	if err != nil {
		return Unknown, worker.Load{}, err
	}
	defer body.Close()
	kind, load, err := read(body)
	if err != nil {
		return Unknown, worker.Load{}, nil
	}
	return kind, load, nil
}

// Model implements worker.Engine.
func (e *Engine) Model() worker.Model { return e.model }

// Load implements worker.Engine: what the metrics said last.
func (e *Engine) Load() worker.Load {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.load
}

// Check implements worker.Checker.
func (e *Engine) Check() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if silent := time.Since(e.last); e.err != nil && silent > e.cfg.Patience {
		return fmt.Errorf("the server has not answered for %v: %w", silent.Round(time.Second), e.err)
	}
	return nil
}

// Close implements worker.Engine. The server goes on.
func (e *Engine) Close() error {
	e.stop()
	<-e.ended
	e.client.CloseIdleConnections()
	return nil
}

// Tokenize implements worker.Engine for the worker's self-check, the only one that
// generates without the proxy: the server makes tokens of the text itself.
func (e *Engine) Tokenize(*openai.Request, int) ([]int32, error) { return []int32{0}, nil }

// Generate implements worker.Engine for the worker's self-check: it asks the server
// for one token, of whatever.
func (e *Engine) Generate(ctx context.Context, _ []int32, _ worker.Params) iter.Seq2[worker.Token, error] {
	return func(yield func(worker.Token, error) bool) {
		err := e.probe(ctx, string(openai.Completions), map[string]any{"prompt": "1"})
		if s, ok := errors.AsType[*statusError](err); ok && s.status == http.StatusNotFound {
			err = e.probe(ctx, string(openai.Chat), map[string]any{"messages": []any{map[string]any{"role": "user", "content": "1"}}})
		}
		yield(worker.Token{Finish: "length"}, err)
	}
}

// probe asks for one token.
func (e *Engine) probe(ctx context.Context, path string, body map[string]any) error {
	body["model"], body["max_tokens"], body["temperature"] = e.name, 1, 0
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.upstream.JoinPath(path).String(), strings.NewReader(string(raw)))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	e.authorize(req.Header)
	resp, err := e.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var answer openai.Completion
	if resp.StatusCode != http.StatusOK {
		return &statusError{path, resp.StatusCode}
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, most)).Decode(&answer); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	if len(answer.Choices) == 0 {
		return fmt.Errorf("%s answered without a choice", path)
	}
	return nil
}
