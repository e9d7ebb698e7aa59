package h2

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
)

// answered is what became of a request.
type answered struct {
	resp *http.Response
	err  error
}

// ask makes a request meanwhile.
func ask(t *testing.T, tr *Transport, method string, body io.Reader) chan answered {
	t.Helper()
	req, done := newRequest(t, method, "/", body), make(chan answered, 1)
	go func() {
		resp, err := tr.RoundTrip(req)
		done <- answered{resp, err}
	}()
	return done
}

// fails checks that neither the answer nor its body ends well.
func (a answered) fails(t *testing.T) (err error) {
	t.Helper()
	if err = a.err; err == nil {
		_, err = io.ReadAll(a.resp.Body)
		_ = a.resp.Body.Close() // it has failed
	}
	if err == nil {
		t.Error("it ends well")
	}
	return err
}

func isGet(f *http2.MetaHeadersFrame) bool { return f.PseudoValue("method") == http.MethodGet }

// What a server must not do ends the answer in an error, and the connection where that is
// at fault.
func TestTransportErrors(t *testing.T) {
	ok := func(p *peer, id uint32, more ...string) {
		p.headers(id, false, append([]string{":status", "200"}, more...)...)
	}
	for name, tc := range map[string]struct {
		do   func(p *peer)
		want http2.ErrCode // of the stream; of the connection with away
		away bool
	}{
		"no status":            {func(p *peer) { p.headers(1, true, "x", "y") }, http2.ErrCodeProtocol, false},
		"status of nonsense":   {func(p *peer) { p.headers(1, true, ":status", "abc") }, http2.ErrCodeProtocol, false},
		"switching protocols":  {func(p *peer) { p.headers(1, false, ":status", "101") }, http2.ErrCodeProtocol, false},
		"request as an answer": {func(p *peer) { p.get(1) }, http2.ErrCodeProtocol, false},
		"ends with 100":        {func(p *peer) { p.headers(1, true, ":status", "100") }, http2.ErrCodeProtocol, false},
		"endless 103": {func(p *peer) {
			for range most1xx + 1 {
				p.headers(1, false, ":status", "103")
			}
		}, http2.ErrCodeProtocol, false},
		"too short":   {func(p *peer) { ok(p, 1, "content-length", "3"); p.did(p.fr.WriteData(1, true, []byte("x"))) }, http2.ErrCodeProtocol, false},
		"too long":    {func(p *peer) { ok(p, 1, "content-length", "3"); p.did(p.fr.WriteData(1, false, []byte("xxxx"))) }, http2.ErrCodeProtocol, false},
		"body of 204": {func(p *peer) { p.headers(1, false, ":status", "204"); p.did(p.fr.WriteData(1, true, []byte("x"))) }, http2.ErrCodeProtocol, false},
		"more than a window": {func(p *peer) {
			ok(p, 1)
			for range 5 {
				p.did(p.fr.WriteData(1, false, make([]byte, 1<<14)))
			}
		}, http2.ErrCodeFlowControl, false},
		"body first": {func(p *peer) { p.did(p.fr.WriteData(1, true, []byte("x"))) }, http2.ErrCodeProtocol, false},
		"upper case": {func(p *peer) { ok(p, 1, "X-Upper", "1") }, http2.ErrCodeProtocol, false},
		"push": {func(p *peer) {
			p.did(p.fr.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, BlockFragment: p.fields(":method", "GET"), EndHeaders: true}))
		}, http2.ErrCodeProtocol, true},
		"answer to nothing": {func(p *peer) { ok(p, 3) }, http2.ErrCodeProtocol, true},
		"data of nothing":   {func(p *peer) { p.did(p.fr.WriteData(3, false, []byte("x"))) }, http2.ErrCodeProtocol, true},
		"headers after end": {func(p *peer) { ok(p, 1); p.did(p.fr.WriteRSTStream(3, 0)) }, http2.ErrCodeProtocol, true},
	} {
		t.Run(name, func(t *testing.T) {
			lis, dial := listen(t)
			done := ask(t, newTransport(t, dial), http.MethodGet, nil)
			p := acceptPeer(t, lis)
			until(p, isGet)
			tc.do(p)
			if tc.away {
				until(p, func(f *http2.GoAwayFrame) bool { return f.ErrCode == tc.want })
			} else {
				until(p, func(f *http2.RSTStreamFrame) bool { return f.StreamID == 1 && f.ErrCode == tc.want })
			}
			(<-done).fails(t)
		})
	}
}

// A reset in the middle of an answer is an error after all that came before it; so is the
// end of the connection.
func TestTransportBroken(t *testing.T) {
	for name, end := range map[string]func(p *peer){
		"reset":  func(p *peer) { p.did(p.fr.WriteRSTStream(1, http2.ErrCodeInternal)) },
		"closed": func(p *peer) { _ = p.nc.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			lis, dial := listen(t)
			done := ask(t, newTransport(t, dial), http.MethodGet, nil)
			p := acceptPeer(t, lis)
			until(p, isGet)
			p.headers(1, false, ":status", "200")
			p.did(p.fr.WriteData(1, false, []byte("half")))
			end(p)
			a := <-done
			if a.err != nil { // the end was faster
				return
			}
			got, err := io.ReadAll(a.resp.Body)
			if err == nil || string(got) != "half" {
				t.Errorf("%q, %v", got, err)
			}
			_ = a.resp.Body.Close() // it has failed
		})
	}
}

