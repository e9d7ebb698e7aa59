package e2e

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

// All workers of one zone and the KV node die at once under load: every answer goes on
// in the other zone, and nothing is lost or repeated.
func TestZoneKilled(t *testing.T) {
	const streams, tokens = 60, 120
	m := testmesh.StartPolicy(t, bin, `apiVersion: kvmesh.io/v1alpha1
kind: Mesh
metadata: {name: zones}
spec:
  kv: {node: true, limit: 64Mi}
---
`+strings.Replace(quick, "[{id: worker-1}, {id: worker-2}, {id: worker-3}]",
		"[{id: a1, zone: a}, {id: a2, zone: a}, {id: b1, zone: b}, {id: b2, zone: b}]", 1))
	testmesh.Eventually(t, "four workers to be healthy", time.Minute, func() bool {
		n := 0
		for _, w := range m.Workers(t) {
			if w.Status == "HEALTHY" {
				n++
			}
		}
		return n == 4
	})
	question := func(i int) ask { return simAsk(i, tokens) }
	want := failover{t, m}.undisturbed(streams, question)
	var flowing sync.WaitGroup
	flowing.Add(streams)
	killed := make(chan struct{})
	go func() {
		defer close(killed)
		flowing.Wait()
		var down sync.WaitGroup
		for _, part := range []string{"a1", "a2", "kvnode"} {
			down.Go(func() { holdDown(t, m, part, 2*time.Second) })
		}
		down.Wait()
	}()
	got := make([]*heard, streams)
	each(streams, func(i int) {
		var err error
		if got[i], err = streamed(t.Context(), m, question(i), func(h *heard) {
			if h.events == 20 {
				flowing.Done()
			}
		}); err != nil {
			t.Errorf("answer %d: %v", i, err)
		}
	})
	<-killed
	if t.Failed() {
		t.FailNow()
	}
	hit := 0
	for i := range got {
		if why := got[i].same(want[i]); why != "" {
			t.Errorf("answer %d, begun by %s: %s", i, got[i].worker, why)
		}
		if strings.HasPrefix(got[i].worker, "a") {
			hit++
		}
	}
	if moved := relayMetric(t, m, "kvmesh_relay_moves_total"); hit < streams/4 || int(moved) < hit {
		t.Errorf("%d answers were the zone's, %.0f moved", hit, moved)
	}
}
