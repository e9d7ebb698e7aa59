package openaiengine

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// fakeVLLM is a server whose model says letters, each a hash of all ids before it: a
// lost, doubled or changed id changes what follows. Ids are bytes.
type fakeVLLM struct {
	*httptest.Server
	breakAt int    // cut the stream before this token, 0 = do not
	metrics string // page; that of vLLM, or of a server without ids
	wide    bool   // many characters of two bytes, each byte a token
	pings   bool   // comments between the events
	silent  bool   // streams end without a finish_reason
}

func newFakeVLLM(t *testing.T) *fakeVLLM {
	f := &fakeVLLM{metrics: "vllm:num_requests_running 0\n"}
	f.Server = httptest.NewServer(http.HandlerFunc(f.serve))
	t.Cleanup(f.Close)
	return f
}

func bytesOf(s string) []int32 {
	out := make([]int32, len(s))
	for i := range len(s) {
		out[i] = int32(s[i])
	}
	return out
}

func (f *fakeVLLM) serve(w http.ResponseWriter, r *http.Request) {
	raw, _ := io.ReadAll(r.Body)
	var ask struct {
		Prompt         json.RawMessage  `json:"prompt"`
		Messages       []openai.Message `json:"messages"`
		Tokens         []int32          `json:"tokens"`
		MaxTokens      int              `json:"max_tokens"`
		Stream         bool             `json:"stream"`
		ReturnTokenIDs bool             `json:"return_token_ids"`
		Model          string           `json:"model"`
		StreamOptions  struct {
			IncludeUsage bool `json:"include_usage"`
		} `json:"stream_options"`
		stopping
	}
	_ = json.Unmarshal(raw, &ask)
	var text string
	var ids []int32
	if json.Unmarshal(ask.Prompt, &text) == nil {
		ids = bytesOf(text)
	} else if json.Unmarshal(ask.Prompt, &ids) != nil {
		ids = conversation(ask.Messages)
	}
	noIDs := !strings.HasPrefix(f.metrics, "vllm:")
	switch {
	case r.URL.Path == "/v1/models":
		fmt.Fprint(w, `{"data":[{"id":"vendor/model","max_model_len":512}]}`)
	case r.URL.Path == "/metrics":
		fmt.Fprint(w, f.metrics)
	case ask.Model != "vendor/model" && r.URL.Path != "/apply-template":
		http.NotFound(w, r)
	case r.URL.Path == "/apply-template":
		var b []byte
		for _, id := range ids {
			b = append(b, byte(id))
		}
		_ = json.NewEncoder(w).Encode(map[string]string{"prompt": string(b)})
	case noIDs && strings.HasSuffix(r.URL.Path, "tokenize"):
		http.NotFound(w, r)
	case r.URL.Path == "/tokenize":
		_ = json.NewEncoder(w).Encode(openai.Tokenized{Tokens: ids})
	case r.URL.Path == "/detokenize":
		var b []byte
		for _, id := range ask.Tokens {
			b = append(b, byte(id))
		}
		_ = json.NewEncoder(w).Encode(openai.Detokenized{Prompt: strings.ToValidUTF8(string(b), "\uFFFD")})
	case ask.Least > ask.MaxTokens:
		http.Error(w, "min_tokens must be less than or equal to max_tokens", http.StatusBadRequest)
	case ask.Stream && len(ask.Stop) > 0:
		ask.withIDs = !noIDs
		f.stopping(w, openai.Endpoint(r.URL.Path), ids, ask.MaxTokens, ask.stopping)
	case ask.Stream:
		f.stream(w, openai.Endpoint(r.URL.Path), ids, ask.MaxTokens, ask.ReturnTokenIDs && !noIDs, ask.StreamOptions.IncludeUsage)
	default:
		fmt.Fprintf(w, `{"choices":[{"index":0,"text":"x"}],"usage":{"prompt_tokens":%d,"completion_tokens":1}}`, len(ids))
	}
}

// conversation is the chat template: an assistant's last message is not over.
func conversation(messages []openai.Message) []int32 {
	var b strings.Builder
	for i, m := range messages {
		fmt.Fprintf(&b, "<%s>%s", m.Role, m.Content)
		if i == len(messages)-1 && m.Role != "assistant" {
			b.WriteString("<assistant>")
		}
	}
	return bytesOf(b.String())
}

