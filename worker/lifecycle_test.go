package worker_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// healthBody is the body of /health and /ready.
type healthBody struct {
	Status  string
	Percent *float64
	Reason  string
}

func TestLoading(t *testing.T) {
	release := make(chan error)
	half := make(chan struct{})
	r := &running{engine: newSim(t, sim.Config{})}
	r.run(t, worker.Config{Open: func(_ context.Context, progress func(float64)) (worker.Engine, error) {
		progress(50)
		close(half)
		return r.engine, <-release
	}})
	<-half
	if s := decode[healthBody](t, r.do(t, http.MethodGet, "/ready", ""), 503); s.Status != "loading" || *s.Percent != 50 {
		t.Errorf("%+v", s)
	}
	if s := decode[healthBody](t, r.do(t, http.MethodGet, "/health", ""), 200); s.Status != "ok" {
		t.Errorf("%+v", s)
	}
	for _, path := range []string{textPath, "/v1/models"} {
		method, body := http.MethodGet, ""
		if path == textPath {
			method, body = http.MethodPost, `{"model":"sim","prompt":"x"}`
		}
		resp := r.do(t, method, path, body)
		if e := decode[apiError](t, resp, 503); resp.Header.Get("Retry-After") == "" || e.Error.Type != "overloaded_error" {
			t.Errorf("%s: %+v", path, e)
		}
	}
	release <- nil
	<-r.Changed()
	if s := decode[healthBody](t, r.do(t, http.MethodGet, "/ready", ""), 200); s.Status != "ready" {
		t.Errorf("%+v", s)
	}
	decode[any](t, r.post(t, textPath, `{"model":"sim","prompt":"x"}`), 200)
}

func TestEngineDoesNotLoad(t *testing.T) {
	broken := errors.New("no such file")
	r := &running{}
	r.run(t, worker.Config{Open: func(context.Context, func(float64)) (worker.Engine, error) { return nil, broken }})
	if err := <-r.ended; !errors.Is(err, broken) {
		t.Errorf("Run returned %v", err)
	}
}

func TestStopWhileLoading(t *testing.T) {
	r := &running{}
	loading := make(chan struct{})
	r.run(t, worker.Config{Open: func(ctx context.Context, _ func(float64)) (worker.Engine, error) {
		close(loading)
		<-ctx.Done()
		return nil, ctx.Err()
	}})
	<-loading
	r.stop()
	if err := <-r.ended; err != nil {
		t.Errorf("Run returned %v", err)
	}
}

// A drain lets running answers finish and refuses new ones.
func TestDrain(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{DrainTimeout: time.Hour})
	resp := r.post(t, textPath, `{"model":"sim","prompt":"x","max_tokens":40,"stream":true,"sim":{"stall_at":20,"stall_ms":300}}`)
	body := bufio.NewReader(resp.Body)
	if _, err := body.Peek(1); err != nil {
		t.Fatal(err)
	}
	r.stop()
	<-r.Changed()
	if s := decode[healthBody](t, r.do(t, http.MethodGet, "/ready", ""), 503); s.Status != "shutting_down" {
		t.Errorf("%+v", s)
	}
	refused := r.post(t, textPath, `{"model":"sim","prompt":"x"}`)
	if e := decode[apiError](t, refused, 503); refused.Header.Get("Retry-After") == "" || e.code() != "service_unavailable" {
		t.Errorf("%+v", e)
	}
	if s := readStream(body); !s.whole() {
		t.Errorf("the running stream ended with %v", s.err)
	}
	if err := <-r.ended; err != nil {
		t.Errorf("Run returned %v", err)
	}
}

// What still runs at the end of the drain time ends in an error event.
func TestDrainTimeout(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{DrainTimeout: 10 * time.Millisecond})
	resp := r.post(t, textPath, `{"model":"sim","prompt":"x","max_tokens":40,"stream":true,"sim":{"stall_at":20}}`)
	r.stop()
	s := readStream(resp.Body)
	if last := s.events[len(s.events)-1]; s.err != nil || !strings.Contains(last, `"service_unavailable"`) {
		t.Errorf("last event %s, %v", last, s.err)
	}
	if err := <-r.ended; err != nil {
		t.Errorf("Run returned %v", err)
	}
}

// pipeListener carries connections in memory, so that a test can run in a bubble.
type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
}

func newPipeListener() *pipeListener {
	return &pipeListener{make(chan net.Conn), make(chan struct{})}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	select {
	case <-l.closed:
	default:
		close(l.closed)
	}
	return nil
}

func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

func (l *pipeListener) dial(context.Context, string, string) (net.Conn, error) {
	here, there := net.Pipe()
	l.conns <- there
	return here, nil
}

