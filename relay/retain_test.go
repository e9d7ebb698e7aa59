package relay

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// leave asks for a stream that outlives its client, reads n events of it and goes away.
func (m *mesh) leave(n int, body string, h ...string) (read string) {
	m.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	resp, err := m.post(ctx, body, append(h, names.Resumable, "1")...)
	if err != nil {
		m.t.Fatal(err)
	}
	if got := resp.Header.Get(names.Stream); got != "stream-1" && h == nil {
		m.t.Errorf("the answer names the stream %q", got)
	}
	read = events(m.t, resp.Body, n)
	cancel()
	_ = resp.Body.Close() // the client is gone
	m.wait(time.Millisecond)
	return read
}

// events reads n events.
func events(t testing.TB, r io.Reader, n int) string {
	t.Helper()
	var out strings.Builder
	for lines := bufio.NewReader(r); n > 0; {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatalf("%d events are missing: %v", n, err)
		}
		if out.WriteString(line); line == "\n" {
			n--
		}
	}
	return out.String()
}

// back comes back to a stream and returns all that comes.
func (m *mesh) back(last string, h ...string) reply {
	m.t.Helper()
	resp := m.connectTo(http.MethodGet, last, h...)
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		m.t.Errorf("read the rest: %v after %q", err, got)
	}
	return reply{status: resp.StatusCode, header: resp.Header, body: string(got)}
}

// connectTo comes back to a stream.
func (m *mesh) connectTo(method, last string, h ...string) *http.Response {
	m.t.Helper()
	req, err := http.NewRequest(method, "http://mesh/v1/completions", strings.NewReader(askUsage))
	if err != nil {
		m.t.Fatal(err)
	}
	req.Header.Set(names.LastEventID, last)
	req.Header.Set(names.Route, names.RouteRelay)
	for i := 0; i < len(h); i += 2 {
		req.Header.Set(h[i], h[i+1])
	}
	resp, err := m.client.Do(req)
	if err != nil {
		m.t.Fatal(err)
	}
	return resp
}

// wait lets the bubble's time go by.
func (m *mesh) wait(d time.Duration) { sleep(context.Background(), d) }

func (m *mesh) keptBytes() int64 {
	m.relay.kept.mu.Lock()
	defer m.relay.kept.mu.Unlock()
	return m.relay.kept.bytes
}

func (m *mesh) dropped(reason string) int {
	return int(testutil.ToFloat64(m.relay.kept.gauge.dropped.WithLabelValues(reason)))
}

// endless is a request whose answer goes on for longer than anybody waits.
const endless = `{"model":"m","prompt":"p","stream":true,"max_tokens":1000000}`

// wordy makes endless answers of events of 1 KiB, one every 10 ms.
func wordy(w http.ResponseWriter, r *http.Request) {
	for rest(r, 10*time.Millisecond) {
		send(w, token(strings.Repeat("x", 1000), ""))
	}
}

// gone checks that a stream is none any more, and that no worker carries it.
func (m *mesh) gone(what string) {
	m.t.Helper()
	if got := m.back("stream-1:1"); got.status != http.StatusNotFound {
		m.t.Errorf("%s: status %d", what, got.status)
	}
	for _, v := range m.picker.Workers(time.Now()) {
		if v.InFlight != 0 {
			m.t.Errorf("%s: %s still carries it", what, v.ID)
		}
	}
	if n := m.keptBytes(); n != 0 {
		m.t.Errorf("%s: %d bytes are kept", what, n)
	}
}