func (f *fakeVLLM) stream(w http.ResponseWriter, ep openai.Endpoint, ids []int32, n int, withIDs, usage bool) {
	chunks := openai.NewChunks(openai.Answer{Endpoint: ep, ID: "up-1", Model: "vendor/model", Created: 5}, usage)
	prompt := len(ids)
	w.Header().Set("Content-Type", "text/event-stream")
	ping := func() {
		if f.pings {
			_, _ = w.Write([]byte(": ping\n\n"))
		}
	}
	ping()
	_, _ = w.Write(chunks.AppendRole(nil, 0))
	for i := range n {
		if f.breakAt > 0 && i == f.breakAt {
			panic(http.ErrAbortHandler)
		}
		h := fnv.New32a()
		fmt.Fprint(h, ids)
		next, text := int32('a'+h.Sum32()%26), []byte(nil)
		switch half := len(ids) > 0 && ids[len(ids)-1] == 0xc3; {
		case f.wide && half:
			next, text = 0xa0+next%16, []byte{0xc3, byte(0xa0 + next%16)}
		case f.wide && next%2 == 0:
			next = 0xc3
		default:
			text = []byte{byte(next)}
		}
		ids = append(ids, next)
		ping()
		ev := chunks.AppendText(nil, 0, text, nil)
		if withIDs {
			ev = chunks.InsertTokens(ev, 0, []int32{next})
		}
		_, _ = w.Write(ev)
		_ = http.NewResponseController(w).Flush()
	}
	var ev []byte
	if !f.silent {
		ev = chunks.AppendFinish(ev, 0, "length")
	}
	if usage {
		ev = chunks.AppendUsage(ev, openai.Usage{PromptTokens: prompt, CompletionTokens: n, TotalTokens: prompt + n})
	}
	_, _ = w.Write(ev)
	ev = nil
	ping()
	_, _ = w.Write(append(ev, openai.Done...))
}

// told is what a relay reads of a stream.
type told struct {
	ids    []int32
	text   string
	reason string
	usage  openai.Usage
	mode   string
	done   bool
	failed bool
	events int
}

// tell reads a stream, at most the given number of events with a choice.
func tell(t *testing.T, body io.Reader, most int) told {
	t.Helper()
	events := openai.NewEventReader(body, 1<<20)
	var out told
	for out.events < most {
		ev, err := events.Next()
		if err != nil {
			return out
		}
		if ev.Done() {
			out.done = true
			return out
		}
		if ev.Comment {
			continue
		}
		var c struct {
			openai.Chunk
			Choices []struct {
				openai.ChunkChoice
				TokenIDs []int32 `json:"token_ids"`
				KV       struct {
					KV string `json:"kv"`
				} `json:"kvmesh"`
			} `json:"choices"`
			Error any `json:"error"`
		}
		if err := json.Unmarshal(ev.Data, &c); err != nil {
			t.Fatalf("%v in %s", err, ev.Data)
		}
		out.failed = out.failed || c.Error != nil
		if c.Usage != nil {
			out.usage = *c.Usage
		}
		for _, ch := range c.Choices {
			out.events++
			out.ids = append(out.ids, ch.TokenIDs...)
			out.text += ch.Added()
			out.mode += ch.KV.KV
			if ch.FinishReason != nil {
				out.reason += *ch.FinishReason
			}
		}
	}
	return out
}

// TestStreamGoesOnByTokenReplay: cut behind each token, ids, text, reason and usage are
// those of the stream that was not cut.
func TestStreamGoesOnByTokenReplay(t *testing.T) {
	t.Run("letters", func(t *testing.T) { testTokenReplay(t, newFakeVLLM(t)) })
	t.Run("halves of characters", func(t *testing.T) {
		f := newFakeVLLM(t)
		f.wide = true
		testTokenReplay(t, f)
	})
	t.Run("comments between the events", func(t *testing.T) {
		f := newFakeVLLM(t)
		f.pings = true
		testTokenReplay(t, f)
	})
}

