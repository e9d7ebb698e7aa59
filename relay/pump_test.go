package relay

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// Plain events of an answer that has begun go through in the goroutine that reads them: all
// but the first token and the end. (In a bubble: a token takes a second.)
func TestInline(t *testing.T) {
	const tokens = 20
	inMesh(t, nil, func(_ int, w http.ResponseWriter, _ *http.Request) {
		for i := range tokens {
			time.Sleep(time.Second)
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
