package relay

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/internal/names"
)

// TestHTTP1 carries a stream and a whole answer over an HTTP/1.1 connection, and
// frees the worker when it is closed.
func TestHTTP1(t *testing.T) {
	freed := make(chan struct{}, 1)
	egress, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := newMesh(t, nil, func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", egress.Addr().String())
	})
	m.serve = func(n int, w http.ResponseWriter, r *http.Request) {
		switch n {
		case 1:
			send(w, token("a", ""), token("", "stop"), done)
		case 2:
			sendJSON(w, http.StatusOK, complete)
		default:
			send(w, token("a", ""))
			<-r.Context().Done()
			freed <- struct{}{}
		}
	}
	workers := &http.Server{Handler: m, Protocols: protocols(false)}
	go func() { _ = workers.Serve(egress) }()
	defer workers.Close()
	edge := httptest.NewServer(m.relay)
	defer edge.Close()
	post := func(body string) *http.Response {
		req, err := http.NewRequest(http.MethodPost, edge.URL+"/v1/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set(names.Pool, "p")
		req.Header.Set(names.ModelRoute, "long")
		req.Header.Set(names.Stream, "stream-1")
		resp, err := edge.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	for body, want := range map[string]string{askStream: token("a", "") + token("", "stop") + done} {
		resp := post(body)
		got, err := io.ReadAll(resp.Body)
		if err != nil || m.numbered(string(got)) != want {
			t.Errorf("stream: %q, %v", got, err)
		}
	}
	resp := post(askWhole)
	if got, err := io.ReadAll(resp.Body); err != nil || string(got) != complete {
		t.Errorf("whole: %q, %v", got, err)
	}
	resp = post(askStream)
	if line, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil || !strings.HasPrefix(line, "id: ") {
		t.Errorf("open stream: %q, %v", line, err)
	}
	_ = resp.Body.Close()
	<-freed
}

// TestOddHeaders: bytes that are no UTF-8, and many headers, pass both ways.
func TestOddHeaders(t *testing.T) {
	serve := func(_ int, w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Echo", r.Header.Get("X-Odd"))
		w.Header().Set("Connection", "x-hop")
		w.Header().Set("X-Hop", "1")
		sendJSON(w, http.StatusOK, complete)
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		h := []string{"X-Odd", "caf\xe9 \xff", names.SessionToken, "\xfe\xff"}
		for i := range 90 {
			h = append(h, fmt.Sprintf("X-Many-%d", i), strings.Repeat("v", 300))
		}
		got := m.ask(askWhole, h...)
		if got.status != 200 || got.header.Get("X-Echo") != "caf\xe9 \xff" {
			t.Errorf("%d %q", got.status, got.header.Get("X-Echo"))
		}
		if m.seen[0].header.Get("X-Many-89") == "" {
			t.Error("headers were lost on the way")
		}
	})
}

// TestHeldBudget: requests, and answers, that do not fit into the budget are
// refused while it is taken, and served afterwards.
func TestHeldBudget(t *testing.T) {
	big := `{"model":"m","prompt":"` + strings.Repeat("x", 900_000) + `"}`
	serve := func(_ int, w http.ResponseWriter, r *http.Request) {
		rest(r, time.Second)
		sendJSON(w, http.StatusOK, `{"choices":[{"finish_reason":"stop","text":"`+strings.Repeat("y", 100_000)+`"}]}`)
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		var wg sync.WaitGroup
		var mu sync.Mutex
		count := map[int]int{}
		for range 8 {
			wg.Go(func() {
				got := m.ask(big)
				mu.Lock()
				defer mu.Unlock()
				count[got.status]++
				if got.status == 503 && got.header.Get("Retry-After") == "" {
					t.Errorf("503 without Retry-After: %s", got.body)
				}
			})
		}
		wg.Wait()
		if count[200] < 3 || count[503] < 3 || count[200]+count[503] != 8 {
			t.Errorf("8 bodies of 0.9 MB against 4 MiB: %v", count)
		}
		if got := m.ask(big); got.status != 200 {
			t.Errorf("afterwards: %d %s", got.status, got.body)
		}
	})
	full := func(c *Config) { c.MaxAnswer = 50_000 }
	inMesh(t, full, serve, func(t *testing.T, m *mesh) {
		if got := m.ask(askWhole); got.status != 502 || !strings.Contains(got.body, "larger than 50000") || len(m.attempts()) != 1 {
			t.Errorf("answer over the limit: %d %s, %d attempts", got.status, got.body, len(m.attempts()))
		}
	})
}

