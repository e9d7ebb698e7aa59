package relay

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/names"
)

// Wherever an answer breaks, it goes on with the next token, and ends once.
func TestGoesOn(t *testing.T) {
	for name, what := range map[string]trouble{"cut": dies, "clean end": ends, "error event": errs, "cut inside an event": torn} {
		t.Run(name, func(t *testing.T) {
			for at := range 13 { // of 10 tokens, the finish, the usage and the end
				inOwnMesh(t, func(t *testing.T, m *mesh) {
					got := m.ask(askUsage)
					m.checkWhole(got.body, 1, 10, true)
					if at > 0 && at <= 10 && (m.movesOf(causeLost, kvRestored) != 1 || testutil.ToFloat64(m.relay.metrics.restored) != float64(at)) {
						if at < 10 {
							t.Errorf("after %d tokens: %d moves, %v restored", at, m.movesOf(causeLost, kvRestored), testutil.ToFloat64(m.relay.metrics.restored))
						}
					}
				}, after(t, at, what), well(t))
			}
		})
	}
}

// Without usage nothing but the end is missing once all is finished, so nobody is asked.
func TestEndOfOurs(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		got := m.ask(`{"model":"m","prompt":"p","stream":true,"max_tokens":10}`)
		m.checkWhole(got.body, 1, 10, false)
		if n := len(m.attempts()); n != 1 {
			t.Errorf("%d attempts", n)
		}
	}, after(t, 11, dies), well(t))
}

// Some choices may have no token yet when an answer breaks. They begin at the next worker, which has
// no word for how, and is not to blame for that.
func TestGoesOnWithChoices(t *testing.T) {
	for _, n := range []int{2, 5} {
		for cut := range 12 * n {
			inOwnMesh(t, func(t *testing.T, m *mesh) {
				got := m.ask(strings.Replace(askUsage, `"stream":true`, fmt.Sprintf(`"stream":true,"n":%d`, n), 1))
				m.checkWhole(got.body, n, 10, true)
				if at := m.attempts(); len(at) > 2 {
					t.Errorf("%d choices, cut after %d: attempts %v", n, cut, at)
				}
				for _, v := range m.relay.Attempts() {
					if v.Worker != "w1" && v.Broken != 0 {
						t.Errorf("%+v", v)
					}
				}
			}, after(t, cut, dies), well(t))
		}
	}
}

// An answer without streaming goes on like a stream and comes in one piece.
func TestWholeGoesOn(t *testing.T) {
	for at := range 13 {
		inOwnMesh(t, func(t *testing.T, m *mesh) {
			got := m.ask(`{"model":"m","stream":false,"prompt":"p","max_tokens":10}`)
			var c struct {
				ID, Object, Model string
				Choices           []struct {
					Text   string
					Finish string `json:"finish_reason"`
				}
				Usage struct {
					Tokens int `json:"completion_tokens"`
				}
			}
			var want strings.Builder
			for i := range 10 {
				want.WriteString(word(0, i))
			}
			err := json.Unmarshal([]byte(got.body), &c)
			if err != nil || got.status != 200 || len(c.Choices) != 1 || c.Choices[0].Text != want.String() || c.Choices[0].Finish != "length" || c.Usage.Tokens != 10 || c.Object != "text_completion" {
				t.Errorf("after %d: %d %s, %v", at, got.status, got.body, err)
			}
			if got.header.Get("Content-Type") != "application/json" || got.header.Get("Content-Length") != fmt.Sprint(len(got.body)) {
				t.Errorf("headers %v", got.header)
			}
		}, after(t, at, dies), well(t))
	}
}

