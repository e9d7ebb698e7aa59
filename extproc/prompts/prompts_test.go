package prompts

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// ask is a worker whose tokens are the bytes of the raw text.
type ask struct {
	mu     sync.Mutex
	err    error
	asked  []Worker
	bodies []string
}

func (a *ask) tokens(_ context.Context, to Worker, body []byte) ([]int32, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked, a.bodies = append(a.asked, to), append(a.bodies, string(body))
	if a.err != nil {
		return nil, a.err
	}
	var q map[string]json.RawMessage
	if err := json.Unmarshal(body, &q); err != nil {
		return nil, err
	}
	var ids []int32
	for _, name := range []string{"prompt", "tools", "messages"} {
		for _, c := range q[name] {
			ids = append(ids, int32(c))
		}
	}
	return ids, nil
}

// running runs a Prompts in a bubble.
func running(t *testing.T, a *ask) *Prompts {
	t.Helper()
	p, err := New(Config{Ask: a.tokens, Registerer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	go p.Run(t.Context())
	return p
}

func parsed(t testing.TB, e openai.Endpoint, body string) *openai.Request {
	t.Helper()
	req, err := openai.Parse(e, []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// chat is a request with a long system prompt and a question, whose text a tokenizer takes byte by
// byte.
func chat(t testing.TB, system, question, more string) *openai.Request {
	return parsed(t, openai.Chat, fmt.Sprintf(`{"model":"m","messages":[{"role":"system","content":%q},{"role":"user","content":%q}]%s}`, system, question, more))
}

var system = strings.Repeat("You are a helpful assistant. ", 200)

func decision(pool string) picker.Decision {
	return picker.Decision{Pool: pool, Model: "own", Candidates: []picker.Candidate{{ID: "w1", Address: "10.0.0.1:1"}, {ID: "w2"}}}
}

// TestLearn: what is not known is asked for beside the request, of the worker that serves it, and
// what begins alike is known from then on.
func TestLearn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &ask{}
		p := running(t, a)
		req := chat(t, system, "What is a mesh?", `,"cache_salt":"s","chat_template_kwargs":{"x":1},"temperature":1`)
		known, learn := p.Known(time.Now(), req)
		if known.IDs != nil || known.Salt != "s" || learn == nil {
			t.Fatalf("%+v", known)
		}
		learn(decision("p"))
		learn(decision("p")) // of two at once one is asked about
		synctest.Wait()
		if len(a.asked) != 1 || a.asked[0] != (Worker{"p", "w1", "10.0.0.1:1"}) {
			t.Fatalf("asked %+v", a.asked)
		}
		if want := fmt.Sprintf(`{"model":"own","messages":%s,"chat_template_kwargs":{"x":1}}`, req.Raw("messages")); a.bodies[0] != want {
			t.Errorf("asked %s\nwant %s", a.bodies[0], want)
		}
		all := len(req.Raw("messages"))
		if known, learn = p.Known(time.Now(), req); len(known.IDs) != all || known.Tokens != all || learn != nil {
			t.Errorf("%d of %d tokens, want all %d", len(known.IDs), known.Tokens, all)
		}
		other := chat(t, system, "And what is a pool? Say it in one sentence.", `,"cache_salt":"s","chat_template_kwargs":{"x":1}`)
		known, learn = p.Known(time.Now(), other)
		if common, want := len(known.IDs), len(system); common < want-step || common > want+2*step || known.Tokens != len(other.Raw("messages")) || learn != nil {
			t.Errorf("%d of %d tokens are known, %d are common", common, known.Tokens, want)
		}
		for i := range known.IDs {
			if known.IDs[i] != int32(other.Raw("messages")[i]) {
				t.Fatalf("token %d of the common beginning is another one", i)
			}
		}
		for name, strange := range map[string]*openai.Request{
			"another salt":     chat(t, system, "What is a mesh?", `,"chat_template_kwargs":{"x":1}`),
			"another template": chat(t, system, "What is a mesh?", `,"cache_salt":"s"`),
			"another text":     chat(t, "X"+system, "What is a mesh?", `,"cache_salt":"s","chat_template_kwargs":{"x":1}`),
		} {
			if known, _ := p.Known(time.Now(), strange); known.IDs != nil {
				t.Errorf("%s: %d tokens are known", name, len(known.IDs))
			}
		}
		time.Sleep(idle + time.Second)
		if known, _ := p.Known(time.Now(), req); known.IDs != nil || p.table.size() != 0 {
			t.Error("tokens that nobody asked for are kept")
		}
	})
}

// TestAskNot: what is short, more than text or given as ids is nobody's question.
func TestAskNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &ask{}
		p := running(t, a)
		for _, req := range []*openai.Request{
			chat(t, "short", "?", ""),
			chat(t, strings.Repeat("x", mostBytes), "?", ""),
			parsed(t, openai.Completions, `{"model":"m","prompt":["`+system+`","b"]}`),
			parsed(t, openai.Chat, `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"`+system+`"},{"type":"image_url","image_url":{"url":"http://10.0.0.1/"}}]}]}`),
		} {
			known, learn := p.Known(time.Now(), req)
			if known.IDs != nil {
				t.Errorf("%+v", known)
			}
			if learn != nil {
				learn(decision("p"))
			}
		}
		synctest.Wait()
		if len(a.asked) != 0 {
			t.Errorf("asked %q", a.bodies)
		}
	})
}

