package relay

import (
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// A worker hangs when nobody hears of it any more, and somebody of others.
func TestJudge(t *testing.T) {
	const second, tenth = time.Second, 100 * time.Millisecond
	many := func(n int, d time.Duration) (out []time.Duration) {
		for range n {
			out = append(out, d)
		}
		return out
	}
	for _, tt := range []struct {
		name   string
		silent time.Duration   // the answer that is judged, at a limit of a second
		mute   bool            // it has not begun
		beside []time.Duration // silence of other answers of the worker
		others []time.Duration // and of other workers, one each
		want   verdict
		frozen []time.Duration // of answers that wait for others to go on with them: there, and one elsewhere
	}{
		{"alone", second, false, nil, nil, hung, nil},
		{"alone, and others flow", second, false, nil, []time.Duration{tenth, 3 * second}, hung, nil},
		{"all of its worker", second, false, many(99, 950*time.Millisecond), []time.Duration{tenth}, hung, nil},
		{"all of two workers, a third flows", second, false, many(9, second), []time.Duration{second, tenth}, hung, nil},
		{"only itself", second, false, many(5, tenth), nil, stuck, nil},
		{"one of few that stand", second, false, append(many(9, tenth), second, second), nil, stuck, nil},
		{"most are slow", second, false, append(many(9, 700*time.Millisecond), tenth), nil, slow, nil},
		{"most are slow, for too long", 5 * second, false, append(many(9, 700*time.Millisecond), tenth), nil, stuck, nil},
		{"everybody is silent", second, false, many(9, second), []time.Duration{second, second}, slow, nil},
		{"everybody is silent, for too long", 5 * second, false, many(9, 5*second), []time.Duration{5 * second}, stuck, nil},
		{"not begun at a worker that says nothing", second, true, nil, nil, stuck, nil},
		{"not begun for very long", 11 * second, true, nil, nil, hung, nil},
		{"not begun, and those that have are silent", second, true, many(3, second), nil, hung, nil},
		{"not begun, and others flow", second, true, many(3, tenth), nil, stuck, nil},
		{"most are frozen", second, false, many(5, tenth), nil, stuck, many(9, 950*time.Millisecond)},
		{"frozen elsewhere", second, false, nil, nil, hung, many(1, time.Second)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			now := time.Unix(1_700_000_000, 0)
			r := &Relay{}
			j := &job{r: r}
			j.route.Stream.StallMin, j.route.Stream.StallMax = policy.Duration(second), policy.Duration(30*second)
			paces := map[string]*pace{}
			put := func(id string, silent time.Duration, mute bool) *attempt {
				a := &attempt{j: j, w: worker{id: id}, place: place{pool: "p"}, pace: paces[id]}
				if a.pace == nil {
					a.pace = &pace{gap: tenth / 10, gapDev: tenth / 100}
					paces[id] = a.pace
				}
				a.since.Store(now.Add(-silent).UnixNano())
				if a.speaks.Store(!mute); !mute {
					a.pace.heard.Store(max(a.pace.heard.Load(), a.since.Load()))
				}
				if r.live.byWorker == nil {
					r.live.byWorker = map[string]map[*attempt]bool{}
				}
				r.live.carry(a, true)
				return a
			}
			a := put("w1", tt.silent, tt.mute)
			for _, d := range tt.beside {
				put("w1", d, false)
			}
			for i, d := range tt.others {
				put("other"+string(rune('0'+i)), d, false)
			}
			for _, d := range tt.frozen {
				put("w1", d, false).frozen.Store(true)
				put("away", d, false).frozen.Store(true)
			}
			if got := j.judge(a, second, now); got != tt.want {
				t.Errorf("verdict %d, want %d", got, tt.want)
			}
		})
	}
}

// loaded is the load of a worker that runs four requests at once.
func loaded(w *fleetpb.Worker, running, waiting uint32) {
	w.Load = &fleetpb.Load{Running: running, Waiting: waiting, MaxRunning: 4}
}

// longest is the longest time between two events of an answer that is followed.
type longest struct {
	last time.Time
	gap  time.Duration
}

func (l *longest) event() {
	if !l.last.IsZero() {
		l.gap = max(l.gap, time.Since(l.last))
	}
	l.last = time.Now()
}

const askHundred = `{"model":"m","prompt":"p","stream":true,"max_tokens":100,"stream_options":{"include_usage":true}}`