// TestBreaker: a worker that cannot be reached is passed over by the next choices
// of this gateway, without the control plane's help.
func TestBreaker(t *testing.T) {
	serve := func(_ int, w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(names.ExpectWorker) == "w1" {
			unreachableBy(w, "UF")
			return
		}
		sendJSON(w, http.StatusOK, complete)
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		if got := m.ask(askWhole); got.status != 200 {
			t.Fatalf("%d %s", got.status, got.body)
		}
		for range 4 { // no candidates from the edge: the relay asks the picker
			if got := m.ask(askWhole, names.Destination, ""); got.status != 200 {
				t.Errorf("%d %s", got.status, got.body)
			}
		}
		for i, id := range m.attempts() {
			if (id == "w1") != (i == 0) {
				t.Errorf("attempt %d went to %s", i+1, id)
			}
		}
	})
}

// TestBusyOpensNoBreaker: a server that is full is asked again, in whatever form it says so.
func TestBusyOpensNoBreaker(t *testing.T) {
	serve := func(n int, w http.ResponseWriter, _ *http.Request) {
		if n <= 6 {
			http.Error(w, "full", http.StatusServiceUnavailable)
			return
		}
		sendJSON(w, http.StatusOK, complete)
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		for range 2 {
			if got := m.ask(askWhole); got.status != 503 || !strings.Contains(got.body, "busy") {
				t.Errorf("%d %s", got.status, got.body)
			}
		}
		if got := m.ask(askWhole); got.status != 200 || m.attempts()[6] != "w1" {
			t.Errorf("%d %s by %v", got.status, got.body, m.attempts())
		}
		for _, a := range m.relay.Attempts() {
			if a.Broken != 0 {
				t.Errorf("counted as broken: %+v", a)
			}
		}
	})
}

// TestMetricLabels: names that the policy does not list share one label.
func TestMetricLabels(t *testing.T) {
	serve := func(_ int, w http.ResponseWriter, _ *http.Request) { sendJSON(w, http.StatusOK, complete) }
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		for i := range 20 {
			m.ask(fmt.Sprintf(`{"model":"client-made-%d","prompt":"p"}`, i))
		}
		m.ask(askWhole)
		m.ask(askWhole, names.ModelRoute, "no such route")
		if n := testutil.CollectAndCount(m.relay.metrics.duration); n != 2 {
			t.Errorf("%d series, want those of m and of all others", n)
		}
	})
}

// TestKeepAliveRace: keep-alives and tokens at the same moments never mix.
func TestKeepAliveRace(t *testing.T) {
	want := strings.Repeat(token("a", ""), 200) + token("", "stop") + done
	serve := func(_ int, w http.ResponseWriter, r *http.Request) {
		for _, ev := range strings.SplitAfter(want, "\n\n") {
			rest(r, time.Millisecond)
			send(w, ev)
		}
	}
	change := func(c *Config) { c.KeepAlive = time.Millisecond }
	inMesh(t, change, serve, func(t *testing.T, m *mesh) {
		got := m.ask(askStream)
		synctest.Wait()
		if bare := strings.ReplaceAll(got.body, ": keep-alive\n\n", ""); bare != want {
			t.Errorf("without the keep-alives: %q", bare)
		}
	})
}
