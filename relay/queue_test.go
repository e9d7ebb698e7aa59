package relay

import (
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/names"
)

// at is a worker for each id; a request of another fails the test.
func at(m **mesh, workers map[string]func(n int, w http.ResponseWriter, r *http.Request, body string)) func(int, http.ResponseWriter, *http.Request, string) {
	return func(n int, w http.ResponseWriter, r *http.Request, body string) {
		id := r.Header.Get(names.ExpectWorker)
		if f := workers[id]; f != nil {
			f(n, w, r, body)
			return
		}
		(*m).t.Errorf("attempt %d at %s", n, id)
		cut()
	}
}

// inFleet is inOwnMesh with a worker for each id.
func inFleet(t *testing.T, workers map[string]func(n int, w http.ResponseWriter, r *http.Request, body string), f func(t *testing.T, m *mesh)) {
	t.Helper()
	var m *mesh
	inOwnMesh(t, func(t *testing.T, own *mesh) {
		m = own
		f(t, own)
	}, at(&m, workers))
}

// full is w1 with four that run and so many that wait, w2 likewise, and w3 with so many free.
func full(waiting, free uint32) func(int, *fleetpb.Worker) {
	return func(i int, w *fleetpb.Worker) {
		if loaded(w, 4, waiting); i == 3 {
			loaded(w, 4-free, 0)
		}
	}
}

// A request without a token leaves the queue of a full worker once another one has a free sequence. That is
// no failure, and takes nothing of the retries. Who may have begun stays. All in a bubble.
func TestQueuedGoesToFree(t *testing.T) {
	tenSeconds := func(t testing.TB) func(int, http.ResponseWriter, *http.Request, string) {
		return func(n int, w http.ResponseWriter, r *http.Request, body string) {
			if rest(r, 10*time.Second) {
				well(t)(n, w, r, body)
			}
		}
	}
	for _, tt := range []struct {
		name    string
		ask     string
		waiting uint32 // at w1
		change  func(i int, w *fleetpb.Worker)
		want    string // attempts
	}{
		{"stream", askUsage, 1, nil, "w1 w3"},
		{"whole", `{"model":"m","prompt":"p","max_tokens":10}`, 1, nil, "w1 w3"},
		{"it has its sequence", askUsage, 0, nil, "w1"},
		{"nobody has room", askUsage, 1, full(1, 0), "w1"},
		{"nobody says how many it takes", askUsage, 1, func(i int, w *fleetpb.Worker) {
			if i == 3 {
				w.Load = nil
			}
		}, "w1"},
		{"other weights can begin it", askUsage, 1, func(i int, w *fleetpb.Worker) {
			if i == 3 {
				w.Fingerprint = "g"
			}
		}, "w1 w3"},
		{"one of another relay's", askUsage, 1, func(i int, w *fleetpb.Worker) {
			if i == 3 {
				w.RelayMark = "strange"
			}
		}, "w1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inFleet(t, map[string]func(int, http.ResponseWriter, *http.Request, string){"w1": tenSeconds(t), "w3": well(t)}, func(t *testing.T, m *mesh) {
				if tt.change == nil {
					tt.change = func(int, *fleetpb.Worker) {}
				}
				none := 0
				for i := range m.relay.cfg.Policy.Routes {
					m.relay.cfg.Policy.Routes[i].Retries = &none
				}
				m.relay.retries.init(0, 0)
				m.picker.Update(ownFleet(3, full(tt.waiting, 0), tt.change))
				go func() {
					time.Sleep(3 * time.Second)
					m.picker.Update(ownFleet(3, full(tt.waiting, 1), tt.change))
				}()
				got := m.ask(tt.ask)
				if strings.Contains(tt.ask, "stream\":true") {
					m.checkWhole(got.body, 1, 10, true)
				}
				moved := tt.want != "w1"
				if by := strings.Join(m.attempts(), " "); got.status != 200 || by != tt.want || (m.result(resultQueued) == 1) != moved {
					t.Errorf("%d, attempts %q, %d queued", got.status, by, m.result(resultQueued))
				}
				if moved && (got.took < 3*time.Second || got.took > 4200*time.Millisecond) {
					t.Errorf("took %v; w3 had room after 3 s", got.took)
				}
				for _, v := range m.relay.Attempts() {
					if v.Broken != 0 {
						t.Errorf("%s is blamed: %+v", v.Worker, v)
					}
				}
			})
		})
	}
}

