package h2

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
)

// idle is a handler that waits for its client to leave.
func idle(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// What HTTP/2 forbids ends the connection, with the reason.
func TestServerConnectionErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		do   func(p *peer)
		want http2.ErrCode
	}{
		"no settings first":   {nil, http2.ErrCodeProtocol},
		"even stream":         {func(p *peer) { p.get(2) }, http2.ErrCodeProtocol},
		"data of no stream":   {func(p *peer) { p.did(p.fr.WriteData(5, true, []byte("x"))) }, http2.ErrCodeProtocol},
		"reset of no stream":  {func(p *peer) { p.did(p.fr.WriteRSTStream(7, 0)) }, http2.ErrCodeProtocol},
		"window of no stream": {func(p *peer) { p.did(p.fr.WriteWindowUpdate(7, 1)) }, http2.ErrCodeProtocol},
		"window too large":    {func(p *peer) { p.did(p.fr.WriteWindowUpdate(0, 1<<31-1)) }, http2.ErrCodeFlowControl},
		"push": {func(p *peer) {
			p.did(p.fr.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, BlockFragment: p.fields(":method", "GET"), EndHeaders: true}))
		}, http2.ErrCodeProtocol},
		"settings twice": {func(p *peer) {
			s := http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1 << 14}
			p.did(p.fr.WriteSettings(s, s))
		}, http2.ErrCodeProtocol},
		"settings of nonsense": {func(p *peer) { p.did(p.fr.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1})) }, http2.ErrCodeProtocol},
		"windows grow too much": {func(p *peer) {
			p.get(1)
			p.did(p.fr.WriteWindowUpdate(1, 1<<31-1-65535))
			p.did(p.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 65536}))
		}, http2.ErrCodeFlowControl},
		"more than the connection": {func(p *peer) {
			for id := range uint32(6) {
				p.post(2*id + 1)
				for range 4 {
					p.did(p.fr.WriteData(2*id+1, false, make([]byte, 1<<14)))
				}
			}
		}, http2.ErrCodeFlowControl},
		"header block broken": {func(p *peer) {
			p.did(p.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, EndHeaders: true}))
		}, http2.ErrCodeCompression},
		"other frame in a block": {func(p *peer) {
			p.did(p.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: p.fields(":method", "GET")}))
			p.did(p.fr.WritePing(false, [8]byte{}))
		}, http2.ErrCodeProtocol},
		"headers after the end": {func(p *peer) { p.get(1); p.get(1) }, http2.ErrCodeStreamClosed},
		"frame too large":       {func(p *peer) { p.post(1); p.did(p.fr.WriteData(1, false, make([]byte, 1<<14+1))) }, http2.ErrCodeFrameSize},
	} {
		t.Run(name, func(t *testing.T) {
			dial := serve(t, newServer(http.HandlerFunc(idle)))
			nc, err := dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			p := newPeer(t, nc)
			_, err = io.WriteString(nc, http2.ClientPreface)
			p.did(err)
			if tc.do == nil {
				p.did(p.fr.WritePing(false, [8]byte{}))
			} else {
				p.did(p.fr.WriteSettings())
				tc.do(p)
			}
			if f := until(p, anyOf[*http2.GoAwayFrame]); f != nil && f.ErrCode != tc.want {
				t.Errorf("GOAWAY %v, want %v", f.ErrCode, tc.want)
			}
			p.gone()
		})
	}
}

