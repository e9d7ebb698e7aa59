package chaos

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// link is a TCP proxy whose line can fail. Safe for concurrent use.
type link struct {
	lis net.Listener
	to  string

	mu    sync.Mutex
	conns map[net.Conn]bool
	cut   bool          // new connections are closed at once
	hole  chan struct{} // while not nil nothing passes; closed when it does again

	closed atomic.Int64 // connections, or not let in
	held   atomic.Int64 // how often something came that could not pass
}

// newLink listens at an address for somebody who will listen at to.
func newLink(t *testing.T, at, to string) *link {
	t.Helper()
	lis, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	l := &link{lis: lis, to: to, conns: map[net.Conn]bool{}}
	go l.serve()
	t.Cleanup(func() { _ = lis.Close(); l.set(true, false) })
	return l
}

func (l *link) serve() {
	for {
		c, err := l.lis.Accept()
		if err != nil {
			return
		}
		l.mu.Lock()
		cut := l.cut
		l.mu.Unlock()
		if cut {
			_ = c.Close() // as a broken line looks
			l.closed.Add(1)
			continue
		}
		up, err := net.Dial("tcp", l.to)
		if err != nil {
			_ = c.Close() // the worker is not there
			continue
		}
		l.mu.Lock()
		l.conns[c], l.conns[up] = true, true
		l.mu.Unlock()
		go l.pass(c, up)
		go l.pass(up, c)
	}
}

// pass copies one direction while the line holds.
func (l *link) pass(from, to net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		l.mu.Lock()
		hole := l.hole
		l.mu.Unlock()
		if hole != nil {
			l.held.Add(1)
			<-hole
		}
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				break
			}
		}
		if err != nil {
			if tcp, ok := to.(*net.TCPConn); ok && err == io.EOF {
				_ = tcp.CloseWrite() // the other direction goes on
				return
			}
			break
		}
	}
	l.mu.Lock()
	delete(l.conns, from)
	delete(l.conns, to)
	l.mu.Unlock()
	_, _ = from.Close(), to.Close() // one of them is broken already
}

// troubles are what can happen to it: closed connections and new ones refused, or
// nothing passes while they stay open.
func (l *link) troubles() []*trouble {
	whole := func() { l.set(false, false) }
	return []*trouble{
		{
			name: "cut", begin: func() { l.set(true, false) }, end: whole,
			hits: l.closed.Load, unit: "connections closed or not let in",
		},
		{
			name: "a hole", begin: func() { l.set(false, true) }, end: whole,
			hits: l.held.Load, unit: "pieces held up",
		},
	}
}

// set makes the line as it should be: cut, a hole, or whole.
func (l *link) set(cut, hole bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = cut
	if cut {
		l.closed.Add(int64(len(l.conns)) / 2) // both ends of each are here
		for c := range l.conns {
			_ = c.Close() // that is the fault
		}
	}
	switch {
	case hole && l.hole == nil:
		l.hole = make(chan struct{})
	case !hole && l.hole != nil:
		close(l.hole)
		l.hole = nil
	}
}