// A request that the server has certainly not looked at is made again, with its body; one
// that it may have looked at is not.
func TestTransportAgain(t *testing.T) {
	for name, tc := range map[string]struct {
		refuse func(p *peer)
		again  bool
		same   bool // connection
	}{
		"refused":      {func(p *peer) { p.did(p.fr.WriteRSTStream(1, http2.ErrCodeRefusedStream)) }, true, true},
		"gone away":    {func(p *peer) { p.did(p.fr.WriteGoAway(0, http2.ErrCodeNo, nil)) }, true, false},
		"reset":        {func(p *peer) { p.did(p.fr.WriteRSTStream(1, http2.ErrCodeInternal)) }, false, true},
		"away, but it": {func(p *peer) { p.did(p.fr.WriteGoAway(1, http2.ErrCodeNo, nil)); _ = p.nc.Close() }, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			lis, dial := listen(t)
			done := ask(t, newTransport(t, dial), http.MethodPost, strings.NewReader("question"))
			p := acceptPeer(t, lis)
			until(p, func(f *http2.DataFrame) bool { return string(f.Data()) == "question" })
			until(p, func(f *http2.DataFrame) bool { return f.StreamEnded() })
			tc.refuse(p)
			if !tc.again {
				if err := (<-done).fails(t); errors.Is(err, errUnprocessed) {
					t.Errorf("got %v", err)
				}
				return
			}
			id := uint32(3)
			if !tc.same {
				p.gone()
				p, id = acceptPeer(t, lis), 1
			}
			until(p, func(f *http2.DataFrame) bool { return f.StreamID == id && string(f.Data()) == "question" })
			p.headers(id, true, ":status", "200")
			if a := <-done; a.err != nil || a.resp.StatusCode != http.StatusOK {
				t.Errorf("%v, %v", a.resp, a.err)
			}
		})
	}
}

// A server that goes away gracefully finishes what it has; new requests use another
// connection.
func TestTransportGoAway(t *testing.T) {
	lis, dial := listen(t)
	tr := newTransport(t, dial)
	first := ask(t, tr, http.MethodGet, nil)
	p := acceptPeer(t, lis)
	until(p, isGet)
	p.did(p.fr.WriteGoAway(1<<31-1, http2.ErrCodeNo, nil))
	p.did(p.fr.WritePing(false, [8]byte{1}))
	until(p, anyOf[*http2.PingFrame])
	second := ask(t, tr, http.MethodGet, nil)
	q := acceptPeer(t, lis)
	until(q, isGet)
	q.headers(1, true, ":status", "204")
	p.headers(1, true, ":status", "200")
	for want, done := range map[int]chan answered{200: first, 204: second} {
		if a := <-done; a.err != nil || a.resp.StatusCode != want {
			t.Errorf("%v, %v; want %d", a.resp, a.err, want)
		}
	}
	p.gone()
}

// Where the server takes no more streams on a connection, another one is made; where it
// takes none at all, the request fails.
func TestTransportStreams(t *testing.T) {
	lis, dial := listen(t)
	tr := newTransport(t, dial)
	one := http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 1}
	var ends []chan answered
	var peers []*peer
	for range 3 {
		ends = append(ends, ask(t, tr, http.MethodGet, nil))
		p := acceptPeer(t, lis, one)
		until(p, isGet)
		peers = append(peers, p)
	}
	for i, p := range peers {
		p.headers(1, true, ":status", "200")
		if a := <-ends[i]; a.err != nil {
			t.Error(a.err)
		}
	}
	tr.CloseIdleConnections()
	for _, p := range peers {
		p.gone()
	}
	end := ask(t, tr, http.MethodGet, nil)
	for range mostTries {
		acceptPeer(t, lis, http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 0})
	}
	if a := <-end; !errors.Is(a.err, errFull) {
		t.Errorf("got %v", a.err)
	}
}

// The transport sends no more of a body than the server's windows allow, and what the
// server answers before it has all ends the rest.
func TestTransportBackPressure(t *testing.T) {
	lis, dial := listen(t)
	done := ask(t, newTransport(t, dial), http.MethodPost, strings.NewReader(strings.Repeat("x", 1<<20)))
	p := acceptPeer(t, lis, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 10_000})
	got := 0
	until(p, func(f *http2.DataFrame) bool { got += len(f.Data()); return got == 10_000 })
	p.did(p.fr.WriteWindowUpdate(1, 1<<20))
	until(p, func(f *http2.DataFrame) bool { got += len(f.Data()); return got == firstWindow }) // the connection's
	p.headers(1, true, ":status", "413")
	a := <-done
	if a.err != nil || a.resp.StatusCode != http.StatusRequestEntityTooLarge {
		t.Fatalf("%v, %v", a.resp, a.err)
	}
	_ = a.resp.Body.Close() // it has none
	until(p, func(f *http2.RSTStreamFrame) bool { return f.StreamID == 1 && f.ErrCode == http2.ErrCodeCancel })
}

