package relay

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestGate: so many are in at once, and the others come in by priority, then in the
// order of their arrival.
func TestGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		most := int64(1)
		g := &gate{most: func() int64 { return most }}
		if !g.try() || g.try() {
			t.Fatal("one may enter, a second may not")
		}
		var mu sync.Mutex
		var order []string
		come := func(name string, priority int32, ctx context.Context) {
			go func() {
				if !g.enter(ctx, priority) {
					name = "not " + name
				}
				mu.Lock()
				order = append(order, name)
				mu.Unlock()
			}()
			synctest.Wait()
		}
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		come("low", -1, t.Context())
		come("first", 0, t.Context())
		come("second", 0, t.Context())
		come("short", 5, short)
		come("high", 5, t.Context())
		time.Sleep(2 * time.Second)
		if g.try() {
			t.Error("one entered past those that wait")
		}
		for range 4 {
			g.leave()
			synctest.Wait()
		}
		if want := []string{"not short", "high", "first", "second", "low"}; !slices.Equal(order, want) {
			t.Errorf("order %v, want %v", order, want)
		}
		most = 3
		come("a", 0, t.Context())
		come("b", 0, t.Context())
		if len(order) != 7 || g.in != 3 || len(g.queue) != 0 {
			t.Errorf("%d in after %v, %d wait", g.in, order, len(g.queue))
		}
		g.leave()
		over, end := context.WithCancel(t.Context())
		end()
		// There was room: whoever is let in while its time ends is in, and has to leave.
		if !g.enter(over, 0) || g.in != 3 {
			t.Errorf("%d in", g.in)
		}
	})
}
