package rollout

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// fakeMesh is a pool of workers whose streams move a second after a drain and whose
// restarts take five. Only one goroutine uses it.
type fakeMesh struct {
	list    map[string]*fakeWorker
	minimum int
	events  []string
	fewest  int // workers that took requests at once, at the least
	// restarted changes a worker that comes back; nil for none.
	restarted func(*fakeWorker)
	// fail, when it returns an error for an event, fails that call.
	fail func(event string) error
	// gateway, when it returns an error, is that of a look at the streams.
	gateway func() error
}

type fakeWorker struct {
	fleet.WorkerView
	streams int
	drained time.Time // when its streams move away, zero for never
	back    time.Time // when it comes back from its restart
	slow    time.Duration
	// attempts are what the gateway has counted by now, nil for none.
	attempts func() fleet.AttemptView
}

// within are the defaults with another time to be ready.
func within(ready time.Duration) Config {
	c := Defaults()
	c.Ready = ready
	return c
}

func newMesh(fingerprints ...string) *fakeMesh {
	m := &fakeMesh{list: map[string]*fakeWorker{}, minimum: 1, fewest: len(fingerprints)}
	for i, f := range fingerprints {
		id := fmt.Sprintf("w%d", i)
		m.list[id] = &fakeWorker{WorkerView: fleet.WorkerView{ID: id, Pool: "main", Status: "HEALTHY", Incarnation: 100, Fingerprint: f}, streams: 3}
	}
	return m
}

func (m *fakeMesh) Workers(context.Context) ([]fleet.WorkerView, error) {
	var out []fleet.WorkerView
	taking := 0
	for _, w := range m.list {
		if !w.back.IsZero() {
			if time.Now().Before(w.back) {
				continue // it left
			}
			w.back = time.Time{}
			w.Incarnation++
			if m.restarted != nil {
				m.restarted(w)
			}
		}
		if !w.drained.IsZero() && time.Now().After(w.drained) {
			w.streams, w.drained = 0, time.Time{}
		}
		w.Running = uint32(w.streams)
		v := w.WorkerView
		if v.State = fleet.StateReady; w.Drained {
			v.Status = "DRAINING"
		}
		if takes(v) {
			taking++
		}
		out = append(out, v)
	}
	m.fewest = min(m.fewest, taking)
	slices.SortFunc(out, func(a, b fleet.WorkerView) int { return strings.Compare(a.ID, b.ID) })
	return out, nil
}

func (m *fakeMesh) Streams(context.Context) (fleet.StreamList, error) {
	var out fleet.StreamList
	if m.gateway != nil {
		if err := m.gateway(); err != nil {
			return out, err
		}
	}
	for _, w := range m.list {
		for range w.streams {
			out.Streams = append(out.Streams, fleet.StreamView{Worker: w.ID})
		}
		if w.attempts != nil {
			out.Attempts = append(out.Attempts, w.attempts())
		}
	}
	return out, nil
}

func (m *fakeMesh) Minimum(context.Context, string) (int, error) { return m.minimum, nil }

func (m *fakeMesh) SetDrain(_ context.Context, id string, on, keep bool) error {
	event := fmt.Sprintf("undrain %s", id)
	if on {
		event = fmt.Sprintf("drain %s", id)
		if keep {
			event += " keeping"
		}
	}
	if err := m.did(event); err != nil {
		return err
	}
	w := m.list[id]
	if now := time.Now(); on && !w.Drained && now.Before(w.back) {
		return errors.New("no such worker: it is away") // as the control plane has it
	}
	w.Drained = on
	if on && w.streams > 0 {
		w.drained = time.Now().Add(time.Second)
		if keep {
			w.drained = time.Now().Add(time.Minute)
		}
	}
	return nil
}

func (m *fakeMesh) Restart(_ context.Context, w fleet.WorkerView) error {
	if err := m.did("restart " + w.ID); err != nil {
		return err
	}
	f := m.list[w.ID]
	f.back = time.Now().Add(5*time.Second + f.slow)
	return nil
}

func (m *fakeMesh) did(event string) error {
	m.events = append(m.events, event)
	if m.fail != nil {
		return m.fail(event)
	}
	return nil
}