// What keeps a silent stream open is no part of an answer that goes out whole.
func TestWholeHasNoComments(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		got := m.ask(`{"model":"m","stream":false,"prompt":"p","max_tokens":10}`)
		if !json.Valid([]byte(got.body)) || got.status != 200 || got.header.Get("Content-Type") != "application/json" || got.header.Get(names.Worker) != "w1" {
			t.Errorf("%d %v %s", got.status, got.header, got.body)
		}
	}, func(n int, w http.ResponseWriter, r *http.Request, body string) {
		send(w, ": keep-alive\n\n")
		generate(t, n, w, r, body, 3, func(w http.ResponseWriter, _ *http.Request) bool {
			send(w, ": keep-alive\n\n", "event: ping\n\n", "id: 7\n\n")
			return true
		})
	})
}

// A worker that hangs is replaced once it is silent for longer than it ever is; when it
// comes back first, it stays.
func TestStall(t *testing.T) {
	learn := func(m *mesh) {
		for range 20 {
			m.ask(`{"model":"m","prompt":"p","stream":true,"max_tokens":10}`)
		}
	}
	slow := func(d time.Duration) trouble {
		return func(_ http.ResponseWriter, r *http.Request) bool { return rest(r, d) }
	}
	for _, tt := range []struct {
		name   string
		what   trouble
		second func(int, http.ResponseWriter, *http.Request, string)
		most   time.Duration
		moves  int
	}{
		{"hangs", hangs, well(t), 1500 * time.Millisecond, 1},
		{"comes back before", slow(900 * time.Millisecond), well(t), 1200 * time.Millisecond, 0},
		{"comes back while another begins", slow(1200 * time.Millisecond), after(t, 0, slow(time.Second)), 1500 * time.Millisecond, 0},
		{"both hang, then the third", hangs, after(t, 0, hangs), 13 * time.Second, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var at *mesh
			serve := func(n int, w http.ResponseWriter, r *http.Request) {
				at.mu.Lock()
				body := at.seen[n-1].body
				at.mu.Unlock()
				switch n {
				case 21:
					generate(t, n, w, r, body, 5, tt.what)
				case 22:
					tt.second(n, w, r, body)
				default:
					generate(t, n, w, r, body, -1, nil)
				}
			}
			inMesh(t, own, serve, func(t *testing.T, m *mesh) {
				at = m
				learn(m)
				got := m.ask(askUsage, names.ModelRoute, "long")
				m.checkWhole(got.body, 1, 10, true)
				if n := m.movesOf(causeStall, kvRestored); n != tt.moves || got.took > tt.most {
					t.Errorf("%d moves in %v, want %d within %v", n, got.took, tt.moves, tt.most)
				}
			})
		})
	}
}

// A program that listens where a worker has died answers for nobody, before the first
// token and when it is asked to go on.
func TestStranger(t *testing.T) {
	stranger := func(_ int, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Del(names.Worker)
		http.Error(w, "who are you?", http.StatusForbidden)
	}
	inOwnMesh(t, func(_ *testing.T, m *mesh) {
		got := m.ask(askUsage)
		m.checkWhole(got.body, 1, 10, true)
	}, stranger, after(t, 3, dies), well(t))
	inOwnMesh(t, func(_ *testing.T, m *mesh) {
		got := m.ask(askUsage)
		m.checkWhole(got.body, 1, 10, true)
	}, after(t, 3, dies), stranger, well(t))
}

// Before its first token an engine of ours that works is slow, and not hung, whatever
// its pace was with other prompts; one that does not know of the request is left.
func TestSlowFirstToken(t *testing.T) {
	for _, tt := range []struct {
		running  uint32
		attempts int
	}{{1, 1}, {0, 2}} {
		var at *mesh
		script := func(n int, w http.ResponseWriter, r *http.Request, body string) {
			if n == 21 && !rest(r, 4*time.Minute) {
				return
			}
			generate(t, n, w, r, body, -1, nil)
		}
		inMesh(t, own, scripted(t, &at, script), func(t *testing.T, m *mesh) {
			at = m
			for range 20 {
				m.ask(askUsage)
			}
			m.picker.Update(ownFleet(3, func(_ int, w *fleetpb.Worker) { w.Load = &fleetpb.Load{Running: tt.running} }))
			got := m.ask(askUsage, names.ModelRoute, "long")
			m.checkWhole(got.body, 1, 10, true)
			if n := len(m.attempts()) - 20; n != tt.attempts {
				t.Errorf("%d running: %d attempts after %v, want %d", tt.running, n, got.took, tt.attempts)
			}
		})
	}
}