func testTokenReplay(t *testing.T, f *fakeVLLM) {
	base := startWorker(t, &upstream{Server: f.Server}, Config{Name: "mine"})
	for path, ask := range map[string]string{
		"/v1/completions":      `{"model":"alias","prompt":"Hello","max_tokens":9,"stream":true,"stream_options":{"include_usage":true}`,
		"/v1/chat/completions": `{"model":"alias","messages":[{"role":"user","content":"hi"}],"max_completion_tokens":9,"stream":true,"stream_options":{"include_usage":true}`,
	} {
		get := func(mesh string, most int) told {
			t.Helper()
			req, err := http.NewRequestWithContext(t.Context(), "POST", base+path, strings.NewReader(ask+`,"kvmesh":{"token_ids":true`+mesh+`}}`))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("X-Kvmesh-Relay", "secret")
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if resp.StatusCode != 200 {
				raw, _ := io.ReadAll(resp.Body)
				t.Fatalf("%d %s", resp.StatusCode, raw)
			}
			return tell(t, resp.Body, most)
		}
		// max_tokens of chat is read by the fake under one name only.
		if path == "/v1/chat/completions" {
			ask = strings.Replace(ask, "max_completion_tokens", "max_tokens", 1)
		}
		whole := get("", 1000)
		if len(whole.ids) != 9 || whole.reason != "length" || !whole.done || whole.usage.CompletionTokens != 9 {
			t.Fatalf("%s: %+v", path, whole)
		}
		for cut := 1; cut <= 8; cut++ {
			first := get("", cut+1)
			n := min(len(first.ids), cut)
			var said []byte
			for _, id := range first.ids[:n] {
				said = append(said, byte(id))
			}
			text := strings.ToValidUTF8(string(said), "") // but for a last half
			raw, _ := json.Marshal(first.ids[:n])
			rest := get(fmt.Sprintf(`,"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":%s,"text_bytes":%d}]}`, raw, len(text)), 1000)
			if ids := slices.Concat(first.ids[:n], rest.ids); !slices.Equal(ids, whole.ids) || text+rest.text != whole.text {
				t.Fatalf("%s cut at %d: %v %q, want %v %q", path, cut, ids, text+rest.text, whole.ids, whole.text)
			}
			if rest.reason != "length" || rest.usage != whole.usage || !rest.done || rest.mode != "replayed" {
				t.Errorf("%s cut at %d: %+v, want the end of %+v", path, cut, rest, whole)
			}
		}
	}
}

func TestContinuationsRefused(t *testing.T) {
	f := newFakeVLLM(t)
	base := startWorker(t, &upstream{Server: f.Server}, Config{})
	resume := func(ids string, text int) string {
		return fmt.Sprintf(`"kvmesh":{"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":%s,"text_bytes":%d}]}}`, ids, text)
	}
	ask := `{"model":"alias","prompt":"x","stream":true,"max_tokens":5,`
	for name, body := range map[string]string{
		"choices":       ask + `"n":2,` + resume("[97]", 1),
		"whole":         `{"model":"alias","prompt":"x",` + resume("[97]", 1),
		"several":       `{"model":"alias","prompt":["x","y"],"stream":true,` + resume("[97]", 1),
		"logprobs":      ask + `"logprobs":1,` + resume("[97]", 1),
		"format":        ask + `"response_format":{"type":"json_object"},` + resume("[97]", 1),
		"penalty":       ask + `"presence_penalty":1,` + resume("[97]", 1),
		"too much text": ask + resume("[97]", 9),
		"half a letter": ask + resume("[195]", 0),
		"min_tokens":    ask + `"stop":"q","min_tokens":3,` + resume("[97]", 1),
		"no token":      ask + resume("[97,null]", 1),
		"malformed":     ask + `"kvmesh":{"resume":7}`,
		"hidden text":   ask + resume("[97,98]", 1), // nothing holds it back
		"hidden more":   ask + `"stop":"xy",` + resume("[97,98,99]", 1),
	} {
		resp, got := do(t, "POST", base+"/v1/completions", body+"}", "X-Kvmesh-Relay", "secret")
		if resp.StatusCode != 400 || !strings.Contains(got, `"param":"kvmesh`) {
			t.Errorf("%s: %d %s", name, resp.StatusCode, got)
		}
	}
	other := newUpstream(t)
	other.set(func(u *upstream) { u.metrics = "tgi.txt" })
	base = startWorker(t, other, Config{})
	if resp, got := do(t, "POST", base+"/v1/completions", ask+resume("[97]", 1)+"}", "X-Kvmesh-Relay", "secret"); resp.StatusCode != 400 || !strings.Contains(got, "cannot continue") {
		t.Errorf("a server without ids: %d %s", resp.StatusCode, got)
	}
}