// An answer whose worker died waits at a full one, and goes to another as soon as that has room. No
// worker is blamed for its queue. In a bubble.
func TestWaitsThenMoves(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		full := func(i int, w *fleetpb.Worker) { loaded(w, 4, 2) }
		m.picker.Update(ownFleet(3, full))
		var seen longest
		body := m.follow(askHundred, func(n int) {
			if seen.event(); n == 4 {
				go func() {
					time.Sleep(3 * time.Second)
					second := m.attempts()[1]
					m.picker.Update(ownFleet(3, full, func(_ int, w *fleetpb.Worker) {
						if w.Id != "w1" && w.Id != second {
							loaded(w, 3, 0)
						}
					}))
				}()
			}
		})
		m.checkWhole(body, 1, 100, true)
		at := m.attempts()
		if len(at) != 3 || at[2] == at[1] || at[1] == "w1" || at[2] == "w1" || m.result(resultQueued) != 1 {
			t.Errorf("attempts %v, %d queued", at, m.result(resultQueued))
		}
		if seen.gap < 3*time.Second || seen.gap > 3500*time.Millisecond {
			t.Errorf("silent for %v; a worker had room after 3 s", seen.gap)
		}
		for _, v := range m.relay.Attempts() {
			if v.Worker != "w1" && v.Broken != 0 {
				t.Errorf("%s is blamed: %+v", v.Worker, v)
			}
		}
	}, after(t, 5, dies), after(t, 0, hangs), well(t))
}

// While nobody else has room, a worker that drains goes on with its answers. In a bubble.
func TestDrainWithoutRoom(t *testing.T) {
	for name, room := range map[string]bool{"for good": false, "until one is free": true} {
		t.Run(name, func(t *testing.T) {
			inOwnMesh(t, func(t *testing.T, m *mesh) {
				draining := func(i int, w *fleetpb.Worker) {
					if loaded(w, 4, 1); i == 1 {
						w.Status = int32(health.Draining)
					}
				}
				var seen longest
				body := m.follow(askHundred, func(n int) {
					switch seen.event(); {
					case n == 10:
						m.picker.Update(ownFleet(3, draining))
						m.relay.Update()
					case n == 60 && room:
						m.picker.Update(ownFleet(3, draining, func(i int, w *fleetpb.Worker) {
							if i == 3 {
								loaded(w, 3, 0)
							}
						}))
					}
				})
				m.checkWhole(body, 1, 100, true)
				want := "w1"
				if room {
					want = "w1 w3"
				}
				if got := strings.Join(m.attempts(), " "); got != want || seen.gap > 100*time.Millisecond {
					t.Errorf("attempts %q, silent for %v; want %q", got, seen.gap, want)
				}
			}, well(t))
		})
	}
}

// A target that turns out to be full gets the answer back from the queue: its old worker goes on. In a
// bubble.
func TestTargetTurnsOutFull(t *testing.T) {
	for name, queue := range map[string]time.Duration{"a quick target": 0, "one whose queue has been long": 8 * time.Second} {
		t.Run(name, func(t *testing.T) { turnsOutFull(t, queue) })
	}
}

// turnsOutFull is a case of it: queue is how long first tokens have taken at the target. The
// old worker is held back for a part of streamIdle at most, and is not to blame.
func turnsOutFull(t *testing.T, queue time.Duration) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		load := func(waiting uint32) func(int, *fleetpb.Worker) {
			return func(i int, w *fleetpb.Worker) {
				switch loaded(w, 4, waiting); {
				case i == 1:
					w.Status = int32(health.Draining)
				case waiting == 0 && i == 2:
					w.Load.Running = 0
				}
			}
		}
		var seen longest
		if queue > 0 {
			m.relay.paces.of("w2").begun(queue)
		}
		body := m.follow(askHundred, func(n int) {
			if seen.event(); n != 10 {
				return
			}
			m.picker.Update(ownFleet(3, load(0)))
			m.relay.Update()
			go func() {
				synctest.Wait()
				if v := m.relay.Streams(time.Now()); len(v) != 1 || v[0].Worker != "w1" || v[0].Next != "w2" {
					t.Errorf("listed as %+v, want it at w1 and w2 asked", v)
				}
				m.picker.Update(ownFleet(3, load(1))) // others were faster
			}()
		})
		m.checkWhole(body, 1, 100, true)
		if got := strings.Join(m.attempts(), " "); got != "w1 w2" || m.result(resultQueued) != 1 || seen.gap > max(time.Second, queue/4) {
			t.Errorf("attempts %q, %d queued, silent for %v", got, m.result(resultQueued), seen.gap)
		}
		for _, v := range m.relay.Attempts() {
			if v.Broken != 0 {
				t.Errorf("%+v", v)
			}
		}
	}, well(t), after(t, 0, hangs))
}

