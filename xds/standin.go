package xds

import (
	"context"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
)

// yieldEvery is how soon connections are given up when the control plane is back.
const yieldEvery = 250 * time.Millisecond

// standIn is a listener that keeps connections only while another address does
// not answer.
type standIn struct {
	net.Listener
	primary string // address of the control plane

	mu    sync.Mutex
	conns map[net.Conn]bool // open ones
}

// Accept implements net.Listener.
func (l *standIn) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	t := &trackedConn{Conn: c, owner: l}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns[t] = true
	return t, nil
}

// yield closes all connections whenever the primary answers, until ctx ends.
func (l *standIn) yield(ctx context.Context) {
	tick := time.NewTicker(yieldEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		// Nobody is asked while nobody is here.
		if l.open() == 0 || !answers(ctx, l.primary) {
			continue
		}
		// Closing takes the lock, so the map is exchanged first.
		l.mu.Lock()
		conns := l.conns
		l.conns = map[net.Conn]bool{}
		l.mu.Unlock()
		for c := range conns {
			_ = c.Close() // it may have closed by itself
		}
	}
}

// open counts the connections.
func (l *standIn) open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.conns)
}

// answers reports whether a gRPC server answers at an address. A process that
// hangs has a socket that takes connections, so connecting proves nothing.
func answers(ctx context.Context, addr string) bool {
	target := "passthrough:///" + addr
	if strings.HasPrefix(addr, "/") {
		target = "unix:" + addr
	}
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		return false
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err = grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	return err == nil
}

// trackedConn tells its listener when it is closed.
type trackedConn struct {
	net.Conn
	owner *standIn // whose conns it is in
}

// Close implements net.Conn.
func (c *trackedConn) Close() error {
	c.owner.mu.Lock()
	delete(c.owner.conns, c)
	c.owner.mu.Unlock()
	return c.Conn.Close()
}