// Servers that do not say when they begin keep what they have: one of another's making, and one in front
// of which we stand, without streaming. In a bubble.
func TestQueuedStays(t *testing.T) {
	for name, change := range map[string]func(i int, w *fleetpb.Worker){
		"listed as it is":       func(_ int, w *fleetpb.Worker) { w.RelayMark, w.Engine = "", "openai" },
		"openai, not streaming": func(_ int, w *fleetpb.Worker) { w.Engine = "openai" },
	} {
		t.Run(name, func(t *testing.T) {
			serve := func(_ int, w http.ResponseWriter, r *http.Request) {
				rest(r, 10*time.Second)
				sendJSON(w, http.StatusOK, complete)
			}
			inMesh(t, own, serve, func(t *testing.T, m *mesh) {
				m.picker.Update(ownFleet(3, full(3, 4), change))
				if got := m.ask(askWhole); got.status != 200 || len(m.attempts()) != 1 {
					t.Errorf("%d, attempts %v", got.status, m.attempts())
				}
			})
		})
	}
}

// A request that meets a queue wherever it goes stays for twice as long each time. In a bubble.
func TestQueuedPatience(t *testing.T) {
	var m *mesh
	var start time.Time
	var asked []time.Duration
	inOwnMesh(t, func(t *testing.T, own *mesh) {
		m, start = own, time.Now()
		m.ask(askUsage)
		want := []time.Duration{0, 1, 3, 7, 15, 31} // firstByte is 40 s
		if !slices.EqualFunc(asked, want, func(a, b time.Duration) bool { return a >= b*time.Second && a < (b+2)*time.Second }) {
			t.Errorf("asked at %v, want about %d s", asked, want)
		}
	}, func(_ int, _ http.ResponseWriter, r *http.Request, _ string) {
		asked = append(asked, time.Since(start))
		there := r.Header.Get(names.ExpectWorker)
		m.picker.Update(ownFleet(3, func(_ int, w *fleetpb.Worker) {
			if loaded(w, 0, 0); w.Id == there {
				loaded(w, 4, 1)
			}
		}))
		<-r.Context().Done()
	})
}

// A worker that comes back takes as many of those that wait elsewhere as it runs, and the next ones as it is
// done with them; nobody else moves. In a bubble.
func TestQueuedFillWhoIsBack(t *testing.T) {
	const n, slots = 20, 4
	var there, most atomic.Int64
	busy := func(d time.Duration) func(int, http.ResponseWriter, *http.Request, string) {
		return func(n int, w http.ResponseWriter, r *http.Request, body string) {
			if rest(r, d) {
				well(t)(n, w, r, body)
			}
		}
	}
	back := func(n int, w http.ResponseWriter, r *http.Request, body string) {
		defer there.Add(-1)
		if at := there.Add(1); at > most.Load() {
			most.Store(at)
		}
		busy(4*time.Second)(n, w, r, body)
	}
	inFleet(t, map[string]func(int, http.ResponseWriter, *http.Request, string){"w1": busy(25 * time.Second), "w3": back}, func(t *testing.T, m *mesh) {
		go func() {
			time.Sleep(time.Second)
			m.picker.Update(ownFleet(3, full(n-slots, 0)))
			time.Sleep(2 * time.Second)
			m.picker.Update(ownFleet(3, full(n-slots, slots)))
		}()
		var all sync.WaitGroup
		for range n {
			all.Go(func() { m.checkWhole(m.ask(askUsage).body, 1, 10, true) })
			time.Sleep(10 * time.Millisecond)
		}
		all.Wait()
		if got := m.result(resultQueued); most.Load() != slots || got != n-slots || len(m.attempts()) != n+got {
			t.Errorf("%d at once at w3, %d moved of %d attempts", most.Load(), got, len(m.attempts()))
		}
	})
}

// What is free goes to the more important request, though it came later. In a bubble.
func TestQueuedByPriority(t *testing.T) {
	var first atomic.Pointer[string]
	slow := func(n int, w http.ResponseWriter, r *http.Request, body string) {
		if rest(r, 10*time.Second) {
			well(t)(n, w, r, body)
		}
	}
	free := func(n int, w http.ResponseWriter, r *http.Request, body string) {
		p := r.Header.Get(names.Priority)
		first.CompareAndSwap(nil, &p)
		slow(n, w, r, body)
	}
	inFleet(t, map[string]func(int, http.ResponseWriter, *http.Request, string){"w1": slow, "w3": free}, func(t *testing.T, m *mesh) {
		m.picker.Update(ownFleet(3, full(9, 0)))
		var all sync.WaitGroup
		for _, route := range []string{"long", "long", "short"} {
			all.Go(func() { m.checkWhole(m.ask(askUsage, names.ModelRoute, route).body, 1, 10, true) })
			time.Sleep(300 * time.Millisecond)
		}
		time.Sleep(2200 * time.Millisecond) // they look at 3.0, 3.3 and 3.6 s
		m.picker.Update(ownFleet(3, full(9, 1)))
		all.Wait()
		if p := first.Load(); p == nil || *p != "7" || m.result(resultQueued) != 1 {
			t.Errorf("the first at w3 has the priority %v, %d moved", p, m.result(resultQueued))
		}
	})
}