// A first token after 185 s arrives, over HTTP/1.1 and HTTP/2; until then a
// comment every 15 s keeps the stream open, and a plain request just waits.
func TestSlowFirstToken(t *testing.T) {
	const ttft = 185 * time.Second
	for _, proto := range []string{"HTTP/1.1", "HTTP/2.0"} {
		synctest.Test(t, func(t *testing.T) {
			l := newPipeListener()
			var p http.Protocols
			p.SetHTTP1(proto == "HTTP/1.1")
			p.SetUnencryptedHTTP2(proto != "HTTP/1.1")
			r := &running{
				engine: newSim(t, sim.Config{TTFT: ttft}),
				client: &http.Client{Transport: &http.Transport{DialContext: l.dial, Protocols: &p}},
			}
			r.run(t, worker.Config{Listener: l, Open: opener(r.engine)})
			r.base = "http://worker"
			<-r.Changed()
			begin := time.Now()
			resp := r.post(t, textPath, `{"model":"sim","prompt":"x","max_tokens":4,"stream":true}`)
			s := readStream(resp.Body)
			if !s.whole() || s.comments != 12 || time.Since(begin) != ttft || resp.Proto != proto {
				t.Errorf("%s: whole %v, %d comments, %v", resp.Proto, s.whole(), s.comments, time.Since(begin))
			}
			begin = time.Now()
			if got := wholeAnswer(t, r.post(t, textPath, `{"model":"sim","prompt":"x","max_tokens":4}`)); time.Since(begin) != ttft {
				t.Errorf("%+v after %v", got, time.Since(begin))
			}
			resp.Body.Close()
		})
	}
}

// Comments come again in every silence, and an error after them is an event.
func TestKeepAliveThenError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newPipeListener()
		r := &running{
			engine: newSim(t, sim.Config{}),
			client: &http.Client{Transport: &http.Transport{DialContext: l.dial}},
		}
		r.run(t, worker.Config{Listener: l, Open: opener(r.engine)})
		r.base = "http://worker"
		<-r.Changed()
		resp := r.post(t, textPath, `{"model":"sim","prompt":"x","max_tokens":9,"stream":true,"sim":{"ttft_ms":20000,"error_at":0}}`)
		if s := readStream(resp.Body); resp.StatusCode != 200 || s.comments != 1 || len(s.events) != 1 || s.whole() {
			t.Errorf("status %d, %+v", resp.StatusCode, s)
		}
		resp = r.post(t, textPath, `{"model":"sim","prompt":"x","max_tokens":9,"stream":true,"sim":{"stall_at":5,"stall_ms":46000}}`)
		if s := readStream(resp.Body); s.comments != 3 || !s.whole() {
			t.Errorf("%+v", s)
		}
	})
}

// A client that stops reading does not keep its sequence for ever.
func TestStuckReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newPipeListener()
		r := &running{engine: newSim(t, sim.Config{ITL: time.Millisecond})}
		r.run(t, worker.Config{Listener: l, Open: opener(r.engine)})
		<-r.Changed()
		conn, err := l.dial(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		body := `{"model":"sim","prompt":"x","max_tokens":5000,"stream":true,"sim":{"max":0}}`
		if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", textPath, len(body), body); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Second)
		if l := r.engine.Load(); l.Running != 1 {
			t.Errorf("a slow reader was given up too early: %+v", l)
		}
		time.Sleep(20 * time.Second)
		if l := r.engine.Load(); l.Running != 0 {
			t.Errorf("a stuck reader still holds its sequence: %+v", l)
		}
	})
}

// Two answers on one connection: the first leaves no deadline behind.
func TestConnectionIsReused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newPipeListener()
		dials := 0
		r := &running{engine: newSim(t, sim.Config{}), client: &http.Client{Transport: &http.Transport{
			DialContext: func(ctx context.Context, a, b string) (net.Conn, error) {
				dials++
				return l.dial(ctx, a, b)
			},
		}}}
		r.run(t, worker.Config{Listener: l, Open: opener(r.engine)})
		r.base = "http://worker"
		<-r.Changed()
		for range 3 {
			resp := r.post(t, textPath, `{"model":"sim","prompt":"x","max_tokens":9,"stream":true}`)
			if s := readStream(resp.Body); !s.whole() {
				t.Errorf("%+v", s)
			}
			resp.Body.Close()
			time.Sleep(time.Minute + time.Second)
		}
		if dials != 1 {
			t.Errorf("%d connections", dials)
		}
	})
}

// controlPlane records what a worker tells it.
type controlPlane struct {
	*httptest.Server
	puts    chan fleet.Registration
	deletes chan string // incarnations
	away    atomic.Bool
}

