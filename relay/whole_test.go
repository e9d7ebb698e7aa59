package relay

import (
	"net/http"
	"testing"
)

// complete is the smallest answer that has come to its end.
const complete = `{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}`

// A 200 is an answer only when every choice has come to its end.
func TestFinished(t *testing.T) {
	for body, want := range map[string]bool{
		complete: true,
		`{"choices":[{"finish_reason":"stop"},{"finish_reason":"length"}]}`: true,
		`{"choices":[{"finish_reason":"stop"},{"finish_reason":null}]}`:     false,
		`{"choices":[{"text":"a","finish_reason":null}]}`:                   false,
		`{"choices":[{"text":"a","finish_reason":"abort"}]}`:                false,
		`{"choices":[{"text":"a","finish_reason":""}]}`:                     false,
		`{"choices":[{"text":"a"}]}`:                                        false,
		`{"choices":[]}`:                                                    false,
		`{}`:                                                                false,
		`{"error":{"message":"x"}}`:                                         false,
		`[]`:                                                                false,
		``:                                                                  false,
	} {
		if got := finished([]byte(body)); got != want {
			t.Errorf("%s: finished = %v", body, got)
		}
	}
}

// What is no whole answer under a 200 is asked for elsewhere, and never passed on.
func TestUnfinishedAnswerIsRetried(t *testing.T) {
	serve := func(n int, w http.ResponseWriter, _ *http.Request) {
		if n == 1 {
			sendJSON(w, http.StatusOK, `{"choices":[{"index":0,"text":"ha","finish_reason":null}]}`)
			return
		}
		sendJSON(w, http.StatusOK, complete)
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		got := m.ask(askWhole)
		if got.status != http.StatusOK || got.body != complete || len(m.attempts()) != 2 {
			t.Errorf("status %d, body %s, %d attempts", got.status, got.body, len(m.attempts()))
		}
	})
}
