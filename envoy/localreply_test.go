package envoy_test

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
)

// openAIError checks that an answer is an OpenAI error of that status.
func openAIError(t *testing.T, got reply, status int) {
	t.Helper()
	if got.status != status {
		t.Errorf("status %d, want %d (body %q)", got.status, status, got.body)
		return
	}
	if ct := got.header.Get("content-type"); ct != "application/json" {
		t.Errorf("content-type %q", ct)
	}
	var body struct {
		Error map[string]any `json:"error"`
	}
	if err := json.Unmarshal([]byte(got.body), &body); err != nil {
		t.Fatalf("body %q: %v", got.body, err)
	}
	for _, field := range []string{"message", "type"} {
		if s, _ := body.Error[field].(string); s == "" {
			t.Errorf("%s is missing in %q", field, got.body)
		}
	}
	if v, ok := body.Error["param"]; !ok || v != nil {
		t.Errorf("param is %v in %q, want null", v, got.body)
	}
	if v, ok := body.Error["code"]; !ok || (v == "service_unavailable") != (status == 503) || v != nil && status != 503 {
		t.Errorf("code is %v in %q", v, got.body)
	}
	if after := got.header.Get("retry-after"); (status == 503) != (after != "") {
		t.Errorf("Retry-After %q on %d", after, status)
	}
}

// raw sends bytes over a connection of its own and reads one HTTP answer.
func (m *mesh) raw(request string) reply {
	m.t.Helper()
	conn, err := net.Dial("tcp", m.cfg.Edge)
	if err != nil {
		m.t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		m.t.Fatal(err)
	}
	if _, err := io.WriteString(conn, request); err != nil {
		m.t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		m.t.Logf("read answer: %v", err)
		return reply{}
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		m.t.Fatal(err)
	}
	return reply{res.StatusCode, res.Header, string(body)}
}

func TestLocalRepliesAreOpenAIErrors(t *testing.T) {
	m := newMesh(t, setup{
		change: func(b *bootstrapv3.Bootstrap) {
			editEdge(t, b, func(h *hcmv3.HttpConnectionManager) {
				h.RequestHeadersTimeout = durationpb.New(200 * time.Millisecond)
			})
		},
		decide: func(s stream) error {
			body, err := askBody(s)
			if err != nil {
				return err
			}
			return s.Send(bodyAnswer(nil, "x-kvmesh-model-route", "quick", "x-kvmesh-pool", "main", "x-length", itoa(len(body))))
		},
	})
	for _, w := range m.workers {
		w.on(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	}
	t.Run("400 bad HTTP", func(t *testing.T) {
		openAIError(t, m.raw("GET / HTTP/1.1\r\nno colon\r\n\r\n"), 400)
	})
	t.Run("408 headers too slow", func(t *testing.T) {
		openAIError(t, m.raw("GET / HTTP/1.1\r\nhost: x\r\n"), 408)
	})
	t.Run("413 body too large, length known", func(t *testing.T) {
		openAIError(t, m.send("POST", "/v1/completions", strings.NewReader(strings.Repeat("x", 60<<20))), 413)
	})
	t.Run("413 body too large, chunked", func(t *testing.T) {
		body := io.LimitReader(endless{}, 60<<20)
		openAIError(t, m.send("POST", "/v1/completions", io.MultiReader(body)), 413)
	})
	t.Run("413 over HTTP/2", func(t *testing.T) {
		tr := h2c()
		defer tr.CloseIdleConnections()
		c := &http.Client{Transport: tr}
		openAIError(t, do(t, c, "POST", m.url+"/v1/x", strings.NewReader(strings.Repeat("x", 60<<20))), 413)
		// A flood of headers is a reset stream in HTTP/2; Envoy stays up.
		if got := do(t, c, "POST", m.url+"/v1/x", nil, "x-big", strings.Repeat("y", 70<<10)); got.status == 200 {
			t.Error("70 KiB of headers were accepted")
		}
	})
	t.Run("431 headers too large", func(t *testing.T) {
		openAIError(t, m.raw("GET / HTTP/1.1\r\nhost: x\r\nx-big: "+strings.Repeat("y", 70<<10)+"\r\n\r\n"), 431)
	})
	t.Run("431 too many headers", func(t *testing.T) {
		openAIError(t, m.raw("GET / HTTP/1.1\r\nhost: x\r\n"+strings.Repeat("x-a: b\r\n", 120)+"\r\n"), 431)
	})
	t.Run("504 worker silent", func(t *testing.T) {
		openAIError(t, m.send("POST", "/v1/completions", strings.NewReader("{}")), 504)
	})
	t.Run("503 no worker", func(t *testing.T) {
		for _, w := range m.workers {
			w.srv.Listener.Close()
			w.srv.CloseClientConnections()
		}
		openAIError(t, m.send("POST", "/v1/completions", strings.NewReader("{}")), 503)
	})
}

// A worker's or gateway's own error must pass untouched, whatever its status.
func TestForeignErrorsPassUntouched(t *testing.T) {
	const body = `{"error":{"message":"100% mine","type":"x","param":"model","code":"y"}}`
	m := newMesh(t, setup{decide: func(s stream) error {
		r, err := s.Recv()
		if err != nil {
			return err
		}
		switch path(r) {
		case "/plain":
			return s.Send(refuse(typev3.StatusCode_NotFound, body, ""))
		case "/details":
			return s.Send(refuse(typev3.StatusCode_ServiceUnavailable, body, "kvmesh_busy"))
		}
		return s.Send(proceed())
	}})
	for _, w := range m.workers {
		w.on(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = io.WriteString(w, body)
		})
	}
	for p, status := range map[string]int{"/plain": 404, "/details": 503, "/worker": 500} {
		if got := m.send("GET", p, nil); got.status != status || got.body != body {
			t.Errorf("%s: %d %q", p, got.status, got.body)
		}
	}
}

// editEdge changes the edge listener's HTTP settings.
func editEdge(t *testing.T, b *bootstrapv3.Bootstrap, edit func(*hcmv3.HttpConnectionManager)) {
	t.Helper()
	f := b.GetStaticResources().GetListeners()[0].GetFilterChains()[0].GetFilters()[0]
	h := &hcmv3.HttpConnectionManager{}
	if err := f.GetTypedConfig().UnmarshalTo(h); err != nil {
		t.Fatal(err)
	}
	edit(h)
	typed, err := anypb.New(h)
	if err != nil {
		t.Fatal(err)
	}
	f.ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: typed}
}

// endless reads as an endless line of zeros.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = '0'
	}
	return len(p), nil
}
