package e2e

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// lettered is an OpenAI-compatible server whose model says a letter at a time, each a
// hash of all before it: one that is lost, doubled or changed changes all that follow.
type lettered struct {
	*httptest.Server
	ids bool // it takes and gives token ids, a byte each, as vLLM does
}

// say is what the model says after a prompt.
func say(prompt string, n int) string {
	for range n {
		h := fnv.New32a()
		_, _ = io.WriteString(h, prompt)
		prompt += string(rune('a' + h.Sum32()%26))
	}
	return prompt[len(prompt)-n:]
}

func newLettered(t *testing.T, ids bool) *lettered {
	s := &lettered{ids: ids}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model","max_model_len":4096}]}`)
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		if ids {
			fmt.Fprint(w, "vllm:num_requests_running 0\n")
		} else {
			fmt.Fprint(w, "llamacpp:requests_processing 0\n")
		}
	})
	if ids {
		mux.HandleFunc("POST /tokenize", func(w http.ResponseWriter, r *http.Request) {
			_ = json.NewEncoder(w).Encode(openai.Tokenized{Tokens: numbers(wantedOf(r).Prompt)})
		})
		mux.HandleFunc("POST /detokenize", func(w http.ResponseWriter, r *http.Request) {
			_ = json.NewEncoder(w).Encode(openai.Detokenized{Prompt: letters(wantedOf(r).Tokens)})
		})
	}
	mux.HandleFunc("POST /v1/completions", s.complete)
	s.Server = httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s
}

// wanted is a request to a lettered server; a prompt of ids is read as its letters.
type wanted struct {
	Prompt    string
	Tokens    []int32
	MaxTokens int
	Stream    bool
	IDs       bool
}

func wantedOf(r *http.Request) wanted {
	var body struct {
		Prompt    json.RawMessage `json:"prompt"`
		Tokens    []int32         `json:"tokens"`
		MaxTokens int             `json:"max_tokens"`
		Stream    bool            `json:"stream"`
		IDs       bool            `json:"return_token_ids"`
	}
	_ = json.NewDecoder(r.Body).Decode(&body) // what is not there is empty, and the answer shows it
	out := wanted{Tokens: body.Tokens, MaxTokens: body.MaxTokens, Stream: body.Stream, IDs: body.IDs}
	var ids []int32
	if json.Unmarshal(body.Prompt, &out.Prompt) != nil && json.Unmarshal(body.Prompt, &ids) == nil {
		out.Prompt = letters(ids)
	}
	return out
}

func letters(ids []int32) string {
	b := make([]byte, len(ids))
	for i, id := range ids {
		b[i] = byte(id)
	}
	return string(b)
}

func numbers(text string) []int32 {
	out := make([]int32, len(text))
	for i := range len(text) {
		out[i] = int32(text[i])
	}
	return out
}

func (s *lettered) complete(w http.ResponseWriter, r *http.Request) {
	a := wantedOf(r)
	said := say(a.Prompt, a.MaxTokens)
	usage := fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}`, len(a.Prompt), len(said), len(a.Prompt)+len(said))
	if !a.Stream {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":%q,"finish_reason":"length"}],"usage":%s}`, said, usage)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	const head = `data: {"id":"c","object":"text_completion","created":1,"model":"m",`
	for i := range len(said) {
		ids := ""
		if s.ids && a.IDs {
			ids = fmt.Sprintf(`,"token_ids":[%d]`, said[i])
		}
		fmt.Fprintf(w, head+`"choices":[{"index":0,"text":%q,"finish_reason":null%s}]}`+"\n\n", said[i:i+1], ids)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
	fmt.Fprint(w, head+`"choices":[{"index":0,"text":"","finish_reason":"length"}]}`+"\n\n")
	fmt.Fprintf(w, head+`"choices":[],"usage":%s}`+"\n\ndata: [DONE]\n\n", usage)
}

