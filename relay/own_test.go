package relay

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/names"
)

const secret = "secret"

// own makes the workers of a mesh ours: they know the relay.
func own(c *Config) {
	c.Secret = secret
	c.Picker.Update(ownFleet(3))
}

// ownFleet is n workers; change says what is the matter with them, by number from 1.
func ownFleet(n int, change ...func(i int, w *fleetpb.Worker)) []*fleetpb.Worker {
	var ws []*fleetpb.Worker
	for i := range n {
		w := &fleetpb.Worker{
			Id: fmt.Sprintf("w%d", i+1), Address: fmt.Sprintf("10.0.0.%d:80", i+1), Pool: "p", Incarnation: 1, Status: 1, Weight: 10,
			Engine: "sim", RelayMark: fleet.RelayMark(secret), Fingerprint: "f",
		}
		for _, f := range change {
			f(i+1, w)
		}
		ws = append(ws, w)
	}
	return ws
}

// wish is a request as our workers read it.
type wish struct {
	N         int  `json:"n"`
	MaxTokens int  `json:"max_tokens"`
	Stream    bool `json:"stream"`
	Options   struct {
		Usage bool `json:"include_usage"`
	} `json:"stream_options"`
	Mesh struct {
		TokenIDs bool `json:"token_ids"`
		Resume   *struct {
			Stream  string
			Attempt int
			Choices []struct {
				Index     int
				TokenIDs  []int32 `json:"token_ids"`
				TextBytes int     `json:"text_bytes"`
			}
		}
	} `json:"kvmesh"`
}

// trouble is what a worker does instead of its next token. It may do it before any.
type trouble func(w http.ResponseWriter, r *http.Request) (goOn bool)

// generate is one of our workers: token i of choice c is " <c>.<i>" with the id 100c+i,
// one every 10 ms. after says how many tokens it sends until the trouble.
func generate(t testing.TB, n int, w http.ResponseWriter, r *http.Request, body string, after int, trouble trouble) {
	var q wish
	if err := json.Unmarshal([]byte(body), &q); err != nil || !q.Stream || r.Header.Get(names.Relay) != secret || !q.Mesh.TokenIDs {
		t.Errorf("attempt %d: the request of a relay is not its own: %s, %v", n, body, r.Header)
	}
	next, fresh := make([]int, max(q.N, 1)), make([]bool, max(q.N, 1))
	if res := q.Mesh.Resume; res != nil {
		if res.Stream != r.Header.Get(names.Stream) || fmt.Sprint(res.Attempt) != r.Header.Get(names.Attempt) {
			t.Errorf("attempt %d: resume %+v with %v", n, res, r.Header)
		}
		for _, c := range res.Choices {
			next[c.Index], fresh[c.Index] = len(c.TokenIDs), true
			var text strings.Builder
			for i, id := range c.TokenIDs {
				if text.WriteString(word(c.Index, i)); id != int32(100*c.Index+i) {
					t.Errorf("attempt %d: token %d of choice %d is %d", n, i, c.Index, id)
				}
			}
			if len(text.String()) != c.TextBytes {
				t.Errorf("attempt %d: %d bytes of text delivered, the tokens have %d", n, c.TextBytes, len(text.String()))
			}
		}
	}
	head := fmt.Sprintf(`data: {"id":"answer-%d","object":"text_completion","created":%d,"model":"m","system_fingerprint":"f",`, n, n)
	sent := 0
	for round := true; round; {
		round = false
		for c := range next {
			if next[c] >= q.MaxTokens {
				continue
			}
			if sent == after && !trouble(w, r) {
				return
			}
			sent++
			how := ""
			if fresh[c] {
				how, fresh[c] = fmt.Sprintf(`"kvmesh":{"kv":"restored","restored":%d,"computed":1},`, next[c]), false
			}
			send(w, head+fmt.Sprintf(`"choices":[{%s"token_ids":[%d],"index":%d,"text":%q,"finish_reason":null}]}`+"\n\n", how, 100*c+next[c], c, word(c, next[c])))
			if next[c]++; next[c] < q.MaxTokens {
				round = true
			}
			if !rest(r, 10*time.Millisecond) {
				return
			}
		}
	}
	for c := range next {
		if sent == after && !trouble(w, r) {
			return
		}
		sent++
		send(w, head+fmt.Sprintf(`"choices":[{"index":%d,"text":"","finish_reason":"length"}]}`+"\n\n", c))
	}
	if sent == after && !trouble(w, r) {
		return
	}
	if q.Options.Usage {
		send(w, head+fmt.Sprintf(`"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%d}}`+"\n\n", q.MaxTokens*len(next)))
	}
	if sent+1 == after && !trouble(w, r) {
		return
	}
	send(w, done)
}