// A worker that was started anew is no longer the one that failed. In a bubble.
func TestStartedAnew(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		full := func(_ int, w *fleetpb.Worker) { loaded(w, 4, 2) }
		m.picker.Update(ownFleet(3, full))
		body := m.follow(askHundred, func(n int) {
			if n != 4 {
				return
			}
			go func() {
				time.Sleep(time.Second / 2)
				m.picker.Update(ownFleet(3, full, func(i int, w *fleetpb.Worker) {
					if i == 1 {
						w.Incarnation = 2
						loaded(w, 0, 0)
					}
				}))
			}()
		})
		m.checkWhole(body, 1, 100, true)
		if at := m.attempts(); len(at) != 3 || at[2] != "w1" {
			t.Errorf("attempts %v, want the last at w1", at)
		}
	}, after(t, 5, dies), after(t, 0, hangs), well(t))
}

// Many answers of one worker whose pace jumps stay where they are, and it is not blamed. In a bubble.
func TestPaceJumps(t *testing.T) {
	slower := func(_ http.ResponseWriter, r *http.Request) bool { return rest(r, 1500*time.Millisecond) }
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		const n = 30
		ends := make(chan string, n)
		for range n {
			go func() {
				got := m.ask(askUsage)
				ends <- got.body
			}()
			time.Sleep(40 * time.Millisecond)
		}
		for range n {
			m.checkWhole(<-ends, 1, 10, true)
		}
		for _, v := range m.relay.Attempts() {
			if v.Broken != 0 || v.Worker != "w1" {
				t.Errorf("%+v", v)
			}
		}
		if got := len(m.attempts()); got != n {
			t.Errorf("%d attempts for %d answers", got, n)
		}
	}, after(t, 5, slower))
}

// With stallMax: off an answer leaves the queue of a full worker, too, once another has room, while
// other answers of that worker flow. In a bubble.
func TestWaitsWithoutStall(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		for i := range m.relay.cfg.Policy.Routes {
			m.relay.cfg.Policy.Routes[i].Stream.StallMax = 0
		}
		full := func(i int, w *fleetpb.Worker) { loaded(w, 4, uint32(i)) }
		m.picker.Update(ownFleet(3, full))
		other := make(chan string)
		go func() {
			other <- m.ask(strings.Replace(askHundred, "100", "600", 1), names.Destination, "10.0.0.2:80").body
		}()
		synctest.Wait()
		var seen longest
		body := m.follow(askHundred, func(n int) {
			if seen.event(); n != 4 {
				return
			}
			go func() {
				time.Sleep(3 * time.Second)
				m.picker.Update(ownFleet(3, full, func(i int, w *fleetpb.Worker) {
					if i == 3 {
						loaded(w, 3, 0)
					}
				}))
			}()
		})
		m.checkWhole(body, 1, 100, true)
		<-other
		if got := strings.Join(m.attempts(), " "); got != "w2 w1 w2 w3" || m.result(resultQueued) != 1 || seen.gap < 3*time.Second {
			t.Errorf("attempts %q, %d queued, silent for %v", got, m.result(resultQueued), seen.gap)
		}
	}, well(t), after(t, 5, dies), after(t, 0, hangs), well(t))
}

// With stallMax: off an answer that flows leaves a worker that drains, and its old attempt does not
// compete with the new one. In a bubble.
func TestDrainWithoutStall(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		for i := range m.relay.cfg.Policy.Routes {
			m.relay.cfg.Policy.Routes[i].Stream.StallMax = 0
		}
		var seen longest
		body := m.follow(askHundred, func(n int) {
			if seen.event(); n == 10 {
				m.picker.Update(ownFleet(2, func(i int, w *fleetpb.Worker) {
					if i == 1 {
						w.Status = int32(health.Draining)
					}
				}))
				m.relay.Update()
			}
		})
		m.checkWhole(body, 1, 100, true)
		if got := strings.Join(m.attempts(), " "); got != "w1 w2" || seen.gap > 100*time.Millisecond || m.movesOf(causeDraining, kvRestored) != 1 {
			t.Errorf("attempts %q, silent for %v", got, seen.gap)
		}
	}, well(t), func(n int, w http.ResponseWriter, r *http.Request, body string) {
		rest(r, 50*time.Millisecond) // the old worker is faster than its restoring
		well(t)(n, w, r, body)
	})
}
