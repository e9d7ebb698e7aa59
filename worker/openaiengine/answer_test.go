package openaiengine

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// odd is a server that answers each prompt in a way of its own; those that name no way
// get an answer.
type odd struct{ hung chan struct{} } // hung gets an element for each request that waits

const chunkOf = `data: {"id":"x","model":"up","choices":[{"index":0,"text":"a"}]}` + "\n\n"

func (o *odd) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var ask struct {
		Model  string
		Prompt any
		Stream bool
		Input  any
	}
	_ = json.NewDecoder(r.Body).Decode(&ask)
	say := func(status int, kind, body string) {
		w.Header().Set("Content-Type", kind)
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	}
	flush := func(body string) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, body)
		_ = http.NewResponseController(w).Flush()
	}
	const js, sse = "application/json", "text/event-stream"
	text, _ := ask.Prompt.(string)
	switch {
	case r.URL.Path == "/v1/models":
		say(200, js, `{"data":[{"id":"up"}]}`)
	case r.URL.Path == "/v1/embeddings" && ask.Model != "up":
		say(404, js, `{"detail":"Not Found"}`)
	case r.URL.Path == "/v1/embeddings":
		say(200, js, `{"object":"list","model":"up","data":[]}`)
	case r.URL.Path == "/v1/odd":
		say(500, "text/html", "<html>odd</html>")
	case r.Method != http.MethodPost:
		http.NotFound(w, r)
	case ask.Prompt == "page":
		say(500, "text/html", "<html>boom</html>")
	case ask.Prompt == "detail":
		w.Header().Set("Retry-After", "7")
		say(429, js, `{"detail":"slow down"}`)
	case ask.Prompt == "details":
		say(422, js, `{"detail":[{"msg":"bad"}]}`)
	case ask.Prompt == "words":
		say(424, js, `{"error":"Input validation error","error_type":"validation"}`)
	case ask.Prompt == "ours":
		say(400, js, `{"error":{"message":"no","type":"BadRequestError","param":"x","code":400}}`)
	case ask.Prompt == "text":
		say(200, "text/plain", "hello")
	case ask.Prompt == "half":
		w.Header().Set("Content-Length", "1000")
		say(200, js, `{"model":"up","choices":[`)
	case ask.Prompt == "hang":
		o.hung <- struct{}{}
		<-r.Context().Done()
	case ask.Prompt == "cut":
		flush(chunkOf)
		panic(http.ErrAbortHandler)
	case ask.Prompt == "cut inside":
		flush(chunkOf + `data: {"id":"x"`)
		panic(http.ErrAbortHandler)
	case ask.Prompt == "garbage":
		say(200, sse, chunkOf+"data: {not json}\n\n"+chunkOf)
	case ask.Prompt == "its error":
		say(200, sse, chunkOf+`data: {"error":{"message":"oom"}}`+"\n\n")
	case strings.HasPrefix(text, "sse:"):
		say(200, "Text/Event-Stream; charset=utf-8", text[len("sse:"):])
	case strings.HasPrefix(text, "json:"):
		say(200, js, text[len("json:"):])
	case ask.Prompt == "no end":
		say(200, sse, chunkOf)
	case ask.Stream:
		say(200, sse, ": hello\n\n"+chunkOf+"data: [DONE]\n\n")
	default:
		say(200, js, `{"model":"up","choices":[{"index":0,"text":"a","finish_reason":"stop"}],"extra":{"model":"up"}}`)
	}
}

// startOdd runs a worker with the model "mine" in front of an odd server.
func startOdd(t *testing.T) (base string, o *odd) {
	t.Helper()
	o = &odd{hung: make(chan struct{}, 1)}
	srv := httptest.NewServer(o)
	t.Cleanup(srv.Close)
	return startWorker(t, &upstream{Server: srv}, Config{Name: "mine"}), o
}

