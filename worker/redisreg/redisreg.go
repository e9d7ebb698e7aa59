// Package redisreg keeps a worker's registration in Redis: the keys that fleet
// describes, written every fleet.Heartbeat and at every change, taken back at the
// end.
//
// Redis is never waited for: while it is away the worker serves on, and the writer
// tries again with growing pauses. When it is back, also with nothing in it, the
// registration is there within the last pause.
//
// # Who owns the keys
//
// An entry carries the incarnation of its writer. A process that finds a later one
// under its id is not the worker any more, and neither writes nor removes anything,
// so a process that wakes from a long pause cannot overwrite its successor.
//
// # Draining by key
//
// The status key says draining while the worker drains. An operator may set it
// instead: the worker then drains until the key expires or is removed. A start
// begins without: a key that a killed process left must not drain its successor.
package redisreg

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// Pauses between two tries while Redis does not answer.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = 2 * time.Second
)

// goodbye bounds the removal of the entry at the end.
const goodbye = time.Second

// ErrReplaced says that a later start of the worker has registered.
var ErrReplaced = errors.New("a later start of the worker is in Redis")

// Config says what is registered. All fields but Registry are required.
type Config struct {
	Client *redis.Client // stays the caller's, who closes it after Run
	// Current returns what to write now. Its WorkerID and Incarnation do not change.
	Current func() fleet.RedisHealth
	// Changed gets an element when Current should be written at once.
	Changed <-chan struct{}
	// Drain is told when an operator sets or removes the status key.
	Drain    func(on bool)
	Log      *slog.Logger
	Registry prometheus.Registerer // takes the metrics, nil = nobody does
}

// Writer writes one worker's keys. Make it with New and call Run once.
type Writer struct {
	cfg     Config
	begun   bool // this process has written its entry
	written bool // the status key is ours
	asked   bool // the status key is an operator's

	mu     sync.Mutex // guards the counters, which scrapes read
	counts map[string]uint64
}

// New makes a Writer; nothing is written before Run.
func New(cfg Config) *Writer {
	w := &Writer{cfg: cfg, counts: map[string]uint64{}}
	if cfg.Registry != nil {
		cfg.Registry.MustRegister(w)
	}
	return w
}

// Run writes until ctx ends, then removes the entry, for which it takes a second at
// most.
func (w *Writer) Run(ctx context.Context) {
	w.keep(ctx)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), goodbye)
	defer cancel()
	if err := w.remove(last); err != nil {
		w.cfg.Log.Info("could not sign off in Redis; the entry will expire", "err", err)
	}
}

// keep writes again and again until ctx ends.
func (w *Writer) keep(ctx context.Context) {
	retry, wrong := firstRetry, ""
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.cfg.Changed:
		case <-timer.C:
		}
		err := w.write(ctx)
		wait := fleet.Heartbeat
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			w.count("written")
			if wrong != "" {
				w.cfg.Log.Info("registered in Redis again")
			}
			retry, wrong = firstRetry, ""
		default:
			outcome := "failed"
			if errors.Is(err, ErrReplaced) {
				outcome = "refused" // it is no fault of Redis, so there is no hurry
			} else {
				wait, retry = retry, min(2*retry, lastRetry)
			}
			w.count(outcome)
			if wrong != err.Error() {
				wrong = err.Error()
				w.cfg.Log.Warn("not registered in Redis", "err", err)
			}
		}
		timer.Reset(wait)
	}
}