// events reads a stream line by line while it comes.
func (m *mesh) follow(body string, each func(n int)) string {
	m.t.Helper()
	resp, err := m.post(context.Background(), body)
	if err != nil {
		m.t.Fatal(err)
	}
	defer resp.Body.Close()
	var all strings.Builder
	buf := make([]byte, 4096)
	seen := 0
	for {
		n, err := resp.Body.Read(buf)
		all.Write(buf[:n])
		for now := strings.Count(all.String(), "\n\n"); seen < now; {
			seen++
			each(seen)
		}
		if err == io.EOF {
			return m.numbered(all.String())
		}
		if err != nil {
			m.t.Errorf("read: %v", err)
			return ""
		}
	}
}

// What the control plane says of a worker moves its answers, before and after their
// first token. All in a bubble.
func TestLeavesSickWorkers(t *testing.T) {
	status := func(s health.Status) func(i int, w *fleetpb.Worker) {
		return func(i int, w *fleetpb.Worker) {
			if i == 1 {
				w.Status = int32(s)
			}
		}
	}
	for _, tt := range []struct {
		cause string
		to    health.Status
	}{{causeDraining, health.Draining}, {causeUnhealthy, health.Unhealthy}, {causeTimeout, health.Timeout}} {
		t.Run(tt.cause, func(t *testing.T) {
			inOwnMesh(t, func(t *testing.T, m *mesh) {
				body := m.follow(askUsage, func(n int) {
					if n == 4 {
						m.picker.Update(ownFleet(3, status(tt.to)))
						m.relay.Update()
					}
				})
				m.checkWhole(body, 1, 10, true)
				if m.movesOf(tt.cause, kvRestored) != 1 || len(m.attempts()) != 2 || m.attempts()[1] == "w1" {
					t.Errorf("%d moves, attempts %v", m.movesOf(tt.cause, kvRestored), m.attempts())
				}
			}, well(t))
		})
		t.Run(tt.cause+" before the first token", func(t *testing.T) {
			inOwnMesh(t, func(t *testing.T, m *mesh) {
				go func() {
					time.Sleep(3 * time.Second)
					m.picker.Update(ownFleet(3, status(tt.to)))
					m.relay.Update()
				}()
				got := m.ask(askUsage)
				m.checkWhole(got.body, 1, 10, true)
				if got.took > 4*time.Second || len(m.attempts()) != 2 {
					t.Errorf("took %v, attempts %v", got.took, m.attempts())
				}
			}, after(t, 0, hangs), well(t))
		})
	}
	t.Run("kept", func(t *testing.T) {
		inOwnMesh(t, func(t *testing.T, m *mesh) {
			body := m.follow(askUsage, func(n int) {
				m.picker.Update(ownFleet(3, status(health.Draining), func(_ int, w *fleetpb.Worker) { w.KeepStreams = true }))
				m.relay.Update()
			})
			m.checkWhole(body, 1, 10, true)
			if n := len(m.attempts()); n != 1 {
				t.Errorf("%d attempts although the streams are to stay", n)
			}
		}, well(t))
	})
	t.Run("most of the pool at once", func(t *testing.T) {
		inOwnMesh(t, func(t *testing.T, m *mesh) {
			body := m.follow(askUsage, func(n int) {
				m.picker.Update(ownFleet(3, func(i int, w *fleetpb.Worker) {
					if i < 3 {
						w.Status = int32(health.Unhealthy)
					}
				}))
				m.relay.Update()
			})
			m.checkWhole(body, 1, 10, true)
			if n := len(m.attempts()); n != 1 || testutil.ToFloat64(m.relay.metrics.held) == 0 {
				t.Errorf("%d attempts, %v held", n, testutil.ToFloat64(m.relay.metrics.held))
			}
		}, well(t))
	})
	t.Run("the target fails", func(t *testing.T) {
		inOwnMesh(t, func(t *testing.T, m *mesh) {
			body := m.follow(askUsage, func(n int) {
				if n == 4 {
					m.picker.Update(ownFleet(2, status(health.Draining)))
					m.relay.Update()
				}
			})
			m.checkWhole(body, 1, 10, true)
			if n := len(m.attempts()); n < 2 {
				t.Errorf("%d attempts", n)
			}
		}, well(t), after(t, 0, dies), after(t, 0, dies), well(t))
	})
}

