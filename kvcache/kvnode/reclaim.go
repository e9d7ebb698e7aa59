//go:build unix

package kvnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

const (
	// farTime bounds one try at the tiers below the memory.
	farTime = 30 * time.Second
	// mostReclaimPause is the longest time between two tries where a tier fails.
	mostReclaimPause = 5 * time.Minute
)

// run gives back the room of old versions until ctx ends: in memory what no stream needs, and
// in the tiers below all of it when there is nothing left in memory. Where that fails it is
// tried again, after a restart too. Beside it what is not kept yet is, whichever tier hangs.
func (e *Epochs) run(ctx context.Context, near *arena.Store, below *stack.Stack) {
	var both sync.WaitGroup
	both.Go(func() {
		e.rounds(ctx, e.kick, "old versions of models are refused, and still take room", func() error { return e.reclaim(ctx, near, below) })
	})
	both.Go(func() {
		e.rounds(ctx, e.news, "what is known of models is not kept everywhere yet", func() error { return e.catchUp(ctx) })
	})
	select {
	case <-ctx.Done():
	case c := <-e.copies:
		e.merge(c)
	}
	both.Wait()
}

// rounds does something again and again until ctx ends, at once when it is kicked, and seldom
// while it fails.
func (e *Epochs) rounds(ctx context.Context, kick <-chan struct{}, failed string, do func() error) {
	pause := e.cfg.Every
	for ctx.Err() == nil {
		err := do()
		if err == nil {
			pause = e.cfg.Every
		} else if ctx.Err() == nil {
			pause = min(2*pause, mostReclaimPause)
			e.cfg.Log.Warn(failed, "err", err, "again_in", pause)
		}
		wait := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-kick:
		case <-wait.C:
		}
		wait.Stop()
	}
}

// reclaim does one round over all old versions. The tiers below come last, when memory has
// nothing of a version any more, because streams of it that go on elsewhere may still need
// what is only there, and because what memory has would be written to them again. Between the
// last look at memory and the note that all is reclaimed an old worker may put one more block:
// its next label says that the version takes room again.
func (e *Epochs) reclaim(ctx context.Context, near *arena.Store, below *stack.Stack) error {
	var errs []error
	for _, f := range e.waiting() {
		l, err := near.Reclaim(ctx, f, time.Now())
		e.metrics.blocks.Add(float64(l.Freed))
		e.metrics.bytes.Add(float64(l.FreedBytes))
		e.note(f, l.Bytes)
		if err != nil {
			return err
		}
		if l.Blocks > 0 || l.Tails > 0 {
			continue
		}
		if below != nil {
			far, cancel := context.WithTimeout(ctx, farTime)
			err = below.Reclaim(far, f)
			cancel()
		}
		if err == nil {
			err = e.reclaimed(f)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// waiting lists the old versions that still take room.
func (e *Epochs) waiting() (list []kvcache.Fingerprint) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.listLocked() {
		for _, o := range r.Old {
			if !o.Reclaimed {
				list = append(list, o.Fingerprint)
			}
		}
	}
	return list
}

// note remembers what is left in memory of an old version.
func (e *Epochs) note(f kvcache.Fingerprint, bytes int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if delete(e.left, f); bytes > 0 {
		e.left[f] = bytes
	}
}

// reclaimed notes that an old version takes no room any more.
func (e *Epochs) reclaimed(f kvcache.Fingerprint) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, known := e.standing[f]
	if !known || !s.old {
		return nil // it was taken into use again
	}
	e.setLocked(e.records[s.key].WithReclaimed(f), time.Now())
	e.behind = true
	e.wake()
	return e.saveLocked()
}

// epochMetrics are the metrics kvmesh_kv_epoch*.
type epochMetrics struct {
	refused       prometheus.Counter
	blocks, bytes prometheus.Counter
}

func newEpochMetrics(registry prometheus.Registerer, e *Epochs) *epochMetrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "kvmesh_kv_epoch_" + name, Help: help})
	}
	m := &epochMetrics{
		refused: counter("refused_total", "Look-ups of new streams that were answered as if nothing were there, because they were of an old version of a model."),
		blocks:  counter("reclaimed_blocks_total", "Blocks of old versions that were removed from memory."),
		bytes:   counter("reclaimed_bytes_total", "Bytes of the blocks of old versions that were removed from memory."),
	}
	if registry != nil {
		registry.MustRegister(m.refused, m.blocks, m.bytes, epochCollector{e})
	}
	return m
}

// epochCollector shows how models stand, at each scrape.
type epochCollector struct{ e *Epochs }

// Describe implements prometheus.Collector.
func (c epochCollector) Describe(to chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, to) }

// Collect implements prometheus.Collector.
func (c epochCollector) Collect(to chan<- prometheus.Metric) {
	gauge := func(name, help string, value float64, labels prometheus.Labels) {
		to <- prometheus.MustNewConstMetric(prometheus.NewDesc("kvmesh_kv_epoch"+name, help, nil, labels), prometheus.GaugeValue, value)
	}
	var bytes, versions float64
	for _, s := range c.e.state() {
		bytes, versions = bytes+float64(s.LeftBytes), versions+float64(s.LeftVersions)
		gauge("", "Number of the epoch of a model's weights.", float64(s.Number), prometheus.Labels{"model": s.Model, "kind": s.Key().Kind})
	}
	gauge("_left_bytes", "Bytes in memory of old versions, as it was last seen.", bytes, nil)
	gauge("_left_versions", "Old versions whose room has not been given back in all tiers.", versions, nil)
}

// errNoEpochs says that a node keeps no epochs.
var errNoEpochs = errors.New("this node keeps no epochs")

// announced is what a client asks for.
type announced struct {
	Model   string `json:"model"`
	Weights string `json:"weights"`
}

// epoch does the operations of epochs.
func (s *Server) epoch(what op, body []byte) ([]byte, error) {
	if s.epochs == nil {
		return nil, errNoEpochs
	}
	if what == opEpochs {
		return json.Marshal(s.epochs.state())
	}
	var a announced
	if err := json.Unmarshal(body, &a); err != nil {
		return nil, errBad
	}
	e, err := s.epochs.Set(a.Model, a.Weights)
	if err != nil {
		return nil, err
	}
	return json.Marshal(e)
}

// Epochs lists which weights are those of the node's models, and what is left of others.
func (c *Client) Epochs(ctx context.Context) (list []EpochState, err error) {
	err = c.ask(ctx, opEpochs, nil, func(_ *conn, body cursor) error { return json.Unmarshal(body.Rest(), &list) })
	return list, err
}

// SetEpoch begins an epoch of a model with weights, KIND:HASH, which it may have had before.
func (c *Client) SetEpoch(ctx context.Context, model, weights string) (e kvcache.Epoch, err error) {
	text, err := json.Marshal(announced{model, weights})
	if err != nil {
		return e, fmt.Errorf("set the epoch of a model: %w", err)
	}
	err = c.ask(ctx, opSetEpoch, func(b []byte) []byte { return append(b, text...) }, func(_ *conn, body cursor) error {
		return json.Unmarshal(body.Rest(), &e)
	})
	return e, err
}