// One that was asked beside a worker that drains leaves a queue, too. In a bubble.
func TestQueuedBesideDraining(t *testing.T) {
	hang := after(t, 0, hangs)
	inFleet(t, map[string]func(int, http.ResponseWriter, *http.Request, string){"w1": hang, "w2": hang, "w3": well(t)}, func(t *testing.T, m *mesh) {
		draining := func(i int, w *fleetpb.Worker) {
			if i == 1 {
				w.Status = int32(health.Draining)
			}
		}
		m.picker.Update(ownFleet(3, full(2, 0)))
		go func() {
			time.Sleep(time.Second / 2)
			m.picker.Update(ownFleet(2, full(2, 0), draining))
			m.relay.Update()
			time.Sleep(3 * time.Second)
			m.picker.Update(ownFleet(3, full(2, 1), draining))
		}()
		m.checkWhole(m.ask(askUsage).body, 1, 10, true)
		if by := strings.Join(m.attempts(), " "); by != "w1 w2 w3" || m.result(resultQueued) != 1 {
			t.Errorf("attempts %q, %d queued", by, m.result(resultQueued))
		}
	})
}

// Requests of a dead worker that wait in a long queue do not keep their share of the retry budget from others:
// none is refused. In a bubble.
func TestRetryTurnsBeforeQueue(t *testing.T) {
	const n = 30
	var first atomic.Int64
	serve := func(_ int, w http.ResponseWriter, r *http.Request) {
		if first.Add(1) <= n {
			rest(r, time.Second)
			cut()
		}
		if rest(r, 20*time.Second) {
			sendJSON(w, http.StatusOK, complete)
		}
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
		if got := testutil.ToFloat64(m.relay.metrics.denied); got != 0 || len(m.attempts()) != 2*n {
			t.Errorf("%v attempts denied of %d", got, len(m.attempts()))
		}
	})
}

// Who refuses late is not asked for more at once for that, be it by the status or in a stream that
// has begun. In a bubble.
func TestLateRefusals(t *testing.T) {
	for _, ask := range []string{askWhole, askStream} {
		var further, most atomic.Int64
		serve := func(_ int, w http.ResponseWriter, r *http.Request) {
			if r.Header.Get(names.Attempt) != "1" {
				defer further.Add(-1)
				if at := further.Add(1); at > most.Load() {
					most.Store(at)
				}
			}
			if ask == askStream {
				send(w, ": wait\n\n")
			}
			rest(r, 5*time.Second)
			if ask == askStream {
				send(w, "data: {\"error\":{\"message\":\"full\",\"code\":503}}\n\n")
				return
			}
			sendJSON(w, http.StatusServiceUnavailable, `{"error":{"message":"full"}}`)
		}
		change := func(c *Config) { c.MinRetries, c.RetryShare = 2, 0.01 }
		inMesh(t, change, serve, func(t *testing.T, m *mesh) {
			var wg sync.WaitGroup
			for range 40 {
				wg.Go(func() { m.ask(ask) })
				time.Sleep(300 * time.Millisecond)
			}
			wg.Wait()
			if most.Load() != 2 {
				t.Errorf("%s: %d further attempts at once, want 2", ask, most.Load())
			}
		})
	}
}

// After the wait for its turn a request goes to who is the best by then, and that is the worker that was
// started again. In a bubble.
func TestRetryLooksAnew(t *testing.T) {
	var dead atomic.Bool
	once := func(n int, w http.ResponseWriter, r *http.Request, body string) {
		if dead.CompareAndSwap(false, true) {
			cut()
		}
		well(t)(n, w, r, body)
	}
	inFleet(t, map[string]func(int, http.ResponseWriter, *http.Request, string){"w1": once}, func(t *testing.T, m *mesh) {
		m.relay.retries.init(0, 1)
		m.relay.retries.try()
		m.picker.Update(ownFleet(3, full(5, 0)))
		go func() {
			time.Sleep(3 * time.Second)
			m.picker.Update(ownFleet(3, full(5, 0), func(i int, w *fleetpb.Worker) {
				if i == 1 {
					w.Incarnation = 2
					loaded(w, 0, 0)
				}
			}))
			m.relay.retries.leave()
		}()
		got := m.ask(askUsage, names.Destination, "10.0.0.1:80,10.0.0.2:80,10.0.0.3:80")
		m.checkWhole(got.body, 1, 10, true)
		if by := strings.Join(m.attempts(), " "); by != "w1 w1" || got.took < 3*time.Second || got.took > 3500*time.Millisecond {
			t.Errorf("attempts %q after %v", by, got.took)
		}
	})
}
