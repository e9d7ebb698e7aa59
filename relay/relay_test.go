package relay

import (
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/internal/names"
)

// TestStream: a complete stream passes byte by byte, comments before its first
// token aside, and the headers are those of the contract.
func TestStream(t *testing.T) {
	want := token("a", "") + ": busy\n\n" + token("b", "") + "event: x\ndata: {\"choices\":[],\r\ndata: \"usage\":{\"completion_tokens\":7}}\r\n\r\n" + token("", "stop") + done
	serve := func(_ int, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set(names.Worker, "w1")
		w.Header().Set("X-Envoy-Upstream-Service-Time", "3")
		w.Header().Set("Endpoint-Load-Metrics", "x")
		w.Header().Set("X-Own", "kept")
		send(w, ": early\n\n", want[:20], want[20:])
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		got := m.ask(askStream, "Accept-Encoding", "gzip", "Authorization", "Bearer x", "X-Envoy-Max-Retries", "9", "Te", "trailers", names.SessionID, "s")
		if got.status != 200 || got.body != want {
			t.Errorf("%d\n%q, want\n%q", got.status, got.body, want)
		}
		h := got.header
		if h.Get(names.Worker) != "w1" || h.Get("X-Own") != "kept" || h.Get("Cache-Control") != "no-cache" || h.Get("Content-Type") != "text/event-stream" {
			t.Errorf("headers %v", h)
		}
		for _, name := range []string{names.Upstream, "X-Envoy-Upstream-Service-Time", "Endpoint-Load-Metrics", "Content-Length"} {
			if v := h.Values(name); len(v) > 0 {
				t.Errorf("header %s: %q reached the client", name, v)
			}
		}
		s := m.seen[0]
		in := map[string]string{}
		for _, name := range []string{names.Destination, names.Pool, names.ExpectWorker, names.Attempt, names.Stream, "Authorization", names.SessionID} {
			in[name] = s.header.Get(name)
		}
		if diff := cmp.Diff(map[string]string{
			names.Destination: "10.0.0.1:80", names.Pool: "p", names.ExpectWorker: "w1", names.Attempt: "1",
			names.Stream: "stream-1", "Authorization": "Bearer x", names.SessionID: "s",
		}, in); diff != "" {
			t.Error(diff)
		}
		for _, name := range []string{names.Route, names.ModelRoute, "Accept-Encoding", "X-Envoy-Max-Retries", "Te"} {
			if v := s.header.Values(name); len(v) > 0 {
				t.Errorf("header %s: %q reached the worker", name, v)
			}
		}
		if s.body != askStream {
			t.Errorf("worker got %q", s.body)
		}
		if m.result(resultOK) != 1 || testutil.CollectAndCount(m.relay.metrics.perToken) != 1 || testutil.CollectAndCount(m.relay.metrics.firstToken) != 1 {
			t.Error("the answer is not in the metrics")
		}
	})
}

func TestWhole(t *testing.T) {
	const body = `{"id":"x","choices":[{"index":0,"text":"a","finish_reason":"stop"}],  "unknown":{"deep":[1]}}`
	serve := func(_ int, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Own", "kept")
		sendJSON(w, http.StatusOK, body)
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		got := m.ask(askWhole)
		if got.status != 200 || got.body != body || got.header.Get("X-Own") != "kept" {
			t.Errorf("%d %q %v", got.status, got.body, got.header)
		}
		if got.header.Get(names.Worker) != "w1" || got.header.Get("Content-Length") != strconv.Itoa(len(body)) {
			t.Errorf("headers %v", got.header)
		}
		if testutil.CollectAndCount(m.relay.metrics.duration) != 1 || testutil.CollectAndCount(m.relay.metrics.firstToken) != 0 {
			t.Error("duration, and no first token, should be in the metrics")
		}
	})
}

// misbehaviour is a worker that does not deliver.
type misbehaviour struct {
	name   string
	do     func(w http.ResponseWriter)
	result string
	// What a client sees when every worker does that.
	status     int
	retryAfter string
	message    string
}

