package rollout

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// A new version that never comes up can be rolled back, and gone on with, while its
// worker is away.
func TestAwayWorkerIsBroughtBack(t *testing.T) {
	for _, way := range []string{"rollback", "same command", "start over"} {
		t.Run(way, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMesh("a", "a", "a")
				m.list["w0"].slow = 1000 * time.Hour
				p := m.planFor(t, 2)
				if _, ok := errors.AsType[*BoundError](Run(t.Context(), m, p, within(time.Minute))); !ok || p.Steps[0].State != Failed {
					t.Fatalf("%+v: want w0 failed", p.Steps)
				}
				again, want := *p, []string{"restart w0", "undrain w0", "drain w1", "restart w1", "undrain w1"}
				switch list, err := m.Workers(t.Context()); {
				case err != nil || len(p.Away(list)) != 1:
					t.Fatalf("away: %+v, %v; want w0", p.Away(list), err)
				case way == "rollback":
					again, want = p.Back(), want[:2]
				case way == "start over":
					if again, err = NewPlan(list, []string{"w0", "w1"}, *p); err != nil {
						t.Fatal(err)
					}
				}
				m.events, m.list["w0"].slow = nil, 0
				if err := Run(t.Context(), m, &again, within(time.Minute)); err != nil {
					t.Fatal(err)
				}
				m.wants(t, want...)
				if again.Left() != 0 || m.list["w0"].Drained || m.list["w0"].Incarnation == 100 {
					t.Errorf("%+v, w0 %+v", again, m.list["w0"].WorkerView)
				}
			})
		})
	}
}

// What the gateway saw break counts, though the worker itself calls its answers fine.
func TestBrokenAnswersStopTheRollout(t *testing.T) {
	for _, c := range []struct {
		name       string
		ok, broken float64 // per second
		streams    int
		stops      bool
	}{
		{"half of them", 1, 1, 0, true},
		{"one in a hundred", 99, 1, 0, false},
		{"one of many that still run", 0, 0.1, 40, false},
		{"all that ended, and few run", 0, 1, 2, true},
		{"none", 5, 0, 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMesh("a", "a")
				m.restarted = func(w *fakeWorker) {
					w.streams = c.streams
					begin := time.Now()
					w.attempts = func() fleet.AttemptView {
						s := time.Since(begin).Seconds()
						return fleet.AttemptView{Worker: w.ID, OK: 100 + int64(s*c.ok), Broken: 1000 + int64(s*c.broken)}
					}
				}
				err := Run(t.Context(), m, m.planFor(t, 1), Defaults())
				b, stopped := errors.AsType[*BoundError](err)
				if stopped != c.stops || stopped && !strings.Contains(b.Reason, "broke") {
					t.Errorf("%v, want stopped %v", err, c.stops)
				}
			})
		})
	}
}

// A gateway that was started anew counts from 0.
func TestCountsBeginAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("a", "a")
		m.restarted = func(w *fakeWorker) {
			begin := time.Now()
			w.attempts = func() fleet.AttemptView {
				if time.Since(begin) > 5*time.Second {
					return fleet.AttemptView{Worker: w.ID, OK: 3, Broken: 2}
				}
				return fleet.AttemptView{Worker: w.ID, OK: 500, Broken: 1}
			}
		}
		if err := Run(t.Context(), m, m.planFor(t, 1), Defaults()); err != nil {
			t.Error(err)
		}
	})
}

// Gateways that follow each other count on beside each other, and end.
func TestCountsOfSeveralGateways(t *testing.T) {
	type counts struct {
		gateway    string
		ok, broken int64
	}
	var since seen
	for i, look := range []struct {
		list       []counts // of the gateway that was asked, and of those before it
		ok, broken int64    // so far
	}{
		{[]counts{{"a", 500, 100}}, 0, 0},
		{[]counts{{"a", 510, 101}}, 10, 1},
		{[]counts{{"b", 0, 2}, {"a", 510, 101}}, 10, 3},              // a was replaced
		{[]counts{{"b", 5, 2}}, 15, 3},                               // it is not heard
		{[]counts{{"b", 5, 2}, {"a", 511, 104}}, 16, 6},              // and is again
		{[]counts{{"c", 1, 0}, {"b", 5, 2}, {"a", 511, 105}}, 17, 7}, // its last word
		{[]counts{{"c", 1, 0}, {"b", 5, 3}}, 17, 8},
		{[]counts{{"c", 1, 1}, {"b", 0, 0}, {"z", 9, 900}}, 17, 9}, // the worker was away for b; z was never heard before
		{[]counts{{"c", 1, 1}, {"b", 0, 1}, {"z", 9, 901}}, 17, 11},
		{[]counts{{"d", 0, 4}}, 17, 15}, // all were killed
	} {
		list := fleet.StreamList{Attempts: []fleet.AttemptView{{Gateway: "a", Worker: "other", Broken: int64(i)}}}
		for _, c := range look.list {
			list.Gateways = append(list.Gateways, c.gateway)
			list.Attempts = append(list.Attempts, fleet.AttemptView{Gateway: c.gateway, Worker: "w", OK: c.ok, Broken: c.broken})
		}
		if since.look(list, "w"); since.ok != look.ok || since.broken != look.broken {
			t.Errorf("look %d: %d whole and %d broken, want %d and %d", i, since.ok, since.broken, look.ok, look.broken)
		}
	}
}

