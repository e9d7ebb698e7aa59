package kvevents

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Source is one publisher, and whose blocks it tells of.
type Source struct {
	// Address, Replay and Topic are a SubscriberConfig's. No two sources have one Address.
	Address, Replay, Topic string
	// Workers are the ids of those that find there what it tells of.
	Workers []string
}

// Followers follow several publishers, which may be away, come back, or tell nonsense: each has a
// connection and a share of the memory of its own. It is safe for concurrent use. It is a
// prometheus.Collector of the metrics kvmesh_kv_events_*, with the publisher's address as label.
type Followers struct {
	index   *Index
	subs    []*Subscriber
	sources []Source
}

// NewFollowers makes followers, which do nothing before Run. Log gets what happens to connections.
func NewFollowers(sources []Source, log *slog.Logger) (*Followers, error) {
	f := &Followers{index: NewIndex(0), sources: sources}
	for _, s := range sources {
		sub, err := NewSubscriber(SubscriberConfig{
			Address: s.Address, Replay: s.Replay, Topic: s.Topic, Log: log,
			OnBatch: func(b Batch) { f.index.Apply(s.Address, b) },
			OnReset: func() { f.index.Forget(s.Address) },
		})
		if err != nil {
			return nil, fmt.Errorf("follow %s: %w", s.Address, err)
		}
		f.subs = append(f.subs, sub)
	}
	return f, nil
}

// Run follows them until ctx ends.
func (f *Followers) Run(ctx context.Context) {
	var all sync.WaitGroup
	for _, s := range f.subs {
		all.Go(func() { s.Run(ctx) })
	}
	all.Wait()
}

// Held tells how many tokens of a prompt each worker finds from its beginning on, by the worker's
// id. Those that find none are not in it.
func (f *Followers) Held(p Prompt) map[string]int {
	held := f.index.Held(p)
	if len(held) == 0 {
		return nil
	}
	workers := map[string]int{}
	for _, s := range f.sources {
		for _, id := range s.Workers {
			if n := held[s.Address]; n > 0 {
				workers[id] = max(workers[id], n)
			}
		}
	}
	return workers
}

// followed is one metric of a publisher that is followed.
type followed struct {
	name, help string
	kind       prometheus.ValueType
	value      func(SubscriberStats, IndexStats) uint64
}

// followedMetrics are all of them.
func followedMetrics() []followed {
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	return []followed{
		{"connected", "Whether the publisher is there: 1 or 0.", gauge, func(s SubscriberStats, _ IndexStats) uint64 {
			if s.Connected {
				return 1
			}
			return 0
		}},
		{"batches_total", "Batches of events that were taken in.", counter, func(s SubscriberStats, _ IndexStats) uint64 { return s.Batches }},
		{"gaps_total", "Times that batches were missing.", counter, func(s SubscriberStats, _ IndexStats) uint64 { return s.Gaps }},
		{"resets_total", "Times that all was forgotten, at the beginning and end of each connection, too.", counter, func(s SubscriberStats, _ IndexStats) uint64 { return s.Resets }},
		{"wrong_total", "Messages that could not be read.", counter, func(s SubscriberStats, _ IndexStats) uint64 { return s.Wrong }},
		{"blocks", "Blocks that are known.", gauge, func(_ SubscriberStats, x IndexStats) uint64 { return uint64(x.Blocks) }},
		{"full", "Blocks, since the last reset, for which there was no room.", gauge, func(_ SubscriberStats, x IndexStats) uint64 { return x.Full }},
		{"nameless", "Blocks, since the last reset, whose tokens were not told.", gauge, func(_ SubscriberStats, x IndexStats) uint64 { return x.Nameless }},
		{"orphans", "Blocks, since the last reset, that follow one that is not known.", gauge, func(_ SubscriberStats, x IndexStats) uint64 { return x.Orphans }},
	}
}

func (m followed) desc() *prometheus.Desc {
	return prometheus.NewDesc("kvmesh_kv_events_"+m.name, m.help, []string{"address"}, nil)
}

// Describe implements prometheus.Collector.
func (f *Followers) Describe(out chan<- *prometheus.Desc) {
	for _, m := range followedMetrics() {
		out <- m.desc()
	}
}

// Collect implements prometheus.Collector.
func (f *Followers) Collect(out chan<- prometheus.Metric) {
	for i, sub := range f.subs {
		st, x := sub.Stats(), f.index.Stats(f.sources[i].Address)
		for _, m := range followedMetrics() {
			out <- prometheus.MustNewConstMetric(m.desc(), m.kind, float64(m.value(st, x)), f.sources[i].Address)
		}
	}
}
