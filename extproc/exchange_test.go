package extproc

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/policy"
)

const policyYAML = `
apiVersion: kvmesh.io/v1alpha1
kind: Mesh
spec: {maxBody: 1000, heldBodies: 2000, defaultPool: big}
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: big}
spec: {engine: sim, model: big-1}
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: lone}
spec: {engine: sim, model: lone-1}
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  models: [chat, big-1]
  tiers: [{pool: big, maxTokens: 100}]
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: lone}
spec:
  models: [lone]
  relay: false
  tiers: [{pool: lone}]
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: dead}
spec:
  models: [dead]
  tiers: [{pool: lone, model: dead}]
`

var t0 = time.Unix(1_700_000_000, 0)

func fleet() []*fleetpb.Worker {
	return []*fleetpb.Worker{
		{Id: "b1", Address: "10.0.0.1:80", Pool: "big", Incarnation: 1, Status: 1, Weight: 10, Load: &fleetpb.Load{Running: 1}},
		{Id: "b2", Address: "10.0.0.2:80", Pool: "big", Incarnation: 1, Status: 1, Weight: 10, Load: &fleetpb.Load{Running: 2}},
		{Id: "l1", Address: "10.0.0.3:80", Pool: "lone", Incarnation: 1, Status: 1, Weight: 10},
	}
}

// newServer makes a server of the given policy that knows the workers ws; nil
// means that no fleet was received.
func newServer(t testing.TB, yaml string, ws []*fleetpb.Worker) *Server {
	t.Helper()
	set, err := policy.Parse(policy.File{Name: "test.yaml", Data: []byte(yaml)})
	if err != nil {
		t.Fatal(err)
	}
	p, err := picker.New(picker.Config{Policy: set})
	if err != nil {
		t.Fatal(err)
	}
	if ws != nil {
		p.Update(ws)
	}
	s, err := New(Config{
		Policy: set, Picker: p, Held: semaphore.NewWeighted(int64(set.Mesh.HeldBodies)),
		Registerer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler),
		NewStream: func() string { return "stream-1" },
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// headersMsg is a message of request headers; h are name, value pairs.
func headersMsg(end bool, method, path string, h ...string) *extprocv3.ProcessingRequest {
	hs := []*corev3.HeaderValue{{Key: ":method", RawValue: []byte(method)}, {Key: ":path", RawValue: []byte(path)}}
	for i := 0; i < len(h); i += 2 {
		hs = append(hs, &corev3.HeaderValue{Key: h[i], RawValue: []byte(h[i+1])})
	}
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{
		RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: hs}, EndOfStream: end},
	}}
}

func bodyMsg(body string) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
		RequestBody: &extprocv3.HttpBody{Body: []byte(body), EndOfStream: true},
	}}
}

