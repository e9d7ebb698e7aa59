package openaiengine

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// stopping is stream with stop strings as vLLM has them: they are looked for in what is
// generated, so much text is held back that none of it is told too early, and ids come at
// once.
func (f *fakeVLLM) stopping(w http.ResponseWriter, ep openai.Endpoint, ids []int32, n int, stops []string, include bool) {
	chunks := openai.NewChunks(openai.Answer{Endpoint: ep, ID: "up-1", Model: "vendor/model", Created: 5}, true)
	prompt, said, told, reason := len(ids), "", 0, ""
	hold := 0
	for _, s := range stops {
		hold = max(hold, len(s)-1)
	}
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = w.Write(chunks.AppendRole(nil, 0))
	for i := 0; reason == ""; i++ {
		h := fnv.New32a()
		fmt.Fprint(h, ids)
		next := int32('a' + h.Sum32()%26)
		ids, said = append(ids, next), said+string(rune(next))
		upTo := max(told, len(said)-hold)
		if i+1 == n {
			upTo, reason = len(said), "length"
		}
		for _, s := range stops {
			if at := strings.Index(said, s); at >= 0 {
				upTo, reason = at, "stop"
				if include {
					upTo += len(s)
				}
			}
		}
		ev := chunks.InsertTokens(chunks.AppendText(nil, 0, []byte(said[told:upTo]), nil), 0, []int32{next})
		told = upTo
		_, _ = w.Write(ev)
		_ = http.NewResponseController(w).Flush()
	}
	ev := chunks.AppendFinish(nil, 0, reason)
	ev = chunks.AppendUsage(ev, openai.Usage{PromptTokens: prompt, CompletionTokens: len(ids) - prompt, TotalTokens: len(ids)})
	_, _ = w.Write(append(ev, openai.Done...))
}

// TestStopStringOverTheCut: a stop string ends a stream where it would have without a
// cut, wherever that is: before it, in it, or behind it; and nothing of it is told.
func TestStopStringOverTheCut(t *testing.T) {
	f := newFakeVLLM(t)
	base := startWorker(t, &upstream{Server: f.Server}, Config{Name: "mine"})
	get := func(path, ask, mesh string, most int) told {
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
	for path, ask := range map[string]string{
		"/v1/completions":      `{"model":"alias","prompt":"Hello","max_tokens":12,"stream":true,"stream_options":{"include_usage":true}`,
		"/v1/chat/completions": `{"model":"alias","messages":[{"role":"user","content":"hi"}],"max_tokens":12,"stream":true,"stream_options":{"include_usage":true}`,
	} {
		free := get(path, ask, "", 1000)
		for _, c := range []struct{ stop, more string }{
			{free.text[5:8], ""},
			{free.text[4:9], ""},
			{free.text[6:7], ""},
			{free.text[5:8], `,"include_stop_str_in_output":true`},
			{free.text[5:8] + "!", ""}, // begins, and does not come
		} {
			ask := ask + fmt.Sprintf(`,"stop":[%q,"@@@@"]`, c.stop) + c.more
			whole := get(path, ask, "", 1000)
			if c.stop[len(c.stop)-1] != '!' && (whole.reason != "stop" || c.more == "" && strings.Contains(whole.text, c.stop)) {
				t.Fatalf("%s to %q: %+v", path, c.stop, whole)
			}
			for cut := 1; cut <= len(whole.ids); cut++ {
				first := get(path, ask, "", cut+1)
				if len(first.ids) > cut {
					first = get(path, ask, "", cut) // an endpoint without a first event of the role
				}
				if first.reason != "" {
					continue // the client has its end
				}
				raw, _ := json.Marshal(first.ids)
				rest := get(path, ask, fmt.Sprintf(`,"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":%s,"text_bytes":%d}]}`, raw, len(first.text)), 1000)
				if ids := slices.Concat(first.ids, rest.ids); !slices.Equal(ids, whole.ids) || first.text+rest.text != whole.text {
					t.Fatalf("%s to %q%s, cut at %d: %q + %q, want %q; ids %v, want %v", path, c.stop, c.more, cut, first.text, rest.text, whole.text, ids, whole.ids)
				}
				if rest.reason != whole.reason || rest.usage != whole.usage || !rest.done {
					t.Errorf("%s to %q%s, cut at %d: %+v, want the end of %+v", path, c.stop, c.more, cut, rest, whole)
				}
			}
		}
	}
}