// cutStream asks for a stream, by a body with more fields, has its server or worker ended after some letters, and
// reads the rest: the text, whether it is whole, and whether it ended in an error event.
func cutStream(t *testing.T, m *testmesh.Mesh, model, fields string, end func(worker string)) (text string, whole, failed bool) {
	t.Helper()
	body := fmt.Sprintf(`{"model":%q,"prompt":"Once","max_tokens":100,"stream":true%s}`, model, fields)
	resp, err := http.Post(m.OpenAI+"/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		all, _ := io.ReadAll(resp.Body) // what there is of it
		t.Fatalf("%s: status %d, %s", model, resp.StatusCode, all)
	}
	events := openai.NewEventReader(resp.Body, 1<<20)
	ended, finished := false, false
	for {
		ev, err := events.Next()
		if err != nil {
			return text, false, failed // without [DONE]
		}
		if ev.Done() {
			return text, finished, failed
		}
		var c struct {
			openai.Chunk
			Error json.RawMessage `json:"error"`
		}
		if err := json.Unmarshal(ev.Data, &c); err != nil {
			t.Fatalf("%v in %s", err, ev.Data)
		}
		failed = failed || len(c.Error) > 0
		for _, ch := range c.Choices {
			text += ch.Added()
			finished = finished || ch.FinishReason != nil && *ch.FinishReason == "length"
		}
		if !ended && len(text) >= 10 {
			ended = true
			end(resp.Header.Get(names.Worker))
		}
	}
}

// TestGuaranteeByEngine holds the README's table of what an answer gets when its worker
// dies after the first token, for servers that are not ours: one row each.
func TestGuaranteeByEngine(t *testing.T) {
	t.Setenv("KVMESH_RELAY_SECRET", relaySecret)
	plain, ids := newLettered(t, false), newLettered(t, true)
	one, two := newLettered(t, true), newLettered(t, true)
	m := testmesh.StartPolicy(t, bin, fmt.Sprintf(`
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: plain}
spec: {engine: openai, model: plain, health: {check: /ready}}
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: ids}
spec: {engine: openai, model: ids, health: {check: /ready}}
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: listed}
spec: {engine: openai, model: m, static: [{id: one, url: %q}, {id: two, url: %q}]}
`, one.URL, two.URL))
	sidecars := map[string]*process{}
	for pool, server := range map[string]*lettered{"plain": plain, "ids": ids} {
		for _, n := range []string{"-1", "-2", "-3"} { // the third, as two streams lose theirs
			sidecars[pool+n] = launch(t, pool+n, "--pool", pool, "--engine", "openai", "--upstream", server.URL, "--model", pool,
				"--upstream-model", "m", "--control-plane", strings.TrimPrefix(m.API, "http://"))
		}
	}
	testmesh.Eventually(t, "all serve", time.Minute, func() bool {
		n := 0
		for _, w := range m.Workers(t) {
			if w.Status == "HEALTHY" {
				n++
			}
		}
		return n == 8
	})
	kill := func(worker string) {
		if sidecars[worker] == nil {
			t.Fatalf("the answer names worker %q", worker)
		}
		sidecars[worker].kill()
	}
	for _, c := range []struct {
		name, model, fields, kind string
		end                       func(worker string)
	}{
		{"sidecars, no token ids, constrained", "plain", `,"grammar":"root ::= [a-z]+"`, "", kill},
		{"sidecars, token ids, constrained", "ids", `,"structured_outputs":{"regex":"[a-z]+"}`, "", kill},
		{"sidecars, no token ids", "plain", "", "text", kill},
		{"sidecars, token ids", "ids", "", "replayed", kill},
		{"listed as they are", "m", "", "", func(worker string) {
			map[string]*lettered{"one": one, "two": two}[worker].CloseClientConnections()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			text, whole, failed := cutStream(t, m, c.model, c.fields, c.end)
			want := say("Once", 100)
			if c.kind == "" {
				if whole || !failed || text == "" || !strings.HasPrefix(want, text) {
					t.Errorf("%q, whole %v, error %v: want an error event after the beginning of %q", text, whole, failed, want)
				}
				return
			}
			if text != want || !whole || failed {
				t.Errorf("%q, whole %v, error %v, want all of %q", text, whole, failed, want)
			}
			moved := 0.0
			for _, cause := range []string{"lost", "stall", "timeout", "unhealthy"} { // on a busy machine a silence may come first
				moved += metricAt(t, m.Gateway(t)+"/metrics", `kvmesh_relay_moves_total{cause="`+cause+`",kind="`+c.kind+`"`)
			}
			if moved < 1 {
				t.Errorf("no move of kind %s is counted", c.kind)
			}
		})
	}
}
