package envoy_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestHTTP2HeaderFlood: too many or too large headers over HTTP/2 are refused, which
// there is a reset and no 431. Up to 60 KiB in a field the other streams of the
// connection go on; a field beyond what Envoy's HTTP/2 reads at all, 64 KiB, may cost
// the connection, and no other client's.
func TestHTTP2HeaderFlood(t *testing.T) {
	m := newMesh(t, setup{})
	more := make(chan struct{})
	for _, w := range m.workers {
		w.on(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/v1/slow" {
				return
			}
			_, _ = io.WriteString(w, "first\n")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-more:
				_, _ = io.WriteString(w, "second\n")
			case <-r.Context().Done():
			}
		})
	}
	var dialed atomic.Int64
	tr := h2c()
	tr.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		dialed.Add(1)
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
	defer tr.CloseIdleConnections()
	c := &http.Client{Transport: tr, Timeout: 30 * time.Second}

	resp, err := c.Get(m.url + "/v1/slow")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	beside := bufio.NewReader(resp.Body)
	if line, err := beside.ReadString('\n'); err != nil || line != "first\n" {
		t.Fatalf("%q, %v", line, err)
	}
	fields := func(n, size int) (out []string) {
		for i := range n {
			out = append(out, fmt.Sprintf("x-flood-%d", i), strings.Repeat("f", size))
		}
		return out
	}
	for name, flood := range map[string][]string{
		"150 fields": fields(150, 1), "95 fields of 1 KiB": fields(95, 1024), "a field of 61 KiB": fields(1, 61<<10), "three of 30 KiB": fields(3, 30<<10),
	} {
		if got := do(t, c, "GET", m.url+"/v1/x", nil, flood...); got.status == 200 {
			t.Errorf("%s: taken", name)
		}
		if got := do(t, c, "GET", m.url+"/v1/x", nil, fields(50, 1024)...); got.status != 200 {
			t.Errorf("50 KiB of headers after %s: status %d", name, got.status)
		}
	}
	close(more)
	if line, err := beside.ReadString('\n'); err != nil || line != "second\n" {
		t.Errorf("the stream beside the floods: %q, %v", line, err)
	}
	if n := dialed.Load(); n != 1 {
		t.Errorf("%d connections were needed, want 1", n)
	}
	if got := do(t, c, "GET", m.url+"/v1/x", nil, fields(1, 300<<10)...); got.status == 200 {
		t.Error("a field of 300 KiB: taken")
	}
	if got := do(t, c, "GET", m.url+"/v1/x", nil); got.status != 200 {
		t.Errorf("after it: status %d", got.status)
	}
}
