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
