package relay

import (
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
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

// plainFleet is n workers that are not ours.
func plainFleet(n int) (ws []*fleetpb.Worker) {
	for i := range n {
		ws = append(ws, &fleetpb.Worker{Id: fmt.Sprintf("w%d", i+1), Address: fmt.Sprintf("10.0.0.%d:80", i+1), Pool: "p", Incarnation: 1, Status: 1, Weight: 10})
	}
	return ws
}