func misbehaviours() []misbehaviour {
	text := func(status int, body string) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) { http.Error(w, body, status) }
	}
	json := func(status int, body string, h ...string) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) {
			if len(h) > 0 {
				w.Header().Set(h[0], h[1])
			}
			sendJSON(w, status, body)
		}
	}
	return []misbehaviour{
		{"refused connection", func(w http.ResponseWriter) { unreachableBy(w, "UF,URX") }, resultConnect, 503, "1", "No worker can be reached"},
		{"no HTTP", func(w http.ResponseWriter) {
			w.Header().Set(names.Fault, "UPE")
			http.Error(w, "upstream connect error or disconnect/reset before headers", http.StatusBadGateway)
		}, resultBroken, 502, "", "no HTTP that can be read"},
		{"too large a header", func(w http.ResponseWriter) {
			w.Header().Set("X-Big", strings.Repeat("x", 70_000))
			sendJSON(w, http.StatusOK, complete)
		}, resultBroken, 502, "", "header of the worker's answer is too large"},
		{"too many fields", func(w http.ResponseWriter) {
			w.Header()["X-Many"] = strings.Split(strings.Repeat("v ", 90), " ")
			sendJSON(w, http.StatusBadRequest, complete)
		}, resultBroken, 502, "", "header of the worker's answer is too large"},
		{"busy in HTML", text(503, "<html>full"), resultStatus, 503, "1", "All workers are busy"},
		{"busy without a word", func(w http.ResponseWriter) {
			w.Header().Set("Retry-After", "3")
			w.WriteHeader(503)
		}, resultStatus, 503, "3", "All workers are busy"},
		{"busy", json(503, `{"error":{"message":"queue full"}}`, "Retry-After", "7"), resultStatus, 503, "7", "queue full"},
		{"crashed", json(500, `{"error":{"message":"boom"}}`), resultStatus, 500, "", "boom"},
		{"bad gateway", text(502, "<html>"), resultStatus, 502, "", "broke off"},
		{"gateway time-out", text(504, "late"), resultStatus, 502, "", "broke off"},
		{"not me", json(421, `{"error":{"message":"other worker"}}`), resultWrong, 503, "1", "left"},
		{"someone else", func(w http.ResponseWriter) {
			w.Header().Set(names.Upstream, "10.9.9.9:80")
			send(w, token("stolen", "stop"), done)
		}, resultWrong, 503, "1", "left"},
		{"cut before headers", func(http.ResponseWriter) { cut() }, resultBroken, 502, "", "broke off"},
	}
}

// streamMisbehaviours are those only a stream can show.
func streamMisbehaviours() []misbehaviour {
	return []misbehaviour{
		{"cut before the first event", func(w http.ResponseWriter) { send(w, ": hi\n\n", "data: {\"cho"); cut() }, resultBroken, 502, "", "broke off"},
		{"empty", func(w http.ResponseWriter) { send(w) }, resultBroken, 502, "", "broke off"},
		{"done at once", func(w http.ResponseWriter) { send(w, done) }, resultBroken, 502, "", "broke off"},
		{"error first", func(w http.ResponseWriter) {
			send(w, "data: {\"error\":{\"message\":\"out of memory\",\"code\":500}}\n\n", done)
		}, resultStatus, 500, "", "out of memory"},
		{"nonsense first", func(w http.ResponseWriter) {
			send(w, "data: hello\n\n", token("a", "stop"), done)
		}, resultBroken, 502, "", "broke off"},
		{"nonsense behind what is none", func(w http.ResponseWriter) {
			send(w, "data:\n\n", "data: null\n\n", "data: {\"choices\":[{]}\n\n", token("a", "stop"), done)
		}, resultBroken, 502, "", "broke off"},
		{"given up at once", func(w http.ResponseWriter) { send(w, token("", "abort"), done) }, resultBroken, 502, "", "broke off"},
		{"endless event", func(w http.ResponseWriter) { send(w, "data: "+strings.Repeat("x", 300)) }, resultBroken, 502, "", "broke off"},
	}
}

// wholeMisbehaviours are those only a whole answer can show.
func wholeMisbehaviours() []misbehaviour {
	return []misbehaviour{
		{"cut inside", func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "100")
			sendJSON(w, http.StatusOK, `{"id":`)
			cut()
		}, resultBroken, 502, "", "broke off"},
		{"half a document", func(w http.ResponseWriter) { sendJSON(w, http.StatusOK, `{"id":`) }, resultBroken, 502, "", "broke off"},
	}
}

func small(c *Config) { c.MaxEvent = 200 }