// must steps and fails the test on an error.
func must(t testing.TB, e *Exchange, m *extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse {
	t.Helper()
	resp, err := e.Step(t0, m)
	if err != nil {
		t.Fatalf("Step(%v): %v", m, err)
	}
	if _, err := proto.Marshal(resp); err != nil {
		t.Fatalf("answer cannot be sent: %v", err)
	}
	return resp
}

// generate runs headers and body of a POST and returns the last answer.
func generate(t testing.TB, s *Server, path, body string, h ...string) *extprocv3.ProcessingResponse {
	t.Helper()
	e := s.NewExchange()
	defer e.Finish()
	resp := must(t, e, headersMsg(false, "POST", path, append(h, "content-length", strconv.Itoa(len(body)))...))
	if resp.GetImmediateResponse() != nil {
		return resp
	}
	if got := resp.GetModeOverride().GetRequestBodyMode(); got != filterv3.ProcessingMode_BUFFERED {
		t.Fatalf("body mode %v, want BUFFERED", got)
	}
	return must(t, e, bodyMsg(body))
}

func setHeaders(m *extprocv3.HeaderMutation) map[string]string {
	out := map[string]string{}
	for _, h := range m.GetSetHeaders() {
		out[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	return out
}

func TestGenerateToRelay(t *testing.T) {
	s := newServer(t, policyYAML, fleet())
	body := `{"model":"chat","messages":[{"role":"user","content":"hi"}],"kvmesh":{"resume":{}}}`
	want := `{"max_tokens":100,"model":"big-1","messages":[{"role":"user","content":"hi"}]}`
	resp := generate(t, s, "/v1/chat/completions?x=y", body)
	c := resp.GetRequestBody().GetResponse()
	if got := string(c.GetBodyMutation().GetBody()); got != want {
		t.Errorf("body %s, want %s", got, want)
	}
	if !c.GetClearRouteCache() {
		t.Error("the route is not chosen again")
	}
	if diff := cmp.Diff(map[string]string{
		names.Destination: "10.0.0.1:80,10.0.0.2:80", names.Pool: "big", names.ModelRoute: "chat",
		names.Stream: "stream-1", names.Route: names.RouteRelay, "content-length": strconv.Itoa(len(want)),
	}, setHeaders(c.GetHeaderMutation())); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]any{
		"envoy.lb": map[string]any{names.Destination: "10.0.0.1:80,10.0.0.2:80"},
		"kvmesh":   map[string]any{"model": "chat", "pool": "big", "route": "chat"},
	}, resp.GetDynamicMetadata().AsMap()); diff != "" {
		t.Error(diff)
	}
	if got := testutil.ToFloat64(s.metrics.requests.WithLabelValues(outcomeRelay)); got != 1 {
		t.Errorf("counted %v requests to the relay, want 1", got)
	}
}

// TestGenerateUnchanged: a body that needs no change is not sent back, and a route
// without relay stays on the direct path.
func TestGenerateUnchanged(t *testing.T) {
	s := newServer(t, policyYAML, fleet())
	for _, body := range []string{
		`{"model":"big-1","prompt":"p","max_tokens":99}`,
		`{"model":"big-1","prompt":"p"}`, // the default of 16 is below the limit
	} {
		c := generate(t, s, "/v1/completions", body).GetRequestBody().GetResponse()
		set := setHeaders(c.GetHeaderMutation())
		if c.GetBodyMutation() != nil || set["content-length"] != "" {
			t.Errorf("%s: changed to %q", body, c.GetBodyMutation().GetBody())
		}
		if set[names.Pool] != "big" || set[names.Route] != names.RouteRelay {
			t.Errorf("%s: sent with %v", body, set)
		}
	}
	set := setHeaders(generate(t, s, "/v1/completions", `{"model":"lone","prompt":"p"}`).GetRequestBody().GetResponse().GetHeaderMutation())
	if set[names.Route] != "" || set[names.Pool] != "lone" || set[names.Destination] != "10.0.0.3:80" {
		t.Errorf("route without relay: sent with %v", set)
	}
}

// TestChunked: without content-length the body decides alone, and a changed body
// gets none either.
func TestChunked(t *testing.T) {
	s := newServer(t, policyYAML, fleet())
	e := s.NewExchange()
	must(t, e, headersMsg(false, "POST", "/v1/completions"))
	c := must(t, e, bodyMsg(`{"model":"chat","prompt":"p"}`)).GetRequestBody().GetResponse()
	if set := setHeaders(c.GetHeaderMutation()); c.GetBodyMutation() == nil || set["content-length"] != "" {
		t.Errorf("body %v, headers %v", c.GetBodyMutation(), set)
	}
	if e.held == 0 {
		t.Error("the body is not counted")
	}
	e = s.NewExchange()
	must(t, e, headersMsg(false, "POST", "/v1/completions"))
	resp := must(t, e, bodyMsg(`{"model":"`+strings.Repeat("x", 1000)+`"}`))
	if got := resp.GetImmediateResponse().GetStatus().GetCode(); got != 413 {
		t.Errorf("chunked body over the limit: %v, want 413", got)
	}
}

func TestRefusals(t *testing.T) {
	many := strings.Repeat("a", 2000)
	for _, tc := range []struct {
		name, method, path, body string
		headers                  []string
		code                     int
		want                     string // in the message
		param                    string
		extra                    [2]string // header name and value
	}{
		{"wrong method", "GET", "/v1/completions", "", nil, 405, "POST", "", [2]string{"allow", "POST"}},
		{"delete", "DELETE", "/v1/chat/completions", "", nil, 405, "POST", "", [2]string{"allow", "POST"}},
		{"no body", "POST", "/v1/completions", "", nil, 400, "missing", "", [2]string{}},
		{"too large", "POST", "/v1/completions", many, nil, 413, "1000 bytes", "", [2]string{}},
		{"compressed", "POST", "/v1/completions", "x", []string{"content-encoding", "gzip"}, 415, "ompressed", "", [2]string{}},
		{"malformed", "POST", "/v1/completions", `{"model"`, nil, 400, "JSON", "", [2]string{}},
		{"not UTF-8", "POST", "/v1/completions", "{\"model\":\"\xff\",\"prompt\":\"p\"}", nil, 400, "JSON", "", [2]string{}},
		{"no model", "POST", "/v1/completions", `{"prompt":"p"}`, nil, 400, "model", "model", [2]string{}},
		{"wrong type", "POST", "/v1/completions", `{"model":"chat","prompt":"p","max_tokens":"1"}`, nil, 400, "integer", "max_tokens", [2]string{}},
		{"negative", "POST", "/v1/completions", `{"model":"chat","prompt":"p","max_tokens":-1}`, nil, 400, "-1", "max_tokens", [2]string{}},
		{"unknown model", "POST", "/v1/completions", `{"model":"nope","prompt":"p"}`, nil, 404, "nope", "model", [2]string{}},
		{"no worker", "POST", "/v1/completions", `{"model":"dead","prompt":"p"}`, nil, 503, "No worker", "", [2]string{"retry-after", "1"}},
		{"unknown card", "GET", "/v1/models/nope", "", nil, 404, "nope", "model", [2]string{}},
		{"invalid escape", "GET", "/a%zz", "", nil, 400, "", "", [2]string{}},
		{"cut escape", "GET", "/v1/models%4?a=b", "", nil, 400, "", "", [2]string{}},
		{"path not UTF-8", "PUT\xff", "/v1/completions?\xff", "", nil, 405, "POST", "", [2]string{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ws := fleet()
			if tc.name == "no worker" {
				ws = ws[:2]
			}
			s := newServer(t, policyYAML, ws)
			e := s.NewExchange()
			h := append(tc.headers, "content-length", strconv.Itoa(len(tc.body)))
			resp := must(t, e, headersMsg(tc.body == "", tc.method, tc.path, h...))
			for resp.GetImmediateResponse() == nil && resp.GetResponse() == nil { // put off
				resp = must(t, e, bodyMsg(tc.body))
			}
			if resp.GetImmediateResponse() == nil {
				resp = must(t, e, bodyMsg(tc.body))
			}
			im := resp.GetImmediateResponse()
			var body struct {
				Error struct{ Message, Type, Param string }
			}
			if err := json.Unmarshal(im.GetBody(), &body); err != nil {
				t.Fatalf("answer %v: %v", resp, err)
			}
			set := setHeaders(im.GetHeaders())
			if int(im.GetStatus().GetCode()) != tc.code || !strings.Contains(body.Error.Message, tc.want) || body.Error.Param != tc.param {
				t.Errorf("%v %s, want %d with %q and param %q", im.GetStatus().GetCode(), im.GetBody(), tc.code, tc.want, tc.param)
			}
			if set["content-type"] != "application/json" || !strings.HasPrefix(im.GetDetails(), "kvmesh") || tc.extra[0] != "" && set[tc.extra[0]] != tc.extra[1] {
				t.Errorf("headers %v, details %q; want %v", set, im.GetDetails(), tc.extra)
			}
			if again := must(t, e, bodyMsg("x")); again != nil || !e.Done() {
				t.Errorf("after the answer: %v", again)
			}
		})
	}
}

// TestHeldBodies: the budget of held bodies refuses what does not fit, and gets
// everything back.
func TestHeldBodies(t *testing.T) {
	s := newServer(t, policyYAML, fleet())
	full := `{"model":"chat","prompt":"` + strings.Repeat("p", 972) + `"}`
	first, second := s.NewExchange(), s.NewExchange()
	for _, e := range []*Exchange{first, second} {
		must(t, e, headersMsg(false, "POST", "/v1/completions", "content-length", strconv.Itoa(len(full))))
	}
	if resp := generate(t, s, "/v1/completions", `{"model":"chat","prompt":"p"}`); resp.GetImmediateResponse() != nil {
		t.Errorf("bodies that only were announced keep others out: %v", resp)
	}
	must(t, first, bodyMsg(full))
	must(t, second, bodyMsg(full))
	resp := generate(t, s, "/v1/completions", `{"model":"chat","prompt":"p"}`)
	if im := resp.GetImmediateResponse(); im.GetStatus().GetCode() != 503 || setHeaders(im.GetHeaders())["retry-after"] == "" {
		t.Errorf("third body: %v, want 503 with Retry-After", resp)
	}
	first.Finish()
	first.Finish()
	if resp := generate(t, s, "/v1/completions", `{"model":"chat","prompt":"p"}`); resp.GetImmediateResponse() != nil {
		t.Errorf("after one finished: %v", resp)
	}
	second.Finish()
	if !s.cfg.Held.TryAcquire(2000) {
		t.Error("not all was given back")
	}
}

func TestPassthrough(t *testing.T) {
	s := newServer(t, policyYAML, fleet())
	for _, tc := range []struct{ method, path, class string }{
		{"POST", "/v1/responses", "/v1/responses"},
		{"POST", "/v1/audio/speech", "/v1/audio"},
		{"GET", "/v1/responsesx", "other"},
		{"POST", "/v1/completions/", "other"},
		{"POST", "/v1/models", "/v1/models"},
		{"POST", "/\xff", "other"},
	} {
		before := testutil.ToFloat64(s.metrics.passthrough.WithLabelValues(tc.class))
		e := s.NewExchange()
		resp := must(t, e, headersMsg(false, tc.method, tc.path, names.SessionToken, "\xff\xfe"))
		set := setHeaders(resp.GetRequestHeaders().GetResponse().GetHeaderMutation())
		if resp.GetModeOverride() != nil || set[names.Route] != "" || strings.Count(set[names.Destination], ",") != 1 {
			t.Errorf("%s: %v", tc.path, resp)
		}
		lb := resp.GetDynamicMetadata().AsMap()["envoy.lb"]
		if diff := cmp.Diff(map[string]any{names.Destination: set[names.Destination]}, lb); diff != "" {
			t.Errorf("%s: %s", tc.path, diff)
		}
		if got := testutil.ToFloat64(s.metrics.passthrough.WithLabelValues(tc.class)); got != before+1 {
			t.Errorf("%s is not counted as %s", tc.path, tc.class)
		}
	}
}

func TestSessionKey(t *testing.T) {
	s := newServer(t, policyYAML, fleet())
	firstOf := func(h ...string) string {
		e := s.NewExchange()
		resp := must(t, e, headersMsg(false, "POST", "/v1/responses", h...))
		list := setHeaders(resp.GetRequestHeaders().GetResponse().GetHeaderMutation())[names.Destination]
		first, _, _ := strings.Cut(list, ",")
		return first
	}
	seen := map[string]bool{}
	for i := range 20 {
		key := fmt.Sprint("user ", i)
		home := firstOf(names.SessionToken, key)
		seen[home] = true
		if got := firstOf(names.SessionID, key); got != home {
			t.Errorf("%s by id goes to %s, by token to %s", key, got, home)
		}
		if got := firstOf(names.SessionID, "other", names.SessionToken, key); got != home {
			t.Errorf("%s: the id wins over the token", key)
		}
	}
	if len(seen) != 2 {
		t.Errorf("20 sessions use %d of 2 workers", len(seen))
	}
}

func TestModels(t *testing.T) {
	s := newServer(t, policyYAML, nil)
	e := s.NewExchange()
	im := must(t, e, headersMsg(true, "GET", "/v1/models?limit=1")).GetImmediateResponse()
	want := `{"object":"list","data":[` +
		`{"id":"chat","object":"model","created":1735689600,"owned_by":"kvmesh"},` +
		`{"id":"big-1","object":"model","created":1735689600,"owned_by":"kvmesh"},` +
		`{"id":"lone","object":"model","created":1735689600,"owned_by":"kvmesh"},` +
		`{"id":"dead","object":"model","created":1735689600,"owned_by":"kvmesh"}]}`
	if got := string(im.GetBody()); im.GetStatus().GetCode() != 200 || got != want {
		t.Errorf("%v %s, want %s", im.GetStatus(), got, want)
	}
	im = must(t, s.NewExchange(), headersMsg(true, "GET", "/v1/models/big%2D1")).GetImmediateResponse()
	if want := `{"id":"big-1","object":"model","created":1735689600,"owned_by":"kvmesh"}`; string(im.GetBody()) != want {
		t.Errorf("one model: %s, want %s", im.GetBody(), want)
	}
	star := strings.Replace(policyYAML, "models: [dead]", `models: ["*"]`, 1)
	resp := must(t, newServer(t, star, fleet()).NewExchange(), headersMsg(true, "GET", "/v1/models"))
	if resp.GetRequestHeaders() == nil {
		t.Errorf("with a route for every name: %v, want the workers to answer", resp)
	}
}

// TestNoFleet: before the first fleet everything passes unchanged.
func TestNoFleet(t *testing.T) {
	s := newServer(t, policyYAML, nil)
	resp := generate(t, s, "/v1/completions", `{"model":"chat","prompt":"p"}`)
	want := continueBody(&extprocv3.CommonResponse{})
	if diff := cmp.Diff(want, resp, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	resp = must(t, s.NewExchange(), headersMsg(true, "POST", "/v1/responses"))
	if m := resp.GetRequestHeaders().GetResponse(); resp.GetRequestHeaders() == nil || m.GetHeaderMutation() != nil {
		t.Errorf("other path: %v", resp)
	}
}

// TestPanic: a panic in a step lets the request pass.
func TestPanic(t *testing.T) {
	s := newServer(t, policyYAML, fleet())
	s.cfg.NewStream = func() string { panic("out of luck") }
	e := s.NewExchange()
	if _, err := s.step(e, headersMsg(false, "POST", "/v1/completions")); err != nil {
		t.Fatal(err)
	}
	resp, err := s.step(e, bodyMsg(`{"model":"chat","prompt":"p"}`))
	if diff := cmp.Diff(continueBody(nil), resp, protocmp.Transform()); diff != "" || err != nil {
		t.Errorf("%v %s", err, diff)
	}
	if got := testutil.ToFloat64(s.metrics.panics); got != 1 {
		t.Errorf("%v panics counted, want 1", got)
	}
}

// kindOf names the phase of a message or answer.
func kindOf(m proto.Message) string {
	r := m.ProtoReflect()
	for _, name := range []string{"request", "response"} {
		if o := r.Descriptor().Oneofs().ByName(protoName(name)); o != nil {
			if f := r.WhichOneof(o); f != nil {
				return string(f.Name())
			}
		}
	}
	return ""
}

// FuzzStep sends messages in any order: every answer is of the message's phase or
// an immediate one, nothing follows an immediate one, and nothing panics.
func FuzzStep(f *testing.F) {
	f.Add([]byte{0, 1}, "/v1/completions", `{"model":"chat","prompt":"p"}`, "x")
	f.Add([]byte{1, 0, 0, 1, 1, 2, 3, 4, 5}, "/v1/chat/completions", `{"model":"lone","messages":[{}]}`, "\xff")
	f.Add([]byte{6, 0, 1}, "/v1/models", "", "")
	f.Fuzz(func(t *testing.T, order []byte, path, body, junk string) {
		if len(order) > 20 || len(body) > 5000 {
			t.Skip()
		}
		s := newServer(t, policyYAML, fleet())
		e := s.NewExchange()
		done := false
		for _, k := range order {
			m := anyMessage(k, path, body, junk)
			resp, err := e.Step(t0, m)
			switch {
			case done && (resp != nil || err != nil):
				t.Fatalf("after an immediate answer: %v, %v", resp, err)
			case err != nil && m.GetRequest() != nil:
				t.Fatalf("%v: %v", m, err)
			case resp == nil:
				continue
			}
			if _, err := proto.Marshal(resp); err != nil {
				t.Fatalf("answer cannot be sent: %v", err)
			}
			kind := kindOf(resp)
			done = kind == "immediate_response"
			if kind == "" && resp.GetModeOverride().GetRequestBodyMode() == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED {
				kind = "request_headers" // their answer is put off
			}
			if !done && kind != kindOf(m) {
				t.Fatalf("answer %q to %q", kind, kindOf(m))
			}
		}
		e.Finish()
		if !s.cfg.Held.TryAcquire(2000) {
			t.Fatal("budget of held bodies leaks")
		}
		if !s.arriving.TryAcquire(4 * 2000) {
			t.Fatal("budget of arriving bodies leaks")
		}
	})
}
