package h2

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// frames is what a peer that is not ill says first.
func frames(block []string, more func(fr *http2.Framer)) []byte {
	var out, b bytes.Buffer
	fr := http2.NewFramer(&out, nil)
	_ = fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 100}) // into memory
	enc := hpack.NewEncoder(&b)
	for i := 0; i < len(block); i += 2 {
		_ = enc.WriteField(hpack.HeaderField{Name: block[i], Value: block[i+1]})
	}
	_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: b.Bytes(), EndHeaders: true})
	more(fr)
	return out.Bytes()
}

// seeds adds conversations that go through most of what there is.
func seeds(f *testing.F, block ...string) {
	f.Add([]byte{})
	f.Add(frames(block, func(fr *http2.Framer) {
		_ = fr.WriteDataPadded(1, false, []byte("hello"), []byte{0, 0})
		_ = fr.WriteWindowUpdate(1, 10)
		_ = fr.WriteWindowUpdate(0, 10)
		_ = fr.WritePing(false, [8]byte{1})
		_ = fr.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: 1})
		_ = fr.WriteData(1, true, []byte("!"))
	}))
	f.Add(frames(block, func(fr *http2.Framer) {
		_ = fr.WriteGoAway(1, http2.ErrCodeNo, nil)
		_ = fr.WriteRSTStream(1, http2.ErrCodeCancel)
		_ = fr.WriteContinuation(1, true, []byte{1})
	}))
}

// feed writes data to a connection as its peer, and reads what comes, until both are over.
func feed(t *testing.T, far net.Conn, data []byte) {
	t.Helper()
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(io.Discard, far)
	}()
	_ = far.SetDeadline(time.Now().Add(hang))
	_, _ = far.Write(data) // it may be closed on the way
	_ = far.Close()
	<-read
}

// Whatever a client sends, the server ends the connection and all handlers, and says
// nothing that net/http's reading of frames does not understand.
func FuzzServer(f *testing.F) {
	seeds(f, ":method", "POST", ":scheme", "http", ":path", "/echo", ":authority", "a")
	f.Fuzz(func(t *testing.T, data []byte) {
		near, far := net.Pipe()
		s := newServer(http.HandlerFunc(exchanges))
		s.conns, s.empty = map[*serverConn]struct{}{}, make(chan struct{})
		c := newServerConn(s, near)
		s.conns[c] = struct{}{}
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.hello()
			c.run()
		}()
		feed(t, far, data)
		<-done
		if c.running != 0 || len(c.streams) != 0 {
			t.Errorf("%d handlers, %d streams", c.running, len(c.streams))
		}
	})
}

// Whatever a server sends, a request and the reading of its answer end.
func FuzzTransport(f *testing.F) {
	seeds(f, ":status", "200", "content-type", "text/plain")
	f.Fuzz(func(t *testing.T, data []byte) {
		near, far := net.Pipe()
		c := newClientConn(&Transport{Window: 1 << 16, Share: 1 << 20, MaxStreams: 1, MaxResets: 1}, near)
		c.start()
		s := c.open(newRequest(t, http.MethodGet, "/", nil))
		done := make(chan struct{})
		go func() {
			defer close(done)
			if resp, err := c.roundTrip(s, newRequest(t, http.MethodGet, "/", nil)); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close() // it was read
			}
		}()
		feed(t, far, data)
		<-done
		<-c.done
		if len(c.streams) != 0 {
			t.Errorf("%d streams", len(c.streams))
		}
	})
}
