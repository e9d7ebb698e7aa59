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
	"github.com/kvmesh/kvmesh/worker"
)

// stopping is what a request says of stop strings.
type stopping struct {
	Stop    []string `json:"stop"`
	Include bool     `json:"include_stop_str_in_output"`
	Least   int      `json:"min_tokens"`
	withIDs bool
}

// ends finds a stop string at the end of what was said, and returns the text up to which
// it is told then.
func (s stopping) ends(said string) (upTo int, yes bool) {
	for _, stop := range s.Stop {
		if len(said) > s.Least && strings.HasSuffix(said, stop) {
			if s.Include {
				return len(said), true
			}
			return len(said) - len(stop), true
		}
	}
	return 0, false
}

// stopping is stream with stop strings as vLLM has them: they are looked for in what is
// generated, behind the first min_tokens; so much text is held back that none of it is told
// too early, and nothing where it is told at the end; and ids come at once.
func (f *fakeVLLM) stopping(w http.ResponseWriter, ep openai.Endpoint, ids []int32, n int, stop stopping) {
	chunks := openai.NewChunks(openai.Answer{Endpoint: ep, ID: "up-1", Model: "vendor/model", Created: 5}, true)
	prompt, said, told, reason := len(ids), "", 0, ""
	hold := 0
	for _, s := range stop.Stop {
		if !stop.Include {
			hold = max(hold, len(s)-1)
		}
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
		if at, yes := stop.ends(said); yes {
			upTo, reason = at, "stop"
		}
		ev := chunks.AppendText(nil, 0, []byte(said[told:upTo]), nil)
		if stop.withIDs {
			ev = chunks.InsertTokens(ev, 0, []int32{next})
		}
		told = upTo
		_, _ = w.Write(ev)
		_ = http.NewResponseController(w).Flush()
	}
	var ev []byte
	if !f.silent {
		ev = chunks.AppendFinish(ev, 0, reason)
	}
	ev = chunks.AppendUsage(ev, openai.Usage{PromptTokens: prompt, CompletionTokens: len(ids) - prompt, TotalTokens: len(ids)})
	_, _ = w.Write(append(ev, openai.Done...))
}

// asks are streams of at most 12 tokens, of each endpoint.
var asks = map[string]string{
	"/v1/completions":      `{"model":"alias","prompt":"Hello","max_tokens":12,"stream":true,"stream_options":{"include_usage":true}`,
	"/v1/chat/completions": `{"model":"alias","messages":[{"role":"user","content":"hi"}],"max_tokens":12,"stream":true,"stream_options":{"include_usage":true}`,
}

// getter returns what asks the worker at base, as the relay, for a stream, and reads at
// most so many events of it.
func getter(t *testing.T, base string) func(path, ask, mesh string, most int) told {
	return func(path, ask, mesh string, most int) told {
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
			t.Fatalf("%s %s %s: %d %s", path, ask, mesh, resp.StatusCode, raw)
		}
		return tell(t, resp.Body, most)
	}
}

// testEveryCut compares a stream that is cut behind each of its tokens from the least on,
// before its finish_reason, with the one that is not cut, which it returns.
func testEveryCut(t *testing.T, base, path, ask string, least int) told {
	t.Helper()
	get := getter(t, base)
	whole := get(path, ask, "", 1000)
	cuts := 0
	for cut := max(least, 1); cut <= len(whole.ids); cut++ {
		first := get(path, ask, "", cut+1)
		if len(first.ids) > cut {
			first = get(path, ask, "", cut) // an endpoint without a first event of the role
		}
		if first.reason != "" {
			continue // the client has its end
		}
		cuts++
		reason := whole.reason
		if cut == 12 && reason == "" {
			reason = "length" // a silent server's tokens are all there
		}
		raw, _ := json.Marshal(first.ids)
		rest := get(path, ask, fmt.Sprintf(`,"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"token_ids":%s,"text_bytes":%d}]}`, raw, len(first.text)), 1000)
		if ids := slices.Concat(first.ids, rest.ids); !slices.Equal(ids, whole.ids) || first.text+rest.text != whole.text {
			t.Errorf("%s %s, cut at %d: %q + %q, want %q; ids %v, want %v", path, ask, cut, first.text, rest.text, whole.text, ids, whole.ids)
		} else if rest.reason != reason || rest.usage != whole.usage || !rest.done {
			t.Errorf("%s %s, cut at %d: %+v, want the end of %+v", path, ask, cut, rest, whole)
		}
	}
	if cuts == 0 {
		t.Fatalf("%s %s: no cut in %+v", path, ask, whole)
	}
	return whole
}

// TestStopStringOverTheCut: a stop string ends a stream where it would have without a
// cut, wherever that is: before it, in it, or behind it. Nothing of it is told, or all once.
func TestStopStringOverTheCut(t *testing.T) {
	base := startWorker(t, &upstream{Server: newFakeVLLM(t).Server}, Config{Name: "mine"})
	for path, ask := range asks {
		free := getter(t, base)(path, ask, "", 1000)
		for _, stop := range []string{
			free.text[5:8], free.text[4:9], free.text[6:7],
			free.text[5:8] + "!", // begins, and does not come
		} {
			for _, include := range []bool{false, true} {
				whole := testEveryCut(t, base, path, ask+fmt.Sprintf(`,"stop":[%q,"@@@@"],"include_stop_str_in_output":%v`, stop, include), 1)
				if comes := !strings.HasSuffix(stop, "!"); (whole.reason == "stop") != comes || comes && strings.HasSuffix(whole.text, stop) != include {
					t.Errorf("%s to %q: %+v", path, stop, whole)
				}
			}
		}
	}
}

