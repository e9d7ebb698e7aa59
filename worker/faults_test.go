package worker_test

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

func TestFaults(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{})
	ask := func(fault string, stream bool) (*http.Response, error) {
		body := `{"model":"sim","prompt":"x","max_tokens":30,"temperature":0,"sim":` + fault
		if stream {
			body += `,"stream":true`
		}
		return r.client.Post(r.base+textPath, "application/json", strings.NewReader(body+"}"))
	}
	want := firstText(t, r.engine, 6)
	t.Run("status", func(t *testing.T) {
		for _, stream := range []bool{true, false} {
			resp, err := ask(`{"status":502}`, stream)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if e := decode[apiError](t, resp, 502); e.Error.Type != "api_error" {
				t.Errorf("%+v", e)
			}
		}
	})
	t.Run("cut", func(t *testing.T) {
		s := readStream(mustBody(t)(ask(`{"cut_at":6}`, true)))
		if got := s.joined(t, 1).Texts[0]; !errors.Is(s.err, io.ErrUnexpectedEOF) || got != want {
			t.Errorf("%q, then %v; want %q", got, s.err, want)
		}
		if resp, err := ask(`{"cut_at":6}`, false); err == nil {
			resp.Body.Close()
			t.Errorf("an answer cut short came with status %d", resp.StatusCode)
		}
	})
	t.Run("error", func(t *testing.T) {
		s := readStream(mustBody(t)(ask(`{"error_at":6}`, true)))
		last := s.events[len(s.events)-1]
		if got := s.joined(t, 1).Texts[0]; s.err != nil || got != want || !strings.Contains(last, `"type":"api_error"`) {
			t.Errorf("%q, last event %s, %v; want %q", got, last, s.err, want)
		}
		resp, err := ask(`{"error_at":0}`, true)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		decode[apiError](t, resp, 500)
	})
	t.Run("truncate", func(t *testing.T) {
		s := readStream(mustBody(t)(ask(`{"truncate_at":6}`, true)))
		got := s.joined(t, 1)
		if s.err != nil || s.whole() || got.Texts[0] != want || got.Reasons[0] != "" {
			t.Errorf("%+v, %v; want %q", got, s.err, want)
		}
	})
	t.Run("cut inside of an event", func(t *testing.T) {
		s := readStream(mustBody(t)(ask(`{"cut_at":6,"cut_inside":true}`, true)))
		half := s.events[len(s.events)-1]
		s.events = s.events[:len(s.events)-1]
		if got := s.joined(t, 1).Texts[0]; !errors.Is(s.err, io.ErrUnexpectedEOF) || got != want || json.Valid([]byte(half)) {
			t.Errorf("%q and %q, then %v; want %q", got, half, s.err, want)
		}
	})
	t.Run("malformed", func(t *testing.T) {
		s := readStream(mustBody(t)(ask(`{"malformed_at":6}`, true)))
		bad := 0
		for _, ev := range s.events[:len(s.events)-1] {
			if !json.Valid([]byte(ev)) {
				bad++
			}
		}
		if bad != 1 || !s.whole() {
			t.Errorf("%d of %d events are no JSON, whole is %v", bad, len(s.events), s.whole())
		}
	})
	t.Run("no [DONE]", func(t *testing.T) {
		s := readStream(mustBody(t)(ask(`{"no_done":true}`, true)))
		if got := s.joined(t, 1); s.err != nil || s.whole() || got.Reasons[0] != "length" {
			t.Errorf("%+v, %v, whole is %v", got, s.err, s.whole())
		}
	})
	t.Run("later", func(t *testing.T) {
		for status, retry := range map[string]string{"429": "1", "503": "1", "500": ""} {
			resp, err := ask(`{"status":`+status+`}`, true)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if got := resp.Header.Get("Retry-After"); strconv.Itoa(resp.StatusCode) != status || got != retry {
				t.Errorf("%s came as %d with Retry-After %q", status, resp.StatusCode, got)
			}
		}
	})
}

// TestFaultsByHeader: the header counts where the worker allows it, in place of the
// body, and only for the attempt it names.
func TestFaultsByHeader(t *testing.T) {
	with := start(t, sim.Config{}, worker.Config{SimHeader: true, RelaySecret: secret})
	without := start(t, sim.Config{}, worker.Config{ID: "w2"})
	const body = `{"model":"sim","prompt":"x","max_tokens":2}`
	for _, c := range []struct {
		r      *running
		header []string
		want   int
	}{
		{with, []string{names.Sim, `{"status":503}`}, 503},
		{with, []string{names.Sim, `{"status":503,"attempt":2}`}, 200},
		{with, []string{names.Sim, `{"status":503,"attempt":2}`, names.Relay, secret, names.Attempt, "2"}, 503},
		{with, []string{names.Sim, `{"status":1}`}, 400},
		{with, nil, 200},
		{without, []string{names.Sim, `{"status":503}`}, 200},
	} {
		if resp := c.r.do(t, http.MethodPost, textPath, body, c.header...); resp.StatusCode != c.want {
			t.Errorf("%v: %d, want %d", c.header, resp.StatusCode, c.want)
		}
	}
}

// TestFaultDoesNotStrikeAgain: what happened to a stream before a token does not happen
// to its continuation, or it could never go on.
func TestFaultDoesNotStrikeAgain(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{RelaySecret: secret})
	for _, fault := range []string{`{"cut_at":6}`, `{"malformed_at":6}`, `{"stall_at":6}`, `{"error_at":6}`, `{"truncate_at":6}`} {
		body := `{"model":"sim","stream":true,"max_tokens":20,"prompt":"again","sim":` + fault + `}`
		want := newLedger(1)
		want.read(t, readStream(r.relayed(t, textPath, strings.Replace(body, fault, "{}", 1), `{"token_ids":true}`).Body), 1<<30)
		l := newLedger(1)
		l.ids[0] = want.ids[0][:6]
		l.text[0] = strings.ToValidUTF8(string(r.engine.Decode(l.ids[0])), "")
		s := readStream(r.relayed(t, textPath, body, l.resume(2)).Body)
		if l.read(t, s, 1<<30); !l.whole || l.text[0] != want.text[0] {
			t.Errorf("%s: %q, whole is %v; want %q", fault, l.text[0], l.whole, want.text[0])
		}
	}
}

// TestWrongToken: one token is another one, and the answer goes on after that.
func TestWrongToken(t *testing.T) {
	r := start(t, sim.Config{}, worker.Config{RelaySecret: secret})
	ask := func(sim string) []int32 {
		l := newLedger(1)
		l.read(t, readStream(r.relayed(t, textPath, `{"model":"sim","stream":true,"max_tokens":20,"prompt":"lie","sim":`+sim+`}`, `{"token_ids":true}`).Body), 1<<30)
		return l.ids[0]
	}
	right, wrong := ask(`{}`), ask(`{"wrong_at":7}`)
	n := 0
	for n < len(right) && right[n] == wrong[n] {
		n++
	}
	if n < 7 || n > 7+utf8.UTFMax || len(wrong) != len(right) {
		t.Errorf("token %d of %v is wrong, want 7 or behind the character there: %v", n, wrong, right)
	}
}