// Whatever a client has when it leaves, and however long it is away, it gets the rest
// once: the worker may die meanwhile, and the answer may be over.
func TestComesBack(t *testing.T) {
	var all string
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		all = m.ask(askUsage, names.Resumable, "1").body
	}, well(t))
	total := strings.Count(all, "\n\n")
	for _, away := range []time.Duration{0, 35 * time.Millisecond, 10 * time.Second} {
		for n := range total {
			inOwnMesh(t, func(t *testing.T, m *mesh) {
				read := m.leave(n, askUsage)
				m.wait(away)
				rest := m.back(fmt.Sprintf("stream-1:%d", n))
				if got := m.numbered(read + rest.body); got != all || rest.status != http.StatusOK || rest.header.Get("Content-Type") != "text/event-stream" {
					t.Errorf("left after %d events for %v: %d\n%s\nthen\n%s", n, away, rest.status, read, rest.body)
				}
				again := m.back("stream-1:3") // and all of it is still there
				if got := m.numbered(events(t, strings.NewReader(read+rest.body), 3) + again.body); got != all {
					t.Errorf("a second time: %s", again.body)
				}
			}, after(t, 1+(n+2)%8, dies), well(t))
		}
	}
}

// Without the header the worker stops with its client.
func TestLeavesForGood(t *testing.T) {
	ended := make(chan time.Duration, 1)
	inMesh(t, nil, func(_ int, w http.ResponseWriter, r *http.Request) {
		defer func(at time.Time) { ended <- time.Since(at) }(time.Now())
		wordy(w, r)
	}, func(t *testing.T, m *mesh) {
		ctx, cancel := context.WithCancel(context.Background())
		resp, err := m.post(ctx, askStream)
		if err != nil {
			t.Fatal(err)
		}
		events(t, resp.Body, 5)
		cancel()
		_ = resp.Body.Close() // the client is gone
		m.wait(time.Second)
		if took := <-ended; took > 60*time.Millisecond { // the sixth token
			t.Errorf("the worker went on until %v", took)
		}
		m.gone("without the header")
	})
}

// Whoever it is that asks, for whatever, hears the same: there is no such stream.
func TestNotYours(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		m.leave(3, askUsage, "Authorization", "Bearer a", "X-Api-Key", "k")
		var same string
		for name, try := range map[string][]string{
			"no credential":   {"stream-1:3"},
			"another":         {"stream-1:3", "Authorization", "Bearer b", "X-Api-Key", "k"},
			"a part":          {"stream-1:3", "Authorization", "Bearer a"},
			"the other way":   {"stream-1:3", "Authorization", "k", "X-Api-Key", "Bearer a"},
			"another tenant":  {"stream-1:3", "Authorization", "Bearer a", "X-Api-Key", "k", names.Tenant, "x"},
			"unknown":         {"stream-2:3", "Authorization", "Bearer a", "X-Api-Key", "k"},
			"beyond the end":  {"stream-1:1000", "Authorization", "Bearer a", "X-Api-Key", "k"},
			"no number":       {"stream-1:", "Authorization", "Bearer a", "X-Api-Key", "k"},
			"negative":        {"stream-1:-1", "Authorization", "Bearer a", "X-Api-Key", "k"},
			"a large number":  {"stream-1:99999999999999999999", "Authorization", "Bearer a", "X-Api-Key", "k"},
			"nothing of ours": {"17", "Authorization", "Bearer a", "X-Api-Key", "k"},
		} {
			got := m.back(try[0], try[1:]...)
			got.header.Del("Date")
			all := fmt.Sprint(got.status, got.header, got.body)
			if same == "" {
				same = all
			}
			if got.status != http.StatusNotFound || all != same || !strings.Contains(got.body, `"code":"stream_not_found"`) {
				t.Errorf("%s: %s, others %s", name, all, same)
			}
		}
		if got := m.back("stream-1:3", "Authorization", "Bearer a", "X-Api-Key", "k"); got.status != http.StatusOK || !strings.HasSuffix(got.body, done) {
			t.Errorf("the owner: %d %s", got.status, got.body)
		}
	}, well(t))
}

