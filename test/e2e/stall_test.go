package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// Clients that ask for a lot and read nothing cost only themselves: everybody
// else is served meanwhile.
func TestClientsThatDoNotRead(t *testing.T) {
	m := startSim(t)
	addr := strings.TrimSuffix(strings.TrimPrefix(m.OpenAI, "http://"), "/v1")
	body := `{"model":"sim-1","prompt":"x","n":8,"max_tokens":8000,"ignore_eos":true,"stream":true,"sim":{"itl_ms":0,"max":0}}`
	for range 14 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := c.(*net.TCPConn).SetReadBuffer(4096); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(20 * time.Second) // until every buffer on the path is full
	load := m.StartLoad(10, func(n int) testmesh.Request { return testmesh.Request{Model: simModel, Stream: n%2 == 0} })
	start := time.Now()
	time.Sleep(10 * time.Second)
	end := time.Now()
	expectServed(t, finish(t, load), start, end)
	if resp, err := http.Get(m.Gateway(t) + "/health"); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("gateway: %v, %v", resp, err)
	} else {
		_ = resp.Body.Close() // only the status counts
	}
}

// Uploads that never end, and one byte now and then, keep nobody else out.
func TestUploadsThatTrickle(t *testing.T) {
	m := startSim(t)
	addr := strings.TrimSuffix(strings.TrimPrefix(m.OpenAI, "http://"), "/v1")
	const length = 32 << 20 // each would take a sixteenth of the bodies held
	var conns []net.Conn
	for range 24 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{", length); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	load := m.StartLoad(20, func(n int) testmesh.Request { return testmesh.Request{Model: simModel, Stream: n%2 == 0} })
	start := time.Now()
	for range 5 {
		time.Sleep(time.Second)
		for _, c := range conns {
			if _, err := c.Write([]byte(" ")); err != nil {
				t.Fatalf("an upload ended: %v", err)
			}
		}
	}
	// A large one is served beside them, too.
	body := `{"model":"sim-1","max_tokens":1,"prompt":"` + strings.Repeat("a", 4<<20) + `"}`
	if resp, out := send(t, m, "/v1/completions", body, nil); resp.StatusCode != http.StatusBadRequest { // longer than the context
		t.Errorf("4 MiB: status %d, %v", resp.StatusCode, out)
	}
	end := time.Now()
	expectServed(t, finish(t, load), start, end)
}

// A client that does not read keeps its answer at no worker: that is drained at once, and the
// client has the whole answer when it goes on.
func TestDrainUnread(t *testing.T) {
	const tokens = 8000
	m := startSim(t)
	body := fmt.Sprintf(`{"model":"sim-1","prompt":"x","n":8,"max_tokens":%d,"ignore_eos":true,"stream":true,"temperature":0,"sim":{"itl_ms":0,"max":0}}`, tokens)
	want, err := streamed(t.Context(), m, ask{path: "/completions", body: body}, nil)
	if err != nil {
		t.Fatal(err)
	}
	small := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err == nil {
			err = c.(*net.TCPConn).SetReadBuffer(64 << 10) // so that the rest stays on the other side
		}
		return c, err
	}}}
	read, stopped := make(chan struct{}), make(chan string, 1)
	got, ended := newHeard(), make(chan error, 1)
	go func() {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, m.OpenAI+"/completions", strings.NewReader(body))
		if err != nil {
			ended <- err
			return
		}
		req.Header.Set("Content-Type", "application/json")
		ended <- got.hear(small, req, func(h *heard) {
			if h.events == 10 {
				stopped <- h.worker
				<-read
			}
		})
	}()
	worker := <-stopped
	events := int64(-1)
	testmesh.Eventually(t, "the answer to stand still", time.Minute, func() bool {
		before := events
		time.Sleep(time.Second)
		events = theStream(t, m).Events
		return events == before
	})
	if events >= 8*tokens {
		t.Fatalf("all of the %d events are on their way: the test proves nothing", events)
	}
	c := exec.Command(bin, "drain", worker, "--timeout", "60s")
	c.Dir = m.Dir
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if s := theStream(t, m); s.Worker == worker || len(s.Moves) != 1 || s.Moves[0].Cause != "draining" {
		t.Errorf("after the drain of %s: %+v", worker, s)
	}
	close(read)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if diff := got.same(want); diff != "" {
		t.Error(diff[:min(len(diff), 1000)])
	}
}

// theStream is the only one that flows.
func theStream(t *testing.T, m *testmesh.Mesh) fleet.StreamView {
	t.Helper()
	list := streamList(m)
	if len(list.Streams) != 1 {
		t.Fatalf("%d streams, want one", len(list.Streams))
	}
	return list.Streams[0]
}
