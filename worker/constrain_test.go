package worker_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// grammarian is an engine that can follow grammars: it notes them.
type grammarian struct {
	*sim.Engine
	mu   sync.Mutex
	seen []worker.Params

	slow, left chan struct{} // see Constrain
}

// Constrain implements worker.Constrainer. "slow" takes until its client has left.
func (g *grammarian) Constrain(ctx context.Context, text string) error {
	if strings.Contains(text, "slow") {
		g.slow <- struct{}{}
		<-ctx.Done()
		g.left <- struct{}{}
		return context.Cause(ctx)
	}
	if strings.Contains(text, "unwanted") {
		return errors.New("too much of a good thing")
	}
	return nil
}

// Follow implements worker.Constrainer: an x breaks every grammar.
func (g *grammarian) Follow(p worker.Params, ids []int32) (bool, error) {
	if slices.Contains(ids, 'y') {
		return false, errors.New("out of order")
	}
	return p.Grammar != "" && !slices.Contains(ids, 'x'), nil
}

func (g *grammarian) Generate(ctx context.Context, ids []int32, p worker.Params) iter.Seq2[worker.Token, error] {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seen = append(g.seen, p)
	return g.Engine.Generate(ctx, ids, p)
}

func TestResponseFormatReachesTheEngine(t *testing.T) {
	e := &grammarian{Engine: newSim(t, sim.Config{})}
	r := &running{engine: e.Engine}
	r.run(t, worker.Config{Open: opener(e)})
	<-r.Changed()
	const ask = `{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":4,"ignore_eos":true`
	post := func(rest string) worker.Params {
		t.Helper()
		e.seen = nil
		decode[map[string]any](t, r.post(t, "/v1/chat/completions", ask+rest+`}`), 200)
		if len(e.seen) == 0 {
			t.Fatal("nothing was generated")
		}
		return e.seen[len(e.seen)-1]
	}
	if p := post(`,"response_format":{"type":"text"}`); p.Grammar != "" || !p.IgnoreEOS {
		t.Errorf("text: %+v", p)
	}
	if p := post(`,"response_format":{"type":"json_object"},"n":2`); !strings.Contains(p.Grammar, "root ::= object") || p.IgnoreEOS || len(e.seen) != 2 {
		t.Errorf("json_object: %+v", p)
	}
	if p := post(`,"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"const":7}}}`); !strings.Contains(p.Grammar, `"7"`) {
		t.Errorf("json_schema: %+v", p)
	}
	for body, param := range map[string]string{
		`{"name":"x","schema":{"const":"unwanted"}}`:                                  "response_format.json_schema.schema",
		`{"name":"x","schema":{"oneOf":[]}}`:                                          "response_format.json_schema.schema.oneOf",
		`{"name":"x","strict":true,"schema":{"type":"object","properties":{"a":{}}}}`: "response_format.json_schema.schema.additionalProperties",
	} {
		got := decode[apiError](t, r.post(t, "/v1/chat/completions", ask+`,"response_format":{"type":"json_schema","json_schema":`+body+`}}`), 400)
		if got.param() != param {
			t.Errorf("%s: param %q, want %q", body, got.param(), param)
		}
	}
}

// TestResumeBreaksTheGrammar: delivered tokens that no grammar allows are a 400 before
// anything is sent, and an engine that cannot say is no client's fault.
func TestResumeBreaksTheGrammar(t *testing.T) {
	e := &grammarian{Engine: newSim(t, sim.Config{})}
	r := &running{engine: e.Engine}
	r.run(t, worker.Config{Open: opener(e), RelaySecret: secret})
	<-r.Changed()
	for text, status := range map[string]int{"ab": http.StatusOK, "ax": http.StatusBadRequest, "ay": http.StatusInternalServerError} {
		body := fmt.Sprintf(`{"model":"sim","prompt":"a","n":2,"max_tokens":4,"stream":true,"response_format":{"type":"json_object"},"kvmesh":{"resume":{"stream":"s","attempt":2,"choices":[
			{"index":0,"token_ids":[97],"text_bytes":1},{"index":1,"token_ids":[%d,%d],"text_bytes":2}]}}}`, text[0], text[1])
		resp := r.do(t, http.MethodPost, textPath, body, names.Relay, secret)
		if resp.StatusCode != status {
			t.Errorf("%s: status %d, want %d", text, resp.StatusCode, status)
		}
		if status == http.StatusBadRequest {
			if e := decode[apiError](t, resp, status); e.param() != "kvmesh.resume" || !strings.Contains(e.Error.Message, "choice 1") {
				t.Errorf("%s: %+v", text, e)
			}
		}
	}
}

// TestClientLeavesTheCompiler: a grammar is made for a client that is there. One that
// leaves ends it, and is counted as one that left, not as a failure.
func TestClientLeavesTheCompiler(t *testing.T) {
	e := &grammarian{Engine: newSim(t, sim.Config{}), slow: make(chan struct{}), left: make(chan struct{})}
	r := &running{engine: e.Engine}
	r.run(t, worker.Config{Open: opener(e)})
	<-r.Changed()
	for _, stream := range []string{"false", "true"} {
		ctx, cancel := context.WithCancel(t.Context())
		body := `{"model":"sim","messages":[{"role":"user","content":"hi"}],"stream":` + stream + `,"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"const":"slow"}}}}`
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.base+"/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() {
			resp, err := http.DefaultClient.Do(req)
			if err == nil {
				resp.Body.Close()
			}
			ended <- err
		}()
		<-e.slow
		cancel()
		<-e.left
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("stream %s: the client has %v", stream, err)
		}
	}
	r.stop()
	if err := <-r.ended; err != nil { // when all requests are over
		t.Error(err)
	}
	r.ended <- nil
	if len(e.seen) > 0 {
		t.Error("something was generated")
	}
}

func TestResponseFormatWithoutGrammars(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	e := decode[apiError](t, r.post(t, "/v1/chat/completions",
		`{"model":"sim","messages":[{"role":"user","content":"hi"}],"response_format":{"type":"json_object"}}`), 400)
	if e.param() != "response_format" {
		t.Errorf("answer is %+v", e)
	}
}