// A gateway that is away for a while counts on from where it was when it is back: what it
// had counted before is not the new worker's.
func TestGatewayThatIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("a", "a")
		m.restarted = func(w *fakeWorker) {
			begin := time.Now()
			w.attempts = func() fleet.AttemptView { return fleet.AttemptView{Worker: w.ID, OK: 100, Broken: 1000} }
			m.gateway = func() error {
				if s := time.Since(begin); s > 3*time.Second && s < 5*time.Second {
					return fmt.Errorf("%w: connection refused", ErrNoGateway)
				}
				return nil
			}
		}
		if err := Run(t.Context(), m, m.planFor(t, 1), Defaults()); err != nil {
			t.Error(err)
		}
		// A worker can be drained without it.
		m.gateway = func() error { return ErrNoGateway }
		if _, err := Drain(t.Context(), m, "w1", DrainDefaults()); err != nil {
			t.Errorf("drain: %v", err)
		}
		m.gateway = func() error { return errors.New("it answers nonsense") }
		if err := Run(t.Context(), m, m.planFor(t, 1), Defaults()); err == nil {
			t.Error("a gateway that cannot be asked passed")
		}
	})
}

func TestValidate(t *testing.T) {
	c := Defaults()
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	c.MaxErrorRate, c.Observe = 0, 0
	if err := c.Validate(); err != nil {
		t.Errorf("no failure allowed, no watching: %v", err)
	}
	for field, change := range map[string]func(*Config){
		"share":    func(c *Config) { c.MaxErrorRate = math.NaN() },
		"of fail":  func(c *Config) { c.MaxErrorRate = -1 },
		"requests": func(c *Config) { c.MaxErrorRate = 1.5 },
		"ready":    func(c *Config) { c.Ready = 0 },
		"timeout":  func(c *Config) { c.Drain.Timeout = 0 },
		"observe":  func(c *Config) { c.Observe = -1 },
		"poll":     func(c *Config) { c.Poll = 0 },
	} {
		c := Defaults()
		change(&c)
		m := newMesh("a")
		if err := Run(t.Context(), m, &Plan{}, c); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	d := DrainDefaults()
	d.Timeout = -time.Second
	if _, err := Drain(t.Context(), newMesh("a"), "w0", d); err == nil || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("drain: %v", err)
	}
}

// With no failure allowed, one is too many.
func TestNoFailureAllowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("a", "a")
		m.restarted = func(w *fakeWorker) { w.ErrorRate = 0.001 }
		c := Defaults()
		c.MaxErrorRate = 0
		if _, ok := errors.AsType[*BoundError](Run(t.Context(), m, m.planFor(t, 1), c)); !ok {
			t.Error("a worker that fails requests passed")
		}
	})
}

// A pool that loses another worker while one is drained keeps that one: it takes requests
// again until there is room.
func TestMinimumIsKeptAtTheRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("a", "a", "a")
		m.minimum = 2
		p := m.planFor(t, 1)
		// It dies as soon as w0 drains, and is back after a while.
		m.fail = func(event string) error {
			if event == "drain w0" && m.list["w2"].Incarnation == 100 {
				m.list["w2"].back, m.list["w2"].streams = time.Now().Add(20*time.Second), 0
			}
			if event == "restart w0" {
				if taking := m.taking(t); taking < m.minimum {
					t.Errorf("w0 is restarted while %d others take requests, want %d", taking, m.minimum)
				}
			}
			return nil
		}
		var said []string
		c := Defaults()
		c.Progress = func(_, what string) { said = append(said, what) }
		if err := Run(t.Context(), m, p, c); err != nil {
			t.Fatal(err)
		}
		m.wants(t, "drain w0", "undrain w0", "drain w0", "restart w0", "undrain w0")
		if !strings.Contains(strings.Join(said, "\n"), "not restarted") {
			t.Errorf("nothing is said of it: %q", said)
		}
	})
}

// taking counts the workers that take requests.
func (m *fakeMesh) taking(t *testing.T) int {
	t.Helper()
	list, err := m.Workers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return len(slices.DeleteFunc(list, func(w fleet.WorkerView) bool { return !takes(w) }))
}

