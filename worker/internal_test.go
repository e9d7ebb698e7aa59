package worker

import (
	"errors"
	"math"
	"net/http"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/openai"
)

func TestRates(t *testing.T) {
	m := &metrics{}
	t0 := time.Unix(1000, 0)
	if r := m.rates(t0, Load{GenTokens: 1000}); r != (rates{}) {
		t.Errorf("rates from one sample: %+v", r)
	}
	for i := 1; i <= 100; i++ { // 10 s at 10 requests/s, one of them failing, 500 tokens/s
		m.finished.Add(1)
		if i%10 == 0 {
			m.failed.Add(1)
		}
		m.rates(t0.Add(time.Duration(i)*100*time.Millisecond), Load{GenTokens: 1000 + uint64(i)*50})
	}
	end := t0.Add(10 * time.Second)
	if r := m.rates(end, Load{GenTokens: 6000}); r.requests < 9.5 || r.requests > 10.5 || r.tokens < 475 || r.tokens > 525 || r.errors < .8 || r.errors > 1.3 {
		t.Errorf("%+v", r)
	}
	if n := len(m.samples); n > int(rateWindow/sampleEvery)+2 {
		t.Errorf("%d samples are kept", n)
	}
	if r := m.rates(end.Add(20*time.Second), Load{GenTokens: 6000}); r.tokens > 3 {
		t.Errorf("after 20 s of silence %+v", r)
	}
}

func TestReport(t *testing.T) {
	for _, c := range []struct {
		load Load
		want float64
	}{
		{Load{}, 0},
		{Load{Running: 3, MaxRunning: 4}, .75},
		{Load{Running: 4, Waiting: 4, MaxRunning: 4}, 2},
		{Load{Running: 1, MaxRunning: 4, KVUsage: .9}, .9},
		{Load{Running: 5, KVUsage: .1}, .1}, // most is unknown
	} {
		if got := report(facts{Load: c.load}, rates{}, time.Unix(7, 0)).ApplicationUtilization; got != c.want {
			t.Errorf("%+v: %v, want %v", c.load, got, c.want)
		}
	}
}

func TestUsageCountsPromptsOnceAndTheLeastReuse(t *testing.T) {
	g := &generation{prompts: 2, ptokens: 30, choices: []*choice{
		{prompt: 0, generated: 5, cached: 4},
		{index: 1, prompt: 0, generated: 6, cached: 9},
		{index: 2, prompt: 1, generated: 7, cached: 0},
		{index: 3, prompt: 1, generated: 8, cached: 20},
	}}
	want := openai.Usage{PromptTokens: 30, CompletionTokens: 26, TotalTokens: 56, PromptTokensDetails: &openai.PromptTokensDetails{CachedTokens: 4}}
	if diff := cmp.Diff(want, g.usage()); diff != "" {
		t.Error(diff)
	}
}

func TestTokenNamesAndNumbers(t *testing.T) {
	for in, want := range map[string]string{"": "", " a": " a", "é": "é", "\xc3": `bytes:\xc3`, "a\xf0\x9f": `bytes:\x61\xf0\x9f`} {
		if got := tokenName([]byte(in)); got != want {
			t.Errorf("%q is named %q, want %q", in, got, want)
		}
	}
	for in, want := range map[float64]float64{-1.5: -1.5, 0: 0, math.Inf(-1): -9999, 1e-9: 0} {
		if got := finite(in); got != want {
			t.Errorf("%g becomes %g, want %g", in, got, want)
		}
	}
	if got := finite(math.NaN()); got != -9999 {
		t.Errorf("NaN becomes %g", got)
	}
}

func TestMaxTokens(t *testing.T) {
	for _, c := range []struct {
		ep          openai.Endpoint
		asked, room int
		want        int
	}{
		{openai.Chat, 0, 100, 100},
		{openai.Chat, 5, 100, 5},
		{openai.Chat, 500, 100, 100},
		{openai.Completions, 0, 100, 16},
		{openai.Completions, 0, 9, 9},
		{openai.Completions, 50, 100, 50},
	} {
		if got := maxTokens(&openai.Request{Endpoint: c.ep, MaxTokens: c.asked}, c.room); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

func TestLifecycleCountsRequests(t *testing.T) {
	l := newLifecycle()
	if _, err := l.begin(); err == nil || err.Status != 503 {
		t.Errorf("while loading: %v", err)
	}
	l.loaded(nil) // no engine is needed to count
	l.engine = struct{ Engine }{}
	for range 2 {
		if _, err := l.begin(); err != nil {
			t.Fatal(err)
		}
	}
	idle := l.stop()
	if _, err := l.begin(); err == nil || err.RetryAfter == 0 {
		t.Errorf("while draining: %v", err)
	}
	l.end()
	select {
	case <-idle:
		t.Fatal("idle with a request running")
	default:
	}
	l.end()
	<-idle
	if l.stop() != idle {
		t.Error("a second drain is another one")
	}
}

// discard is a client that reads everything at once.
type discard struct{ h http.Header }

func (d discard) Header() http.Header         { return d.h }
func (d discard) Write(b []byte) (int, error) { return len(b), nil }
func (d discard) WriteHeader(int)             {}
func (d discard) Flush()                      {}

// BenchmarkStreamToken is the server's own cost of one streamed token: text,
// stop strings, event.
func BenchmarkStreamToken(b *testing.B) {
	for _, c := range []struct {
		name string
		req  openai.Request
	}{
		{"plain", openai.Request{TopLogprobs: -1}},
		{"stop", openai.Request{TopLogprobs: -1, Stop: []string{"\n\n", "END"}}},
		{"logprobs", openai.Request{TopLogprobs: 0}},
	} {
		b.Run(c.name, func(b *testing.B) {
			st := newSSE(discard{http.Header{}}, openai.Answer{Endpoint: openai.Chat, ID: "chatcmpl-x", Model: "m"}, true, time.Hour)
			defer st.close()
			ch := newChoice(0, nil, &c.req)
			tok := Token{ID: 7, Bytes: []byte(" river")}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := ch.step(tok, st); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// The route's limit of a look-up comes in milliseconds; nonsense is none.
func TestKVWithin(t *testing.T) {
	for ms, want := range map[int64]time.Duration{0: 0, 1: time.Millisecond, 2500: 2500 * time.Millisecond, -5: 0, math.MaxInt64: math.MaxInt32 * time.Millisecond} {
		if got := (meshField{KVWithinMS: ms}).kvWithin(); got != want {
			t.Errorf("%d ms: %v, want %v", ms, got, want)
		}
	}
}

// remote is an engine whose server is another process.
type remote struct {
	Engine
	Proxy
}

// Failed self-checks ask for a new start of the process only where it has the engine.
func TestHealthOfARemoteEngine(t *testing.T) {
	for _, c := range []struct {
		engine Engine
		want   int
	}{{remote{}, http.StatusOK}, {nil, http.StatusServiceUnavailable}} {
		l := newLifecycle()
		for range hopeless {
			l.checked(c.engine, errors.New("no token"))
		}
		if got, _, _ := l.health(); got != c.want {
			t.Errorf("%T: health is %d, want %d", c.engine, got, c.want)
		}
		if got, _ := l.ready(); got != http.StatusServiceUnavailable {
			t.Errorf("%T: ready is %d", c.engine, got)
		}
	}
}
