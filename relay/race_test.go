package relay

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/names"
)

// rounds is how often a coincidence is tried.
const rounds = 60

// drained has the first n workers drained.
func drained(n int) func(i int, w *fleetpb.Worker) {
	return func(i int, w *fleetpb.Worker) {
		if i <= n {
			w.Status = int32(health.Draining)
		}
	}
}

// The first of two attempts dies at the moment that the second leaves a queue, or is given up because
// its worker drains, too. Whichever is heard of first, the third worker answers. In a bubble.
func TestTwoEndAtOnce(t *testing.T) {
	for name, second := range map[string][2]func(int, *fleetpb.Worker){
		"leaves a queue":     {full(2, 0), full(2, 1)},
		"drains, too":        {func(int, *fleetpb.Worker) {}, drained(2)},
		"is full and drains": {full(2, 0), func(i int, w *fleetpb.Worker) { full(2, 1)(i, w); drained(2)(i, w) }},
	} {
		t.Run(name, func(t *testing.T) {
			for range rounds {
				inFleet(t, map[string]func(int, http.ResponseWriter, *http.Request, string){
					"w1": func(_ int, _ http.ResponseWriter, r *http.Request, _ string) { rest(r, 3*time.Second); cut() },
					"w2": after(t, 0, hangs), "w3": well(t),
				}, func(t *testing.T, m *mesh) {
					m.picker.Update(ownFleet(3, second[0]))
					go func() {
						time.Sleep(time.Second / 2)
						m.picker.Update(ownFleet(2, second[0], drained(1))) // w3 comes later
						m.relay.Update()
						time.Sleep(2400 * time.Millisecond)
						m.picker.Update(ownFleet(3, second[1], drained(1)))
					}()
					m.checkWhole(m.ask(askUsage).body, 1, 10, true)
				})
			}
		})
	}
}

// A request leaves a queue at the moment that its worker is drained: it is at one worker at a time, and
// once at each. In a bubble.
func TestDrainWhileLeaving(t *testing.T) {
	for range rounds {
		inFleet(t, map[string]func(int, http.ResponseWriter, *http.Request, string){
			"w1": after(t, 0, hangs), "w2": after(t, 0, hangs), "w3": well(t),
		}, func(t *testing.T, m *mesh) {
			m.picker.Update(ownFleet(3, full(2, 0)))
			go func() {
				time.Sleep(2900 * time.Millisecond)
				m.picker.Update(ownFleet(3, full(2, 4)))
				time.Sleep(100 * time.Millisecond)
				m.picker.Update(ownFleet(3, full(2, 4), drained(1)))
				m.relay.Update()
			}()
			m.checkWhole(m.ask(askUsage).body, 1, 10, true)
			if got := strings.Join(m.attempts(), " "); got != "w1 w3" {
				t.Errorf("attempts %s", got)
			}
		})
	}
}

// An answer that lacks nothing but its end stays where it is. In a bubble.
func TestDrainAtTheEnd(t *testing.T) {
	inFleet(t, map[string]func(int, http.ResponseWriter, *http.Request, string){"w1": after(t, 11, hangs)}, func(t *testing.T, m *mesh) {
		go func() {
			time.Sleep(time.Second)
			m.picker.Update(ownFleet(3, drained(1)))
			m.relay.Update()
		}()
		m.checkWhole(m.ask(`{"model":"m","prompt":"p","stream":true,"max_tokens":10}`).body, 1, 10, false)
		for _, v := range m.relay.Attempts() {
			if v.Broken != 0 {
				t.Errorf("%s is blamed", v.Worker)
			}
		}
	})
}

// An important request leaves the queue behind less important ones that run, which do not say so by a
// token. In a bubble.
func TestQueuedBehindWhole(t *testing.T) {
	serve := func(n int, w http.ResponseWriter, r *http.Request, body string) {
		switch {
		case n <= 4:
			rest(r, 30*time.Second)
			sendJSON(w, http.StatusOK, complete)
		case rest(r, 25*time.Second):
			well(t)(n, w, r, body)
		}
	}
	inFleet(t, map[string]func(int, http.ResponseWriter, *http.Request, string){"w1": serve, "w3": well(t)}, func(t *testing.T, m *mesh) {
		openai := func(_ int, w *fleetpb.Worker) { w.Engine = "openai" }
		m.picker.Update(ownFleet(3, full(1, 0), openai))
		ends := make(chan reply, 4)
		for range cap(ends) {
			go func() {
				ends <- m.ask(`{"model":"m","prompt":"p","max_tokens":10}`, names.ModelRoute, "long", names.Stream, "stream-0")
			}()
		}
		time.Sleep(2 * time.Second)
		m.picker.Update(ownFleet(3, full(1, 0), openai))
		go func() {
			time.Sleep(3 * time.Second)
			m.picker.Update(ownFleet(3, full(1, 4), openai))
		}()
		if got := m.ask(askUsage); got.took > 5*time.Second {
			t.Errorf("took %v, %v", got.took, m.attempts())
		}
		for range cap(ends) {
			<-ends
		}
	})
}

// A worker that does not say how many it takes does not hide one that has room. In a bubble.
func TestQueuedBesideUnknown(t *testing.T) {
	slow := func(n int, w http.ResponseWriter, r *http.Request, body string) {
		if rest(r, 10*time.Second) {
			well(t)(n, w, r, body)
		}
	}
	inFleet(t, map[string]func(int, http.ResponseWriter, *http.Request, string){"w1": slow, "w3": well(t)}, func(t *testing.T, m *mesh) {
		m.picker.Update(ownFleet(3, full(2, 1), func(i int, w *fleetpb.Worker) {
			if i == 2 {
				w.Load = nil
			}
		}))
		m.checkWhole(m.ask(askUsage).body, 1, 10, true)
		if got := strings.Join(m.attempts(), " "); got != "w1 w3" {
			t.Errorf("attempts %s", got)
		}
	})
}

// A member of a chat request that is a completion's says nothing about its choices.
func TestChatWithPrompt(t *testing.T) {
	const head = `data: {"id":"a","object":"chat.completion.chunk","created":1,"model":"m","system_fingerprint":"f","choices":[{"index":0,`
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		req, err := http.NewRequest(http.MethodPost, "http://mesh/v1/chat/completions", strings.NewReader(`{"model":"m","messages":[{"role":"user","content":"x"}],"prompt":["a","b"],"stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range map[string]string{names.Pool: "p", names.ModelRoute: "short", names.Destination: "10.0.0.1:80", names.Stream: "stream-1", names.Route: names.RouteRelay} {
			req.Header.Set(k, v)
		}
		resp, err := m.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		if err != nil || !strings.HasSuffix(string(got), done) || len(m.attempts()) != 1 {
			t.Errorf("%v, attempts %v: %s", err, m.attempts(), got)
		}
	}, func(_ int, w http.ResponseWriter, _ *http.Request, _ string) {
		send(w, head+`"token_ids":[1],"delta":{"role":"assistant","content":"x"},"finish_reason":null}]}`+"\n\n", head+`"delta":{},"finish_reason":"stop"}]}`+"\n\n", done)
	})
}