// planFor is a plan for the workers w0 and on.
func (m *fakeMesh) planFor(t *testing.T, n int) *Plan {
	t.Helper()
	list, err := m.Workers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for i := range n {
		ids = append(ids, fmt.Sprintf("w%d", i))
	}
	p, err := NewPlan(list, ids, Plan{})
	if err != nil {
		t.Fatal(err)
	}
	return &p
}

func (m *fakeMesh) wants(t *testing.T, events ...string) {
	t.Helper()
	if d := cmp.Diff(events, m.events); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
}

func TestRunOneAfterTheOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("a", "a", "a")
		p := m.planFor(t, 3)
		if err := Run(t.Context(), m, p, Defaults()); err != nil {
			t.Fatal(err)
		}
		m.wants(t, "drain w0", "restart w0", "undrain w0", "drain w1", "restart w1", "undrain w1", "drain w2", "restart w2", "undrain w2")
		if p.Left() != 0 || m.fewest != 2 {
			t.Errorf("%d left, %d workers at the fewest; want 0 and 2", p.Left(), m.fewest)
		}
	})
}

// In a rollout of other weights, streams move to what is left of the old ones, and
// the last old worker keeps its own.
func TestLastOfItsWeightsKeepsItsStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("old", "old", "old")
		m.restarted = func(w *fakeWorker) { w.Fingerprint = "new" }
		if err := Run(t.Context(), m, m.planFor(t, 3), Defaults()); err != nil {
			t.Fatal(err)
		}
		m.wants(t, "drain w0", "restart w0", "undrain w0", "drain w1", "restart w1", "undrain w1", "drain w2 keeping", "restart w2", "undrain w2")
	})
}

func TestBoundsStopTheRollout(t *testing.T) {
	for _, c := range []struct {
		name, reason string
		restarted    func(*fakeWorker)
		slow         time.Duration
	}{
		{"not ready", "not ready 1m0s after its restart: it is UNHEALTHY, self-check failed", func(w *fakeWorker) { w.Status, w.Reason = "UNHEALTHY", "self-check failed" }, 0},
		{"never back", "did not come back", nil, time.Hour},
		{"errors", "20.0 % of its requests fail", func(w *fakeWorker) { w.ErrorRate = 0.2 }, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMesh("a", "a", "a")
				m.restarted = c.restarted
				m.list["w0"].slow = c.slow
				p := m.planFor(t, 2)
				err := Run(t.Context(), m, p, within(time.Minute))
				if b, ok := errors.AsType[*BoundError](err); !ok || b.Worker != "w0" || !strings.Contains(b.Reason, c.reason) {
					t.Fatalf("got %v, want a bound of w0: %s", err, c.reason)
				}
				if p.Steps[0].State != Failed || p.Steps[1].State != Pending || !m.list["w0"].Drained {
					t.Errorf("steps %+v, drained %v; want w0 failed and drained, w1 untouched", p.Steps, m.list["w0"].Drained)
				}
				if back := p.Back(); len(back.Steps) != 1 || back.Steps[0].Worker != "w0" {
					t.Errorf("back: %+v, want w0 only", back)
				}
			})
		})
	}
}

// Back restarts in the reverse order what the rollout touched, from what the workers
// are by then.
func TestRollback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("old", "old", "old")
		m.restarted = func(w *fakeWorker) {
			if w.Fingerprint = "new"; w.ID == "w1" {
				w.ErrorRate = 1
			}
		}
		p := m.planFor(t, 3)
		if err := Run(t.Context(), m, p, Defaults()); err == nil {
			t.Fatal("a worker that fails all requests passed")
		}
		m.events, m.restarted = nil, func(w *fakeWorker) { w.Fingerprint, w.ErrorRate = "old", 0 }
		back := p.Back()
		if err := Run(t.Context(), m, &back, Defaults()); err != nil {
			t.Fatal(err)
		}
		// w1 takes nothing, but its streams are of the new weights, which w0 has too.
		m.wants(t, "drain w1", "restart w1", "undrain w1", "drain w0 keeping", "restart w0", "undrain w0")
	})
}

