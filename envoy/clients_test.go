package envoy_test

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/envoy/envoytest"
)

// Old clients are served, with and without a host, and their connections closed
// at once after the answer.
func TestHTTP10(t *testing.T) {
	m := newMesh(t, setup{})
	for _, request := range []string{
		"GET /v1/x HTTP/1.0\r\n\r\n", "GET /v1/x HTTP/1.0\r\nhost: a\r\n\r\n",
		"GET /v1/x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
	} {
		start := time.Now()
		if got := m.raw(request); got.status != 200 {
			t.Errorf("%q: status %d %s", request, got.status, got.body)
		}
		if took := time.Since(start); took > 5*time.Second {
			t.Errorf("%q: the end of the answer took %v", request, took)
		}
	}
}

// A refused HEAD has no body, whatever shapes the error.
func TestShapedHEAD(t *testing.T) {
	m := newMesh(t, setup{policy: foreignPolicy, workers: 1})
	m.workers[0].on(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "x", http.StatusNotFound) })
	conn := dialEdge(t, m)
	for range 2 {
		if _, err := io.WriteString(conn, "HEAD /v1/x HTTP/1.1\r\nhost: a\r\n\r\nGET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		r := bufio.NewReader(conn)
		for _, want := range []struct {
			method string
			status int
		}{{"HEAD", 404}, {"GET", 200}} {
			res, err := http.ReadResponse(r, &http.Request{Method: want.method})
			if err != nil || res.StatusCode != want.status {
				t.Fatalf("%s: %v, %v", want.method, res, err)
			}
			_, _ = io.Copy(io.Discard, res.Body)
		}
	}
}

func dialEdge(t *testing.T, m *mesh) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", m.cfg.Edge)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// A request with headers that HTTP forbids ends its own stream and no other of the
// connection.
func TestBadHTTP2Request(t *testing.T) {
	m := newMesh(t, setup{})
	conn := dialEdge(t, m)
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	fr := http2.NewFramer(conn, conn)
	fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if err := fr.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	for i, extra := range [][2]string{{"connection", "x"}, {"Upper", "x"}, {"a", "b\x00c"}, {"transfer-encoding", "chunked"}, {"fine", "x"}} {
		var b bytes.Buffer
		enc := hpack.NewEncoder(&b)
		for _, f := range [][2]string{{":method", "GET"}, {":path", "/v1/x"}, {":scheme", "http"}, {":authority", "a"}, extra} {
			if err := enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}); err != nil {
				t.Fatal(err)
			}
		}
		id := uint32(2*i + 1)
		if err := fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: b.Bytes(), EndStream: true, EndHeaders: true}); err != nil {
			t.Fatal(err)
		}
		status := ""
		for status == "" {
			f, err := fr.ReadFrame()
			if err != nil {
				t.Fatalf("%v: %v", extra, err)
			}
			switch f := f.(type) {
			case *http2.GoAwayFrame:
				t.Fatalf("%v ended the connection: %v", extra, f)
			case *http2.RSTStreamFrame:
				if f.StreamID == id {
					status = "reset"
				}
			case *http2.MetaHeadersFrame:
				if f.StreamID == id {
					status = f.PseudoValue("status")
				}
			}
		}
		if bad := extra[0] != "fine"; bad == (status == "200") {
			t.Errorf("%v: %s", extra, status)
		}
	}
}

// A request whose body trickles in is ended after bodyTimeout.
func TestSlowBody(t *testing.T) {
	m := newMesh(t, setup{policy: strings.Replace(quickPolicy, "maxBody: 24Mi", "maxBody: 24Mi\n  bodyTimeout: 1s", 1), decide: func(s stream) error {
		_, err := askBody(s)
		return err
	}})
	start := time.Now()
	got := m.raw("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{")
	openAIError(t, got, 408)
	if took := time.Since(start); took < 500*time.Millisecond {
		t.Errorf("it took %v only", took)
	}
}

// Uploads that would fill Envoy's memory are ended, those that hold most first, and
// others go on being served. Envoy knows what each holds in HTTP/2 only.
func TestUploadsHaveABound(t *testing.T) {
	m := newMesh(t, setup{
		change: func(b *bootstrapv3.Bootstrap) {
			limited, err := envoy.Bootstrap(envoy.BootstrapConfig{Node: "x", Admin: "127.0.0.1:0", XDS: "/x", MaxHeap: 160 << 20})
			if err != nil {
				t.Fatal(err)
			}
			b.OverloadManager = limited.GetOverloadManager()
		},
		decide: func(s stream) error {
			msg, err := s.Recv()
			if err != nil || path(msg) != "/v1/completions" {
				return s.Send(proceed())
			}
			return buffered(s)
		},
	})
	const uploads = 24 // of 20 MiB
	ended := make(chan struct{}, uploads)
	ctx, cancel := context.WithCancel(t.Context())
	for range uploads {
		go func() {
			defer func() { ended <- struct{}{} }()
			tr := h2c()
			defer tr.CloseIdleConnections()
			body := io.MultiReader(io.LimitReader(endless{}, 20<<20), waiting{ctx})
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.url+"/v1/completions", body)
			if err != nil {
				t.Error(err)
				return
			}
			if res, err := tr.RoundTrip(req); err == nil {
				_ = res.Body.Close() // refused; how does not matter
			}
		}()
	}
	for range uploads / 2 {
		<-ended
	}
	envoytest.Eventually(t, 10*time.Second, "others to be served", func() bool { return m.send("GET", "/v1/x", nil).status == 200 })
	cancel()
	for range uploads - uploads/2 {
		<-ended
	}
}

// waiting reads nothing until its context ends.
type waiting struct{ ctx context.Context }

func (w waiting) Read([]byte) (int, error) {
	<-w.ctx.Done()
	return 0, w.ctx.Err()
}
