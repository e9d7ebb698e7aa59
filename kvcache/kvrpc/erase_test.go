//go:build unix

package kvrpc

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// TestEraseStopped: a peer that stops in the middle of everything is given up after a time,
// and does what it is asked for when it goes on.
func TestEraseStopped(t *testing.T) {
	t.Parallel()
	p := startPeer(t, childSpec{Limit: 8 << 20, Dir: shmDir(t)})
	c := newClient(t, Config{Addr: p.addr, PutTimeout: time.Second, Away: 10 * time.Millisecond})
	f := sealed(t, 1, 100_000)
	if err := c.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	awaitPeer(t, c)
	p.stop(t)
	e := kvcache.ErasureOf("some tenant", func(int) {})
	if _, err := c.EraseTenant(t.Context(), e); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a peer that has stopped: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.EraseTenant(ctx, e); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that has left: %v", err)
	}
	if err := p.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	awaitPeer(t, c)
	looked := 0
	e.Looked = func(n int) { looked += n }
	if n, err := c.EraseTenant(t.Context(), e); err != nil || n != 0 || looked == 0 {
		t.Errorf("%d blocks of somebody else are erased of %d: %v", n, looked, err)
	}
	same(t, c, f)
	p.kill()
	if _, err := c.EraseTenant(t.Context(), e); err == nil {
		t.Error("a peer that is dead has erased")
	}
}

// slowForget takes its time, and cannot do everything.
type slowForget struct {
	erased, ended atomic.Int32
}

// EraseTenant looks at a block each half second.
func (s *slowForget) EraseTenant(ctx context.Context, e kvcache.Erasure) (int, error) {
	defer s.ended.Add(1)
	for range 7 {
		e.Looked(1)
		select {
		case <-time.After(eraseTell / 2):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	if s.erased.Add(1) > 1 {
		return 0, errors.New("the disk is away")
	}
	return 7, nil
}

// Drop does nothing.
func (s *slowForget) Drop(context.Context, kvcache.Fingerprint) error { return nil }

// TestEraseLong: an erasure that takes longer than any other call is waited for, with news of
// it; what the peer could not do is its error, and a caller that leaves ends it.
func TestEraseLong(t *testing.T) {
	t.Parallel()
	s := &slowForget{}
	n := newNode(t, 8<<20, ServerConfig{Forget: s})
	c := newClient(t, Config{Addr: n.addr, Timeout: time.Second, PutTimeout: time.Second})
	told, looked := 0, 0
	e := kvcache.ErasureOf("t", func(n int) { told, looked = told+1, looked+n })
	if blocks, err := c.EraseTenant(t.Context(), e); err != nil || blocks != 7 || looked != 7 || told < 2 {
		t.Errorf("%d blocks of %d, in %d steps: %v", blocks, looked, told, err)
	}
	if _, err := c.EraseTenant(t.Context(), e); err == nil || !strings.Contains(err.Error(), "the disk is away") {
		t.Errorf("a disk that is away: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	e.Looked = func(int) { cancel() }
	if _, err := c.EraseTenant(ctx, e); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that leaves: %v", err)
	}
	for s.ended.Load() < 3 {
		<-time.After(10 * time.Millisecond)
	}
	for _, tenant := range []string{"", strings.Repeat("t", mostTenant+1)} {
		if _, err := c.EraseTenant(t.Context(), kvcache.ErasureOf(tenant, func(int) {})); err == nil {
			t.Errorf("a name of %d bytes is taken", len(tenant))
		}
	}
}
