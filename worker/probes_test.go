package worker_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"iter"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/gpu"
	"github.com/kvmesh/kvmesh/worker/sim"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden writes down what probes answer and holds it against a file.
type golden struct {
	t *testing.T
	r *running
	b bytes.Buffer
}

// ask notes the answer to one request, under a line that says what was asked.
func (g *golden) ask(method, path string, header ...string) {
	g.t.Helper()
	resp := g.r.do(g.t, method, path, "", header...)
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	fmt.Fprintf(&g.b, "%s %s\n%d %s\n%s\n", method, strings.Join(append([]string{path}, header...), " "), resp.StatusCode, resp.Header.Get("Content-Type"), body)
}

// probes asks what load balancers, orchestrators and operators ask.
func (g *golden) probes(state string) {
	g.t.Helper()
	fmt.Fprintf(&g.b, "# %s\n\n", state)
	for _, path := range []string{"/health", "/ready", "/drain"} {
		g.ask(http.MethodGet, path)
	}
}

// check compares with the file, or writes it.
func (g *golden) check(name string) {
	g.t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, g.b.Bytes(), 0o644); err != nil {
			g.t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		g.t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), g.b.String()); diff != "" {
		g.t.Errorf("%s (go test ./worker -run Probes -update writes it anew):\n%s", path, diff)
	}
}

// fakeGPUs is a probe that says what a test wants.
type fakeGPUs struct{ devices atomic.Pointer[[]gpu.Device] }

func (f *fakeGPUs) Devices() []gpu.Device { return *f.devices.Load() }

// What the probes answer through a worker's life.
func TestProbes(t *testing.T) {
	release, half := make(chan struct{}), make(chan struct{})
	r := &running{engine: newSim(t, sim.Config{})}
	r.run(t, worker.Config{
		ID: "w-7", Pool: "main", Zone: "eu-1b", Model: "llama-3", DrainTimeout: time.Hour,
		Open: func(_ context.Context, progress func(float64)) (worker.Engine, error) {
			progress(41.5)
			close(half)
			<-release
			return r.engine, nil
		},
	})
	g := &golden{t: t, r: r}
	<-half
	g.probes("loading")
	close(release)
	<-r.Changed()
	g.probes("ready")

	stream := r.post(t, textPath, `{"model":"llama-3","prompt":"x","max_tokens":40,"stream":true,"sim":{"stall_at":20,"stall_ms":100}}`)
	if _, err := stream.Body.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(&g.b, "# drained while one request runs\n\n")
	g.ask(http.MethodPost, "/drain")
	<-r.Changed()
	g.ask(http.MethodPost, "/drain") // again is no error
	g.ask(http.MethodGet, "/ready")
	refused := r.post(t, textPath, `{"model":"llama-3","prompt":"x"}`)
	if e := decode[apiError](t, refused, 503); refused.Header.Get("Retry-After") == "" || !strings.Contains(e.Error.Message, "draining") {
		t.Errorf("%+v", e)
	}
	if s := readStream(stream.Body); s.err != nil || s.events[len(s.events)-1] != "[DONE]" {
		t.Errorf("the running stream ended with %v", s.err)
	}
	until(t, func() bool { return strings.Contains(body(t, r.do(t, http.MethodGet, "/drain", "")), `"drained"`) })
	g.probes("drained")
	g.ask(http.MethodDelete, "/drain")
	<-r.Changed()
	decode[any](t, r.post(t, textPath, `{"model":"llama-3","prompt":"x"}`), 200)

	fmt.Fprintf(&g.b, "# not from where operators are\n\n")
	for _, h := range []string{"X-Forwarded-For", "Origin"} {
		g.ask(http.MethodPost, "/drain", h, "http://there")
	}
	g.ask(http.MethodPut, "/drain")

	held := r.post(t, textPath, `{"model":"llama-3","prompt":"x","max_tokens":40,"stream":true,"sim":{"stall_at":20,"stall_ms":200}}`)
	if _, err := held.Body.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	r.stop()
	<-r.Changed()
	g.probes("shutting down")
	g.ask(http.MethodDelete, "/drain")
	g.check("probes")
	_ = readStream(held.Body)
}

