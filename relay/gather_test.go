package relay

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// gatheringPair is a gathering connection and its other side.
func gatheringPair(t *testing.T) (*gathering, net.Conn) {
	t.Helper()
	near, far := net.Pipe()
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	return newGathering(near), far
}

// What many write at once arrives whole, and each one's writes in their order.
func TestGatheringKeepsOrder(t *testing.T) {
	t.Parallel()
	g, far := gatheringPair(t)
	const writers, writes = 20, 200
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for n := range writes {
				if _, err := g.Write([]byte{byte(i), byte(n), 0xff}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	got := make([]byte, 3*writers*writes)
	if _, err := io.ReadFull(far, got); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	next := [writers]byte{}
	for w := range bytes.SplitSeq(bytes.TrimSuffix(got, []byte{0xff}), []byte{0xff}) {
		if len(w) != 2 || w[1] != next[w[0]] {
			t.Fatalf("got the write %v, want number %d of its writer", w, next[w[0]])
		}
		next[w[0]]++
	}
}

// What is written while a write is under way goes out as one.
func TestGatheringGathers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g, far := gatheringPair(t)
		for range 3 {
			write(t, g, "token ")
			synctest.Wait() // the first is being sent, which nobody takes
		}
		buf := make([]byte, 100)
		for _, want := range []string{"token ", "token token "} {
			if n, err := far.Read(buf); string(buf[:n]) != want {
				t.Errorf("read %q, %v; want %q", buf[:n], err, want)
			}
			synctest.Wait()
		}
	})
}

func write(t *testing.T, w io.Writer, s string) {
	t.Helper()
	if _, err := io.WriteString(w, s); err != nil {
		t.Error(err)
	}
}

// A peer that takes nothing holds the writers up, and what is held is bounded.
func TestGatheringHoldsWritersUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g, far := gatheringPair(t)
		chunk := string(make([]byte, mostPending/4))
		written := 0
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range 20 {
				write(t, g, chunk)
				written++
			}
		}()
		synctest.Wait()
		if written > 8 { // four are being sent, four wait
			t.Errorf("%d chunks were taken of a peer that reads none", written)
		}
		if _, err := io.CopyN(io.Discard, far, int64(20*len(chunk))); err != nil {
			t.Fatal(err)
		}
		<-done
	})
}

// An error of sending is that of the writes after it.
func TestGatheringTellsErrors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g, far := gatheringPair(t)
		_ = far.Close()
		write(t, g, "lost")
		synctest.Wait()
		if _, err := g.Write([]byte("more")); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("got %v, want that the pipe is closed", err)
		}
	})
}

// Close sends what was written before, but does not wait for ever for a peer that takes
// nothing.
func TestGatheringClose(t *testing.T) {
	t.Parallel()
	for _, reads := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			g, far := gatheringPair(t)
			write(t, g, "last ")
			synctest.Wait()
			write(t, g, "words")
			got := make(chan string, 1)
			if reads {
				go func() {
					b, _ := io.ReadAll(far)
					got <- string(b)
				}()
			}
			began := time.Now()
			if err := g.Close(); err != nil {
				t.Error(err)
			}
			switch took := time.Since(began); {
			case reads && <-got != "last words":
				t.Error("not all arrived")
			case !reads && took != lastSend:
				t.Errorf("it took %v, want %v", took, lastSend)
			}
			if _, err := g.Write([]byte("more")); err == nil {
				t.Error("a write after Close succeeded")
			}
		})
	}
}
