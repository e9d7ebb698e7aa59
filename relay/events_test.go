package relay

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestUnknownEvents: events without data keep an answer alive and go no further; JSON of
// another kind than ours passes, and before the first token it is no beginning.
func TestUnknownEvents(t *testing.T) {
	odd := "data: null\n\n" + "data: [1]\n\n" + "data: {\"choices\":7,\"x\":{}}\n\n"
	empty := []string{"data:\n\n", "data: \n\n", "event: ping\ndata:\n\n", "data: \t \n\n", "data:\ndata:\n\n"}
	t.Run("pass", func(t *testing.T) {
		serve := func(_ int, w http.ResponseWriter, _ *http.Request) {
			send(w, empty...)
			send(w, strings.SplitAfter(odd, "\n\n")...)
			send(w, token("a", ""))
			send(w, empty...)
			send(w, strings.SplitAfter(odd, "\n\n")...)
			send(w, token("", "stop"), "data: [DONE] \n\n")
		}
		inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
			if diff := cmp.Diff(odd+token("a", "")+odd+token("", "stop")+done, m.ask(askStream).body); diff != "" {
				t.Error(diff)
			}
			if m.result(resultOK) != 1 {
				t.Error("not counted as complete")
			}
		})
	})
	t.Run("begin nothing", func(t *testing.T) {
		serve := func(n int, w http.ResponseWriter, _ *http.Request) {
			if n == 1 {
				send(w, empty...)
				send(w, strings.SplitAfter(odd, "\n\n")...)
				cut()
			}
			send(w, token("a", "stop"), done)
		}
		inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
			if got := m.ask(askStream); got.body != token("a", "stop")+done || len(m.attempts()) != 2 {
				t.Errorf("%q after %d attempts", got.body, len(m.attempts()))
			}
		})
	})
}
