package relay

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/internal/names"
)

// hang blocks until the relay gives the attempt up, and notes when.
func hang(r *http.Request, start time.Time, freed *atomic.Int64) {
	<-r.Context().Done()
	freed.Store(int64(time.Since(start)))
}

// TestTimeouts: each time-out of the route frees the worker at its moment and
// tells the client in the form that is still possible.
func TestTimeouts(t *testing.T) {
	for _, tc := range []struct {
		name, ask string
		serve     func(w http.ResponseWriter, r *http.Request) // before it hangs
		after     time.Duration
		status    int
		want      string
	}{
		{"first byte of a stream", askStream, func(http.ResponseWriter, *http.Request) {}, 40 * time.Second, 200, ": keep-alive\n\n: keep-alive\n\ndata: {\"error\":{\"message\":\"The worker did not answer in time: no token within the route's firstByte"},
		{"worker's comments are no token", askStream, func(w http.ResponseWriter, r *http.Request) {
			for range 10 {
				send(w, ": busy\n\n")
				if !rest(r, 3*time.Second) {
					return
				}
			}
		}, 40 * time.Second, 200, ": keep-alive\n\n: keep-alive\n\ndata: {\"error\":"},
		{"first byte of a whole answer", askWhole, func(http.ResponseWriter, *http.Request) {}, 40 * time.Second, 504, `{"error":{"message":"The worker did not answer in time: no token within the route's firstByte`},
		{"idle stream", askStream, func(w http.ResponseWriter, r *http.Request) {
			send(w, token("a", ""))
			rest(r, 4*time.Second)
			send(w, token("b", ""), ": busy\n\n")
		}, 9 * time.Second, 200, token("a", "") + token("b", "") + ": busy\n\ndata: {\"error\":{\"message\":\"The worker did not answer in time: no token within the route's streamIdle"},
		{"idle inside a whole answer", askWhole, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			send(w, "{")
			rest(r, 4*time.Second)
			send(w, `"a":`)
		}, 9 * time.Second, 504, `{"error":{"message":"The worker did not answer in time: no token within the route's streamIdle`},
		{"whole request", askStream, func(w http.ResponseWriter, r *http.Request) {
			for rest(r, 4100*time.Millisecond) { // none comes at the very end
				send(w, token("a", ""))
			}
		}, 120 * time.Second, 200, strings.Repeat(token("a", ""), 29) + "data: {\"error\":{\"message\":\"The worker did not answer in time: not complete within the route's request"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var freed atomic.Int64
			var start time.Time
			serve := func(_ int, w http.ResponseWriter, r *http.Request) {
				tc.serve(w, r)
				hang(r, start, &freed)
			}
			inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
				start = time.Now()
				got := m.ask(tc.ask)
				synctest.Wait()
				if got.status != tc.status || !strings.HasPrefix(got.body, tc.want) {
					t.Errorf("%d %q, want %d %q", got.status, got.body, tc.status, tc.want)
				}
				if got.took != tc.after || time.Duration(freed.Load()) != tc.after {
					t.Errorf("client waited %v, worker was freed after %v; want %v", got.took, time.Duration(freed.Load()), tc.after)
				}
				if len(m.attempts()) != 1 || m.result(resultTimeout) != 1 {
					t.Errorf("%d attempts, %d timed out", len(m.attempts()), m.result(resultTimeout))
				}
			})
		})
	}
}

// rest waits within a request; false when it ended.
func rest(r *http.Request, d time.Duration) bool {
	select {
	case <-r.Context().Done():
		return false
	case <-time.After(d):
		return true
	}
}

