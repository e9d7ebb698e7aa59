package bench

import (
	"encoding/json"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// drainBound is how long a worker with 100 live streams may take until it is empty.
const drainBound = 2 * time.Second

// BenchmarkDrainOf100 drains the worker of 100 streams that have seconds to go and measures
// how long it takes until nothing runs there, by what the gateway carries and by what the
// worker itself reports. No stream may break. It fails above drainBound where the machine
// had nothing else to do.
func BenchmarkDrainOf100(b *testing.B) {
	const streams, tokens = 100, 400
	busy, known := hostLoad()
	m := startMesh(b)
	client := fleet.NewClient(m.API)
	var took []time.Duration
	for b.Loop() {
		testmesh.Eventually(b, "all workers are well", time.Minute, func() bool {
			return !slices.ContainsFunc(m.Workers(b), func(w fleet.WorkerView) bool { return w.Status != "HEALTHY" })
		})
		worker := home(b, m)
		s := &splicer{b: b, urls: []string{m.OpenAI}, tokens: tokens}
		var flowing, all sync.WaitGroup
		flowing.Add(streams)
		s.ready = flowing.Done
		for i := range streams {
			all.Go(func() { s.gap(i) })
		}
		flowing.Wait()
		if n := carriedBy(b, m, worker); n < streams {
			b.Fatalf("%s carries %d streams, want %d", worker, n, streams)
		}
		begin := time.Now()
		if err := client.Drain(b.Context(), worker, true); err != nil {
			b.Fatal(err)
		}
		testmesh.Eventually(b, "the worker is empty", time.Minute, func() bool {
			list := m.Workers(b)
			i := slices.IndexFunc(list, func(w fleet.WorkerView) bool { return w.ID == worker })
			return i >= 0 && list[i].Running+list[i].Waiting == 0 && carriedBy(b, m, worker) == 0
		})
		took = append(took, time.Since(begin))
		all.Wait()
		if err := client.Drain(b.Context(), worker, false); err != nil {
			b.Fatal(err)
		}
	}
	slices.Sort(took)
	median := took[len(took)/2]
	b.ReportMetric(ms(median), "empty-ms")
	b.ReportMetric(busy, "load-avg")
	b.ReportMetric(0, "ns/op")
	if idle := known && busy < float64(runtime.NumCPU()); idle && median > drainBound {
		b.Errorf("a worker with %d streams was empty after %v, want at most %v", streams, median, drainBound)
	}
}

// carriedBy counts the streams that the gateway carries at a worker.
func carriedBy(b *testing.B, m *testmesh.Mesh, worker string) int {
	b.Helper()
	resp, err := http.Get(m.Gateway(b) + "/v1/streams")
	if err != nil {
		b.Fatal(err)
	}
	defer resp.Body.Close()
	var list fleet.StreamList
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil {
		b.Fatal(err)
	}
	return len(slices.DeleteFunc(list.Streams, func(v fleet.StreamView) bool { return v.Worker != worker }))
}