// forAll runs f for every misbehaviour, with and without streaming.
func forAll(t *testing.T, f func(t *testing.T, ask string, b misbehaviour)) {
	for _, kind := range []struct {
		name, ask string
		list      []misbehaviour
	}{
		{"stream", askStream, append(misbehaviours(), streamMisbehaviours()...)},
		{"whole", askWhole, append(misbehaviours(), wholeMisbehaviours()...)},
	} {
		for _, b := range kind.list {
			t.Run(kind.name+"/"+b.name, func(t *testing.T) { f(t, kind.ask, b) })
		}
	}
}

// TestRetry: before the first byte the next candidate takes over, unseen.
func TestRetry(t *testing.T) {
	forAll(t, func(t *testing.T, ask string, b misbehaviour) {
		serve := func(n int, w http.ResponseWriter, _ *http.Request) {
			switch {
			case n == 1:
				b.do(w)
			case ask == askStream:
				send(w, token("a", "stop"), done)
			default:
				sendJSON(w, http.StatusOK, complete)
			}
		}
		inMesh(t, small, serve, func(t *testing.T, m *mesh) {
			got := m.ask(ask)
			if got.status != 200 || strings.Contains(got.body, "error") || got.header.Get(names.Worker) != "w2" {
				t.Errorf("%d %q by %s", got.status, got.body, got.header.Get(names.Worker))
			}
			if diff := cmp.Diff([]string{"w1", "w2"}, m.attempts()); diff != "" {
				t.Error(diff)
			}
			if m.seen[1].address != "10.0.0.2:80" || m.seen[1].header.Get(names.Attempt) != "2" || m.seen[1].body != ask {
				t.Errorf("second attempt %+v", m.seen[1])
			}
			if m.result(b.result) != 1 || m.result(resultOK) != 1 {
				t.Errorf("attempts are not counted as %s and ok", b.result)
			}
		})
	})
}

// TestAllFail: when nobody delivers, three different workers were asked and the
// client gets one error that says so.
func TestAllFail(t *testing.T) {
	forAll(t, func(t *testing.T, ask string, b misbehaviour) {
		serve := func(_ int, w http.ResponseWriter, _ *http.Request) { b.do(w) }
		inMesh(t, small, serve, func(t *testing.T, m *mesh) {
			got := m.ask(ask)
			if got.status != b.status || !strings.Contains(got.body, b.message) || !strings.HasPrefix(got.body, `{"error":{`) {
				t.Errorf("%d %s, want %d with %q", got.status, got.body, b.status, b.message)
			}
			if got.header.Get("Retry-After") != b.retryAfter || got.header.Get("Content-Type") != "application/json" {
				t.Errorf("headers %v, want Retry-After %q", got.header, b.retryAfter)
			}
			if diff := cmp.Diff([]string{"w1", "w2", "w3"}, m.attempts()); diff != "" {
				t.Error(diff)
			}
			if testutil.ToFloat64(m.relay.metrics.truncated) != 0 {
				t.Error("counted as truncated though nothing was sent")
			}
		})
	})
}

// TestClientErrors: a 4xx is the client's and is never repeated, but for 429, which is
// the worker's own state.
func TestClientErrors(t *testing.T) {
	for _, tc := range []struct {
		status      int
		body        string
		contentType string
		want        string
	}{
		{400, `{"error":{"message":"too long","param":"prompt"}}`, "application/json", `{"error":{"message":"too long","param":"prompt"}}`},
		{404, `{"error":{"message":"no model"}}`, "application/json; charset=utf-8", `{"error":{"message":"no model"}}`},
		{429, `{"error":{"message":"slow down"}}`, "application/json", `{"error":{"message":"slow down"}}`},
		{413, "<html>", "text/html", `{"error":{"message":"The worker refused the request with status 413.","type":"invalid_request_error","param":null,"code":null}}`},
	} {
		t.Run(strconv.Itoa(tc.status), func(t *testing.T) {
			serve := func(_ int, w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "9")
				w.Header().Set("Content-Type", tc.contentType)
				w.WriteHeader(tc.status)
				_, _ = w.Write([]byte(tc.body))
			}
			inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
				for _, ask := range []string{askStream, askWhole} {
					got := m.ask(ask)
					if got.status != tc.status || got.body != tc.want || got.header.Get("Retry-After") != "9" {
						t.Errorf("%d %s %v", got.status, got.body, got.header)
					}
				}
				want, result := 2, resultRefused
				if tc.status == http.StatusTooManyRequests {
					want, result = 6, resultStatus
				}
				if n := len(m.attempts()); n != want || m.result(result) != want {
					t.Errorf("%d attempts for two requests, want %d", n, want)
				}
			})
		})
	}
}

