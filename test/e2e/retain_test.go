package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// A client whose process, connection or worker is gone comes back and has its answer as
// if nothing had been; nobody else gets it; a client that leaves for good frees its
// worker.
func TestClientsComeBack(t *testing.T) {
	m := testmesh.StartPolicy(t, bin, quick)
	t.Run("killed client", func(t *testing.T) { killedClient(t, m) })
	t.Run("connection closed", func(t *testing.T) { closedConnections(t, m, m, 80, func() {}) })
	t.Run("worker killed meanwhile", func(t *testing.T) {
		closedConnections(t, m, m, 80, func() { m.Signal(t, "worker-2", syscall.SIGKILL) })
		if n := relayMetric(t, m, "kvmesh_relay_moves_total"); n < 1 {
			t.Errorf("%v answers moved", n)
		}
	})
	t.Run("gateway replaced meanwhile", func(t *testing.T) { replacedGateway(t, m) })
	t.Run("for good", func(t *testing.T) { goneForGood(t, m) })
	t.Run("not theirs", func(t *testing.T) { notTheirs(t, m, m) })
}

// killedClient kills examples/resume.py with SIGKILL again and again.
func killedClient(t *testing.T, m *testmesh.Mesh) {
	body := `{"model":"sim-1","prompt":"tell me","max_tokens":250,"temperature":0,"ignore_eos":true,"sim":{"max":0}}`
	run := func(log string, kill time.Duration) string {
		ctx := t.Context()
		if kill > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, kill) // the command dies of SIGKILL then
			defer cancel()
		}
		cmd := exec.CommandContext(ctx, "python3", filepath.Join(testmesh.Root(), "examples", "resume.py"), m.OpenAI, log, body)
		cmd.Stderr = t.Output()
		out, err := cmd.Output()
		if (err == nil) != (kill == 0) {
			t.Errorf("resume.py, to be killed after %v: %v, %s", kill, err, out)
		}
		return string(out)
	}
	want := run(filepath.Join(t.TempDir(), "undisturbed"), 0)
	log := filepath.Join(t.TempDir(), "answer.log")
	for range 4 {
		run(log, 600*time.Millisecond)
	}
	if got := run(log, 0); got != want || len(want) < 200 {
		t.Errorf("after four deaths\n%s\nwant\n%s", got, want)
	}
}

var errLeft = errors.New("the client leaves")

