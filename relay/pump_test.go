package relay

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
)

// Plain events of an answer that has begun go through in the goroutine that reads them: all
// but the first token and the end. (In a bubble: a token takes about a second.)
func TestInline(t *testing.T) {
	const tokens = 20
	inMesh(t, nil, func(_ int, w http.ResponseWriter, _ *http.Request) {
		for i := range tokens {
			time.Sleep(1001 * time.Millisecond) // never together with a look at the clock
			finish := ""
			if i == tokens-1 {
				finish = "stop"
			}
			send(w, token("x", finish))
		}
		send(w, done)
	}, func(t *testing.T, m *mesh) {
		if got := m.ask(askStream); got.status != http.StatusOK {
			t.Fatalf("%d %s", got.status, got.body)
		}
		if n := m.relay.inlined.Load(); n != tokens-1 {
			t.Errorf("%d of %d tokens took the short way", n, tokens)
		}
	})
}

// What comes while a client's window is full takes the long way, and is lost no more than
// repeated.
func TestInlineNotWhenFull(t *testing.T) {
	const tokens = 40
	large := token(strings.Repeat("x", 8<<10), "") // more than the client's window of 64 KiB, in all
	serve := func(_ int, w http.ResponseWriter, _ *http.Request) {
		for range tokens {
			send(w, large)
		}
		send(w, token("x", "stop"), done)
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		resp, err := m.post(t.Context(), askStream)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		synctest.Wait()
		if n := m.relay.inlined.Load(); n >= tokens {
			t.Errorf("%d events were written to a client that does not read", n)
		}
		got, err := io.ReadAll(resp.Body)
		if want := strings.Repeat(large, tokens) + token("x", "stop") + done; err != nil || m.numbered(string(got)) != want {
			t.Errorf("%v after %d bytes, want %d without ids", err, len(got), len(want))
		}
	})
}

// A client that does not read keeps its answer at no worker: an operator moves it, again and
// again, within the time that it takes to ask (in a bubble). Nothing is lost when the client goes on.
func TestMigrateUnread(t *testing.T) {
	const tokens = 4000 // more than there is room for on the way
	body := strings.Replace(askUsage, `"max_tokens":10`, `"max_tokens":4000`, 1)
	for _, resumable := range []string{"", "1"} {
		inOwnMesh(t, func(t *testing.T, m *mesh) {
			resp, err := m.post(t.Context(), body, names.Resumable, resumable)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			events := func() int64 {
				time.Sleep(6 * time.Second)
				return m.relay.Streams(time.Now())[0].Events
			}
			for before := int64(-1); before != events(); before = events() {
			}
			if n := events(); n >= tokens {
				t.Fatalf("all %d events are on their way", n)
			}
			for i, to := range []string{"w3", "w1", "w2"} {
				start := time.Now()
				rec := httptest.NewRecorder()
				m.relay.StreamsHandler().ServeHTTP(rec, httptest.NewRequest(http.MethodPost, "/v1/streams/stream-1/migrate?to="+to, nil))
				if took := time.Since(start); rec.Code != http.StatusNoContent || took > 0 {
					t.Fatalf("to %s: %d %s, after %v", to, rec.Code, rec.Body, took)
				}
				time.Sleep(time.Second)
				if list := m.relay.Streams(time.Now()); list[0].Worker != to || len(list[0].Moves) != i+1 {
					t.Errorf("to %s: %+v", to, list[0])
				}
			}
			got, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Error(err)
			}
			m.checkWhole(m.numbered(string(got)), 1, tokens, true)
		}, well(t))
	}
}
