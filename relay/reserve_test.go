package relay

import (
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
)

// TestDrainUsesFreed: answers that look for room again and again, and stay where they are,
// keep no sequence from others: the one of w2 is used again after an attempt there has died.
// In a bubble.
func TestDrainUsesFreed(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		fleet := func(i int, w *fleetpb.Worker) {
			switch i {
			case 1:
				loaded(w, 4, 1)
				w.Status = int32(health.Draining)
			case 2:
				loaded(w, 3, 0)
			case 3:
				loaded(w, 4, 1)
			}
		}
		ask := strings.Replace(askHundred, "100", "2000", 1) // 20 s
		other := make(chan string, 4)
		for range 4 {
			go func() { other <- m.ask(ask).body }()
		}
		m.follow(ask, func(n int) {
			if n != 10 {
				return
			}
			m.picker.Update(ownFleet(3, fleet))
			m.relay.Update()
			go func() {
				for range 30 { // the reports stay the same
					time.Sleep(time.Second / 2) // in the bubble
					m.picker.Update(ownFleet(3, fleet))
				}
			}()
		})
		for range 4 {
			<-other
		}
		if at := m.attempts(); len(at) < 7 {
			t.Errorf("attempts %v: w2 was never used after one there had died", at)
		}
	}, well(t), well(t), well(t), well(t), well(t), after(t, 0, dies), well(t))
}

// TestFullAndSilent: a worker that calls itself full and gives nobody a token is to blame for
// those who wait in vain.
func TestFullAndSilent(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		m.picker.Update(ownFleet(1, func(_ int, w *fleetpb.Worker) { loaded(w, 4, 0) }))
		for range 4 {
			m.ask(askUsage)
		}
		if at := m.relay.Attempts(); len(at) != 1 || at[0].Broken != 4 {
			t.Errorf("%+v, want 4 that broke", at)
		}
		if !m.picker.Workers(time.Now())[0].Broken {
			t.Error("its breaker is closed")
		}
	}, after(t, 0, hangs))
}

// TestKeptForAnother: a sequence that was kept for an answer is not taken where an operator
// has named another worker, and not later either. In a bubble.
func TestKeptForAnother(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		kept := worker{id: "w2", fingerprint: "f"}
		for _, tt := range []struct{ to, want string }{{"", "w2"}, {"w2", "w2"}, {"w3", "w3"}} {
			j := &job{r: m.relay, hunt: hunt{to: kept}}
			a := &attempt{j: j, w: worker{id: "w1", fingerprint: "f"}, place: place{pool: "p"}}
			w, ok := j.target(a, []string{"w1"}, tt.to, true)
			if !ok || w.id != tt.want || j.hunt.to.id != "" {
				t.Errorf("to %q: %q, %v, and %q is still kept; want %q and nothing", tt.to, w.id, ok, j.hunt.to.id, tt.want)
			}
		}
	}, well(t))
}