// TestPatience: with the default time-outs a first token after 180 s arrives, kept
// alive meanwhile, and so does a whole answer; each by one attempt.
func TestPatience(t *testing.T) {
	serve := func(n int, w http.ResponseWriter, r *http.Request) {
		rest(r, 180*time.Second)
		if n == 1 {
			send(w, token("a", "stop"), done)
			return
		}
		sendJSON(w, http.StatusOK, complete)
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		got := m.ask(askStream, names.ModelRoute, "long")
		want := strings.Repeat(": keep-alive\n\n", 12) + token("a", "stop") + done
		if got.body != want || got.status != 200 || got.header.Get("Content-Type") != "text/event-stream" {
			t.Errorf("%d %q, want %q", got.status, got.body, want)
		}
		if w := m.attempts()[0]; got.header.Get(names.Worker) != w {
			t.Errorf("the stream names worker %q, and %s was at work", got.header.Get(names.Worker), w)
		}
		if got := m.ask(askWhole, names.ModelRoute, "long"); got.status != 200 || got.body != complete || got.took != 180*time.Second {
			t.Errorf("%+v", got)
		}
		if n := len(m.attempts()); n != 2 {
			t.Errorf("%d attempts for two requests", n)
		}
	})
}

// TestKeepAliveThenFailure: once a keep-alive went out the status is spent, but
// another worker may still take over, and a refusal becomes the stream's error.
func TestKeepAliveThenFailure(t *testing.T) {
	serve := func(n int, w http.ResponseWriter, r *http.Request) {
		rest(r, 16*time.Second)
		switch {
		case n == 2:
			send(w, token("a", "stop"), done)
		case n == 3:
			sendJSON(w, 400, "{\n\"error\":{\"message\":\"too long\",\"type\":\"t\",\"param\":\"prompt\",\"code\":\"c\"}}")
		case n == 4:
			sendJSON(w, 200, complete)
		default:
			unreachableBy(w, "UF")
		}
	}
	const alive = ": keep-alive\n\n"
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		got := m.ask(askStream)
		if got.body != alive+alive+token("a", "stop")+done {
			t.Errorf("taken over: %q", got.body)
		}
		if by := m.attempts(); got.header.Get(names.Worker) != by[0] || by[0] == by[1] {
			t.Errorf("the stream names worker %q; %v were asked, the first one when it began", got.header.Get(names.Worker), by)
		}
		if got := m.ask(askStream); got.body != alive+"data: {\"error\":{\"message\":\"too long\",\"type\":\"t\",\"param\":\"prompt\",\"code\":\"c\"}}\n\n" {
			t.Errorf("refused: %q", got.body)
		}
		if got := m.ask(askStream); !strings.HasPrefix(got.body, alive+"data: {\"error\":{\"message\":\"The worker answered without a stream") {
			t.Errorf("no stream: %q", got.body)
		}
		if got := m.ask(askStream, names.ModelRoute, "long"); !strings.HasPrefix(got.body, strings.Repeat(alive, 3)+"data: {\"error\":{\"message\":\"No worker can be reached") {
			t.Errorf("nobody: %q", got.body)
		}
	})
}

// TestClientGone: a client that leaves frees the worker at once, before and after
// the first token, and says nothing against the worker.
func TestClientGone(t *testing.T) {
	var freed atomic.Int64
	var start time.Time
	serve := func(n int, w http.ResponseWriter, r *http.Request) {
		if n == 2 {
			send(w, token("a", ""))
		}
		hang(r, start, &freed)
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		for n := 1; n <= 2; n++ {
			freed.Store(0)
			start = time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			resp, err := m.post(ctx, askStream)
			if err == nil {
				_, err = io.ReadAll(resp.Body)
			}
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("client: %v", err)
			}
			cancel()
			synctest.Wait()
			if got := time.Duration(freed.Load()); got != 3*time.Second {
				t.Errorf("request %d: worker was freed after %v, want 3s", n, got)
			}
			if m.result(resultGone) != n || testutil.ToFloat64(m.relay.metrics.truncated) != 0 {
				t.Errorf("request %d: not counted as the client's leaving", n)
			}
		}
		for _, v := range m.picker.Workers(time.Now()) {
			if v.Broken {
				t.Errorf("%s is blamed", v.ID)
			}
		}
	})
}

