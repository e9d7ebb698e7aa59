package h2

import (
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/test/bufconn"
)

// slowListener's connections take their time for each write.
type slowListener struct {
	net.Listener
	over *atomic.Bool
	late *atomic.Int64 // writes that ended when it was over
}

// Accept implements net.Listener.
func (l slowListener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	return slowConn{nc, l}, err
}

type slowConn struct {
	net.Conn
	l slowListener
}

// Write implements net.Conn, in a bubble.
func (c slowConn) Write(p []byte) (int, error) {
	time.Sleep(lastSend / 10)
	if c.l.over.Load() {
		c.l.late.Add(1)
	}
	return c.Conn.Write(p)
}

// What was answered is sent before Shutdown returns: after it the process may end.
func TestShutdownSends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goOn := make(chan struct{})
		s := newServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_ = http.NewResponseController(w).Flush()
			<-goOn
			_, _ = io.WriteString(w, "whole")
		}))
		mem := bufconn.Listen(64 << 10)
		lis := slowListener{mem, &atomic.Bool{}, &atomic.Int64{}}
		serveOn(t, s, lis)
		tr := newTransport(t, mem.DialContext)
		resp, err := tr.RoundTrip(newRequest(t, http.MethodGet, "/", nil))
		if err != nil {
			t.Fatal(err)
		}
		down := make(chan error, 1)
		go func() {
			down <- s.Shutdown(t.Context())
			lis.over.Store(true)
		}()
		time.Sleep(10 * lastSend) // the client knows by now
		close(goOn)
		if body, err := io.ReadAll(resp.Body); string(body) != "whole" || err != nil {
			t.Errorf("%q, %v", body, err)
		}
		if err := <-down; err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if n := lis.late.Load(); n > 0 {
			t.Errorf("%d writes came after Shutdown had returned", n)
		}
	})
}

// halfListener's connections can end one way, like sockets, but in memory: nothing shows
// that to the other side.
type halfListener struct {
	net.Listener
	halves *atomic.Int64
}

// Accept implements net.Listener.
func (l halfListener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	return halfConn{nc, l.halves}, err
}

type halfConn struct {
	net.Conn
	halves *atomic.Int64
}

// CloseWrite is called like a socket's.
func (c halfConn) CloseWrite() error {
	c.halves.Add(1)
	return nil
}

// A client may write until it has read the end: the socket is not closed under it. One that
// stays for ever is not waited for.
func TestShutdownLingers(t *testing.T) {
	for _, leaves := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "whole") }))
			mem := bufconn.Listen(64 << 10)
			lis := halfListener{mem, &atomic.Int64{}}
			serveOn(t, s, lis)
			p := newClient(t, mem.DialContext)
			p.get(1)
			until(p, func(f *http2.DataFrame) bool { return f.StreamEnded() })
			down := make(chan error, 1)
			go func() { down <- s.Shutdown(t.Context()) }()
			ping := until(p, anyOf[*http2.PingFrame])
			p.did(p.fr.WritePing(true, ping.Data))
			until(p, func(f *http2.GoAwayFrame) bool { return f.LastStreamID == 1 })
			synctest.Wait()
			if err := p.fr.WriteWindowUpdate(0, 5); err != nil || lis.halves.Load() != 1 {
				t.Errorf("a write before the end was read: %v, closed one way %d times", err, lis.halves.Load())
			}
			start := time.Now()
			if leaves {
				_ = p.nc.Close() // it was read to its end
			}
			if err := <-down; err != nil {
				t.Error(err)
			}
			if took := time.Since(start); leaves && took > 0 || took > lastSend {
				t.Errorf("Shutdown waited for %v", took)
			}
		})
	}
}
