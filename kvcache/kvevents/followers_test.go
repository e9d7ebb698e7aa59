//go:build unix

package kvevents

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// TestFollowers: workers of two publishers are told apart, and what one has told is forgotten when
// it ends, while the other's stays.
func TestFollowers(t *testing.T) {
	one, two := serve(t, PublisherConfig{}, nil), serve(t, PublisherConfig{}, nil)
	f, err := NewFollowers([]Source{
		{Address: "tcp://" + one.at, Replay: "tcp://" + one.replay, Workers: []string{"a", "b"}},
		{Address: "tcp://" + two.at, Replay: "tcp://" + two.replay, Workers: []string{"b", "c"}},
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(f)
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { f.Run(ctx) })
	defer done.Wait()
	defer cancel()
	ids := []int32{1, 2, 3, 4, 5}
	store := func(s *station, blocks int) {
		s.Publish(Event{Kind: BlockStored, Hashes: n(1, 2)[:blocks], IDs: ids[:2*blocks], BlockSize: 2})
	}
	held := func(want map[string]int) {
		t.Helper()
		await(t, "held", func() bool { return maps.Equal(f.Held(Prompt{IDs: ids}), want) })
	}
	store(one, 1)
	held(map[string]int{"a": 2, "b": 2})
	store(two, 2)
	held(map[string]int{"a": 2, "b": 4, "c": 4})
	sum := func(name string) (v float64) {
		all, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range all {
			for _, m := range family.GetMetric() {
				if family.GetName() == "kvmesh_kv_events_"+name {
					v += m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
		return v
	}
	if sum("connected") != 2 || sum("blocks") != 3 || sum("batches_total") < 2 {
		t.Errorf("connected %v, blocks %v, batches %v", sum("connected"), sum("blocks"), sum("batches_total"))
	}
	two.stop()
	held(map[string]int{"a": 2, "b": 2})
	three := serve(t, PublisherConfig{}, two) // another process at the same place
	store(three, 1)
	held(map[string]int{"a": 2, "b": 2, "c": 2})
	if _, err := NewFollowers([]Source{{Address: "nowhere"}}, nil); err == nil {
		t.Error("an address that is none is taken")
	}
}