// What is wrong with one stream ends that one, and no other.
func TestServerStreamErrors(t *testing.T) {
	request := []string{":method", "POST", ":scheme", "http", ":authority", "a", ":path", "/"}
	for name, tc := range map[string]struct {
		do   func(p *peer)
		want http2.ErrCode
	}{
		"no path":           {func(p *peer) { p.headers(1, true, ":method", "GET", ":scheme", "http") }, http2.ErrCodeProtocol},
		"path of nonsense":  {func(p *peer) { p.headers(1, true, ":method", "GET", ":scheme", "http", ":path", "nowhere") }, http2.ErrCodeProtocol},
		"upper case":        {func(p *peer) { p.post(1, "X-Upper", "1") }, http2.ErrCodeProtocol},
		"transfer-encoding": {func(p *peer) { p.post(1, "transfer-encoding", "chunked") }, http2.ErrCodeProtocol},
		"two lengths":       {func(p *peer) { p.post(1, "content-length", "1", "content-length", "2") }, http2.ErrCodeProtocol},
		"negative length":   {func(p *peer) { p.post(1, "content-length", "-1") }, http2.ErrCodeProtocol},
		"length, no body":   {func(p *peer) { p.headers(1, true, append(request, "content-length", "1")...) }, http2.ErrCodeProtocol},
		"body too long":     {func(p *peer) { p.post(1, "content-length", "1"); p.did(p.fr.WriteData(1, false, []byte("xx"))) }, http2.ErrCodeProtocol},
		"body too short":    {func(p *peer) { p.post(1, "content-length", "3"); p.did(p.fr.WriteData(1, true, []byte("xx"))) }, http2.ErrCodeProtocol},
		"more than a window": {func(p *peer) {
			p.post(1)
			for range 5 {
				p.did(p.fr.WriteData(1, false, make([]byte, 1<<14)))
			}
		}, http2.ErrCodeFlowControl},
		"data after the end": {func(p *peer) { p.get(1); p.did(p.fr.WriteData(1, false, []byte("x"))) }, http2.ErrCodeStreamClosed},
		"trailers go on":     {func(p *peer) { p.post(1); p.headers(1, false, "x-sum", "1") }, http2.ErrCodeProtocol},
		"window too large":   {func(p *peer) { p.get(1); p.did(p.fr.WriteWindowUpdate(1, 1<<31-1)) }, http2.ErrCodeFlowControl},
		"window of zero":     {func(p *peer) { p.get(1); p.did(p.fr.WriteWindowUpdate(1, 0)) }, http2.ErrCodeProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			p := newClient(t, serve(t, newServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/" {
					idle(w, r)
				}
			}))))
			tc.do(p)
			if f := until(p, anyOf[*http2.RSTStreamFrame]); f != nil && (f.ErrCode != tc.want || f.StreamID != 1) {
				t.Errorf("stream %d: %v, want %v", f.StreamID, f.ErrCode, tc.want)
			}
			p.headers(9, true, ":method", "GET", ":scheme", "http", ":authority", "a", ":path", "/other")
			until(p, func(f *http2.MetaHeadersFrame) bool { return f.StreamID == 9 && f.PseudoValue("status") == "200" })
		})
	}
}

// A header that is too large is refused, and does not end the connection.
func TestServerLargeHeader(t *testing.T) {
	p := newClient(t, serve(t, newServer(http.HandlerFunc(exchanges))))
	rest := p.fields(":method", "GET", ":scheme", "http", ":authority", "a", ":path", "/small", "x", strings.Repeat("\x7f", 2<<20))
	wrote := make(chan struct{})
	defer func() {
		_ = p.nc.Close() // nobody has to hear the rest
		<-wrote
	}()
	go func() {
		defer close(wrote)
		p.did(p.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndStream: true, BlockFragment: rest[:1<<14]}))
		for rest = rest[1<<14:]; len(rest) > 0; {
			n := min(len(rest), 1<<14)
			if p.fr.WriteContinuation(1, n == len(rest), rest[:n]) != nil {
				return // refused on the way
			}
			rest = rest[n:]
		}
	}()
	for {
		f, err := p.fr.ReadFrame()
		if err != nil {
			return // it is cut
		}
		if h, ok := f.(*http2.MetaHeadersFrame); ok {
			if h.PseudoValue("status") != "431" {
				t.Errorf("status %s", h.PseudoValue("status"))
			}
			return
		}
	}
}

// Handlers are bounded, those of streams that were reset included: whoever opens and
// resets them as fast as it can keeps no more of them busy.
func TestServerRapidReset(t *testing.T) {
	const most = 10
	var running, peak atomic.Int64
	s := newServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if n := running.Add(1); n > peak.Load() {
			peak.Store(n)
		}
		defer running.Add(-1)
		<-r.Context().Done()
	}))
	s.MaxStreams = most
	p := newClient(t, serve(t, s))
	go func() {
		for id := uint32(1); id < 4000; id += 2 {
			p.get(id)
			if id > 2*most {
				p.did(p.fr.WriteRSTStream(id, http2.ErrCodeCancel))
			}
		}
		p.did(p.fr.WritePing(false, [8]byte{'e', 'n', 'd'}))
	}()
	refused := 0
	until(p, func(f http2.Frame) bool {
		switch f := f.(type) {
		case *http2.RSTStreamFrame:
			if f.ErrCode == http2.ErrCodeRefusedStream {
				refused++
			}
		case *http2.PingFrame:
			return f.IsAck()
		}
		return false
	})
	if refused == 0 || peak.Load() > most {
		t.Errorf("%d refused, %d at once", refused, peak.Load())
	}
}