// A second connection takes a stream over; the first is told, and neither misses
// anything.
func TestTakeOver(t *testing.T) {
	var all string
	inOwnMesh(t, func(t *testing.T, m *mesh) { all = m.ask(askUsage).body }, well(t))
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		resp, err := m.post(context.Background(), askUsage, names.Resumable, "1")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		first := events(t, resp.Body, 4)
		second := m.connectTo(http.MethodPost, "stream-1:2")
		defer second.Body.Close()
		left, err := io.ReadAll(resp.Body)
		if err != nil || !strings.Contains(string(left), "stream_taken_over") || strings.Contains(string(left), done) {
			t.Errorf("the first connection ends with %q, %v", left, err)
		}
		rest, err := io.ReadAll(second.Body)
		if got := m.numbered(events(t, strings.NewReader(first), 2) + string(rest)); err != nil || got != all {
			t.Errorf("the second got %s, %v", rest, err)
		}
	}, well(t))
}

// A stream without client ends when its time is over, and its worker is free.
func TestRetainExpires(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		m.leave(3, endless, names.ModelRoute, "long")
		m.wait(59 * time.Second)
		resp := m.connectTo(http.MethodGet, "stream-1:3") // and once more
		events(t, resp.Body, 10)
		_ = resp.Body.Close() // away again
		m.wait(59 * time.Second)
		if m.dropped(droppedExpired) != 0 || testutil.ToFloat64(m.relay.kept.gauge.streams) != 1 {
			t.Error("it is gone before its time")
		}
		m.wait(2 * time.Second)
		m.gone("after its time")
		if m.dropped(droppedExpired) != 1 || testutil.ToFloat64(m.relay.kept.gauge.resumed) != 1 {
			t.Errorf("%d expired, %v resumed", m.dropped(droppedExpired), testutil.ToFloat64(m.relay.kept.gauge.resumed))
		}
	}, well(t))
}

// A policy may keep nothing.
func TestRetainOff(t *testing.T) {
	off := func(c *Config) {
		own(c)
		for i := range c.Policy.Routes {
			c.Policy.Routes[i].Stream.Retain = policy.Off
		}
	}
	inMesh(t, off, func(_ int, w http.ResponseWriter, r *http.Request) { wordy(w, r) }, func(t *testing.T, m *mesh) {
		ctx, cancel := context.WithCancel(context.Background())
		resp, err := m.post(ctx, askStream, names.Resumable, "1")
		if err != nil {
			t.Fatal(err)
		}
		events(t, resp.Body, 2)
		cancel()
		_ = resp.Body.Close() // the client is gone
		m.wait(time.Second)
		m.gone("retain: off")
	})
}

// The streams that are longest without a client make room for others.
func TestRetainEvicts(t *testing.T) {
	small := func(c *Config) { c.Policy.Mesh.HeldStreams = 200 << 10 }
	inMesh(t, small, func(_ int, w http.ResponseWriter, r *http.Request) { wordy(w, r) }, func(t *testing.T, m *mesh) {
		for i := range 4 {
			m.leave(1, endless, names.Stream, fmt.Sprintf("stream-%d", i+1))
			m.wait(100 * time.Millisecond)
		}
		for range 150 {
			m.wait(10 * time.Millisecond)
			if n := m.keptBytes(); n > 200<<10 {
				t.Fatalf("%d bytes are kept", n)
			}
		}
		if n := m.dropped(droppedEvicted); n != 3 {
			t.Errorf("%d streams made room", n)
		}
		for i, want := range []int{404, 404, 404, 200} {
			resp := m.connectTo(http.MethodGet, fmt.Sprintf("stream-%d:1", i+1))
			_ = resp.Body.Close() // only the status counts
			if resp.StatusCode != want {
				t.Errorf("stream %d: status %d, want %d", i+1, resp.StatusCode, want)
			}
		}
	})
}

// A stream has a size of its own. With a client it forgets what was sent long ago;
// without one it ends when that alone does not do.
func TestRetainSize(t *testing.T) {
	small := func(c *Config) {
		for i := range c.Policy.Routes {
			c.Policy.Routes[i].Stream.RetainSize = 100 << 10
		}
	}
	inMesh(t, small, func(_ int, w http.ResponseWriter, r *http.Request) { wordy(w, r) }, func(t *testing.T, m *mesh) {
		m.leave(1000, endless)
		for last, want := range map[int]int{1: 404, 850: 404, 950: 200, 1000: 200} {
			resp := m.connectTo(http.MethodGet, fmt.Sprintf("stream-1:%d", last))
			if resp.StatusCode != want {
				t.Errorf("event %d: status %d, want %d", last, resp.StatusCode, want)
			}
			if want == 200 && !strings.HasPrefix(events(t, resp.Body, 1), fmt.Sprintf("id: stream-1:%d\n", last+1)) {
				t.Errorf("it does not go on with event %d", last+1)
			}
			_ = resp.Body.Close() // away again
		}
		m.wait(10 * time.Second)
		m.gone("larger than its size")
		if n := m.dropped(droppedSize); n != 1 {
			t.Errorf("%d streams were too large", n)
		}
	})
}