func word(choice, i int) string { return fmt.Sprintf(" %d.%dé", choice, i) }

// Troubles.
func dies(http.ResponseWriter, *http.Request) bool { cut(); return false }
func ends(http.ResponseWriter, *http.Request) bool { return false }
func errs(w http.ResponseWriter, _ *http.Request) bool {
	send(w, "data: {\"error\":{\"message\":\"out of memory\"}}\n\n")
	return false
}
func hangs(_ http.ResponseWriter, r *http.Request) bool { <-r.Context().Done(); return false }
func torn(w http.ResponseWriter, _ *http.Request) bool {
	send(w, `data: {"id":"answer","choices":[{"token_ids":[9],"index":0,"te`)
	cut()
	return false
}

// flow is a streamed answer as the client has it.
type flow struct {
	text   []string // by choice
	finish []string
	heads  map[string]int
	usage  int // completion tokens, summed over all usages
	done   int
	errs   []string
}

// read reads a stream.
func (m *mesh) flow(body string) flow {
	m.t.Helper()
	f := flow{heads: map[string]int{}}
	for line := range strings.Lines(body) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			f.done++
			continue
		}
		var c struct {
			ID, Model string
			Created   int
			Choices   []struct {
				Index  int
				Text   string
				Finish *string `json:"finish_reason"`
			}
			Usage *struct {
				Tokens int `json:"completion_tokens"`
			}
			Error *struct{ Message string }
		}
		if err := json.Unmarshal([]byte(data), &c); err != nil || strings.Contains(data, "token_ids") || strings.Contains(data, "kvmesh") {
			m.t.Errorf("event %s: %v", data, err)
		}
		if c.Error != nil {
			f.errs = append(f.errs, c.Error.Message)
			continue
		}
		f.heads[fmt.Sprint(c.ID, c.Created, c.Model)]++
		if c.Usage != nil {
			f.usage += c.Usage.Tokens
		}
		for _, ch := range c.Choices {
			for len(f.text) <= ch.Index {
				f.text, f.finish = append(f.text, ""), append(f.finish, "")
			}
			f.text[ch.Index] += ch.Text
			if ch.Finish != nil {
				f.finish[ch.Index] += *ch.Finish
			}
		}
	}
	return f
}

// checkWhole checks that an answer of n choices of so many tokens is whole and has
// nothing twice.
func (m *mesh) checkWhole(body string, n, tokens int, usage bool) {
	m.t.Helper()
	f := m.flow(body)
	want := flow{usage: 0}
	if usage {
		want.usage = n * tokens
	}
	for c := range n {
		var text strings.Builder
		for i := range tokens {
			text.WriteString(word(c, i))
		}
		want.text, want.finish = append(want.text, text.String()), append(want.finish, "length")
	}
	if fmt.Sprint(f.text, f.finish, f.usage, f.done, f.errs) != fmt.Sprint(want.text, want.finish, want.usage, 1, want.errs) || len(f.heads) != 1 {
		m.t.Errorf("got\n%+v\nof\n%s", f, body)
	}
}

// scripted serves attempt i by the i-th function, and the last of them all others.
func scripted(t testing.TB, m **mesh, scripts ...func(n int, w http.ResponseWriter, r *http.Request, body string)) func(int, http.ResponseWriter, *http.Request) {
	return func(n int, w http.ResponseWriter, r *http.Request) {
		(*m).mu.Lock()
		body := (*m).seen[n-1].body
		(*m).mu.Unlock()
		scripts[min(n, len(scripts))-1](n, w, r, body)
	}
}

// after is a worker that has trouble after so many tokens.
func after(t testing.TB, tokens int, what trouble) func(int, http.ResponseWriter, *http.Request, string) {
	return func(n int, w http.ResponseWriter, r *http.Request, body string) {
		generate(t, n, w, r, body, tokens, what)
	}
}

// well is a worker without.
func well(t testing.TB) func(int, http.ResponseWriter, *http.Request, string) {
	return after(t, -1, nil)
}

// inOwnMesh is inMesh with our workers, which do as scripted.
func inOwnMesh(t *testing.T, f func(t *testing.T, m *mesh), scripts ...func(n int, w http.ResponseWriter, r *http.Request, body string)) {
	t.Helper()
	var at *mesh
	inMesh(t, own, scripted(t, &at, scripts...), func(t *testing.T, m *mesh) {
		at = m
		f(t, m)
	})
}

const askUsage = `{"model":"m","prompt":"p","stream":true,"max_tokens":10,"stream_options":{"include_usage":true}}`

func (m *mesh) movesOf(cause, kind string) int {
	return int(testutil.ToFloat64(m.relay.metrics.moves.WithLabelValues(cause, kind)))
}