func TestContinuationBreaksOff(t *testing.T) {
	f := newFakeVLLM(t)
	f.breakAt = 2
	base := startWorker(t, &upstream{Server: f.Server}, Config{})
	_, body := do(t, "POST", base+"/v1/completions", `{"model":"alias","prompt":"x","stream":true,"max_tokens":9,"kvmesh":{"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":[97],"text_bytes":1}]}}}`, "X-Kvmesh-Relay", "secret")
	if got := tell(t, strings.NewReader(body), 1000); got.done || !got.failed || len(got.ids) != 2 {
		t.Errorf("a server that breaks off: %+v", got)
	}
}

// TestStreamGoesOnByText: a server that gives no ids goes on from the delivered text, in
// both endpoints, and usage counts the tokens once.
func TestStreamGoesOnByText(t *testing.T) {
	f := newFakeVLLM(t)
	f.metrics = "llamacpp:requests_processing 0\n"
	base := startWorker(t, &upstream{Server: f.Server}, Config{})
	const opts = `,"max_tokens":9,"stream":true,"stream_options":{"include_usage":true},"kvmesh":{"token_ids":true`
	for path, ask := range map[string]string{
		"/v1/completions":      `{"model":"alias","prompt":"Hello"` + opts,
		"/v1/chat/completions": `{"model":"alias","messages":[{"role":"user","content":"hi"}]` + opts,
	} {
		get := func(mesh string) told {
			t.Helper()
			resp, body := do(t, "POST", base+path, ask+mesh+`}}`, "X-Kvmesh-Relay", "secret")
			if resp.StatusCode != 200 {
				t.Fatalf("%d %s", resp.StatusCode, body)
			}
			return tell(t, strings.NewReader(body), 1000)
		}
		whole := get(`,"resume":{"stream":"s","attempt":2,"choices":[{"index":0}]}`) // nothing was delivered yet
		if len(whole.text) != 9 || len(whole.ids) != 0 || whole.usage.CompletionTokens != 9 {
			t.Fatalf("%s: %+v", path, whole)
		}
		for cut := 1; cut <= 9; cut++ {
			rest := get(fmt.Sprintf(`,"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"text_bytes":%d,"text":%q}]}`, cut, whole.text[:cut]))
			mode := "text"
			if cut == 9 {
				mode = "" // nothing was left to say
			}
			if whole.text[:cut]+rest.text != whole.text || rest.usage != whole.usage || rest.reason != "length" || !rest.done || rest.mode != mode {
				t.Errorf("%s cut at %d: %+v, want the end of %+v", path, cut, rest, whole)
			}
		}
	}
}

func TestTextContinuationsRefused(t *testing.T) {
	f := newFakeVLLM(t)
	base := startWorker(t, &upstream{Server: f.Server}, Config{})
	const resume = `"stream":true,"kvmesh":{"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"text_bytes":2,"text":"ab"}]}}}`
	for body, path := range map[string]string{
		`{"model":"alias","prompt":[1,2],` + resume:                                                                         "/v1/completions",
		`{"model":"alias","messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],` + resume:          "/v1/chat/completions",
		`{"model":"alias","prompt":"a",` + strings.Replace(resume, `"text_bytes":2`, `"text_bytes":1`, 1):                   "/v1/completions",
		`{"model":"alias","prompt":"a","response_format":{"type":"json_object"},` + resume:                                  "/v1/completions",
		`{"model":"alias","messages":[{"role":"user","content":"a"}],"tools":[{}],` + strings.Replace(resume, "ab", "é", 1): "/v1/chat/completions",
	} {
		if resp, got := do(t, "POST", base+path, body, "X-Kvmesh-Relay", "secret"); resp.StatusCode != 400 || !strings.Contains(got, `"param":"kvmesh.resume"`) {
			t.Errorf("%s: %d %s", body, resp.StatusCode, got)
		}
	}
	f.metrics = "tgi_queue_size 0\n"
	base = startWorker(t, &upstream{Server: f.Server}, Config{})
	if resp, got := do(t, "POST", base+"/v1/chat/completions", `{"model":"alias","messages":[{"role":"user","content":"a"}],`+resume, "X-Kvmesh-Relay", "secret"); resp.StatusCode != 400 {
		t.Errorf("a server that begins a new message: %d %s", resp.StatusCode, got)
	}
	if resp, got := do(t, "POST", base+"/v1/completions", `{"model":"alias","prompt":"a","max_tokens":4,`+resume, "X-Kvmesh-Relay", "secret"); resp.StatusCode != 200 || !strings.Contains(got, `"kv":"text"`) {
		t.Errorf("a completion of any server: %d %s", resp.StatusCode, got)
	}
}