// TestAskFailed: a pool whose worker does not say is left alone for a while, the others are not;
// and where too many wait no more are taken.
func TestAskFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &ask{err: errors.New("no such path")}
		p := running(t, a)
		n := 0
		try := func(pool string, want int) {
			t.Helper()
			n++
			_, learn := p.Known(time.Now(), chat(t, fmt.Sprint(n, system), "?", ""))
			learn(decision(pool))
			synctest.Wait()
			if len(a.asked) != want {
				t.Errorf("asked %d times, want %d", len(a.asked), want)
			}
		}
		try("p", 1)
		try("p", 1)
		try("q", 2)
		time.Sleep(restTime + time.Second)
		try("p", 3)
		if got := testutil.ToFloat64(p.asked.WithLabelValues("failed")); got != 3 {
			t.Errorf("%v failures are counted", got)
		}
	})
	idle, err := New(Config{Ask: (&ask{}).tokens, Registerer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for i := range mostWaiting + 5 { // nobody asks
		_, learn := idle.Known(time.Now(), chat(t, fmt.Sprint(i, system), "?", ""))
		learn(decision("p"))
	}
	if got := testutil.ToFloat64(idle.asked.WithLabelValues("dropped")); got != 5 {
		t.Errorf("%v are counted as dropped, want 5", got)
	}
}

func TestIDs(t *testing.T) {
	for raw, want := range map[string][]int32{
		"[1,2, 3]": {1, 2, 3}, "[ 1 ,\n2]": {1, 2}, "[1,22,33": {1, 22}, "[2147483647]": {2147483647},
		"[2147483648]": nil, "[99999999999999999999]": nil, "[-1]": nil, "[1.5]": nil, `["a"]`: nil, "[[1]]": nil, "": nil, "1": nil, "[,]": nil, "[]": nil,
	} {
		if got := idsOf([]byte(raw)); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", raw, got, want)
		}
	}
	p := running(t, &ask{})
	known, learn := p.Known(time.Now(), parsed(t, openai.Completions, `{"model":"m","prompt":[1,2,3]}`))
	if !slices.Equal(known.IDs, []int32{1, 2, 3}) || known.Tokens != 3 || learn != nil {
		t.Errorf("%+v", known)
	}
}

// TestTableBounds: what is kept is bounded, what is used stays, and what goes takes nothing of
// others with it.
func TestTableBounds(t *testing.T) {
	table, now := NewTable(), time.Unix(1e9, 0)
	long := func(i int) text { return table.hash(nil, []byte(system), fmt.Appendf(nil, "%8d", i)) }
	first := long(0)
	table.learn(now, first, make([]int32, mostIDs/8))
	for i := 1; i < 40; i++ {
		table.learn(now, long(i), make([]int32, mostIDs/8))
		if _, _, whole := table.find(now, first); !whole {
			t.Fatalf("what is used is gone after %d others", i)
		}
	}
	if n := table.size(); n > mostIDs {
		t.Errorf("%d ids", n)
	}
	if _, _, whole := table.find(now, long(1)); whole {
		t.Error("what nobody used is still there")
	}
	table.learn(now, long(50), make([]int32, mostIDs+1))
	if _, _, whole := table.find(now, long(50)); whole {
		t.Error("what is larger than the table is taken")
	}
	table.expire(now.Add(idle + time.Second))
	if table.size() != 0 || len(table.at) != 0 || table.order.Len() != 0 {
		t.Errorf("%d ids, %d steps, %d texts are left", table.size(), len(table.at), table.order.Len())
	}
}

// FuzzKnown: whatever clients send, what is known is no more than there is.
func FuzzKnown(f *testing.F) {
	f.Add(system, "a", "b", 10)
	f.Fuzz(func(t *testing.T, common, a, b string, tokens int) {
		table, now := NewTable(), time.Unix(1e9, 0)
		ids := make([]int32, min(max(tokens, 0), 1<<16))
		table.learn(now, table.hash([]byte("h"), []byte(common+a)), ids)
		got, about, whole := table.find(now, table.hash([]byte("h"), []byte(common), []byte(b)))
		if len(got) > len(ids) || about < len(got) || whole && (common+a != common+b || len(got) != len(ids)) {
			t.Errorf("%d of %d ids, about %d, whole %v", len(got), len(ids), about, whole)
		}
		if a == b && !whole {
			t.Error("the same text in two parts is another one")
		}
	})
}

func BenchmarkKnown(b *testing.B) {
	p, err := New(Config{Ask: (&ask{}).tokens, Registerer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	req := chat(b, strings.Repeat("x", 128<<10), "?", "")
	p.table.learn(time.Now(), p.table.hash([]byte("chat")), nil)
	b.SetBytes(128 << 10)
	for b.Loop() {
		p.Known(time.Now(), req)
	}
}