// TestTruncated: a stream that breaks after its first token ends with exactly one
// error event, after whole events only.
func TestTruncated(t *testing.T) {
	a, b := token("a", ""), token("b", "")
	for _, tc := range []struct {
		name string
		do   func(w http.ResponseWriter)
		want string // before the error event
	}{
		{"cut", func(w http.ResponseWriter) { send(w, a, b); cut() }, a + b},
		{"cut inside an event", func(w http.ResponseWriter) { send(w, a, b[:10]); cut() }, a},
		{"clean end", func(w http.ResponseWriter) { send(w, a, b) }, a + b},
		{"clean end inside an event", func(w http.ResponseWriter) { send(w, a, b[:len(b)-1]) }, a},
		{"done without finish", func(w http.ResponseWriter) { send(w, a, done) }, a},
		{"given up", func(w http.ResponseWriter) { send(w, a, b, token("", "abort"), done) }, a + b},
		{"nonsense", func(w http.ResponseWriter) {
			send(w, a, "data: {\"choices\":[{]}\n\n", token("", "stop"), done)
		}, a},
		{"nonsense of two lines", func(w http.ResponseWriter) {
			send(w, a, b, "data: {\"choices\":[]}\ndata: }\n\n", token("", "stop"), done)
		}, a + b},
		{"an empty reason", func(w http.ResponseWriter) {
			send(w, strings.Replace(a, `"finish_reason":null`, `"finish_reason":""`, 1))
		}, strings.Replace(a, `"finish_reason":null`, `"finish_reason":""`, 1)},
		{"too large an event", func(w http.ResponseWriter) { send(w, a, "data: "+strings.Repeat("x", 300)+"\n\n", done) }, a},
	} {
		t.Run(tc.name, func(t *testing.T) {
			serve := func(_ int, w http.ResponseWriter, _ *http.Request) { tc.do(w) }
			inMesh(t, small, serve, func(t *testing.T, m *mesh) {
				got := m.ask(askStream)
				rest, ok := strings.CutPrefix(got.body, tc.want)
				if !ok || !strings.HasPrefix(rest, `data: {"error":{"message":"The worker broke off`) || strings.Count(rest, "\n\n") != 1 || !strings.HasSuffix(rest, "\n\n") {
					t.Errorf("got %q, want %q and one error event", got.body, tc.want)
				}
				if a := m.relay.Attempts(); len(a) != 1 || a[0].Broken != 1 || a[0].OK != 0 {
					t.Errorf("the worker's attempts are counted as %+v, want one broken", a)
				}
				if len(m.attempts()) != 1 || m.result(resultTruncated) != 1 || testutil.ToFloat64(m.relay.metrics.truncated) != 1 {
					t.Errorf("%d attempts, %d truncated", len(m.attempts()), m.result(resultTruncated))
				}
			})
		})
	}
	t.Run("all but the end", func(t *testing.T) {
		serve := func(_ int, w http.ResponseWriter, _ *http.Request) { send(w, a, token("", "stop")) }
		inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
			if got := m.ask(askStream); got.body != a+token("", "stop")+done {
				t.Errorf("an answer of which only the end is missing: %q", got.body)
			}
			if m.result(resultOK) != 1 {
				t.Error("not counted as complete")
			}
			if a := m.relay.Attempts(); len(a) != 1 || a[0].Broken != 1 {
				t.Errorf("the worker broke off, and that is counted as %+v", a)
			}
		})
	})
	t.Run("nonsense behind the last end", func(t *testing.T) {
		serve := func(_ int, w http.ResponseWriter, _ *http.Request) {
			send(w, a, token("", "stop"), "data: bye\n\n", done)
		}
		inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
			if got := m.ask(askStream); got.body != a+token("", "stop")+done {
				t.Errorf("an answer with nothing but nonsense behind it: %q", got.body)
			}
		})
	})
	t.Run("the worker's own error event", func(t *testing.T) {
		own := "data: {\"error\":{\"message\":\"out of memory\"}}\n\n"
		serve := func(_ int, w http.ResponseWriter, _ *http.Request) { send(w, a, own, done) }
		inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
			if got := m.ask(askStream); got.body != a+own {
				t.Errorf("got %q, want %q", got.body, a+own)
			}
			if testutil.ToFloat64(m.relay.metrics.truncated) != 1 {
				t.Error("not counted as truncated")
			}
		})
	})
}