// What an answer's reader takes is given back, what it leaves and what comes for it later,
// too: the connection's window does not shrink.
func TestTransportGivesBack(t *testing.T) {
	lis, dial := listen(t)
	tr := newTransport(t, dial)
	var p *peer
	given := uint32(0)
	for id := uint32(1); id < 100; id += 2 {
		done := ask(t, tr, http.MethodGet, nil)
		if p == nil {
			p = acceptPeer(t, lis)
		}
		until(p, func(f http2.Frame) bool {
			switch f := f.(type) {
			case *http2.WindowUpdateFrame:
				if f.StreamID == 0 {
					given += f.Increment
				}
			case *http2.MetaHeadersFrame:
				return true
			}
			return false
		})
		p.headers(id, false, ":status", "200")
		p.did(p.fr.WriteData(id, false, make([]byte, 1<<14)))
		a := <-done
		if a.err != nil {
			t.Fatal(a.err)
		}
		if id%4 == 1 {
			if _, err := io.ReadFull(a.resp.Body, make([]byte, 1<<14)); err != nil {
				t.Error(err)
			}
		}
		_ = a.resp.Body.Close() // half of them unread
		p.did(p.fr.WriteData(id, true, make([]byte, 1<<14)))
	}
	if sent := uint32(50 * 2 << 14); given < 1<<20-firstWindow+sent-1<<19 {
		t.Errorf("%d bytes were given back of %d", given, sent)
	}
}

// A server that hangs is noticed by the pings it leaves unanswered, and one that answers
// them, or says anything else, is not cut.
func TestTransportPing(t *testing.T) {
	for _, alive := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			tr := &Transport{
				Dial: func(context.Context) (net.Conn, error) { return near, nil }, DialTimeout: hang,
				Window: 64 << 10, Share: 1 << 20, PingAfter: 30 * time.Second, PingTimeout: 15 * time.Second, MaxStreams: 1, MaxResets: 1,
			}
			begun := time.Now()
			done := ask(t, tr, http.MethodGet, nil)
			p := newPeer(t, far)
			_ = far.SetDeadline(time.Time{})
			_, err := io.ReadFull(far, make([]byte, len(http2.ClientPreface)))
			p.did(err)
			p.did(p.fr.WriteSettings())
			until(p, isGet)
			pings := 0
			if alive {
				until(p, func(f *http2.PingFrame) bool {
					p.did(p.fr.WritePing(true, f.Data))
					pings++
					return pings == 10
				})
				p.headers(1, true, ":status", "200")
				go func() { _, _ = io.Copy(io.Discard, far) }()
				if a := <-done; a.err != nil {
					t.Error(a.err)
				}
				tr.CloseIdleConnections()
			} else {
				until(p, anyOf[*http2.PingFrame])
				go func() { _, _ = io.Copy(io.Discard, far) }()
				(<-done).fails(t)
				if took := time.Since(begun); took != 45*time.Second {
					t.Errorf("it took %v", took)
				}
			}
			_ = far.Close()
		})
	}
}

// A server that never says a word is no connection.
func TestTransportSilentServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, far) }()
		tr := &Transport{Dial: func(context.Context) (net.Conn, error) { return near, nil }, DialTimeout: 10 * time.Second, Window: 64 << 10, Share: 1 << 20, MaxStreams: 1, MaxResets: 1}
		begun := time.Now()
		if err := (<-ask(t, tr, http.MethodGet, nil)).fails(t); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		if took := time.Since(begun); took != 10*time.Second {
			t.Errorf("it took %v", took)
		}
		_ = far.Close()
	})
}

// A body that ends early or fails resets the request.
func TestTransportBrokenBody(t *testing.T) {
	for name, body := range map[string]io.Reader{"short": strings.NewReader("x"), "long": strings.NewReader("xxxxx"), "fails": io.MultiReader(strings.NewReader("xx"), errReader{})} {
		t.Run(name, func(t *testing.T) {
			lis, dial := listen(t)
			tr := newTransport(t, dial)
			req := newRequest(t, http.MethodPost, "/", body)
			req.ContentLength = 3
			done := make(chan error, 1)
			go func() {
				_, err := tr.RoundTrip(req)
				done <- err
			}()
			until(acceptPeer(t, lis), func(f *http2.RSTStreamFrame) bool { return f.ErrCode == http2.ErrCodeCancel })
			if err := <-done; err == nil {
				t.Error("it went well")
			}
		})
	}
}

// errReader always fails.
type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errors.New("broken") }
