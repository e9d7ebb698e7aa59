package relay

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/names"
)

// What the first tier cannot do goes to the next, once its workers have been asked; what
// no worker can do does not.
func TestNextTier(t *testing.T) {
	json := func(status int, body string) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) {
			w.Header().Set("Retry-After", "3")
			sendJSON(w, status, body)
		}
	}
	tooLong := json(400, `{"error":{"message":"This model's maximum context length is 10 tokens.","code":"context_length_exceeded"}}`)
	for _, tt := range []struct {
		name     string
		first    func(http.ResponseWriter) // every worker of the first tier
		second   func(http.ResponseWriter) // nil serves
		attempts []string
		status   int
		want     string
	}{
		{"busy", json(503, `{"error":{"message":"full"}}`), nil, []string{"w1", "w2", "w3", "v1"}, 200, ""},
		{"queue full", json(429, `{"error":{"message":"full"}}`), nil, []string{"w1", "w2", "w3", "v1"}, 200, ""},
		{"broken", json(500, `{"error":{"message":"boom"}}`), nil, []string{"w1", "w2", "w3", "v1"}, 200, ""},
		{"too long", tooLong, nil, []string{"w1", "v1"}, 200, ""},
		{"too long for all", tooLong, tooLong, []string{"w1", "v1"}, 400, "maximum context length"},
		{"too long, and the next is full", tooLong, json(503, `{"error":{"message":"full"}}`), []string{"w1", "v1"}, 400, "maximum context length"},
		{"wrong", json(400, `{"error":{"message":"no"}}`), nil, []string{"w1"}, 400, "no"},
		{"all full", json(429, `{"error":{"message":"full"}}`), json(429, `{"error":{"message":"full, too"}}`), []string{"w1", "w2", "w3", "v1"}, 429, "full, too"},
	} {
		for _, ask := range []string{askStream, askWhole} {
			var at *mesh
			serve := func(n int, w http.ResponseWriter, r *http.Request) {
				do := tt.second
				if r.Header.Get(names.Pool) == "p" {
					do = tt.first
				}
				switch {
				case do != nil:
					do(w)
				case ask == askStream:
					send(w, token("a", "stop"), done)
				default:
					sendJSON(w, 200, complete)
				}
			}
			inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
				at = m
				m.picker.Update(append(ownFleet(3, func(_ int, w *fleetpb.Worker) { w.RelayMark = "" }),
					&fleetpb.Worker{Id: "v1", Address: "10.0.1.1:80", Pool: "q", Incarnation: 1, Status: 1, Weight: 10}))
				got := m.ask(strings.Replace(ask, `"m"`, `"m","max_tokens":20`, 1), names.ModelRoute, "tiers")
				if got.status != tt.status || !strings.Contains(got.body, tt.want) {
					t.Errorf("%s: %d %s", tt.name, got.status, got.body)
				}
				var seen []string
				for _, s := range m.attempts() {
					if len(seen) < len(tt.attempts) { // a pool of one is asked again in the end
						seen = append(seen, s)
					}
				}
				if diff := cmp.Diff(tt.attempts, seen); diff != "" {
					t.Errorf("%s: %s", tt.name, diff)
				}
				if tt.status == 429 && got.header.Get("Retry-After") != "3" {
					t.Errorf("%s: headers %v", tt.name, got.header)
				}
				if n := len(tt.attempts) - 1; tt.attempts[n] == "v1" && !strings.Contains(at.seen[n].body, `"model":"big","max_tokens":7`) {
					t.Errorf("%s: the next tier was asked %s", tt.name, at.seen[n].body)
				}
			})
		}
	}
}