// A peer that makes the server answer and never reads is cut off.
func TestServerFloods(t *testing.T) {
	for name, flood := range map[string]func(p *peer) error{
		"pings":    func(p *peer) error { return p.fr.WritePing(false, [8]byte{}) },
		"settings": func(p *peer) error { return p.fr.WriteSettings() },
		"refused":  func(p *peer) error { p.get(2); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			p := newClient(t, serve(t, newServer(http.HandlerFunc(idle))))
			p.fr = http2.NewFramer(bufio.NewWriterSize(p.nc, 32<<10), p.nc)
			if name == "refused" {
				for id := uint32(1); ; id += 2 {
					err := p.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndStream: true, EndHeaders: true, BlockFragment: p.fields("no", "path")})
					if err != nil {
						return
					}
				}
			}
			for flood(p) == nil { // until the connection is closed
			}
		})
	}
}

// A client that does not read holds its handler up, and nothing piles up; when it reads,
// all comes, and another stream is not held up meanwhile.
func TestServerBackPressure(t *testing.T) {
	const chunk, chunks = 8 << 10, 100
	var wrote atomic.Int64
	p := newClient(t, serve(t, newServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			return
		}
		for range chunks {
			if _, err := w.Write(make([]byte, chunk)); err != nil {
				t.Error(err)
			}
			wrote.Add(chunk)
		}
	}))))
	p.did(p.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 20_000}))
	p.post(1)
	got := 0
	until(p, func(f *http2.DataFrame) bool { got += len(f.Data()); return got == 20_000 })
	p.get(3)
	until(p, func(f *http2.MetaHeadersFrame) bool { return f.StreamID == 3 })
	if n := wrote.Load(); n > 20_000+chunk {
		t.Errorf("%d bytes were taken of a handler whose client reads 20000", n)
	}
	p.did(p.fr.WriteWindowUpdate(0, chunk*chunks))
	p.did(p.fr.WriteWindowUpdate(1, chunk*chunks))
	until(p, func(f *http2.DataFrame) bool { got += len(f.Data()); return f.StreamEnded() })
	if got != chunk*chunks {
		t.Errorf("%d bytes of %d", got, chunk*chunks)
	}
}

// The windows of a request's body are given back as it is read, and when nobody reads it.
func TestServerGivesBack(t *testing.T) {
	p := newClient(t, serve(t, newServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))))
	for id := uint32(1); id < 40; id += 2 { // 20 bodies of 48 KiB, of which nothing is read
		p.post(id)
		for range 3 {
			p.did(p.fr.WriteDataPadded(id, false, make([]byte, 1<<14-256), make([]byte, 255)))
		}
		ended := false
		until(p, func(f http2.Frame) bool {
			switch f := f.(type) {
			case *http2.MetaHeadersFrame:
				ended = ended || f.StreamID == id && f.StreamEnded()
			case *http2.RSTStreamFrame:
				return f.StreamID == id && ended && f.ErrCode == http2.ErrCodeNo
			}
			return false
		})
	}
}

// Deadlines of both directions end what waits.
func TestServerDeadlines(t *testing.T) {
	errs := make(chan error, 1)
	p := newClient(t, serve(t, newServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		if r.URL.Path == "/read" {
			_ = rc.SetReadDeadline(time.Now().Add(time.Millisecond))
			_, err := r.Body.Read(make([]byte, 1))
			errs <- err
			return
		}
		_ = rc.SetWriteDeadline(time.Now().Add(time.Hour))
		_ = rc.SetWriteDeadline(time.Now().Add(time.Millisecond))
		_, err := w.Write(make([]byte, 1<<20))
		errs <- err
	}))))
	p.headers(1, false, ":method", "POST", ":scheme", "http", ":authority", "a", ":path", "/read")
	if err := <-errs; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
	p.get(3)
	if err := <-errs; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("write: %v", err)
	}
	until(p, func(f *http2.RSTStreamFrame) bool { return f.StreamID == 3 && f.ErrCode == http2.ErrCodeInternal })
}