// body reads an answer of any status.
func body(t testing.TB, resp *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// A worker with GPUs shows them, and takes no requests when one must not be used.
func TestProbesOfGPUs(t *testing.T) {
	probe := &fakeGPUs{}
	set := func(change func(*gpu.Device)) {
		d := []gpu.Device{
			{
				Index: 0, UUID: "GPU-5f1c", Name: "NVIDIA H200", MemoryUsedMB: 61234, MemoryTotalMB: 143771,
				Utilization: 0.75, TemperatureC: 61, PowerW: 345.5, Throttle: []string{"sw_power_cap"}, ECCTotal: 3, XID: 13,
			},
			{Index: 1, UUID: "GPU-77aa", MemoryTotalMB: 143771},
		}
		change(&d[1])
		probe.devices.Store(&d)
	}
	set(func(*gpu.Device) {})
	r := start(t, sim.Config{}, worker.Config{GPU: probe})
	g := &golden{t: t, r: r}
	g.probes("fine")
	set(func(d *gpu.Device) { d.XID, d.FatalXID, d.ECCTotal, d.ECC = 79, 79, 1, 1 })
	<-r.Changed()
	g.probes("one has fallen off the bus")
	set(func(*gpu.Device) {})
	<-r.Changed()
	g.ask(http.MethodGet, "/ready")
	g.check("gpus")

	page := body(t, r.do(t, http.MethodGet, "/metrics", ""))
	for _, want := range []string{
		`DCGM_FI_DEV_FB_USED{UUID="GPU-5f1c",gpu="0",modelName="NVIDIA H200"} 61234`,
		`DCGM_FI_DEV_FB_FREE{UUID="GPU-5f1c",gpu="0",modelName="NVIDIA H200"} 82537`,
		`DCGM_FI_DEV_GPU_UTIL{UUID="GPU-5f1c",gpu="0",modelName="NVIDIA H200"} 75`,
		`DCGM_FI_DEV_GPU_TEMP{UUID="GPU-5f1c",gpu="0",modelName="NVIDIA H200"} 61`,
		`DCGM_FI_DEV_POWER_USAGE{UUID="GPU-5f1c",gpu="0",modelName="NVIDIA H200"} 345.5`,
		`DCGM_FI_DEV_XID_ERRORS{UUID="GPU-5f1c",gpu="0",modelName="NVIDIA H200"} 13`,
		`DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{UUID="GPU-5f1c",gpu="0",modelName="NVIDIA H200"} 3`,
		`DCGM_FI_DEV_ROW_REMAP_FAILURE{UUID="GPU-77aa",gpu="1",modelName=""} 0`,
	} {
		if !strings.Contains(page, want+"\n") {
			t.Errorf("no metric %s", want)
		}
	}
}

// moody is an engine whose generation fails, hangs or works as a test says.
type moody struct {
	*sim.Engine
	mood atomic.Pointer[string]
}

func newMoody(t testing.TB, mood string) *moody {
	m := &moody{Engine: newSim(t, sim.Config{})}
	m.mood.Store(&mood)
	return m
}

func (m *moody) set(mood string) { m.mood.Store(&mood) }

func (m *moody) Generate(ctx context.Context, ids []int32, p worker.Params) iter.Seq2[worker.Token, error] {
	switch *m.mood.Load() {
	case "error":
		return func(yield func(worker.Token, error) bool) { yield(worker.Token{}, errors.New("CUDA error 700")) }
	case "nothing":
		return func(func(worker.Token, error) bool) {}
	case "panic":
		panic("index out of range")
	case "hang":
		return func(func(worker.Token, error) bool) { <-ctx.Done() }
	}
	return m.Engine.Generate(ctx, ids, p)
}

// A worker is ready only once its engine has generated a token, and registers as
// failed with the reason until then.
func TestSelfCheckBeforeReady(t *testing.T) {
	for mood, want := range map[string]string{
		"error": "CUDA error 700", "nothing": "generated nothing", "panic": "panicked", "hang": "no token within 1m0s",
	} {
		synctest.Test(t, func(t *testing.T) {
			m, r := newMoody(t, mood), &running{}
			r.pipe(t, worker.Config{Open: opener(m), SelfCheck: 30 * time.Second})
			time.Sleep(90 * time.Second)
			s := decode[healthBody](t, r.do(t, http.MethodGet, "/ready", ""), 503)
			if s.Status != "not_ready" || !strings.Contains(s.Reason, "self-check failed: ") || !strings.Contains(s.Reason, want) {
				t.Errorf("%s: %+v", mood, s)
			}
			decode[apiError](t, r.post(t, textPath, `{"model":"sim","prompt":"x"}`), 503)
			coldStart := func() string {
				_, value, _ := strings.Cut(body(t, r.do(t, http.MethodGet, "/metrics", "")), "\nkvmesh_worker_cold_start_seconds ")
				value, _, _ = strings.Cut(value, "\n")
				return value
			}
			if got := coldStart(); got != "0" {
				t.Errorf("%s: cold start of %q s before the first token", mood, got)
			}
			m.set("well")
			time.Sleep(66 * time.Second) // a check under way may take its minute
			if s := decode[healthBody](t, r.do(t, http.MethodGet, "/ready", ""), 200); s.Status != "ready" {
				t.Errorf("%s: recovered: %+v", mood, s)
			}
			if got, err := strconv.ParseFloat(coldStart(), 64); err != nil || got < 90 || got > 156 {
				t.Errorf("%s: a cold start of %v s, %v; want what it took until the token", mood, got, err)
			}
			decode[any](t, r.post(t, textPath, `{"model":"sim","prompt":"x"}`), 200)
		})
	}
}

// pipe runs a worker over an in-memory listener, for a bubble.
func (r *running) pipe(t testing.TB, cfg worker.Config) {
	l := newPipeListener()
	cfg.Listener = l
	r.client = &http.Client{Transport: &http.Transport{DialContext: l.dial}}
	r.run(t, cfg)
	r.base = "http://worker"
}

// An idle engine is checked every SelfCheck, a busy one is not; after three
// failures the process had better be started anew, and one success forgives all.
func TestSelfCheckWhenIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, r := newMoody(t, "well"), &running{}
		r.pipe(t, worker.Config{Open: opener(m), SelfCheck: 30 * time.Second})
		<-r.Changed()
		generated := func() uint64 { return m.Load().GenTokens }
		if n := generated(); n != 1 {
			t.Errorf("%d tokens before the worker was ready", n)
		}
		time.Sleep(95 * time.Second)
		if n := generated(); n != 4 {
			t.Errorf("%d checks in 95 idle seconds", n-1)
		}
		resp := r.post(t, textPath, `{"model":"sim","prompt":"x","max_tokens":9,"stream":true,"sim":{"stall_at":5,"stall_ms":300000}}`)
		if s := readStream(resp.Body); !s.whole() {
			t.Errorf("the stream ended with %v", s.err)
		}
		if n := generated(); n != 4+9 {
			t.Errorf("checked while busy: %d tokens", n)
		}

		m.set("error")
		time.Sleep(31 * time.Second)
		if s := decode[healthBody](t, r.do(t, http.MethodGet, "/ready", ""), 503); !strings.Contains(s.Reason, "CUDA error 700") {
			t.Errorf("%+v", s)
		}
		decode[healthBody](t, r.do(t, http.MethodGet, "/health", ""), 200)
		time.Sleep(15 * time.Second)
		decode[healthBody](t, r.do(t, http.MethodGet, "/health", ""), 503)
		m.set("well")
		time.Sleep(6 * time.Second)
		decode[healthBody](t, r.do(t, http.MethodGet, "/ready", ""), 200)
		decode[healthBody](t, r.do(t, http.MethodGet, "/health", ""), 200)
		page := body(t, r.do(t, http.MethodGet, "/metrics", ""))
		if !strings.Contains(page, "\nkvmesh_worker_self_checks_failed_total 4\n") {
			t.Errorf("failed checks are not counted: %.300s", page[strings.Index(page, "kvmesh_worker_self_checks"):])
		}
	})
}