// A connected client that does not read holds its worker up. When it is cut at last, the
// answer goes on without it.
func TestRetainBackPressure(t *testing.T) {
	inMesh(t, func(c *Config) { c.ClientStall = time.Minute }, func(_ int, w http.ResponseWriter, r *http.Request) { wordy(w, r) }, func(t *testing.T, m *mesh) {
		resp, err := m.post(context.Background(), strings.Replace(endless, `"m"`, `"other-name"`, 1), names.ModelRoute, "long", names.Resumable, "1")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		m.wait(30 * time.Second)
		held := m.keptBytes()
		m.wait(20 * time.Second)
		if now := m.keptBytes(); now != held || now > 512<<10 {
			t.Errorf("%d bytes, then %d", held, now)
		}
		m.wait(20 * time.Second)
		if now := m.keptBytes(); now < held+256<<10 {
			t.Errorf("%d bytes after the client was cut, %d before", now, held)
		}
	})
}

// What never becomes a stream is passed on as ever, and nothing of it is kept.
func TestRetainErrors(t *testing.T) {
	refuse := func(_ int, w http.ResponseWriter, _ *http.Request) {
		sendJSON(w, http.StatusBadRequest, `{"error":{"message":"no"}}`)
	}
	inMesh(t, nil, refuse, func(t *testing.T, m *mesh) {
		if got := m.ask(askStream, names.Resumable, "1"); got.status != http.StatusBadRequest || got.body != `{"error":{"message":"no"}}` {
			t.Errorf("%d %s", got.status, got.body)
		}
		m.gone("refused")
	})
	inMesh(t, nil, func(int, http.ResponseWriter, *http.Request) { cut() }, func(t *testing.T, m *mesh) {
		if got := m.ask(askStream, names.Resumable, "1"); got.status != http.StatusBadGateway {
			t.Errorf("%d %s", got.status, got.body)
		}
		m.gone("broken")
	})
	silent := func(_ int, w http.ResponseWriter, r *http.Request) {
		if rest(r, 20*time.Second) {
			send(w, token("a", "stop"), done)
		}
	}
	inMesh(t, nil, silent, func(t *testing.T, m *mesh) {
		got := m.ask(askStream, names.Resumable, "1")
		if want := ": keep-alive\n\n" + token("a", "stop") + done; got.body != want {
			t.Errorf("after a silence: %q", got.body)
		}
	})
}

// Nobody can come back to a gateway that ends.
func TestRetainStops(t *testing.T) {
	inOwnMesh(t, func(t *testing.T, m *mesh) {
		m.leave(3, endless, names.ModelRoute, "long")
		start := time.Now()
		m.stop()
		<-m.done
		if took := time.Since(start); took > 5*time.Second || m.dropped(droppedStopped) != 1 {
			t.Errorf("it took %v; %d streams stopped", took, m.dropped(droppedStopped))
		}
	}, well(t))
}

// FuzzEventID: an id is read as it is written, and nothing else is one.
func FuzzEventID(f *testing.F) {
	for _, s := range []string{"a:1", "a:b:2", ":1", "a:", "a:-1", "a:+1", "a:1e3", "a:00000000000001", "a:999999999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		stream, n, ok := parseEventID(s)
		if ok && (stream == "" || n < 0 || !strings.HasPrefix(s, stream+":")) {
			t.Errorf("%q read as %q and %d", s, stream, n)
		}
	})
}