// Where an answer cannot go on, it ends in one error event with the reason.
func TestCannotGoOn(t *testing.T) {
	busy := func(_ int, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Retry-After", "1")
		sendJSON(w, http.StatusTooManyRequests, `{"error":{"message":"queue full"}}`)
	}
	unreachable := func(_ int, w http.ResponseWriter, _ *http.Request, _ string) {
		unreachableBy(w, "UH")
	}
	ignores := func(n int, w http.ResponseWriter, r *http.Request, _ string) {
		generate(t, n, w, r, strings.Replace(askUsage, "{", `{"kvmesh":{"token_ids":true},`, 1), -1, nil)
	}
	for _, tt := range []struct {
		name    string
		scripts []func(int, http.ResponseWriter, *http.Request, string)
		want    string
		took    time.Duration
	}{
		{"all dead", []func(int, http.ResponseWriter, *http.Request, string){after(t, 4, dies), unreachable}, "no other worker could go on with it in time", 12 * time.Second},
		{"all busy", []func(int, http.ResponseWriter, *http.Request, string){after(t, 4, dies), busy}, "no other worker could go on with it in time", 12 * time.Second},
		{"it kills them", []func(int, http.ResponseWriter, *http.Request, string){after(t, 4, dies), after(t, 0, dies)}, "every worker that went on with it broke off, too", 2 * time.Second},
		{"too often", []func(int, http.ResponseWriter, *http.Request, string){after(t, 1, dies)}, "it has changed its worker as often as it may", 5 * time.Second},
		{"they do not continue", []func(int, http.ResponseWriter, *http.Request, string){after(t, 4, dies), ignores}, "every worker that went on with it broke off, too", 2 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inOwnMesh(t, func(t *testing.T, m *mesh) {
				got := m.ask(askUsage, names.ModelRoute, "long")
				f := m.flow(got.body)
				if len(f.errs) != 1 || !strings.Contains(f.errs[0], tt.want) || f.done != 0 || got.took > tt.took {
					t.Errorf("%+v in %v, want an error with %q", f, got.took, tt.want)
				}
				if !strings.HasPrefix(word(0, 0)+word(0, 1)+word(0, 2)+word(0, 3)+word(0, 4)+word(0, 5)+word(0, 6)+word(0, 7)+word(0, 8), f.text[0]) {
					t.Errorf("text %q", f.text)
				}
			}, tt.scripts...)
		})
	}
}

// A worker that comes back in time goes on with the answer of the pool's only worker. In
// a bubble.
func TestWaitsForWorker(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		m.picker.Update(ownFleet(1))
		go func() {
			time.Sleep(time.Second)
			m.picker.Update(ownFleet(1, func(_ int, w *fleetpb.Worker) { w.Status = int32(health.Unhealthy) }))
			m.relay.Update()
			time.Sleep(5 * time.Second)
			m.picker.Update(ownFleet(1, func(_ int, w *fleetpb.Worker) { w.Incarnation = 2 }))
			m.relay.Update()
		}()
		got := m.ask(strings.Replace(askUsage, `"max_tokens":10`, `"max_tokens":200`, 1))
		m.checkWhole(got.body, 1, 200, true)
	}, after(t, 150, dies), well(t))
}