// TestSlowClient: a client that stops reading stops the worker, with bounded bytes
// between them, and is cut after a while; one that reads slowly is served.
func TestSlowClient(t *testing.T) {
	var sent atomic.Int64
	event := token(strings.Repeat("x", 1000), "")
	serve := func(_ int, w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, event); err != nil {
				return
			}
			sent.Add(int64(len(event)))
		}
	}
	change := func(c *Config) { c.ClientStall = time.Minute }
	inMesh(t, change, serve, func(t *testing.T, m *mesh) {
		resp, err := m.post(t.Context(), askStream, names.ModelRoute, "long")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		synctest.Wait()
		stalled := sent.Load()
		if stalled > 1<<20 {
			t.Errorf("%d bytes are under way to a client that reads nothing", stalled)
		}
		for range 10 { // slower than the streamIdle of other routes, faster than the stall
			<-time.After(50 * time.Second)
			if _, err := io.CopyN(io.Discard, resp.Body, 100_000); err != nil {
				t.Fatalf("a slow client is cut: %v", err)
			}
		}
		synctest.Wait()
		if got := sent.Load(); got < stalled+900_000 || got > stalled+1_200_000 {
			t.Errorf("worker sent %d bytes for 1000000 read", got-stalled)
		}
		<-time.After(3 * time.Minute)
		synctest.Wait()
		for _, v := range m.picker.Workers(time.Now()) {
			if v.InFlight != 0 || v.Broken {
				t.Errorf("after the stall: %+v", v)
			}
		}
		if m.result(resultGone) != 1 {
			t.Error("not counted as the client's fault")
		}
	})
}

// TestDrain: at the end of Run's context running streams may finish, and those
// that run too long end with an error event.
func TestDrain(t *testing.T) {
	for name, long := range map[string]bool{"in time": false, "too long": true} {
		t.Run(name, func(t *testing.T) {
			serve := func(_ int, w http.ResponseWriter, r *http.Request) {
				send(w, token("a", ""))
				for range 8 {
					rest(r, 2*time.Second)
					send(w, token("b", ""))
				}
				if long {
					for rest(r, 2*time.Second) {
						send(w, token("b", ""))
					}
					return
				}
				send(w, token("", "stop"), done)
			}
			change := func(c *Config) { c.Drain = 20 * time.Second }
			inMesh(t, change, serve, func(t *testing.T, m *mesh) {
				resp, err := m.post(t.Context(), askStream)
				if err != nil {
					t.Fatal(err)
				}
				m.stop()
				start := time.Now()
				body, err := io.ReadAll(resp.Body)
				took := time.Since(start)
				if err != nil {
					t.Fatalf("%v after %q", err, body)
				}
				_ = resp.Body.Close()
				if long && (took != 20*time.Second || !strings.Contains(string(body), "The gateway is stopping") || strings.Contains(string(body), "DONE")) {
					t.Errorf("after %v: %q", took, body)
				}
				if !long && (took != 16*time.Second || !strings.HasSuffix(string(body), done)) {
					t.Errorf("after %v: %q", took, body)
				}
				<-m.done
				if _, err := m.post(t.Context(), askStream); err == nil {
					t.Error("a stopped relay takes requests")
				}
			})
		})
	}
}

// TestRetryBudget: with many requests refused at once only a share is repeated.
func TestRetryBudget(t *testing.T) {
	serve := func(_ int, w http.ResponseWriter, r *http.Request) {
		rest(r, time.Second)
		sendJSON(w, http.StatusServiceUnavailable, `{"error":{"message":"full"}}`)
	}
	change := func(c *Config) { c.MinRetries, c.RetryShare = 2, 0.1 }
	inMesh(t, change, serve, func(t *testing.T, m *mesh) {
		var wg sync.WaitGroup
		for range 40 {
			wg.Go(func() {
				if got := m.ask(askWhole); got.status != 503 {
					t.Errorf("%d %s", got.status, got.body)
				}
			})
		}
		wg.Wait()
		if n := len(m.attempts()) - 40; n < 4 || n > 8 { // 4 at once at most, each request twice at most
			t.Errorf("%d further attempts for 40 requests", n)
		}
		if testutil.ToFloat64(m.relay.metrics.denied) == 0 {
			t.Error("what was not repeated is not counted")
		}
	})
}

