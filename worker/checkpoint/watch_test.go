package checkpoint

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/worker"
)

// hanging is a store whose calls return when the gate opens, whatever their context says.
type hanging struct {
	Store
	gate  chan struct{}
	asked atomic.Int64 // calls of Longest
}

func (h *hanging) Longest(context.Context, kvcache.Query) (kvcache.Match, error) {
	h.asked.Add(1)
	<-h.gate
	return kvcache.Match{}, nil
}

func (h *hanging) ReadTail(context.Context, kvcache.Space, string, int) ([]kvcache.Tail, error) {
	return nil, nil
}

func (h *hanging) Put(context.Context, *kvcache.Frame) error { <-h.gate; return nil }

func (h *hanging) OpenTail(context.Context, kvcache.TailSpec) (kvcache.TailWriter, error) {
	<-h.gate
	return closeFunc(func() {}), nil
}

// inHang runs f in a bubble with a keeper over a store that hangs.
func inHang(t *testing.T, f func(t *testing.T, h *hanging, k *Keeper)) {
	synctest.Test(t, func(t *testing.T) {
		h := &hanging{gate: make(chan struct{})}
		k, err := New(Config{Store: h, Block: 16, Interval: 4, Registry: prometheus.NewRegistry()})
		if err != nil {
			t.Fatal(err)
		}
		f(t, h, k)
	})
}

// look runs one look-up and returns how long it took.
func look(ctx context.Context, k *Keeper, within time.Duration) time.Duration {
	begin := time.Now()
	k.Session(worker.Model{Fingerprint: "m"}, worker.KVStream{ID: "s", Within: within}).Restore(ctx, make([]int32, 40), time.Hour)
	return time.Since(begin)
}

// TestHangingLookUps: no look-up takes longer than its time, a store that hangs is soon not
// asked any more, and is again when it answers.
func TestHangingLookUps(t *testing.T) {
	inHang(t, func(t *testing.T, h *hanging, k *Keeper) {
		for i := range 1000 {
			if took := look(t.Context(), k, 100*time.Millisecond); took > 100*time.Millisecond {
				t.Fatalf("look-up %d took %v", i, took)
			}
			<-time.After(100 * time.Millisecond)
		}
		if n := h.asked.Load(); n != mostLeft {
			t.Errorf("the store was asked %d times, want %d", n, mostLeft)
		}
		results := k.metrics.restores
		if late, hung := testutil.ToFloat64(results.WithLabelValues("late")), testutil.ToFloat64(results.WithLabelValues("hung")); late != mostLeft || hung != 1000-mostLeft || testutil.ToFloat64(k.metrics.left) != mostLeft {
			t.Errorf("%v late and %v not asked", late, hung)
		}
		if why := k.Degraded(); !strings.Contains(why, "has not answered for 1m") {
			t.Errorf("degraded: %q", why)
		}
		close(h.gate)
		synctest.Wait()
		<-time.After(probeEvery)
		for range 2 {
			if look(t.Context(), k, time.Second) != 0 || k.Degraded() != "" {
				t.Errorf("a store that answers again: %q", k.Degraded())
			}
		}
		if n := testutil.ToFloat64(results.WithLabelValues("miss")); n != 2 {
			t.Errorf("%v look-ups of 2 were answered", n)
		}
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestClientLeavesAHangingLookUp: a request whose client is gone is over.
func TestClientLeavesAHangingLookUp(t *testing.T) {
	inHang(t, func(t *testing.T, h *hanging, k *Keeper) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if took := look(ctx, k, time.Hour); took != time.Second {
			t.Errorf("it took %v", took)
		}
		close(h.gate)
		_ = k.Close() // nothing was queued
	})
}

// TestHangingWriter: copies that nobody would store are not made, and a keeper ends
// although its store hangs.
func TestHangingWriter(t *testing.T) {
	inHang(t, func(t *testing.T, h *hanging, k *Keeper) {
		s := k.Session(worker.Model{Fingerprint: "m"}, stream(1))
		copies, tokens := 0, make([]int32, 4000)
		step := func(held int) {
			s.Step(tokens, held, false, func(dst []byte, from, to int) ([]byte, error) {
				copies++
				return append(dst, make([]byte, to-from)...), nil
			})
			synctest.Wait()
		}
		step(20)
		if copies == 0 || k.Degraded() != "" {
			t.Fatalf("%d copies at first, degraded: %q", copies, k.Degraded())
		}
		<-time.After(3 * time.Second)
		made := copies
		for held := 21; held < 200; held++ {
			step(held)
		}
		if copies != made || k.Degraded() == "" || testutil.ToFloat64(k.metrics.skipped.WithLabelValues("block")) == 0 {
			t.Errorf("%d copies more, degraded: %q", copies-made, k.Degraded())
		}
		begin := time.Now()
		if err := k.Close(); err == nil || time.Since(begin) > 2*closeTime {
			t.Errorf("closed after %v: %v", time.Since(begin), err)
		}
		close(h.gate)
		if err := k.Close(); err != nil {
			t.Errorf("closed when the store answers: %v", err)
		}
	})
}

// TestWatch: a call that hangs while later ones return, as a single bad file makes, is not
// the store's; one of the writer is.
func TestWatch(t *testing.T) {
	at := func(s float64) time.Time { return time.Unix(0, 0).Add(time.Duration(s * float64(time.Second))) }
	w := newWatch(2 * time.Second)
	bad, _ := w.begin(at(0), false)
	w.leave(bad)
	if !w.admits(at(1)) || w.admits(at(3)) != true || w.admits(at(4)) {
		t.Error("after the call hangs, one probe is admitted and no second one")
	}
	_, end := w.begin(at(3), false)
	end(at(3.1))
	if !w.admits(at(4)) || w.degraded(at(4)) != "" {
		t.Errorf("a call after it has returned: %q", w.degraded(at(4)))
	}
	_, late := w.begin(at(5), false)
	late(at(9)) // and says nothing
	_, end = w.begin(at(10), true)
	if w.degraded(at(11)) != "" || w.degraded(at(12)) == "" || w.writes(at(12)) {
		t.Errorf("a writer that hangs: %q", w.degraded(at(12)))
	}
	end(at(13))
	if w.degraded(at(13)) != "" || !w.writes(at(13)) {
		t.Error("it returned")
	}
}
