package envoy_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
)

// foreignPolicy is a pool of servers that are not ours.
const foreignPolicy = `
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: main}
spec:
  engine: openai
  static: [{url: "http://127.0.0.1:1"}]
`

// Errors of foreign servers reach the client in OpenAI's shape without the gateway.
func TestForeignErrorsAreShaped(t *testing.T) {
	m := newMesh(t, setup{policy: foreignPolicy, workers: 1})
	m.gateway.server.Stop()
	const own = `{ "error": {"message":"100% mine","type":"x","param":"model","code":"y"}}`
	for _, c := range []struct {
		name, contentType, body string
		status                  int
		want                    string // message, "" = the body unchanged
	}{
		{"OpenAI's own", "application/json", own, 500, ""},
		{"FastAPI", "application/json", `{"detail":"Not \u00e4 \"thing\""}`, 404, `The server answered with status 404: {"detail":"Not \u00e4 \"thing\""}`},
		{"FastAPI, plain words", "application/json", `{"detail":"Method Not Allowed"}`, 405, "The server answered with status 405: Method Not Allowed"},
		{"vLLM of old", "application/json; charset=utf-8", `{"object":"error","message":"too long","code":400}`, 400, "The server answered with status 400: too long"},
		{"text", "text/plain", "out of \"memory\"\n\x01", 429, "The server answered with status 429: out of \"memory\"\n\x01"},
		{"page", "text/html", "<html><body>Bad Gateway</body></html>", 503, "The server answered with status 503."},
		{"no body", "", "", 501, "The server answered with status 501."},
		{"no UTF-8", "text/plain", "a\xff\xfeb", 500, "The server answered with status 500: a?b"},
		{"gzip", "application/json", "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff{\"error\":{\"message\":\"x\"", 400, "The server answered with status 400."},
		{"gzip of a page", "text/html", "\x1f\x8b\x08\x00\x00\x00", 502, "The server answered with status 502."},
		{"plain by name", "application/json", `{"detail":"no"}`, 404, "The server answered with status 404: no"},
		{"long", "text/plain", strings.Repeat("x", 70000), 500, "The server answered with status 500: " + strings.Repeat("x", 1000)},
	} {
		m.workers[0].on(func(w http.ResponseWriter, _ *http.Request) {
			if c.contentType != "" {
				w.Header().Set("Content-Type", c.contentType)
			}
			switch {
			case strings.HasPrefix(c.name, "gzip"):
				w.Header().Set("Content-Encoding", "gzip")
			case strings.HasSuffix(c.name, "by name"):
				w.Header().Set("Content-Encoding", "identity")
			}
			w.WriteHeader(c.status)
			_, _ = io.WriteString(w, c.body)
		})
		got := m.send("POST", "/v1/chat/completions", strings.NewReader("{}"), "content-type", "application/json")
		if got.status != c.status || (got.header.Get("retry-after") != "") != (c.status == 429 || c.status == 503) {
			t.Errorf("%s: status %d, Retry-After %q", c.name, got.status, got.header.Get("retry-after"))
		}
		if c.want == "" {
			if got.body != c.body {
				t.Errorf("%s: body %q", c.name, got.body)
			}
			continue
		}
		var body struct {
			Error struct{ Message, Type string }
		}
		if err := json.Unmarshal([]byte(got.body), &body); err != nil || got.header.Get("content-type") != "application/json" || got.header.Get("content-encoding") != "" {
			t.Errorf("%s: %q: %v", c.name, got.body, err)
		}
		if body.Error.Message != c.want || body.Error.Type == "" {
			t.Errorf("%s: %q, want %q", c.name, got.body, c.want)
		}
	}
	// What is no error passes as it is, as it comes.
	m.workers[0].on(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "plain") })
	if got := m.send("GET", "/v1/x", nil); got.status != 200 || got.body != "plain" {
		t.Errorf("%d %q", got.status, got.body)
	}
}
