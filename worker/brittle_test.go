package worker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// brittle is an engine that misbehaves in ways the simulator does not.
type brittle struct {
	*sim.Engine
	broken atomic.Bool
}

func (b *brittle) Check() error {
	if b.broken.Load() {
		return errors.New("out of memory")
	}
	return nil
}

func (b *brittle) Generate(ctx context.Context, ids []int32, p worker.Params) iter.Seq2[worker.Token, error] {
	return func(yield func(worker.Token, error) bool) {
		n := 0
		for tok, err := range b.Engine.Generate(ctx, ids, p) {
			if n == p.MaxTokens/2 {
				switch p.TopK {
				case 1:
					panic("boom")
				case 2:
					return
				case 3:
					yield(worker.Token{}, errors.New("secret detail"))
					return
				}
			}
			n++
			if !yield(tok, err) {
				return
			}
		}
	}
}

func TestBrittleEngine(t *testing.T) {
	var log strings.Builder
	b := &brittle{Engine: newSim(t, sim.Config{})}
	r := &running{}
	r.run(t, worker.Config{Open: opener(b), Log: slog.New(slog.NewTextHandler(&log, nil))})
	<-r.Changed()
	for kind, name := range []string{1: "panic", 2: "no finish", 3: "error"} {
		if name == "" {
			continue
		}
		body := `{"model":"sim","prompt":["x","y"],"max_tokens":20,"top_k":` + string(rune('0'+kind))
		resp := r.post(t, textPath, body+"}")
		if e := decode[apiError](t, resp, 500); e.Error.Type != "api_error" || strings.Contains(e.Error.Message, "secret") {
			t.Errorf("%s: %+v", name, e)
		}
		s := readStream(r.post(t, textPath, body+`,"stream":true}`).Body)
		if last := s.events[len(s.events)-1]; s.err != nil || !strings.Contains(last, `"api_error"`) || strings.Contains(last, "secret") {
			t.Errorf("%s: last event %s", name, last)
		}
	}
	decode[any](t, r.post(t, textPath, `{"model":"sim","prompt":"x"}`), 200)
	b.broken.Store(true)
	if s := decode[healthBody](t, r.do(t, http.MethodGet, "/health", ""), 503); s.Status != "failed" {
		t.Errorf("%+v", s)
	}
	if s := decode[healthBody](t, r.do(t, http.MethodGet, "/ready", ""), 503); s.Status != "not_ready" {
		t.Errorf("%+v", s)
	}
	r.stop()
	<-r.ended
	if !strings.Contains(log.String(), "boom") || !strings.Contains(log.String(), "secret detail") {
		t.Errorf("the log lacks the causes: %.300s", log.String())
	}
}

func (b *brittle) Tokenize(req *openai.Request, i int) ([]int32, error) {
	if req.TopK == 99 {
		panic("cannot tokenize")
	}
	return b.Engine.Tokenize(req, i)
}

func (b *brittle) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(200)
		panic("after the header")
	})
}

// A panic ends one request only: with a 500, or a cut connection when the
// response has begun.
func TestPanicInAHandler(t *testing.T) {
	r := &running{}
	r.run(t, worker.Config{Open: opener(&brittle{Engine: newSim(t, sim.Config{})})})
	<-r.Changed()
	e := decode[apiError](t, r.post(t, textPath, `{"model":"sim","prompt":"x","top_k":99}`), 500)
	if e.Error.Type != "api_error" || strings.Contains(e.Error.Message, "tokenize") {
		t.Errorf("%+v", e)
	}
	if resp, err := r.client.Get(r.base + "/sim"); err == nil {
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err == nil {
			t.Errorf("a broken answer looks whole: %d %q", resp.StatusCode, body)
		}
	}
	decode[any](t, r.post(t, textPath, `{"model":"sim","prompt":"x"}`), 200)
}

// A body that does not arrive ends in 408 instead of holding the handler, and one that
// is refused anyway in its refusal.
func TestSlowBody(t *testing.T) {
	t.Run("awaited", func(t *testing.T) { slowBody(t, textPath, http.StatusRequestTimeout) })
	t.Run("refused", func(t *testing.T) { slowBody(t, "/v1/responses", http.StatusNotFound) })
}