// TestChoices: [DONE] counts only when every choice has ended.
func TestChoices(t *testing.T) {
	two := func(index int, finish string) string {
		return strings.Replace(token("x", finish), `"index":0`, `"index":`+strconv.Itoa(index), 1)
	}
	stream := two(0, "") + two(1, "") + two(0, "stop")
	serve := func(n int, w http.ResponseWriter, _ *http.Request) {
		if n == 1 {
			send(w, stream, done)
			return
		}
		send(w, stream, two(1, "length"), done)
	}
	ask := `{"model":"m","prompt":"p","stream":true,"n":2}`
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		if got := m.ask(ask); !strings.Contains(got.body, "error") || strings.Contains(got.body, "DONE") {
			t.Errorf("one choice is not finished: %q", got.body)
		}
		if got := m.ask(ask); got.body != stream+two(1, "length")+done {
			t.Errorf("both are finished: %q", got.body)
		}
	})
}

// TestFewerChoices: some servers ignore n, and what they end well is whole. One of ours that
// ends an answer with fewer choices than were asked for has not told all of it.
func TestFewerChoices(t *testing.T) {
	one := token("x", "stop")
	ask := `{"model":"m","prompt":"p","n":2,"max_tokens":4,"stream":`
	inMesh(t, nil, func(n int, w http.ResponseWriter, _ *http.Request) {
		if n == 1 {
			send(w, one, done)
			return
		}
		sendJSON(w, http.StatusOK, complete)
	}, func(t *testing.T, m *mesh) {
		if got := m.ask(ask + "true}"); got.body != one+done {
			t.Errorf("stream: %q", got.body)
		}
		if got := m.ask(ask + "false}"); got.body != complete {
			t.Errorf("whole: %q", got.body)
		}
	})
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		m.checkWhole(m.ask(ask+"true}").body, 2, 4, false)
		if len(m.attempts()) != 2 {
			t.Errorf("attempts %v", m.attempts())
		}
	}, func(n int, w http.ResponseWriter, r *http.Request, body string) {
		generate(t, n, w, r, strings.Replace(body, `"n":2`, `"n":1`, 1), -1, nil)
	}, well(t))
}

// TestCountPrompts: as many answers are expected as a request has prompts.
func TestCountPrompts(t *testing.T) {
	for raw, want := range map[string]int{
		``: 1, `"[1"`: 1, `[1,2,3]`: 1, `[ 7 ]`: 1, `["a"]`: 1, `["a","b]"]`: 2, `[[1,2],[3], [4]]`: 3, `[]`: 0,
	} {
		if got := prompts([]byte(raw)); got != want {
			t.Errorf("%s: %d prompts, want %d", raw, got, want)
		}
	}
}

// TestBadRequests: what should never pass the edge is refused, not served.
func TestBadRequests(t *testing.T) {
	serve := func(_ int, w http.ResponseWriter, _ *http.Request) { sendJSON(w, 200, complete) }
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		for name, tc := range map[string]struct {
			status int
			body   string
			header []string
		}{
			"no pool":   {400, askWhole, []string{names.Pool, ""}},
			"malformed": {400, `{`, nil},
			"too large": {413, `{"model":"m","prompt":"` + strings.Repeat("x", 1<<20) + `"}`, nil},
		} {
			if got := m.ask(tc.body, tc.header...); got.status != tc.status || !strings.HasPrefix(got.body, `{"error":`) {
				t.Errorf("%s: %d %s, want %d", name, got.status, got.body, tc.status)
			}
		}
		for path, want := range map[string]int{"/v1/models": 404, "/v1/completions": 405} {
			resp, err := m.client.Get("http://mesh" + path)
			if err != nil || resp.StatusCode != want {
				t.Errorf("GET %s: %v %v, want %d", path, resp, err, want)
				continue
			}
			_ = resp.Body.Close()
		}
		if n := len(m.attempts()); n != 0 {
			t.Errorf("%d attempts", n)
		}
	})
}