// TestRetryTurns: when a worker dies under many requests that have no token yet, all of
// them are served by others, a share at a time.
func TestRetryTurns(t *testing.T) {
	const n = 40
	var first, further, most atomic.Int64
	serve := func(k int, w http.ResponseWriter, r *http.Request) {
		if first.Add(1) <= n {
			rest(r, time.Second)
			cut()
		}
		if at := further.Add(1); at > most.Load() {
			most.Store(at)
		}
		rest(r, time.Second)
		further.Add(-1)
		sendJSON(w, http.StatusOK, complete)
	}
	change := func(c *Config) { c.MinRetries, c.RetryShare = 4, 0.1 }
	inMesh(t, change, serve, func(t *testing.T, m *mesh) {
		var wg sync.WaitGroup
		for range n {
			wg.Go(func() {
				if got := m.ask(askWhole); got.status != 200 {
					t.Errorf("%d %s", got.status, got.body)
				}
			})
		}
		wg.Wait()
		if k := most.Load(); k < 2 || k > 4 {
			t.Errorf("%d further attempts at once, want up to 4", k)
		}
		if got := testutil.ToFloat64(m.relay.metrics.denied); got != 0 {
			t.Errorf("%v attempts denied", got)
		}
	})
}

// TestRetryWaitsInVain: who does not get a turn in time is told what went wrong.
func TestRetryWaitsInVain(t *testing.T) {
	serve := func(_ int, _ http.ResponseWriter, r *http.Request) {
		rest(r, time.Second)
		cut()
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		m.relay.retries.init(0, 0)
		start := time.Now()
		got := m.ask(askWhole)
		waited := time.Since(start).Truncate(time.Second) // without the pause before
		if got.status != 502 || !strings.Contains(got.body, "broke off") || waited != 11*time.Second {
			t.Errorf("%d %s after %v", got.status, got.body, waited)
		}
		if got := testutil.ToFloat64(m.relay.metrics.denied); got != 1 {
			t.Errorf("%v attempts denied", got)
		}
	})
}

// TestRefresh: when all candidates failed, the picker names others; when it has no
// others, the same again.
func TestRefresh(t *testing.T) {
	serve := func(n int, w http.ResponseWriter, _ *http.Request) {
		if n < 3 {
			unreachableBy(w, "UF")
			return
		}
		sendJSON(w, http.StatusOK, complete)
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		if got := m.ask(askWhole, names.Destination, "10.0.0.3:80,10.0.0.99:80"); got.status != 200 {
			t.Errorf("%d %s", got.status, got.body)
		}
		at := m.attempts()
		if len(at) != 3 || at[0] != "w3" || at[1] == at[0] || at[2] == at[1] || at[2] == at[0] {
			t.Errorf("attempts %v, want w3 and then the others", at)
		}
	})
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		m.picker.Update(nil)
		if got := m.ask(askWhole); got.status != 503 || got.header.Get("Retry-After") == "" || len(m.attempts()) != 0 {
			t.Errorf("no worker at all: %d %s after %v", got.status, got.body, m.attempts())
		}
	})
}

// TestEgressAway: while Envoy's egress cannot be reached no worker is blamed.
func TestEgressAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, nil, noEgress)
		w := &recorder{header: http.Header{}}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", strings.NewReader(askWhole))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set(names.Pool, "p")
		req.Header.Set(names.ModelRoute, "short")
		m.relay.ServeHTTP(w, req)
		if w.status != 503 || m.result(resultEgress) != 3 {
			t.Errorf("%d %s, %d attempts", w.status, w.body.String(), m.result(resultEgress))
		}
		for _, v := range m.picker.Workers(time.Now()) {
			if v.Broken {
				t.Errorf("%s is blamed", v.ID)
			}
		}
		m.checkIdle()
	})
}