// TestAnswersAreTheWorkersOwn: whatever the server says, the client reads OpenAI's form
// and the name of the model that it asked for.
func TestAnswersAreTheWorkersOwn(t *testing.T) {
	base, _ := startOdd(t)
	for prompt, want := range map[string]struct {
		status int
		holds  string
	}{
		"page":    {500, `{"error":{"message":"The server behind this worker answered with status 500.","type":"api_error","param":null,"code":null}}`},
		"detail":  {429, `answered with status 429: slow down","type":"rate_limit_error"`},
		"details": {422, `answered with status 422: [{\"msg\":\"bad\"}]","type":"invalid_request_error"`},
		"words":   {424, `answered with status 424: Input validation error"`},
		"ours":    {400, `{"error":{"message":"no","type":"BadRequestError","param":"x","code":400}}`},
		"text":    {502, `{"error":{"message":"The server behind this worker gave no whole answer.","type":"api_error"`},
		"half":    {502, `gave no whole answer`},
		"well":    {200, `{"model":"mine","choices":[{"index":0,"text":"a","finish_reason":"stop"}],"extra":{"model":"up"}}`},
	} {
		resp, body := do(t, "POST", base+"/v1/completions", fmt.Sprintf(`{"model":"mine","prompt":%q}`, prompt))
		if resp.StatusCode != want.status || !strings.Contains(body, want.holds) || resp.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %v %s", prompt, resp.StatusCode, resp.Header, body)
		}
		if after := resp.Header.Get("Retry-After"); (after == "7") != (prompt == "detail") {
			t.Errorf("%s: Retry-After is %q", prompt, after)
		}
	}
	if resp, body := do(t, "POST", base+"/v1/embeddings", `{"model":"mine","input":"x"}`); resp.StatusCode != 200 || !strings.Contains(body, `"model":"mine"`) {
		t.Errorf("embeddings: %d %s", resp.StatusCode, body)
	}
	if resp, body := do(t, "POST", base+"/v1/embeddings", `{"model":"other","input":"x"}`); resp.StatusCode != 404 || !strings.Contains(body, `"message":"The server behind this worker answered with status 404: Not Found"`) {
		t.Errorf("embeddings of another model: %d %s", resp.StatusCode, body)
	}
	if resp, body := do(t, "POST", base+"/v1/odd", `{}`); resp.StatusCode != 500 || body != "<html>odd</html>" {
		t.Errorf("a path of the server: %d %s", resp.StatusCode, body)
	}
}

// TestStreamsEndInOneOfTwoWays: with [DONE], or with an error event.
func TestStreamsEndInOneOfTwoWays(t *testing.T) {
	base, _ := startOdd(t)
	mine := strings.ReplaceAll(chunkOf, `"up"`, `"mine"`)
	const broken = `data: {"error":{"message":"The server behind this worker broke off the answer.","type":"api_error","param":null,"code":null}}` + "\n\n"
	for prompt, want := range map[string]string{
		"well":       ": hello\n\n" + mine + "data: [DONE]\n\n",
		"cut":        mine + broken,
		"cut inside": mine + broken,
		"no end":     mine + broken,
		"garbage":    mine + broken,
		"its error":  mine + `data: {"error":{"message":"oom"}}` + "\n\n",
	} {
		resp, body := do(t, "POST", base+"/v1/completions", fmt.Sprintf(`{"model":"mine","prompt":%q,"stream":true}`, prompt))
		if resp.StatusCode != 200 || body != want {
			t.Errorf("%s: %d\n%s\nwant\n%s", prompt, resp.StatusCode, body, want)
		}
	}
}