// An operator moves an answer, to a worker of a name too, and hears why it stays.
func TestMigrate(t *testing.T) {
	post := func(m *mesh, path string) (int, string) {
		rec := httptest.NewRecorder()
		m.relay.StreamsHandler().ServeHTTP(rec, httptest.NewRequest(http.MethodPost, path, nil))
		return rec.Code, rec.Body.String()
	}
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		var moves []fleet.MoveView
		body := m.follow(askUsage, func(n int) {
			switch n {
			case 2:
				for path, want := range map[string]string{
					"/v1/streams/nobody/migrate":         "404 No stream of that id",
					"/v1/streams/stream-1/migrate?to=w1": "409 it is at w1 already",
					"/v1/streams/stream-1/migrate?to=w9": "409 there is no worker w9",
				} {
					if code, text := post(m, path); !strings.HasPrefix(want, fmt.Sprint(code)) || !strings.Contains(text, want[4:]) {
						t.Errorf("%s: %d %s, want %s", path, code, text, want)
					}
				}
				if code, text := post(m, "/v1/streams/stream-1/migrate?to=w3"); code != http.StatusNoContent {
					t.Errorf("%d %s", code, text)
				}
			case 6:
				if list := m.relay.Streams(time.Now()); len(list) == 1 && list[0].Worker == "w3" {
					moves = list[0].Moves
				}
			}
		})
		m.checkWhole(body, 1, 10, true)
		if len(moves) != 1 || moves[0].From != "w1" || moves[0].To != "w3" || moves[0].Cause != causeMigrate || moves[0].KV != kvRestored || moves[0].Computed != 1 || moves[0].GapSeconds < 0 {
			t.Errorf("moves %+v", moves)
		}
	}, well(t))
}

// The worker is told how long its look-up may take on this route, and its priority.
func TestRouteIsTold(t *testing.T) {
	inOwnMesh(t, func(_ *testing.T, m *mesh) { m.ask(askUsage) }, func(n int, w http.ResponseWriter, r *http.Request, body string) {
		if !strings.Contains(body, `"kv_within_ms":700`) {
			t.Errorf("the route's limit is not in %s", body)
		}
		if got := r.Header.Get(names.Priority); got != "7" {
			t.Errorf("priority %q, want the route's", got)
		}
		well(t)(n, w, r, body)
	})
}

// Why an answer cannot go on at the worker that was named.
func TestRefuses(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		m.picker.Update(ownFleet(5, func(i int, w *fleetpb.Worker) {
			switch i {
			case 2:
				w.Status = int32(health.Draining)
			case 3:
				w.Fingerprint = "g"
			case 4:
				w.Status = int32(health.Timeout)
			}
		}))
		from := m.relay.worker("w1", "10.0.0.1:80")
		for to, want := range map[string]string{
			"": "", "w5": "", "w1": "it is at w1 already", "w9": "there is no worker w9", "w2": "w2 is being drained",
			"w3": "w3 has other weights than w1", "w4": "w4 takes no requests, it is TIMEOUT",
		} {
			if got := m.relay.refuses(to, from); got != want {
				t.Errorf("to %q: %q, want %q", to, got, want)
			}
		}
	}, well(t))
}

// What operators wish does not use up what an answer may move by itself.
func TestWishesAreNotCounted(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		to := "w2"
		body := m.follow(strings.Replace(askUsage, `"max_tokens":10`, `"max_tokens":60`, 1), func(n int) {
			if n%4 != 0 || n > 48 {
				return
			}
			rec := httptest.NewRecorder()
			m.relay.StreamsHandler().ServeHTTP(rec, httptest.NewRequest(http.MethodPost, "/v1/streams/stream-1/migrate?to="+to, nil))
			if rec.Code != http.StatusNoContent {
				t.Errorf("migration at token %d: %d %s", n, rec.Code, rec.Body)
			}
			to = map[string]string{"w2": "w3", "w3": "w2"}[to]
		})
		m.checkWhole(body, 1, 60, true)
		if n := m.movesOf(causeMigrate, kvRestored); n <= 8 {
			t.Errorf("%d moves, want more than the 8 that an answer may make by itself", n)
		}
	}, well(t))
}
