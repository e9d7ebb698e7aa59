package h2

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/test/bufconn"
)

// hang is how long a test waits for what never comes.
const hang = time.Minute

// listen returns a Unix socket and what connects to it.
func listen(t testing.TB) (net.Listener, func(context.Context) (net.Conn, error)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	lis, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lis.Close() })
	return lis, func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "unix", path) }
}

// newServer is a server with small limits.
func newServer(h http.Handler) *Server {
	return &Server{Handler: h, MaxStreams: 200, Window: 64 << 10, Share: 256 << 10, Hello: hang, Log: slog.New(slog.DiscardHandler)}
}

// serve runs a server until the test ends.
func serve(t testing.TB, s *Server) func(context.Context) (net.Conn, error) {
	t.Helper()
	lis, dial := listen(t)
	serveOn(t, s, lis)
	return dial
}

// serveInMemory is serve without sockets, for time that does not pass.
func serveInMemory(t testing.TB, s *Server) func(context.Context) (net.Conn, error) {
	t.Helper()
	lis := bufconn.Listen(64 << 10)
	serveOn(t, s, lis)
	return lis.DialContext
}

func serveOn(t testing.TB, s *Server, lis net.Listener) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- s.Serve(lis) }()
	t.Cleanup(func() {
		_ = s.Close() // it may be down already
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("Serve: %v", err)
		}
	})
}

// newTransport is a transport with small limits.
func newTransport(t testing.TB, dial func(context.Context) (net.Conn, error)) *Transport {
	tr := &Transport{Dial: dial, DialTimeout: hang, Window: 64 << 10, Share: 1 << 20, PingAfter: hang, PingTimeout: hang, MaxStreams: 1000, MaxResets: 1000}
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

// protocols is HTTP/2 without TLS.
func protocols() *http.Protocols {
	p := &http.Protocols{}
	p.SetUnencryptedHTTP2(true)
	return p
}

// theirs is net/http's client.
func theirs(t testing.TB, dial func(context.Context) (net.Conn, error)) *http.Transport {
	tr := &http.Transport{
		Protocols: protocols(), DisableCompression: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
	}
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

// theirServer is net/http's server.
func theirServer(t testing.TB, h http.Handler) func(context.Context) (net.Conn, error) {
	t.Helper()
	lis, dial := listen(t)
	srv := &http.Server{Handler: h, Protocols: protocols(), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	go func() { _ = srv.Serve(lis) }() // until it is closed
	t.Cleanup(func() { _ = srv.Close() })
	return dial
}

func newRequest(t testing.TB, method, path string, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://host"+path, body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// peer speaks frames, allowed ones and others.
type peer struct {
	t     testing.TB
	nc    net.Conn
	fr    *http2.Framer
	enc   *hpack.Encoder
	block bytes.Buffer
}

func newPeer(t testing.TB, nc net.Conn) *peer {
	p := &peer{t: t, nc: nc, fr: http2.NewFramer(nc, nc)}
	t.Cleanup(func() { _ = nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(hang))
	p.fr.AllowIllegalWrites = true
	p.fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	p.enc = hpack.NewEncoder(&p.block)
	return p
}

// newClient is a peer that has begun a connection as a client.
func newClient(t testing.TB, dial func(context.Context) (net.Conn, error)) *peer {
	t.Helper()
	nc, err := dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p := newPeer(t, nc)
	_, err = io.WriteString(nc, http2.ClientPreface)
	p.did(err)
	p.did(p.fr.WriteSettings())
	return p
}

// acceptPeer is a peer that has begun a connection as a server.
func acceptPeer(t testing.TB, lis net.Listener, settings ...http2.Setting) *peer {
	nc, err := lis.Accept()
	if err != nil {
		t.Error(err)
		return nil
	}
	p := newPeer(t, nc)
	preface := make([]byte, len(http2.ClientPreface))
	_, err = io.ReadFull(nc, preface)
	p.did(err)
	p.did(p.fr.WriteSettings(settings...))
	return p
}

// did checks a write. The other side may have ended the connection, which the next read
// shows.
func (p *peer) did(err error) {
	p.t.Helper()
	if err != nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		p.t.Error(err)
	}
}

// fields makes a header block of names and values.
func (p *peer) fields(pairs ...string) []byte {
	p.block.Reset()
	for i := 0; i < len(pairs); i += 2 {
		p.did(p.enc.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]}))
	}
	return p.block.Bytes()
}

func (p *peer) headers(id uint32, end bool, pairs ...string) {
	p.t.Helper()
	p.did(p.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndStream: end, EndHeaders: true, BlockFragment: p.fields(pairs...)}))
}

// get asks for something.
func (p *peer) get(id uint32) {
	p.t.Helper()
	p.headers(id, true, ":method", "GET", ":scheme", "http", ":authority", "a", ":path", "/")
}

// post asks for something, with a body.
func (p *peer) post(id uint32, more ...string) {
	p.t.Helper()
	p.headers(id, false, append([]string{":method", "POST", ":scheme", "http", ":authority", "a", ":path", "/"}, more...)...)
}

// until reads frames until one is as wanted. It returns nil where none is.
func until[F http2.Frame](p *peer, want func(F) bool) (f F) {
	p.t.Helper()
	for {
		got, err := p.fr.ReadFrame()
		if err != nil {
			p.t.Errorf("no %T: %v", f, err)
			return f
		}
		if f, ok := got.(F); ok && want(f) {
			return f
		}
	}
}

// gone reads until the connection is closed.
func (p *peer) gone() {
	p.t.Helper()
	for {
		if _, err := p.fr.ReadFrame(); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return
			}
			var op *net.OpError
			if !errors.As(err, &op) || op.Timeout() {
				p.t.Errorf("the connection is not closed: %v", err)
			}
			return
		}
	}
}

func anyOf[F http2.Frame](F) bool { return true }
