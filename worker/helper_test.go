package worker_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// running is a worker under test.
type running struct {
	*worker.Server
	engine *sim.Engine
	base   string // URL
	client *http.Client
	stop   context.CancelFunc
	ended  chan error // result of Run
}

func newSim(t testing.TB, cfg sim.Config) *sim.Engine {
	t.Helper()
	e, err := sim.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// opener hands over an engine that is ready at once.
func opener(e worker.Engine) func(context.Context, func(float64)) (worker.Engine, error) {
	return func(context.Context, func(float64)) (worker.Engine, error) { return e, nil }
}

func localListener(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// start runs a worker with a simulated engine until the test ends. Settings that
// cfg leaves open get values for tests.
func start(t testing.TB, simCfg sim.Config, cfg worker.Config) *running {
	t.Helper()
	r := &running{engine: newSim(t, simCfg)}
	cfg.Open = opener(r.engine)
	r.run(t, cfg)
	if cfg.ControlPlane == "" {
		<-r.Changed()
	}
	return r
}

// run starts the worker that cfg describes, without waiting for it to be ready.
func (r *running) run(t testing.TB, cfg worker.Config) {
	t.Helper()
	if cfg.ID == "" {
		cfg.ID = "w1"
	}
	if cfg.Pool == "" {
		cfg.Pool = "default"
	}
	cfg.EngineName = "sim"
	if cfg.SelfCheck == 0 {
		cfg.SelfCheck = -1 // tests of other things count tokens
	}
	if cfg.Listener == nil {
		cfg.Listener = localListener(t)
	}
	s, err := worker.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.Server, r.stop, r.ended = s, cancel, make(chan error, 1)
	r.base = "http://" + s.Addr()
	if r.client == nil {
		r.client = &http.Client{Transport: &http.Transport{}}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.ended <- s.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		r.client.CloseIdleConnections()
		<-done
	})
}

// do sends a request with a JSON body, "" for none.
func (r *running) do(t testing.TB, method, path, body string, header ...string) *http.Response {
	t.Helper()
	var rd io.Reader
	if body != "" {
		rd = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, r.base+path, rd)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := r.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

func (r *running) post(t testing.TB, path, body string) *http.Response {
	t.Helper()
	return r.do(t, http.MethodPost, path, body)
}

// decode reads a JSON body of the wanted status.
func decode[T any](t testing.TB, resp *http.Response, status int) T {
	t.Helper()
	var v T
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != status {
		t.Fatalf("status %d, want %d: %s", resp.StatusCode, status, body)
	}
	if err := json.Unmarshal(body, &v); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	return v
}

// apiError is OpenAI's error body.
type apiError struct {
	Error struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	} `json:"error"`
}

func (e apiError) param() string {
	if e.Error.Param == nil {
		return ""
	}
	return *e.Error.Param
}

func (e apiError) code() string {
	if e.Error.Code == nil {
		return ""
	}
	return *e.Error.Code
}

// stream is a read answer: its events in order.
type stream struct {
	events   []string // data of each, [DONE] included
	comments int
	err      error // how reading ended, nil at a clean end
}

// readStream reads server-sent events to the end.
func readStream(body io.Reader) stream {
	var s stream
	sc := bufio.NewScanner(body)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		line := sc.Bytes()
		switch {
		case bytes.HasPrefix(line, []byte("data: ")):
			s.events = append(s.events, string(line[6:]))
		case bytes.HasPrefix(line, []byte(":")):
			s.comments++
		}
	}
	s.err = sc.Err()
	return s
}

// whole reports whether the stream ended with [DONE].
func (s stream) whole() bool {
	return s.err == nil && len(s.events) > 0 && s.events[len(s.events)-1] == "[DONE]"
}

// answer is what all choices of a request said.
type answer struct {
	Texts   []string
	Reasons []string
	Usage   openai.Usage
}

// joined puts the chunks of a stream together.
func (s stream) joined(t testing.TB, choices int) answer {
	t.Helper()
	a := answer{Texts: make([]string, choices), Reasons: make([]string, choices)}
	for _, ev := range s.events {
		if ev == "[DONE]" {
			continue
		}
		var c openai.Chunk
		if err := json.Unmarshal([]byte(ev), &c); err != nil {
			t.Fatalf("event %s: %v", ev, err)
		}
		for _, ch := range c.Choices {
			a.Texts[ch.Index] += ch.Added()
			if ch.FinishReason != nil {
				a.Reasons[ch.Index] += *ch.FinishReason
			}
		}
		if c.Usage != nil {
			a.Usage = *c.Usage
		}
	}
	return a
}

// until waits for a condition that other goroutines bring about.
func until(t testing.TB, cond func() bool) {
	t.Helper()
	for !cond() {
		select {
		case <-time.After(time.Millisecond):
		case <-t.Context().Done():
			t.Fatal("the test ended first")
		}
	}
}
