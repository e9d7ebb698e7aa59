package testmesh

import (
	"net"
	"sync"
	"testing"
	"time"
)

// Line is a TCP proxy to one address, as a network between two hosts that can be slow, or
// lose everything. Safe for concurrent use.
type Line struct {
	// Addr is where it listens.
	Addr string

	lis net.Listener
	to  string

	mu sync.Mutex
	// conns are both ends of all connections.
	conns map[net.Conn]bool
	// delay is that of what comes in from now on.
	delay time.Duration
	// hole holds up everything while it is not nil; it is closed when all passes again.
	hole  chan struct{}
	ended bool
}

// NewLine makes a line to an address, where nobody need listen yet. It ends with the test.
func NewLine(t testing.TB, to string) *Line {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &Line{Addr: lis.Addr().String(), lis: lis, to: to, conns: map[net.Conn]bool{}}
	go l.serve()
	t.Cleanup(l.end)
	return l
}

// Slow has everything arrive so much later.
func (l *Line) Slow(delay time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay = delay
}

// Break has nothing pass any more, and no connection end: what is sent is lost on the way,
// as where a cable is pulled.
func (l *Line) Break() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hole == nil {
		l.hole = make(chan struct{})
	}
}

// Mend has everything pass again.
func (l *Line) Mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hole != nil {
		close(l.hole)
		l.hole = nil
	}
}

// end closes everything.
func (l *Line) end() {
	l.Mend()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	_ = l.lis.Close()
	for c := range l.conns {
		_ = c.Close()
	}
}

// serve accepts until the end.
func (l *Line) serve() {
	for {
		c, err := l.lis.Accept()
		if err != nil {
			return
		}
		go func() {
			up, err := net.Dial("tcp", l.to)
			if err != nil {
				_ = c.Close() // nobody is there
				return
			}
			l.mu.Lock()
			l.conns[c], l.conns[up] = true, true
			ended := l.ended
			l.mu.Unlock()
			if ended {
				l.end()
				return
			}
			go l.pass(c, up)
			l.pass(up, c)
		}()
	}
}

// piece is something on its way.
type piece struct {
	data []byte
	at   time.Time // when it arrives at the earliest
}

// pass carries one direction, in order.
func (l *Line) pass(to, from net.Conn) {
	way := make(chan piece, 64)
	go func() {
		defer to.Close()
		for p := range way {
			time.Sleep(time.Until(p.at))
			l.mu.Lock()
			hole := l.hole
			l.mu.Unlock()
			if hole != nil {
				<-hole
			}
			if _, err := to.Write(p.data); err != nil {
				_ = from.Close()
			}
		}
	}()
	defer close(way)
	for {
		b := make([]byte, 64<<10)
		n, err := from.Read(b)
		if n > 0 {
			l.mu.Lock()
			at := time.Now().Add(l.delay)
			l.mu.Unlock()
			way <- piece{b[:n], at}
		}
		if err != nil {
			l.mu.Lock()
			delete(l.conns, from)
			l.mu.Unlock()
			return
		}
	}
}