// A graceful end: the client hears of it, what it has sent before is served, what runs is
// answered whole, and nothing new is taken.
func TestServerShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goOn := make(chan struct{})
		s := newServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_ = http.NewResponseController(w).Flush()
			<-goOn
			_, _ = io.WriteString(w, "whole")
		}))
		p := newClient(t, serveInMemory(t, s))
		p.get(1)
		until(p, anyOf[*http2.MetaHeadersFrame])
		down := make(chan error, 1)
		go func() { down <- s.Shutdown(t.Context()) }()
		until(p, func(f *http2.GoAwayFrame) bool { return f.LastStreamID == 1<<31-1 && f.ErrCode == http2.ErrCodeNo })
		p.get(3) // on its way when the word came
		ping := until(p, anyOf[*http2.PingFrame])
		p.did(p.fr.WritePing(true, ping.Data))
		until(p, func(f *http2.GoAwayFrame) bool { return f.LastStreamID == 3 })
		p.get(5) // it has been told
		close(goOn)
		ended := map[uint32]bool{}
		until(p, func(f *http2.DataFrame) bool {
			if f.StreamEnded() {
				ended[f.StreamID] = true
			}
			return len(ended) == 2
		})
		if !ended[1] || !ended[3] {
			t.Errorf("ended: %v", ended)
		}
		p.gone()
		if err := <-down; err != nil {
			t.Error(err)
		}
	})
}

// A client that has connected before the end, and said nothing until then, is served; one
// that goes on saying nothing is not waited for, nor one that does not answer pings.
func TestServerShutdownFresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(http.HandlerFunc(exchanges))
		dial := serveInMemory(t, s)
		var conns [3]net.Conn
		for i := range conns {
			nc, err := dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			conns[i] = nc
		}
		synctest.Wait()
		down := make(chan error, 1)
		go func() { down <- s.Shutdown(t.Context()) }()
		synctest.Wait()
		for _, answers := range []bool{true, false} {
			p := newPeer(t, conns[0])
			if !answers {
				p = newPeer(t, conns[1])
			}
			_, err := io.WriteString(p.nc, http2.ClientPreface)
			p.did(err)
			p.did(p.fr.WriteSettings())
			p.get(1)
			ping, answered := false, false // in whatever order
			until(p, func(f http2.Frame) bool {
				switch f := f.(type) {
				case *http2.PingFrame:
					if ping = true; answers {
						p.did(p.fr.WritePing(true, f.Data))
					}
				case *http2.MetaHeadersFrame:
					answered = f.StreamID == 1
				}
				return ping && answered
			})
			p.gone()
		}
		begun := time.Now()
		if err := <-down; err != nil || time.Since(begun) > lastHello+drainPing {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
	})
}

// A handler that panics has no answer, and takes nobody with it.
func TestServerPanic(t *testing.T) {
	var log bytes.Buffer
	s := newServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			panic("oops")
		}
	}))
	s.Log = slog.New(slog.NewTextHandler(&log, nil))
	p := newClient(t, serve(t, s))
	p.post(1)
	until(p, func(f *http2.RSTStreamFrame) bool { return f.StreamID == 1 && f.ErrCode == http2.ErrCodeInternal })
	p.get(3)
	until(p, func(f *http2.MetaHeadersFrame) bool { return f.StreamID == 3 })
	if !strings.Contains(log.String(), "oops") {
		t.Errorf("the log says %q", log.String())
	}
}

// A client that asks before it sends its body is told to.
func TestServerContinue(t *testing.T) {
	p := newClient(t, serve(t, newServer(http.HandlerFunc(exchanges))))
	p.headers(1, false, ":method", "POST", ":scheme", "http", ":authority", "a", ":path", "/echo", "expect", "100-continue")
	until(p, func(f *http2.MetaHeadersFrame) bool { return f.PseudoValue("status") == "100" })
	p.did(p.fr.WriteData(1, true, []byte("body")))
	until(p, func(f *http2.DataFrame) bool { return string(f.Data()) == "body" })
}

// Trailers end a request's body.
func TestServerTrailers(t *testing.T) {
	got := make(chan string, 1)
	p := newClient(t, serve(t, newServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		got <- string(body)
	}))))
	p.post(1)
	p.did(p.fr.WriteData(1, false, []byte("body")))
	p.headers(1, true, "x-sum", "1")
	if body := <-got; body != "body" {
		t.Errorf("got %q", body)
	}
}
