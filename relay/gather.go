package relay

import (
	"net"
	"runtime"
	"sync"
	"time"
)

// gathering is a connection whose writes go out together. Each token is a write of its
// own, and one connection carries all streams; where tokens of many streams are there at
// the same time they so cost one system call, and wake Envoy once. Nothing waits for a
// clock: what was written goes out as soon as the goroutines that could run at that time
// had their turn.
//
// Write returns before its bytes are sent, so an error is that of an earlier one. Safe
// for concurrent use.
type gathering struct {
	net.Conn

	mu      sync.Mutex
	changed sync.Cond // pending, sending or err
	pending []byte    // not sent yet, less than mostPending and one write
	spare   []byte    // an empty buffer to take its place
	sending bool      // a goroutine sends what is pending
	err     error     // of sending, sticky
}

// Limits of a gathering.
const (
	mostPending = 64 << 10    // bytes; a writer waits while there are more
	lastSend    = time.Second // that Close allows for what is pending
)

func newGathering(c net.Conn) *gathering {
	g := &gathering{Conn: c}
	g.changed.L = &g.mu
	return g
}

// Write implements net.Conn.
func (g *gathering) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.pending) >= mostPending && g.err == nil {
		g.changed.Wait()
	}
	if g.err != nil {
		return 0, g.err
	}
	g.pending = append(g.pending, p...)
	if !g.sending {
		g.sending = true
		go g.send()
	}
	return len(p), nil
}

// send writes what is pending until there is nothing more.
func (g *gathering) send() {
	runtime.Gosched() // others that can run may have something to add
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.pending) > 0 && g.err == nil {
		out := g.pending
		g.pending = g.spare[:0]
		g.changed.Broadcast()
		g.mu.Unlock()
		_, err := g.Conn.Write(out)
		runtime.Gosched()
		g.mu.Lock()
		g.spare, g.err = out, err
	}
	g.sending = false
	g.changed.Broadcast()
}

// Close sends what is pending, as long as that takes no more than lastSend, and closes
// the connection.
func (g *gathering) Close() error {
	g.mu.Lock()
	if g.sending {
		_ = g.SetWriteDeadline(time.Now().Add(lastSend)) // one that cannot be set is closed already
	}
	for g.sending {
		g.changed.Wait()
	}
	if g.err == nil {
		g.err = net.ErrClosed
	}
	g.mu.Unlock()
	return g.Conn.Close()
}

// gatheringListener makes the connections of a listener gathering ones.
type gatheringListener struct{ net.Listener }

// Accept implements net.Listener.
func (l gatheringListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return newGathering(c), nil
}