// TestEventsOfOddForm: whatever the form of a server's events, a client reads one object
// on one line of each, with the worker's name of the model, and no error in another shape
// than OpenAI's; nothing comes after an error.
func TestEventsOfOddForm(t *testing.T) {
	base, _ := startOdd(t)
	mine := strings.ReplaceAll(chunkOf, `"up"`, `"mine"`)
	const (
		done   = "data: [DONE]\n\n"
		broken = `data: {"error":{"message":"The server behind this worker broke off the answer.","type":"api_error","param":null,"code":null}}` + "\n\n"
	)
	told := func(words string) string {
		return `data: {"error":{"message":"The server behind this worker ended the answer with an error` + words + `","type":"api_error","param":null,"code":null}}` + "\n\n"
	}
	reason := func(name, r string) string {
		return `data: {"model":"` + name + `","choices":[{"index":0,"text":"a","finish_reason":` + r + `}],"finish_reason":"eos_token"}` + "\n\n"
	}
	for said, want := range map[string]string{
		"data: {\ndata:  \"model\": \"up\",\r\ndata: \"n\": [1,\ndata: 2]\ndata: }\n\n" + done: `data: {"model":"mine","n":[1,2]}` + "\n\n" + done,
		"data: {\"model\": \"mine\",\ndata: \"n\": 1}\n\n" + done:                              `data: {"model":"mine","n":1}` + "\n\n" + done,
		"id: 7\nevent: message\n: c\ndata: {\"model\":\"up\"}\n\n" + done:                      "id: 7\nevent: message\n: c\ndata: {\"model\":\"mine\"}\n\n" + done,
		"event: timings\ndata: not JSON\n\nevent: x\ndata: {\"model\":\"up\"}\n\n" + done:      "event: timings\ndata: not JSON\n\nevent: x\ndata: {\"model\":\"mine\"}\n\n" + done,
		chunkOf + "data: [DONE]":   mine + done,
		chunkOf + "data: [DONE]\n": mine + done,
		chunkOf + "data: [DONE":    mine + broken,

		chunkOf + `data: {"error":"boom","error_type":"overloaded"}` + "\n\n" + done:               mine + told(": boom"),
		chunkOf + "event: error\ndata: {\"message\":\"boom\",\"code\":500}\n\n" + done:             mine + `data: {"error":{"message":"boom","code":500}}` + "\n\n",
		chunkOf + "event: error\ndata: boom\n\n" + done:                                            mine + told(": boom"),
		chunkOf + "event: error\ndata: {\"error\":{\"message\":\"boom\"}}\n\n" + done:              mine + `data: {"error":{"message":"boom"}}` + "\n\n",
		chunkOf + "event: error\n\n" + done:                                                        mine + told("."),
		chunkOf + `data: {"object":"error","message":"boom","code":400}` + "\n\n" + done:           mine + `data: {"error":{"object":"error","message":"boom","code":400}}` + "\n\n",
		chunkOf + "data: {\"error\":\ndata: {\"message\":\"boom\"}}\n\n" + done:                    mine + `data: {"error":{"message":"boom"}}` + "\n\n",
		chunkOf + `error: {"code":500,"message":"boom","type":"server_error"}` + "\n\n" + done:     mine + `data: {"error":{"code":500,"message":"boom","type":"server_error"}}` + "\n\n",
		`data: {"model":"up","error":null,"choices":[{"index":0,"text":"error"}]}` + "\n\n" + done: `data: {"model":"mine","error":null,"choices":[{"index":0,"text":"error"}]}` + "\n\n" + done,
		chunkOf + reason("up", `"abort"`) + done:                                                   mine + broken,
		chunkOf + reason("up", `"error"`) + done:                                                   mine + broken,
		chunkOf + reason("up", `"cancelled"`) + done:                                               mine + broken,
		reason("up", `"eos_token"`) + done:                                                         reason("mine", `"stop"`) + done,
		reason("up", `"stop_sequence"`) + done:                                                     reason("mine", `"stop"`) + done,
		reason("up", `"repetition"`) + done:                                                        reason("mine", `"repetition"`) + done,
		reason("up", `null`) + reason("up", `7`) + done:                                            reason("mine", `null`) + reason("mine", `7`) + done,
	} {
		ask, _ := json.Marshal(map[string]any{"model": "mine", "prompt": "sse:" + said, "stream": true})
		if resp, body := do(t, "POST", base+"/v1/completions", string(ask)); resp.StatusCode != 200 || body != want {
			t.Errorf("%s\nbecame %d\n%s\nwant\n%s", said, resp.StatusCode, body, want)
		}
	}
	for said, want := range map[string]int{
		`{"model":"up","choices":[{"finish_reason":"stop"},{"finish_reason":"abort"}]}`: 502,
		`{"model":"up","choices":[{"finish_reason":"stop"}]}`:                           200,
	} {
		ask, _ := json.Marshal(map[string]any{"model": "mine", "prompt": "json:" + said})
		if resp, body := do(t, "POST", base+"/v1/completions", string(ask)); resp.StatusCode != want {
			t.Errorf("%s became %d %s", said, resp.StatusCode, body)
		}
	}
}

// TestHalfClosedClientGetsNoFalseSuccess: what looks like a client that left gets no
// status, because it may still read.
func TestHalfClosedClientGetsNoFalseSuccess(t *testing.T) {
	base, o := startOdd(t)
	conn, err := net.Dial("tcp", strings.TrimPrefix(base, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	body := `{"model":"mine","prompt":"hang"}`
	fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	<-o.hung
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(bufio.NewReader(conn)); err != nil || len(got) > 0 {
		t.Errorf("the answer is %q, %v", got, err)
	}
}

// TestServerGoneIsNoReasonToStartAnew: a worker whose server is away is not ready, and
// healthy, since to start it again would not bring the server back.
func TestServerGoneIsNoReasonToStartAnew(t *testing.T) {
	u := newUpstream(t)
	base := startWorker(t, u, Config{Patience: 20 * time.Millisecond})
	u.set(func(u *upstream) { u.down = true })
	status := func(path string) int {
		resp, _ := do(t, "GET", base+path, "")
		return resp.StatusCode
	}
	await(t, "a worker that is not ready", func() bool { return status("/ready") == 503 })
	if got := status("/health"); got != 200 {
		t.Errorf("/health answers %d", got)
	}
	u.set(func(u *upstream) { u.down = false })
	await(t, "a worker that is ready again", func() bool { return status("/ready") == 200 })
}