// write stores the entry, unless a later start of the worker is there.
func (w *Writer) write(ctx context.Context) error {
	h := w.cfg.Current()
	raw, err := json.Marshal(h)
	if err != nil {
		return fmt.Errorf("encode the registration: %w", err)
	}
	health, status := fleet.RedisHealthKey(h.WorkerID), fleet.RedisStatusKey(h.WorkerID)
	var mark string // what the status key said before
	err = w.cfg.Client.Watch(ctx, func(tx *redis.Tx) error {
		if err := w.mine(ctx, tx, h); err != nil {
			return err
		}
		mark, err = tx.Get(ctx, status).Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
		_, err := tx.TxPipelined(ctx, func(p redis.Pipeliner) error {
			p.SAdd(ctx, fleet.RedisActive, h.WorkerID)
			p.Set(ctx, health, raw, fleet.TTL)
			switch {
			case h.Status == fleet.RedisDraining && !w.asked:
				p.Set(ctx, status, fleet.RedisDraining, fleet.RedisStatusTTL)
			case h.Status != fleet.RedisDraining && (w.written || !w.begun):
				p.Del(ctx, status)
			}
			return nil
		})
		return err
	}, health)
	if errors.Is(err, redis.TxFailedErr) {
		return fmt.Errorf("write the registration: %w", errors.New("somebody else wrote it at the same moment"))
	}
	if err != nil {
		return fmt.Errorf("write the registration: %w", err)
	}
	if w.begun {
		w.obey(h, mark)
	}
	w.begun, w.written = true, h.Status == fleet.RedisDraining && !w.asked
	return nil
}

// obey follows a status key that an operator set or removed.
func (w *Writer) obey(h fleet.RedisHealth, mark string) {
	draining := h.Status == fleet.RedisDraining
	switch {
	case mark == fleet.RedisDraining && !draining && !w.written && !w.asked:
		w.asked = true
		w.cfg.Log.Info("drain asked for in Redis")
		w.cfg.Drain(true)
	case mark != fleet.RedisDraining && w.asked:
		w.asked = false
		w.cfg.Log.Info("drain in Redis is over")
		w.cfg.Drain(false)
	}
}

// mine reports ErrReplaced when the entry is of a later start.
func (w *Writer) mine(ctx context.Context, tx *redis.Tx, h fleet.RedisHealth) error {
	raw, err := tx.Get(ctx, fleet.RedisHealthKey(h.WorkerID)).Bytes()
	if errors.Is(err, redis.Nil) {
		return nil
	}
	if err != nil {
		return err
	}
	// What cannot be read is nobody's.
	if there, err := fleet.ParseRedisHealth(h.WorkerID, raw); err == nil && there.Incarnation > h.Incarnation {
		return ErrReplaced
	}
	return nil
}

// remove takes the entry back, unless it is of a later start.
func (w *Writer) remove(ctx context.Context) error {
	h := w.cfg.Current()
	health := fleet.RedisHealthKey(h.WorkerID)
	err := w.cfg.Client.Watch(ctx, func(tx *redis.Tx) error {
		if err := w.mine(ctx, tx, h); err != nil {
			return err
		}
		_, err := tx.TxPipelined(ctx, func(p redis.Pipeliner) error {
			p.SRem(ctx, fleet.RedisActive, h.WorkerID)
			p.Del(ctx, health, fleet.RedisStatusKey(h.WorkerID))
			return nil
		})
		return err
	}, health)
	if errors.Is(err, ErrReplaced) {
		return nil
	}
	return err
}

// count counts one try.
func (w *Writer) count(outcome string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.counts[outcome]++
}

// desc is built anew each time, for there are no package variables.
func (w *Writer) desc() *prometheus.Desc {
	return prometheus.NewDesc("kvmesh_worker_redis_writes_total", "Registrations in Redis: written, failed, or refused because a later start of the worker is there.", []string{"outcome"}, nil)
}

// Describe implements prometheus.Collector.
func (w *Writer) Describe(out chan<- *prometheus.Desc) { out <- w.desc() }

// Collect implements prometheus.Collector.
func (w *Writer) Collect(out chan<- prometheus.Metric) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, outcome := range []string{"written", "failed", "refused"} {
		out <- prometheus.MustNewConstMetric(w.desc(), prometheus.CounterValue, float64(w.counts[outcome]), outcome)
	}
}