// A rollout that was interrupted at any moment goes on without a second restart of a
// worker and ends like any other.
func TestGoesOnAfterAnInterruption(t *testing.T) {
	for n := range 30 {
		synctest.Test(t, func(t *testing.T) {
			m := newMesh("a", "a", "a")
			p := m.planFor(t, 2)
			stored := *p
			stored.Steps = slices.Clone(p.Steps)
			c := Defaults()
			c.Save = func(p Plan) error { stored.Steps = slices.Clone(p.Steps); return nil }
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(n)*1300*time.Millisecond)
			defer cancel()
			err := Run(ctx, m, p, c)
			if err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			again := stored
			if err := Run(t.Context(), m, &again, c); err != nil {
				t.Fatalf("after %d: %v", n, err)
			}
			restarts := slices.DeleteFunc(slices.Clone(m.events), func(e string) bool { return !strings.HasPrefix(e, "restart") })
			if d := cmp.Diff([]string{"restart w0", "restart w1"}, restarts); d != "" {
				t.Errorf("interrupted after %d steps of 1.3 s (-want +got):\n%s", n, d)
			}
			if stored.Left() != 0 || m.list["w0"].Drained || m.list["w1"].Drained {
				t.Errorf("%d left, drains %v %v", stored.Left(), m.list["w0"].Drained, m.list["w1"].Drained)
			}
		})
	}
}

func TestMinimumIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("a", "a")
		m.minimum = 1
		m.list["w1"].Status = "TIMEOUT"
		err := Run(t.Context(), m, m.planFor(t, 1), within(time.Minute))
		if err == nil || !strings.Contains(err.Error(), "0 other workers") || len(m.events) != 0 {
			t.Errorf("%v, %v; want an error and w0 untouched", err, m.events)
		}
	})
}

// Streams that do not end stop the rollout with the worker as it was.
func TestDrainThatTakesTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("a", "b")
		p := m.planFor(t, 1)
		c := Defaults()
		c.Drain.Timeout = 10 * time.Second
		err := Run(t.Context(), m, p, c)
		if e, ok := errors.AsType[*NotEmptyError](err); !ok || e.Streams != 3 {
			t.Fatalf("got %v, want 3 streams left", err)
		}
		m.wants(t, "drain w0 keeping", "undrain w0")
		if p.Steps[0].State != Pending {
			t.Errorf("state %s, want pending", p.Steps[0].State)
		}
	})
}

func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh("a", "a")
		var seen []Left
		c := DrainDefaults()
		c.Progress = func(l Left) { seen = append(seen, l) }
		d, err := Drain(t.Context(), m, "w0", c)
		if err != nil || d.Streams != 3 || d.Seconds < 1 || d.Seconds > 1.5 {
			t.Errorf("%+v, %v", d, err)
		}
		if d := cmp.Diff([]Left{{"w0", 3, 3}, {"w0", 0, 0}}, seen); d != "" {
			t.Errorf("progress (-want +got):\n%s", d)
		}
		if _, err := Drain(t.Context(), m, "w9", DrainDefaults()); !errors.Is(err, ErrUnknown) {
			t.Errorf("drain of nobody: %v", err)
		}
		stored := errors.New("disk is full")
		m.fail = func(string) error { return stored }
		if _, err := Drain(t.Context(), m, "w1", DrainDefaults()); !errors.Is(err, stored) {
			t.Errorf("drain that could not be stored: %v", err)
		}
	})
}

func TestNewPlan(t *testing.T) {
	list := []fleet.WorkerView{{ID: "w0", Incarnation: 100}, {ID: "w1", Incarnation: 100}, {ID: "server", Incarnation: fleet.ForeignIncarnation}}
	if _, err := NewPlan(list, []string{"w0", "w0"}, Plan{}); err == nil {
		t.Error("a worker named twice was taken")
	}
	if _, err := NewPlan(list, []string{"w2"}, Plan{}); !errors.Is(err, ErrUnknown) {
		t.Errorf("unknown worker: %v", err)
	}
	if _, err := NewPlan(list, []string{"server"}, Plan{}); err == nil || !strings.Contains(err.Error(), "tells nothing of its starts") {
		t.Errorf("a server whose starts nobody sees: %v", err)
	}
	away := Plan{Steps: []Step{{Worker: "w2", Pool: "main", State: Failed, Incarnation: 7, Drained: true}}}
	p, err := NewPlan(list, []string{"w2", "w0"}, away)
	if err != nil || p.Steps[0] != (Step{Worker: "w2", Pool: "main", State: Pending, Incarnation: 7, Drained: true}) || p.Steps[1].Drained {
		t.Errorf("one that the rollout before left away: %+v, %v", p, err)
	}
}