// replacedGateway has a new gateway take over in the middle of answers whose clients are
// away, and of one whose client does not notice: they have the rest from the new one, and
// the old one ends.
func replacedGateway(t *testing.T, m *testmesh.Mesh) {
	before := m.PID("gateway")
	var stays sync.WaitGroup
	want, err := streamed(t.Context(), m, ask{path: "/completions", body: answering(100, 400)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	flows := make(chan struct{})
	stays.Go(func() {
		got := newHeard()
		err := got.hear(&http.Client{Transport: &http.Transport{}}, resuming(t.Context(), m, http.MethodPost, answering(100, 400), ""), func(h *heard) {
			if h.events == 5 {
				close(flows)
			}
		})
		if err != nil {
			t.Errorf("a client that stayed: %v", err)
		} else if diff := got.same(want); diff != "" {
			t.Errorf("a client that stayed: %s", diff)
		}
	})
	<-flows
	closedConnections(t, m, m, 400, func() {
		if err := restart(m, "gateway"); err != nil {
			t.Error(err)
		}
	})
	if n := relayMetric(t, m, `kvmesh_relay_passed_total{by="restart",to="here"`); n < 24 {
		t.Errorf("%v streams were handed over", n)
	}
	if n := relayMetric(t, m, `kvmesh_relay_moves_total{cause="gateway"`); n < 20 {
		t.Errorf("%v streams went on at the new gateway", n)
	}
	stays.Wait()
	testmesh.Eventually(t, "the end of the old gateway", 20*time.Second, func() bool { return !testmesh.Alive(before) })
}

// resumable is the body of a request that number i's answer is for.
func resumable(i int) string { return answering(i, 80) }

// answering is resumable with a number of tokens.
func answering(i, tokens int) string {
	return fmt.Sprintf(`{"model":"sim-1","prompt":"client %d","max_tokens":%d,"ignore_eos":true,"stream":true,"temperature":0,"stream_options":{"include_usage":true},"sim":{"max":0}}`, i, tokens)
}

// resuming is a request of a client with a key, and with the id of the last event that it
// has.
func resuming(ctx context.Context, m *testmesh.Mesh, method, body, last string) *http.Request {
	req, err := http.NewRequestWithContext(ctx, method, m.OpenAI+"/completions", strings.NewReader(body))
	if err != nil {
		panic(err) // the URL is the mesh's own
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer some-key")
	if last == "" {
		req.Header.Set(names.Resumable, "1")
	} else {
		req.Header.Set(names.LastEventID, last)
	}
	return req
}

// comingBack is resuming for what a client has heard so far.
func comingBack(t *testing.T, i int, m *testmesh.Mesh, h *heard) *http.Request {
	if i%2 == 0 {
		return resuming(t.Context(), m, http.MethodGet, "", h.ids[len(h.ids)-1])
	}
	return resuming(t.Context(), m, http.MethodPost, resumable(i), h.ids[len(h.ids)-1])
}

// closedConnections has many clients of m close their connections in the middle of answers
// of so many tokens and come back, to another mesh, once meanwhile is over, each with what
// it has.
func closedConnections(t *testing.T, m, back *testmesh.Mesh, tokens int, meanwhile func()) {
	const clients = 24
	want, got := make([]*heard, clients), make([]*heard, clients)
	each(clients, func(i int) {
		var err error
		if want[i], err = streamed(t.Context(), m, ask{path: "/completions", body: answering(i, tokens)}, nil); err != nil || !want[i].done {
			t.Errorf("undisturbed answer %d: %v", i, err)
		}
	})
	each(clients, func(i int) {
		ctx, cancel := context.WithCancelCause(t.Context())
		got[i] = newHeard()
		err := got[i].hear(&http.Client{Transport: &http.Transport{}}, resuming(ctx, m, http.MethodPost, answering(i, tokens), ""), func(h *heard) {
			if h.events == 3+i {
				cancel(errLeft) // closes its only connection
			}
		})
		if err == nil || context.Cause(ctx) == nil {
			t.Errorf("client %d did not leave: %v", i, err)
		}
	})
	if t.Failed() {
		return
	}
	meanwhile()
	time.Sleep(300 * time.Millisecond)
	each(clients, func(i int) {
		if err := got[i].hear(http.DefaultClient, comingBack(t, i, back, got[i]), nil); err != nil {
			t.Errorf("client %d comes back: %v", i, err)
		} else if diff := got[i].same(want[i]); diff != "" {
			t.Errorf("client %d: %s", i, diff)
		}
	})
}

// goneForGood leaves without the header.
func goneForGood(t *testing.T, m *testmesh.Mesh) {
	ctx, cancel := context.WithCancel(t.Context())
	_, err := streamed(ctx, m, ask{path: "/completions", body: `{"model":"sim-1","prompt":"x","max_tokens":5000,"ignore_eos":true,"stream":true,"sim":{"max":0,"itl_ms":100}}`}, func(h *heard) {
		if h.events == 3 {
			cancel()
		}
	})
	if err == nil {
		t.Error("the client did not leave")
	}
	left := time.Now()
	testmesh.Eventually(t, "the worker stops", 5*time.Second, func() bool { return live(t, m) == 0 })
	t.Logf("the gateway lets go of it after %v", time.Since(left).Round(time.Millisecond))
}

// notTheirs asks for streams of others that began in m, and for none; back is where it
// asks.
func notTheirs(t *testing.T, m, back *testmesh.Mesh) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.OpenAI+"/completions", strings.NewReader(`{"model":"sim-1","prompt":"x","max_tokens":50,"ignore_eos":true,"stream":true,"sim":{"max":0}}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer mine")
	req.Header.Set(names.Resumable, "1")
	h := newHeard()
	if err := h.hear(http.DefaultClient, req, nil); err != nil || !h.done {
		t.Fatal(err)
	}
	first := ""
	for _, try := range [][2]string{{h.ids[3], "Bearer yours"}, {h.ids[3], ""}, {"nothing:3", "Bearer mine"}, {"x", "Bearer mine"}, {h.ids[3] + "00000", "Bearer mine"}} {
		status, header, body := comeBack(t, back, try[0], try[1])
		if first == "" {
			first = body
		}
		if status != http.StatusNotFound || body != first || header.Get("Content-Type") != "application/json" || !strings.Contains(body, "stream_not_found") {
			t.Errorf("%v: %d %s", try, status, body)
		}
	}
	if status, _, body := comeBack(t, back, h.ids[3], "Bearer mine"); status != http.StatusOK || !strings.HasPrefix(body, "id: "+h.ids[4]+"\n") || !strings.HasSuffix(body, "data: [DONE]\n\n") {
		t.Errorf("the owner: %d %s", status, body)
	}
}

// comeBack asks for the events after last.
func comeBack(t *testing.T, m *testmesh.Mesh, last, auth string) (int, http.Header, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, m.OpenAI+"/completions", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(names.LastEventID, last)
	if auth != "" {
		req.Header.Set("Authorization", auth)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(body)
}

// brokenWithin bounds how long a client waits to hear that its answer is broken: Envoy's
// delayed_close_timeout of a second, and room for a busy machine.
const brokenWithin = 5 * time.Second

// A gateway that dies in the middle of answers cannot be hidden from plain clients: each
// sees an error, by HTTP/1.1 and HTTP/2, and none an end. Who comes back while it is away
// or when it has started again hears that there is nothing, and not a fresh answer.
func TestGatewayKilledInStreams(t *testing.T) {
	m := testmesh.StartPolicy(t, bin, quick)
	h2 := &http.Protocols{}
	h2.SetUnencryptedHTTP2(true)
	clients := map[string]*http.Client{
		"HTTP/1.1": {Transport: &http.Transport{}},
		"HTTP/2":   {Transport: &http.Transport{Protocols: h2}},
	}
	body := `{"model":"sim-1","prompt":"x","max_tokens":3000,"ignore_eos":true,"stream":true,"sim":{"max":0}}`
	flowing, ended := make(chan struct{}, 100), make(chan struct{})
	go func() {
		defer close(ended)
		each(20, func(i int) {
			proto := []string{"HTTP/1.1", "HTTP/2"}[i%2]
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, m.OpenAI+"/completions", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Content-Type", "application/json")
			if i%4 < 2 {
				req.Header.Set(names.Resumable, "1")
			}
			h := newHeard()
			err = h.hear(clients[proto], req, func(h *heard) {
				if h.events == 10 {
					flowing <- struct{}{}
				}
			})
			if err == nil || h.done || h.failure != "" || len(h.finish) > 0 {
				t.Errorf("%s: after %d events: error %v, done %v, finish %v", proto, h.events, err, h.done, h.finish)
			}
			if i < 2 {
				t.Logf("%s: %v", proto, err)
			}
		})
	}()
	for range 20 {
		<-flowing
	}
	m.Signal(t, "gateway", syscall.SIGKILL)
	killed := time.Now()
	<-ended
	if d := time.Since(killed); d > brokenWithin {
		t.Errorf("the last client heard of it after %v, want within %v", d, brokenWithin)
	}
	if status, _, body := comeBack(t, m, "some-stream:3", ""); status != http.StatusServiceUnavailable && status != http.StatusNotFound || strings.Contains(body, "choices") {
		t.Errorf("without the gateway: %d %s", status, body)
	}
	testmesh.Eventually(t, "the gateway is back", 20*time.Second, func() bool { return viaRelay(t, m) })
	if status, _, body := comeBack(t, m, "some-stream:3", ""); status != http.StatusNotFound {
		t.Errorf("a new gateway: %d %s", status, body)
	}
}
