package rollout

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
)

// A journal that was stored before steps said whether they are drained: their states do.
func TestJournalWithoutDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, state := range []State{Draining, Restarting, Failed} {
			m := newMesh("a", "a")
			m.list["w0"].Drained = true
			if state != Draining {
				m.list["w0"].Incarnation = 101
			}
			var p Plan
			stored := fmt.Sprintf(`{"steps":[{"worker":"w0","pool":"main","state":%q,"incarnation":100,"fingerprint":"a"}]}`, state)
			if err := json.Unmarshal([]byte(stored), &p); err != nil {
				t.Fatal(err)
			}
			if state == Draining {
				again := Plan{slices.Clone(p.Steps)}
				if ids, err := GiveBack(t.Context(), m, &again, Defaults()); err != nil || len(ids) != 1 || m.list["w0"].Drained {
					t.Errorf("given back: %v, %v", ids, err)
				}
				m.list["w0"].Drained = true
			}
			if err := Run(t.Context(), m, &p, Defaults()); err != nil || m.list["w0"].Drained || p.Steps[0].Held {
				t.Errorf("%s: %v, %+v, drained %v", state, err, p.Steps, m.list["w0"].Drained)
			}
		}
	})
	// Journals of today say so, and what they say holds.
	data, err := json.Marshal(Plan{[]Step{{Worker: "w0", State: Failed}, {Worker: "w1", State: Pending, Drained: true}, {Worker: "w2", State: Failed, Held: true}}})
	if err != nil {
		t.Fatal(err)
	}
	var p Plan
	if err := json.Unmarshal(data, &p); err != nil || p.Steps[0].Drained || !p.Steps[1].Drained || p.Steps[2].Drained {
		t.Errorf("%s: %+v, %v", data, p, err)
	}
	if err := json.Unmarshal([]byte(`{"steps":[{"worker":"w0","state":"pending"},{"worker":"w1","state":"done"},{"worker":"w2","state":"observing"}]}`), &p); err != nil || slices.ContainsFunc(p.Steps, func(s Step) bool { return s.Drained }) {
		t.Errorf("%+v, %v; want none drained", p, err)
	}
}
