package xds

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/xds/registry"
)

// paced is a control plane without network: only its state, server and loops.
func paced(t *testing.T, ctx context.Context) *ControlPlane {
	t.Helper()
	set := policies(t, "a")
	r, err := envoy.Build(envoy.Config{
		Policy: set, Edge: "127.0.0.1:1", Egress: "/e", Relay: "/r", ExtProc: "/x",
	})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	cp := &ControlPlane{log: log, state: newState(), metrics: newMetrics(), pools: map[string]context.CancelFunc{}, run: ctx}
	cp.server = newServer(log, cp.metrics)
	cp.state.setPools(set)
	cp.server.expect(r.Clusters)
	return cp
}

// young is a member by the bubble's clock.
func young(id string) registry.Member {
	m := member(id, "a", 1)
	m.ReadySince, m.Heard = time.Time{}, time.Now()
	return m
}

// The first change of a burst is published at once, the rest together after the
// gap; silence is noticed without anybody reporting it.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cp := paced(t, ctx)
		cp.startPools()
		pushes := func() float64 { return testutil.ToFloat64(cp.metrics.pushes.WithLabelValues("endpoints")) }
		cp.state.put(young("w"), origin{})
		synctest.Wait()
		<-time.After(time.Second)
		synctest.Wait()

		before := pushes()
		loaded(cp.state, "w", 1, time.Now(), 0.5)
		synctest.Wait()
		if got := pushes() - before; got != 1 {
			t.Errorf("%v pushes at once for the first change, want 1", got)
		}
		for i := range 9 { // nine changes within 9 ms
			loaded(cp.state, "w", 1, time.Now(), 1+float64(i))
			<-time.After(time.Millisecond)
		}
		<-time.After(20 * time.Millisecond)
		synctest.Wait()
		if got := pushes() - before; got != 2 {
			t.Errorf("%v pushes for ten changes, want 2", got)
		}
		if v := cp.state.views()[0]; v.Weight != 11 { // 100/9
			t.Errorf("weight %d, want that of the last change", v.Weight)
		}

		<-time.After(3500 * time.Millisecond)
		synctest.Wait()
		if v := cp.state.workers["w"].raw; v.Status != health.Timeout {
			t.Errorf("after 3.5 s of silence: %+v", v)
		}
		cancel()
		cp.loops.Wait()
	})
}

// With many workers the gap grows, because every push costs every Envoy the
// whole pool.
func TestPaceOfLargePools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cp := paced(t, ctx)
		const n = 1000
		for i := range n {
			cp.state.put(young(fmt.Sprint("w", i)), origin{})
		}
		cp.startPools()
		synctest.Wait()
		before := testutil.ToFloat64(cp.metrics.pushes.WithLabelValues("endpoints"))
		ids := cp.state.views()
		for i := range n { // one change per millisecond for a second
			loaded(cp.state, ids[i].ID, 1, time.Now(), 0.3)
			<-time.After(time.Millisecond)
		}
		synctest.Wait()
		pushes := testutil.ToFloat64(cp.metrics.pushes.WithLabelValues("endpoints")) - before
		if most := float64(time.Second / (minGap + n*perWorker)); pushes < most/2 || pushes > most+time.Second.Seconds()*float64(time.Second/loadEvery) {
			t.Errorf("%v pushes in a second, want about %v", pushes, most)
		}
		cancel()
		cp.loops.Wait()
	})
}