func slowBody(t *testing.T, path string, status int) {
	synctest.Test(t, func(t *testing.T) {
		l := newPipeListener()
		r := &running{
			engine: newSim(t, sim.Config{}),
			client: &http.Client{Transport: &http.Transport{DialContext: l.dial}},
		}
		r.run(t, worker.Config{Listener: l, Open: opener(r.engine), BodyTimeout: 20 * time.Second})
		<-r.Changed()
		body, unsent := io.Pipe()
		go func() {
			_, _ = io.WriteString(unsent, `{"model":"sim",`)
			time.Sleep(time.Hour)
			unsent.Close()
		}()
		begin := time.Now()
		resp, err := r.client.Post("http://worker"+path, "application/json", body)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		decode[apiError](t, resp, status)
		if d := time.Since(begin); d != 20*time.Second {
			t.Errorf("answered after %v", d)
		}
		time.Sleep(2 * time.Hour) // let the sender end
	})
}

// Many streams at once are all whole and leave nothing behind.
func TestManyStreams(t *testing.T) {
	r := start(t, sim.Config{MaxSeqs: 8}, worker.Config{})
	r.client.Transport = &http.Transport{MaxIdleConnsPerHost: 64}
	want := wholeAnswer(t, r.post(t, textPath, `{"model":"sim","prompt":"x","temperature":0,"max_tokens":50}`)).Texts[0]
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			body := fmt.Sprintf(`{"model":"sim","prompt":"x","temperature":0,"max_tokens":50,"stream":true,"user":"u%d"}`, i)
			resp, err := r.client.Post(r.base+textPath, "application/json", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if s := readStream(resp.Body); !s.whole() || s.joined(t, 1).Texts[0] != want {
				t.Errorf("stream %d: %v, %q", i, s.err, s.joined(t, 1).Texts[0])
			}
		})
	}
	wg.Wait()
	if l := r.engine.Load(); l.Running != 0 || l.Waiting != 0 || l.KVUsage != 0 {
		t.Errorf("load afterwards %+v", l)
	}
}

// BenchmarkLoopbackToken is one streamed token over a real connection, with the
// simulator as engine and the client reading it.
func BenchmarkLoopbackToken(b *testing.B) {
	r := start(b, sim.Config{ContextLen: 1 << 30}, worker.Config{})
	req := strings.NewReader(fmt.Sprintf(`{"model":"sim","prompt":"x","max_tokens":%d,"stream":true,"sim":{"max":0}}`, b.N))
	b.ReportAllocs()
	resp, err := r.client.Post(r.base+textPath, "application/json", req)
	if err != nil {
		b.Fatal(err)
	}
	defer resp.Body.Close()
	if n, err := io.Copy(io.Discard, resp.Body); err != nil || n < int64(b.N) {
		b.Fatal(n, err)
	}
}

// What Envoy took from a client never reaches the operators' paths, in any
// spelling that the worker would decode; what came to the port directly does.
func TestPrivatePathsFromTheEdge(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	for _, path := range []string{"/metrics", "/%6detrics", "/drain", "/%64rain", "/sim", "/ready"} {
		for _, edge := range []string{"", "1"} {
			resp := r.do(t, http.MethodGet, path, "", names.Edge, edge)
			_ = resp.Body.Close() // only the status counts
			if (resp.StatusCode == http.StatusNotFound) != (edge != "") {
				t.Errorf("GET %s with %s=%q: status %d", path, names.Edge, edge, resp.StatusCode)
			}
		}
	}
}

// A client's content type does not make its request a gRPC call: gRPC would answer
// 200 with an empty body.
func TestGRPCContentTypeOnOpenAIPath(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	var h2c http.Protocols
	h2c.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: &h2c}}
	defer client.CloseIdleConnections()
	resp, err := client.Post(r.base+textPath, "application/grpc", strings.NewReader(`{"model":"sim","prompt":"x","max_tokens":2}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got := decode[openai.Completion](t, resp, http.StatusOK); resp.ProtoMajor != 2 || len(got.Choices) != 1 || got.Choices[0].Text == "" {
		t.Errorf("HTTP/%d: %+v", resp.ProtoMajor, got)
	}
}