// TestStopStringBesideMinTokens: a stop string in the first tokens is text, delivered or
// held back; one that ends behind them counts.
func TestStopStringBesideMinTokens(t *testing.T) {
	base := startWorker(t, &upstream{Server: newFakeVLLM(t).Server}, Config{Name: "mine"})
	for path, ask := range asks {
		free := getter(t, base)(path, ask, "", 1000)
		for _, c := range []struct {
			stops []string
			least int
			want  int // letters with the stop string that counts
		}{
			{[]string{free.text[1:3], free.text[7:10]}, 3, 10},
			{[]string{free.text[1:3], free.text[7:10], "@@@@@@@@@@"}, 3, 10}, // holds the first back
			{[]string{free.text[1:3], free.text[2:5], "@@@@"}, 3, 5},         // the second begins in the first
			{[]string{free.text[2:6], "@@@@"}, 4, 6},
			{[]string{free.text[1:4], "@@@@"}, 4, 12},
		} {
			stops, _ := json.Marshal(c.stops)
			for _, include := range []bool{false, true} {
				whole := testEveryCut(t, base, path, ask+fmt.Sprintf(`,"stop":%s,"min_tokens":%d,"include_stop_str_in_output":%v`, stops, c.least, include), c.least)
				if len(whole.ids) != c.want {
					t.Errorf("%s to %q: %+v", path, c.stops, whole)
				}
			}
		}
		// What of min_tokens is delivered is not asked for again.
		testEveryCut(t, base, path, ask+`,"min_tokens":11`, 1)
	}
}

// TestToldStopStringByText: one whose beginning was delivered ends a stream that goes on by
// text, whose server sees only the rest.
func TestToldStopStringByText(t *testing.T) {
	f := newFakeVLLM(t)
	f.metrics = "llamacpp:requests_processing 0\n"
	base := startWorker(t, &upstream{Server: f.Server}, Config{})
	get := getter(t, base)
	for path, ask := range asks {
		free := get(path, ask, "", 1000)
		ask += fmt.Sprintf(`,"stop":[%q,"@@@@"],"include_stop_str_in_output":true`, free.text[5:8])
		whole := get(path, ask, "", 1000)
		if whole.text != free.text[:8] || whole.reason != "stop" {
			t.Fatalf("%s: %+v", path, whole)
		}
		for cut := 1; cut <= 8; cut++ { // the last without its finish_reason
			rest := get(path, ask, fmt.Sprintf(`,"resume":{"stream":"s","attempt":2,"choices":[{"index":0,"text_bytes":%d,"text":%q}]}`, cut, whole.text[:cut]), 1000)
			if whole.text[:cut]+rest.text != whole.text || rest.reason != "stop" || rest.usage != whole.usage || !rest.done {
				t.Errorf("%s cut at %d: %+v, want the end of %+v", path, cut, rest, whole)
			}
		}
	}
}

// TestHeldTextOfASilentEnd: a server that ends without a finish_reason ends what was held
// back as the beginning of a stop string.
func TestHeldTextOfASilentEnd(t *testing.T) {
	f := newFakeVLLM(t)
	f.silent = true
	base := startWorker(t, &upstream{Server: f.Server}, Config{Name: "mine"})
	for path, ask := range asks {
		free := getter(t, base)(path, ask, "", 1000)
		whole := testEveryCut(t, base, path, ask+fmt.Sprintf(`,"stop":[%q]`, free.text[8:]+"!"), 1)
		if whole.text != free.text || whole.reason != "" {
			t.Errorf("%s: %+v", path, whole)
		}
	}
}

// TestDeliveredTextWentOn: a stop string inside of delivered text has not ended the stream,
// which went on behind it; one that is told and is the last of it has.
func TestDeliveredTextWentOn(t *testing.T) {
	for _, c := range []struct {
		text    string
		has     int
		include string
		early   int
		want    bool
	}{
		{"xENDy", 5, "false", 0, false},
		{"xEND", 4, "false", 0, false},
		{"xENDy", 1, "false", 0, true},  // held back
		{"xENDy", 1, "false", 4, false}, // held back, in the tokens of min_tokens
		{"xENDy", 2, "true", 0, true},
		{"xENDy", 5, "true", 0, false},
		{"xEND", 4, "true", 0, true}, // without its finish_reason
		{"xEND", 4, "true", 4, false},
		{"", 0, "true", 0, false},
	} {
		req, bad := openai.Parse(openai.Completions, []byte(`{"model":"m","prompt":"x","stop":["END"],"include_stop_str_in_output":`+c.include+`}`))
		if bad != nil {
			t.Fatal(bad)
		}
		co := continuation{req: req, delivered: worker.Delivered{TextBytes: c.has}, text: []byte(c.text)}
		co.spare(c.early)
		if got := co.stopped(); got != c.want {
			t.Errorf("%+v: stopped %v", c, got)
		}
	}
}
