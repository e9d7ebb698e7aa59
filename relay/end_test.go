package relay

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
)

// A pause in a script of what a server sends.
func pause(d time.Duration) string { return d.String() }

// sendSlowly sends the parts of a script, with its pauses. It returns false when nobody
// reads any more.
func sendSlowly(w http.ResponseWriter, r *http.Request, script ...string) bool {
	for _, s := range script {
		if d, err := time.ParseDuration(s); err != nil {
			send(w, s)
		} else if !rest(r, d) {
			return false
		}
	}
	return true
}

// spoken is what a script sends.
func spoken(script ...string) string {
	var out strings.Builder
	for _, s := range script {
		if _, err := time.ParseDuration(s); err != nil {
			out.WriteString(s)
		}
	}
	return out.String()
}

// TestSaysTheEnd: an answer of which only [DONE] is missing ends soon, though its server
// keeps the connection open, and that server is not called broken. Nothing else that a
// server may be slow to say is cut off. (In a bubble.)
func TestSaysTheEnd(t *testing.T) {
	a, stop := token("a", ""), token("", "stop")
	one := func(s string) string { return strings.Replace(s, `"index":0`, `"index":1`, 1) }
	usage := "data: {\"choices\":[],\"usage\":{\"completion_tokens\":7}}\n\n"
	const hour = time.Hour
	for _, tt := range []struct {
		name, ask string
		script    []string
		took      time.Duration
		ended     bool // by the relay
	}{
		{"silent", askStream, []string{a, stop, pause(hour)}, 2 * time.Second, true},
		{"at once", askStream, []string{token("a", "stop"), pause(hour)}, 2 * time.Second, true},
		{"comments only", askStream, []string{a, stop, pause(time.Second), ": hi\n\n", pause(999 * time.Millisecond), ": hi\n\n", pause(hour)}, 2 * time.Second, true},
		{"in time", askStream, []string{a, stop, pause(1999 * time.Millisecond), done}, 1999 * time.Millisecond, false},
		{"goes on behind its end", askStream, []string{a, stop, pause(1900 * time.Millisecond), token("b", ""), pause(1900 * time.Millisecond), token("c", ""), pause(hour)}, 5800 * time.Millisecond, true},
		{"with usage", askUsage, []string{a, stop, usage, pause(hour)}, 2 * time.Second, true},
		{"usage comes late", askUsage, []string{a, stop, pause(4 * time.Second), usage, done}, 4 * time.Second, false},
		{"another choice comes late", strings.Replace(askStream, `"stream"`, `"n":2,"stream"`, 1), []string{a, stop, pause(4 * time.Second), one(a), one(stop), pause(hour)}, 6 * time.Second, true},
		{"another prompt's comes late", strings.Replace(askStream, `"p"`, `["p","q"]`, 1), []string{a, stop, pause(4 * time.Second), one(a), one(stop), done}, 4 * time.Second, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			serve := func(_ int, w http.ResponseWriter, r *http.Request) { sendSlowly(w, r, tt.script...) }
			inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
				want := spoken(tt.script...)
				if tt.ended {
					want += done
				}
				if got := m.ask(tt.ask); got.body != want || got.took != tt.took {
					t.Errorf("after %v: %q, want after %v: %q", got.took, got.body, tt.took, want)
				}
				a := m.relay.Attempts()
				if m.result(resultOK) != 1 || len(a) == 1 && (a[0].Broken != 0 || tt.ended == (a[0].OK != 0)) {
					t.Errorf("%d attempts ok, counted as %+v", m.result(resultOK), a)
				}
			})
		})
	}
}

// Both say the end at the same moment: the client hears it once. (In a bubble.)
func TestSaysTheEndOnce(t *testing.T) {
	serve := func(_ int, w http.ResponseWriter, r *http.Request) {
		sendSlowly(w, r, token("a", "stop"), pause(endTime), done)
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		for range 20 {
			if got := m.ask(askStream); got.body != token("a", "stop")+done {
				t.Errorf("%q", got.body)
			}
		}
		if n := m.result(resultOK); n != 20 {
			t.Errorf("%d attempts ok", n)
		}
	})
}

// Usage that was asked for and never comes is no end. (In a bubble.)
func TestUsageNeverComes(t *testing.T) {
	serve := func(_ int, w http.ResponseWriter, r *http.Request) {
		sendSlowly(w, r, token("a", "stop"), pause(time.Hour))
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		got := m.ask(askUsage)
		if strings.Contains(got.body, "DONE") || !strings.Contains(got.body, `"code":"timeout"`) || got.took != 5*time.Second {
			t.Errorf("after %v: %q", got.took, got.body)
		}
	})
}

// Where less patience is asked for, it ends sooner, and not in an error. (In a bubble.)
func TestSaysTheEndInTime(t *testing.T) {
	serve := func(_ int, w http.ResponseWriter, r *http.Request) {
		sendSlowly(w, r, token("a", "stop"), pause(time.Hour))
	}
	quick := func(c *Config) { c.Policy.Routes[0].Timeouts.StreamIdle = 1e9 }
	inMesh(t, quick, serve, func(t *testing.T, m *mesh) {
		if got := m.ask(askStream); got.body != token("a", "stop")+done || got.took != time.Second/2 {
			t.Errorf("after %v: %q", got.took, got.body)
		}
	})
}

// Of ours, too, streamed or not, nobody else is asked for an end. (In a bubble.)
func TestSaysTheEndOfOurs(t *testing.T) {
	for name, tt := range map[string]struct {
		ask   string
		after int
		usage bool
	}{
		"stream":     {`{"model":"m","prompt":"p","stream":true,"max_tokens":10}`, 11, false},
		"with usage": {askUsage, 12, true},
		"whole":      {`{"model":"m","prompt":"p","max_tokens":10}`, 12, true},
	} {
		t.Run(name, func(t *testing.T) {
			inOwnMesh(t, func(t *testing.T, m *mesh) {
				got := m.ask(tt.ask, names.ModelRoute, "long")
				if name != "whole" {
					m.checkWhole(got.body, 1, 10, tt.usage)
				} else if !json.Valid([]byte(got.body)) || !strings.Contains(got.body, `"finish_reason":"length"`) {
					t.Errorf("%d %s", got.status, got.body)
				}
				if n := len(m.attempts()); n != 1 || got.took > 3*time.Second || m.result(resultOK) != 1 {
					t.Errorf("%d attempts, %d ok, in %v", n, m.result(resultOK), got.took)
				}
			}, after(t, tt.after, hangs), well(t))
		})
	}
}
