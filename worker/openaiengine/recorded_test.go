package openaiengine

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
)

// recorded is what a real server answered, in testdata/recorded; README.md there says
// which and how.
type recorded struct {
	folder  string
	model   string // as it lists it
	context int
	load    worker.Load
	ids     bool // its streams have token ids
}

func recordings() []recorded {
	return []recorded{
		{
			folder: "vllm-0.32.0", model: "gemma", context: 2048, ids: true,
			load: worker.Load{Running: 8, Waiting: 2, MaxRunning: 256, KVUsage: 0.0010986663411358677, PromptTokens: 1654, GenTokens: 1888},
		},
		{
			folder: "llama-server-11434", model: "gemma", context: 2048,
			load: worker.Load{Running: 2, Waiting: 1, MaxRunning: 2, KVUsage: 19.0 / 4096, PromptTokens: 47, GenTokens: 24},
		},
	}
}

// page reads a recorded answer.
func (r recorded) page(t *testing.T, name string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata/recorded", r.folder, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// pageOf names the recorded answers of a generation endpoint.
func pageOf(path string) string {
	switch path {
	case "/v1/completions":
		return "completions"
	case "/v1/chat/completions":
		return "chat"
	}
	return ""
}

// serve answers as the server did.
func (r recorded) serve(t *testing.T) *httptest.Server {
	pages := map[string]string{"/v1/models": "models.json", "/metrics": "metrics.txt", "/slots": "slots.json", "/apply-template": "apply-template.json", "/tokenize": "tokenize.json", "/detokenize": "detokenize.json"}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		name, kind := pages[req.URL.Path], "application/json"
		if page := pageOf(req.URL.Path); page != "" {
			var ask struct {
				Stream    bool
				MaxTokens int `json:"max_tokens"`
			}
			_ = json.NewDecoder(req.Body).Decode(&ask)
			name = page + ".json"
			switch {
			case ask.MaxTokens > 9999:
				name = "error.json"
				w.Header().Set("Content-Type", kind)
				w.WriteHeader(http.StatusBadRequest)
			case ask.Stream:
				name = page + ".sse"
			}
		}
		if strings.HasSuffix(name, ".sse") {
			kind = "text/event-stream"
		}
		raw, err := os.ReadFile(filepath.Join("testdata/recorded", r.folder, name))
		if name == "" || err != nil {
			http.NotFound(w, req)
			return
		}
		w.Header().Set("Content-Type", kind)
		_, _ = w.Write(raw)
	}))
	t.Cleanup(srv.Close)
	return srv
}

// TestRecordedServers: the engine reads the pages of real servers, and passes their
// answers on byte by byte.
func TestRecordedServers(t *testing.T) {
	for _, r := range recordings() {
		t.Run(r.folder, func(t *testing.T) {
			srv := r.serve(t)
			e, err := Open(t.Context(), Config{Upstream: srv.URL})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { e.Close() })
			if m := e.Model(); m.Name != r.model || m.ContextLen != r.context {
				t.Errorf("model %+v", m)
			}
			if got := e.Load(); got != r.load || e.Check() != nil {
				t.Errorf("load %+v, want %+v; %v", got, r.load, e.Check())
			}
			base := startWorker(t, &upstream{Server: srv}, Config{})
			for path, body := range map[string]string{
				"/v1/completions":      `{"model":"alias","prompt":"Once upon a time"`,
				"/v1/chat/completions": `{"model":"alias","messages":[{"role":"user","content":"Hello"}]`,
			} {
				page := pageOf(path)
				for more, name := range map[string]string{`}`: page + ".json", `,"stream":true}`: page + ".sse", `,"max_tokens":99999}`: "error.json"} {
					resp, got := do(t, "POST", base+path, body+more)
					if got != r.page(t, name) || (resp.StatusCode == 400) != (name == "error.json") {
						t.Errorf("%s%s: %d %s", body, more, resp.StatusCode, got)
					}
				}
				// A relay finds in the stream what it needs.
				_, sse := do(t, "POST", base+path, body+`,"stream":true}`)
				if got := tell(t, strings.NewReader(sse), 1000); !got.done || got.failed || got.reason != "length" || got.text == "" || (len(got.ids) == 8) != r.ids || got.usage.CompletionTokens != 8 {
					t.Errorf("%s: %+v", path, got)
				}
			}
		})
	}
}

// TestRecordedContinuation goes on with recorded streams: their text and ids come out in
// the form of the client's endpoint, with the usage of the whole answer.
func TestRecordedContinuation(t *testing.T) {
	for _, r := range recordings() {
		base := startWorker(t, &upstream{Server: r.serve(t)}, Config{})
		choice, mode := `{"index":0,"text":"a","text_bytes":1}`, "text"
		if r.ids {
			choice, mode = `{"index":0,"token_ids":[41,70,77,284],"text_bytes":5}`, "replayed"
		}
		for path, body := range map[string]string{
			"/v1/completions":      `{"model":"alias","prompt":"Once upon a time"`,
			"/v1/chat/completions": `{"model":"alias","messages":[{"role":"user","content":"Hello"}]`,
		} {
			_, sse := do(t, "POST", base+path, body+`,"max_tokens":50,"stream":true,"stream_options":{"include_usage":true},"kvmesh":{"token_ids":true,"resume":{"stream":"s","attempt":2,"choices":[`+choice+`]}}}`,
				"X-Kvmesh-Relay", "secret")
			got := tell(t, strings.NewReader(sse), 1000)
			if !got.done || got.mode != mode || got.reason != "length" || got.text == "" || got.usage.CompletionTokens < 9 || (len(got.ids) > 0) != r.ids {
				t.Errorf("%s, %s: %+v in %s", r.folder, path, got, sse)
			}
		}
	}
}
