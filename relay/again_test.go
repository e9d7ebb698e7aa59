package relay

import (
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/names"
)

// Who has said no himself is asked again only where he is the only one, and when he wants it. In a
// bubble.
func TestAskedAgain(t *testing.T) {
	for _, tt := range []struct {
		name    string
		status  int
		after   string // Retry-After
		workers int
		yes     int // the attempt that succeeds
		want    []time.Duration
		ends    int // status
	}{
		{"all refuse", 503, "7", 3, 9, []time.Duration{0, 0, 0}, 503},
		{"both refuse", 503, "7", 2, 9, []time.Duration{0, 0}, 503},
		{"all fail", 500, "", 3, 9, []time.Duration{0, 0, 0}, 500},
		{"the last one serves", 429, "7", 3, 3, []time.Duration{0, 0, 0}, 200},
		{"the only one", 503, "7", 1, 2, []time.Duration{0, 7 * time.Second}, 200},
		{"the only one refuses for too long", 503, "7", 1, 9, []time.Duration{0, 7 * time.Second}, 503},
		{"the only one names a long time", 429, "11", 1, 9, []time.Duration{0}, 429},
		{"the only one names none", 500, "", 1, 3, []time.Duration{0, 0, 0}, 200},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var start time.Time
			var at []time.Duration
			serve := func(n int, w http.ResponseWriter, _ *http.Request) {
				at = append(at, time.Since(start).Truncate(time.Second))
				if n == tt.yes {
					sendJSON(w, http.StatusOK, complete)
					return
				}
				if tt.after != "" {
					w.Header().Set("Retry-After", tt.after)
				}
				sendJSON(w, tt.status, `{"error":{"message":"no"}}`)
			}
			inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
				m.picker.Update(plainFleet(tt.workers))
				start = time.Now()
				got := m.ask(askWhole)
				by := m.attempts()
				slices.Sort(by)
				if !slices.Equal(at, tt.want) || got.status != tt.ends || tt.workers > 1 && len(slices.Compact(by)) != len(at) {
					t.Errorf("asked %v at %v, status %d; want %v and %d", m.attempts(), at, got.status, tt.want, tt.ends)
				}
				if got.status != 200 && got.header.Get("Retry-After") != tt.after {
					t.Errorf("Retry-After %q, want %q", got.header.Get("Retry-After"), tt.after)
				}
			})
		})
	}
}

// Of two servers, one has said no and the other broke off: the other is asked again. In a bubble.
func TestAgainNotWhoRefused(t *testing.T) {
	for range 10 { // whichever of them the choice names first
		cuts := 0
		inMesh(t, nil, func(_ int, w http.ResponseWriter, r *http.Request) {
			if r.Header.Get(names.ExpectWorker) == "w1" {
				sendJSON(w, http.StatusServiceUnavailable, `{"error":{"message":"full"}}`)
				return
			}
			if cuts++; cuts == 1 {
				cut()
			}
			sendJSON(w, http.StatusOK, complete)
		}, func(t *testing.T, m *mesh) {
			m.picker.Update(plainFleet(2))
			if got := m.ask(askWhole); got.status != http.StatusOK || len(m.attempts()) != 3 {
				t.Errorf("attempts %v, status %d", m.attempts(), got.status)
			}
		})
	}
}

// Who waits for a Retry-After takes nothing of the retry budget. In a bubble.
func TestRetryAfterTakesNoShare(t *testing.T) {
	serve := func(_ int, w http.ResponseWriter, r *http.Request) {
		switch r.Header.Get(names.ExpectWorker) {
		case "w9": // the only one of its pool
			w.Header().Set("Retry-After", "9")
			sendJSON(w, http.StatusServiceUnavailable, `{"error":{"message":"full"}}`)
		case "w1":
			cut()
		default:
			sendJSON(w, http.StatusOK, complete)
		}
	}
	inMesh(t, func(c *Config) { c.MinRetries, c.RetryShare = 4, 0.01 }, serve, func(t *testing.T, m *mesh) {
		m.picker.Update(append(plainFleet(3), &fleetpb.Worker{Id: "w9", Address: "10.0.0.9:80", Pool: "q", Incarnation: 1, Status: 1, Weight: 10}))
		ends := make(chan reply, 4)
		for range cap(ends) {
			go func() {
				ends <- m.ask(askWhole, names.Pool, "q", names.Destination, "10.0.0.9:80", names.ModelRoute, "long")
			}()
		}
		time.Sleep(time.Second)
		if got := m.ask(askWhole); got.status != http.StatusOK || got.took > time.Second {
			t.Errorf("a request whose worker died waited %v, status %d", got.took, got.status)
		}
		for range cap(ends) {
			if got := <-ends; got.took < 9*time.Second {
				t.Errorf("asked again before the time: over after %v", got.took)
			}
		}
	})
}

// Envoy's own 404, of a pool that it does not know yet, is no worker's word. In a bubble.
func TestPoolNotKnownYet(t *testing.T) {
	inMesh(t, nil, func(n int, w http.ResponseWriter, _ *http.Request) {
		if n == 1 {
			w.Header().Del(names.Upstream)
			w.Header().Del(names.Worker)
			w.Header().Set(names.Fault, "-")
			http.Error(w, "no such pool", http.StatusNotFound)
			return
		}
		sendJSON(w, http.StatusOK, complete)
	}, func(t *testing.T, m *mesh) {
		if got := m.ask(askWhole); got.status != http.StatusOK || len(m.attempts()) != 2 {
			t.Errorf("status %d, attempts %v", got.status, m.attempts())
		}
	})
}

// plainFleet is n workers that are not ours.
func plainFleet(n int) (ws []*fleetpb.Worker) {
	for i := range n {
		ws = append(ws, &fleetpb.Worker{Id: fmt.Sprintf("w%d", i+1), Address: fmt.Sprintf("10.0.0.%d:80", i+1), Pool: "p", Incarnation: 1, Status: 1, Weight: 10})
	}
	return ws
}