// A worker that failed says so at the control plane, with the reason.
func TestFailureIsRegistered(t *testing.T) {
	cp := newControlPlane(t)
	m, r := newMoody(t, "error"), &running{}
	r.run(t, worker.Config{Open: opener(m), ControlPlane: cp.URL, SelfCheck: 10 * time.Millisecond})
	failed := cp.next(fleet.StateFailed)
	if err := failed.Validate(); err != nil || !strings.Contains(failed.Reason, "CUDA error 700") {
		t.Errorf("%v: %+v", err, failed)
	}
	m.set("well")
	if ready := cp.next(fleet.StateReady); ready.Reason != "" {
		t.Errorf("%+v", ready)
	}
}

// limping is a keeper of KV that keeps none.
type limping struct{}

func (limping) Session(worker.Model, worker.KVStream) worker.KVSession { return nil }
func (limping) Degraded() string                                       { return "the KV store has not answered for 3s" }

// A worker whose KV store is away says so where it is probed, and serves.
func TestDegradedIsTold(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{KV: limping{}})
	for _, path := range []string{"/ready", "/health"} {
		resp := r.do(t, http.MethodGet, path, "")
		if got := body(t, resp); resp.StatusCode != 200 || !strings.Contains(got, `"degraded":"the KV store has not answered for 3s"`) {
			t.Errorf("%s: %d %s", path, resp.StatusCode, got)
		}
	}
	decode[any](t, r.post(t, textPath, `{"model":"sim","prompt":"x"}`), 200)
}