func newControlPlane(t *testing.T) *controlPlane {
	c := &controlPlane{puts: make(chan fleet.Registration, 1000), deletes: make(chan string, 10)}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c.away.Load() {
			http.Error(w, "away", http.StatusServiceUnavailable)
			return
		}
		if r.Method == http.MethodDelete {
			c.deletes <- r.URL.Query().Get("incarnation")
			return
		}
		var reg fleet.Registration
		if err := json.NewDecoder(r.Body).Decode(&reg); err != nil || r.URL.Path != "/v1/workers/"+reg.ID {
			http.Error(w, "bad", http.StatusBadRequest)
			return
		}
		c.puts <- reg
		_ = json.NewEncoder(w).Encode(fleet.Lease{TTLSeconds: 0.3})
	}))
	t.Cleanup(c.Close)
	return c
}

// next waits for a registration of the given state.
func (c *controlPlane) next(state string) fleet.Registration {
	for reg := range c.puts {
		if reg.State == state {
			return reg
		}
	}
	return fleet.Registration{}
}

func TestRegistration(t *testing.T) {
	cp := newControlPlane(t)
	cp.away.Store(true)
	release := make(chan struct{})
	r := &running{engine: newSim(t, sim.Config{})}
	r.run(t, worker.Config{
		ID: "w-7", Pool: "p", Zone: "z", Aliases: []string{"a"}, ControlPlane: cp.URL + "/", DrainTimeout: time.Hour,
		Open: func(context.Context, func(float64)) (worker.Engine, error) {
			<-release
			return r.engine, nil
		},
	})
	cp.away.Store(false)
	loading := cp.next(fleet.StateLoading)
	if err := loading.Validate(); err != nil || loading.Address != r.Addr() || loading.Zone != "z" || loading.Engine != "sim" || loading.PID == 0 {
		t.Errorf("%v: %+v", err, loading)
	}
	close(release)
	ready := cp.next(fleet.StateReady)
	if ready.Model != "sim" || ready.Fingerprint == "" || ready.Incarnation != loading.Incarnation || ready.Aliases[0] != "a" {
		t.Errorf("%+v", ready)
	}
	cp.next(fleet.StateReady) // a heartbeat
	resp := r.post(t, textPath, `{"model":"sim","prompt":"x","max_tokens":9,"stream":true,"sim":{"stall_at":5,"stall_ms":50}}`)
	r.stop()
	cp.next(fleet.StateDraining)
	if s := readStream(resp.Body); !s.whole() {
		t.Errorf("the stream ended with %v", s.err)
	}
	if got := <-cp.deletes; got == "" || got == "0" {
		t.Errorf("signed off incarnation %q", got)
	}
	if err := <-r.ended; err != nil {
		t.Error(err)
	}
}

// A control plane that is not there holds up neither service nor end.
func TestNoControlPlane(t *testing.T) {
	l := localListener(t)
	nobody := "http://" + l.Addr().String()
	l.Close()
	r := &running{engine: newSim(t, sim.Config{})}
	opened := make(chan struct{})
	r.run(t, worker.Config{ControlPlane: nobody, Open: func(context.Context, func(float64)) (worker.Engine, error) {
		close(opened)
		return r.engine, nil
	}})
	<-opened
	until(t, func() bool { return r.do(t, http.MethodGet, "/ready", "").StatusCode == 200 })
	decode[any](t, r.post(t, textPath, `{"model":"sim","prompt":"x"}`), 200)
	r.stop()
	if err := <-r.ended; err != nil {
		t.Error(err)
	}
}

func TestConfigIsChecked(t *testing.T) {
	good := worker.Config{ID: "w", Pool: "p", Open: opener(nil), Listen: "127.0.0.1:0"}
	for name, change := range map[string]func(*worker.Config){
		"no id":          func(c *worker.Config) { c.ID = "" },
		"bad id":         func(c *worker.Config) { c.ID = "a/b" },
		"no pool":        func(c *worker.Config) { c.Pool = "" },
		"no engine":      func(c *worker.Config) { c.Open = nil },
		"bad advertise":  func(c *worker.Config) { c.Advertise = "localhost:1" },
		"bad URL":        func(c *worker.Config) { c.ControlPlane = "127.0.0.1:1" },
		"bad listen":     func(c *worker.Config) { c.Listen = "nowhere" },
		"no address":     func(c *worker.Config) { c.Listen, c.ControlPlane = ":0", "http://x" },
		"negative limit": func(c *worker.Config) { c.MaxBody = -1 },
	} {
		c := good
		change(&c)
		if _, err := worker.New(c); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}