// A worker that dies while it is drained comes back with the old version: that is no
// restart. One that does not come back is restarted all the same.
func TestDeathInTheDrain(t *testing.T) {
	for _, back := range []time.Duration{300 * time.Millisecond, 2 * time.Second, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			m := newMesh("old", "old", "old")
			p := m.planFor(t, 1)
			m.fail = func(event string) error {
				switch w := m.list["w0"]; event {
				case "drain w0":
					if w.Incarnation > 100 {
						return nil // it dies once
					}
					w.back, w.streams = time.Now().Add(back), 0
				case "restart w0":
					if back < comeback && !w.back.IsZero() {
						t.Errorf("restarted while it was about to come back by itself after %v", back)
					}
					m.restarted = func(w *fakeWorker) { w.Fingerprint = "new" }
				}
				return nil
			}
			if err := Run(t.Context(), m, p, Defaults()); err != nil {
				t.Fatal(err)
			}
			// What came back took requests again, and is emptied like any other.
			if n := strings.Count(strings.Join(m.events, ","), "drain w0,restart w0"); back < comeback && (n != 1 || len(m.events) != 4) {
				t.Errorf("back after %v: %v", back, m.events)
			}
			if !slices.Contains(m.events, "restart w0") || p.Steps[0].Now != "new" {
				t.Errorf("back after %v: %v, %+v; want a restart to the new version", back, m.events, p.Steps)
			}
		})
	}
}

// The same over an interruption: a rollout that goes on does not take the death for its
// own restart.
func TestDeathBetweenTwoRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("a", "a", "a")
		p := m.planFor(t, 1)
		p.Steps[0].State, p.Steps[0].Drained, m.list["w0"].Drained = Draining, true, true
		m.list["w0"].Incarnation++
		if err := Run(t.Context(), m, p, Defaults()); err != nil {
			t.Fatal(err)
		}
		m.wants(t, "drain w0", "restart w0", "undrain w0")
	})
}

// A rollout that is interrupted while it drains gives the worker back; one that was
// killed there leaves that to the next.
func TestDrainIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("a", "a", "a")
		p := m.planFor(t, 1)
		var killed Plan
		c := Defaults()
		c.Save = func(p Plan) error {
			if p.Steps[0].State == Draining {
				killed.Steps = slices.Clone(p.Steps)
			}
			return nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if err := Run(ctx, m, p, c); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		if m.list["w0"].Drained || p.Steps[0].State != Pending || p.Steps[0].Drained {
			t.Errorf("interrupted: %+v, drained %v", p.Steps, m.list["w0"].Drained)
		}
		m.list["w0"].Drained = true
		ids, err := GiveBack(t.Context(), m, &killed, c)
		if err != nil || !slices.Equal(ids, []string{"w0"}) || m.list["w0"].Drained || killed.Steps[0].State != Pending {
			t.Errorf("killed: %v, %v, %+v", ids, err, killed.Steps)
		}
		if back := killed.Back(); len(back.Steps) != 0 {
			t.Errorf("back: %+v, want nobody", back)
		}
	})
}

// An operator's drain holds over the rollout: the worker is restarted, and nobody is sent
// there.
func TestOperatorsDrainHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("a", "a", "a")
		m.list["w0"].Drained = true
		var said []string
		c := Defaults()
		c.Progress = func(_, what string) { said = append(said, what) }
		p := m.planFor(t, 2)
		if err := Run(t.Context(), m, p, c); err != nil {
			t.Fatal(err)
		}
		m.wants(t, "drain w0", "restart w0", "drain w1", "restart w1", "undrain w1")
		if !m.list["w0"].Drained || p.Left() != 0 || !strings.Contains(strings.Join(said, "\n"), "stays drained") {
			t.Errorf("drained %v, %+v, said %q", m.list["w0"].Drained, p, said)
		}
	})
}

// A rollout that cannot be is found out before it begins.
func TestRooms(t *testing.T) {
	m := newMesh("a", "a")
	m.minimum = 2
	rooms, err := Rooms(t.Context(), m, *m.planFor(t, 1))
	if err != nil || len(rooms) != 1 || rooms[0].Workers != 2 || rooms[0].Taking != 2 || !slices.Equal(rooms[0].Never, []string{"w0"}) {
		t.Errorf("%+v, %v; want that w0 can never be restarted", rooms, err)
	}
	m.minimum = 1
	if rooms, err = Rooms(t.Context(), m, *m.planFor(t, 1)); err != nil || len(rooms[0].Never) > 0 || !strings.Contains(rooms[0].String(), "at least 1 others must") {
		t.Errorf("%+v, %v", rooms, err)
	}
}
