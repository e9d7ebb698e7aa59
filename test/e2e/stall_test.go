package e2e

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

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
