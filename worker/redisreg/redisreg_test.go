package redisreg_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
	"github.com/kvmesh/kvmesh/worker/redisreg"
)

// writer is a Writer that runs for a test.
type writer struct {
	t       *testing.T
	stop    func() // ends Run and waits for it
	changed chan struct{}
	drains  chan bool
	metrics *prometheus.Registry

	mu sync.Mutex
	h  fleet.RedisHealth
}

func start(t *testing.T, s *redistest.Server, id string, incarnation uint64) *writer {
	t.Helper()
	return startAt(t, redislink.Config{URL: s.URL()}, id, incarnation)
}

func startAt(t *testing.T, c redislink.Config, id string, incarnation uint64) *writer {
	t.Helper()
	client, err := redislink.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	w := &writer{
		t: t, changed: make(chan struct{}, 1), drains: make(chan bool, 10), metrics: prometheus.NewRegistry(),
		h: fleet.RedisHealth{WorkerID: id, Incarnation: incarnation, Status: fleet.RedisHealthy, Model: "m"},
	}
	r := redisreg.New(redisreg.Config{
		Client: client, Current: w.current, Changed: w.changed, Registry: w.metrics,
		Drain: func(on bool) { w.drains <- on }, Log: slog.New(slog.DiscardHandler),
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	w.stop = sync.OnceFunc(func() {
		cancel()
		<-done
		_ = client.Close() // nothing uses it any more
	})
	t.Cleanup(w.stop)
	return w
}

func (w *writer) current() fleet.RedisHealth {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.h
}

// set changes the status and announces it.
func (w *writer) set(status string) {
	w.mu.Lock()
	w.h.Status = status
	w.mu.Unlock()
	w.changed <- struct{}{}
}

// nudge asks for another write.
func (w *writer) nudge() { w.changed <- struct{}{} }

// eventually waits for what the writer brings about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-deadline:
			t.Fatal(what)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// entry reads what is in Redis of a worker; ok is false when there is none.
func entry(t *testing.T, c *redis.Client, id string) (h fleet.RedisHealth, ttl, statusTTL time.Duration, ok bool) {
	t.Helper()
	raw, err := c.Get(t.Context(), fleet.RedisHealthKey(id)).Bytes()
	if err != nil {
		return h, 0, 0, false
	}
	if err := json.Unmarshal(raw, &h); err != nil {
		t.Fatal(err)
	}
	active, err := c.SIsMember(t.Context(), fleet.RedisActive, id).Result()
	if err != nil || !active {
		t.Errorf("%s is no member of %s: %v", id, fleet.RedisActive, err)
	}
	ttl = c.PTTL(t.Context(), fleet.RedisHealthKey(id)).Val()
	statusTTL = c.PTTL(t.Context(), fleet.RedisStatusKey(id)).Val()
	return h, ttl, statusTTL, true
}

func there(t *testing.T, s *redistest.Server, id string) func() bool {
	return func() bool { _, _, _, ok := entry(t, s.Client, id); return ok }
}

// gone reports whether nothing is left of a worker.
func gone(t *testing.T, s *redistest.Server, id string) bool {
	t.Helper()
	n, err := s.Client.Exists(t.Context(), fleet.RedisHealthKey(id), fleet.RedisStatusKey(id)).Result()
	active, aerr := s.Client.SIsMember(t.Context(), fleet.RedisActive, id).Result()
	if err != nil || aerr != nil {
		t.Fatal(err, aerr)
	}
	return n == 0 && !active
}

func TestLifeOfAnEntry(t *testing.T) {
	s := redistest.Start(t)
	w := start(t, s, "w1", 7)
	eventually(t, "no entry", there(t, s, "w1"))
	h, ttl, _, _ := entry(t, s.Client, "w1")
	if h.Status != "healthy" || h.Model != "m" || ttl <= 13*time.Second || ttl > 15*time.Second {
		t.Errorf("%+v for %v", h, ttl)
	}
	w.set(fleet.RedisDraining)
	eventually(t, "no draining", func() bool { h, _, _, _ := entry(t, s.Client, "w1"); return h.Status == "draining" })
	if status, err := s.Client.Get(t.Context(), "llm:worker:w1:status").Result(); status != "draining" || err != nil {
		t.Errorf("status %q, %v", status, err)
	}
	if _, _, ttl, _ := entry(t, s.Client, "w1"); ttl <= 590*time.Second || ttl > 600*time.Second {
		t.Errorf("status for %v", ttl)
	}
	w.nudge()
	w.set(fleet.RedisHealthy)
	eventually(t, "still draining", func() bool {
		return s.Client.Exists(t.Context(), fleet.RedisStatusKey("w1")).Val() == 0
	})
	w.stop()
	if !gone(t, s, "w1") {
		t.Error("something is left after the end")
	}
	if len(w.drains) != 0 {
		t.Error("its own drain was taken for an operator's")
	}
}

// An operator drains a worker by its status key, and undrains it.
func TestDrainByKey(t *testing.T) {
	s := redistest.Start(t)
	if err := s.Client.Set(t.Context(), fleet.RedisStatusKey("w1"), "draining", time.Minute).Err(); err != nil {
		t.Fatal(err)
	}
	w := start(t, s, "w1", 7)
	eventually(t, "no entry", there(t, s, "w1"))
	if len(w.drains) != 0 || s.Client.Exists(t.Context(), fleet.RedisStatusKey("w1")).Val() != 0 {
		t.Error("a key from before the start drains the worker")
	}
	if err := s.Client.Set(t.Context(), fleet.RedisStatusKey("w1"), "draining", time.Minute).Err(); err != nil {
		t.Fatal(err)
	}
	w.nudge()
	if on := <-w.drains; !on {
		t.Error("undrained")
	}
	w.set(fleet.RedisDraining) // as the worker then says
	eventually(t, "no draining", func() bool { h, _, _, _ := entry(t, s.Client, "w1"); return h.Status == "draining" })
	if _, _, ttl, _ := entry(t, s.Client, "w1"); ttl > time.Minute {
		t.Errorf("the operator's key was prolonged to %v", ttl)
	}
	if err := s.Client.Del(t.Context(), fleet.RedisStatusKey("w1")).Err(); err != nil {
		t.Fatal(err)
	}
	w.nudge()
	if on := <-w.drains; on {
		t.Error("drained")
	}
}

// A process that lost its place neither writes nor removes anything.
func TestSuccessor(t *testing.T) {
	s := redistest.Start(t)
	old := start(t, s, "w1", 7)
	eventually(t, "no entry", there(t, s, "w1"))
	next := start(t, s, "w1", 8)
	eventually(t, "the successor did not take over", func() bool { h, _, _, _ := entry(t, s.Client, "w1"); return h.Incarnation == 8 })
	old.nudge()
	eventually(t, "not counted", func() bool {
		return testutil.ToFloat64(only(t, old.metrics, "refused")) == 1
	})
	old.stop()
	if h, _, _, ok := entry(t, s.Client, "w1"); !ok || h.Incarnation != 8 {
		t.Errorf("%+v, %v", h, ok)
	}
	next.stop()
	if !gone(t, s, "w1") {
		t.Error("something is left after the end")
	}
}

// only collects the one counter of an outcome.
func only(t *testing.T, reg *prometheus.Registry, outcome string) prometheus.Collector {
	t.Helper()
	g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "x"})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if m.GetLabel()[0].GetValue() == outcome {
				g.Set(m.GetCounter().GetValue())
			}
		}
	}
	return g
}

// Redis is killed and comes back with nothing in it: the entry is there again, and
// in between nobody waits.
func TestRedisDies(t *testing.T) {
	s := redistest.Start(t)
	w := start(t, s, "w1", 7)
	eventually(t, "no entry", there(t, s, "w1"))
	s.Kill()
	w.nudge()
	eventually(t, "not counted", func() bool { return testutil.ToFloat64(only(t, w.metrics, "failed")) > 1 })
	s.Start()
	eventually(t, "no entry after the restart", there(t, s, "w1"))

	// It also dies for good: the end does not wait for it.
	s.Kill()
	begin := time.Now()
	w.stop()
	if d := time.Since(begin); d > 10*time.Second {
		t.Errorf("the end took %v", d)
	}
}

// A worker that starts before Redis registers when that is there.
func TestRedisComesLater(t *testing.T) {
	s := redistest.Start(t)
	s.Kill()
	w := start(t, s, "w1", 7)
	eventually(t, "not tried", func() bool { return testutil.ToFloat64(only(t, w.metrics, "failed")) > 0 })
	s.Start()
	eventually(t, "no entry", there(t, s, "w1"))
}

// The password of the URL works, and a wrong one is not in the log.
func TestPassword(t *testing.T) {
	s := redistest.Start(t, "--requirepass", "hunter2")
	w := startAt(t, redislink.Config{URL: "redis://:hunter2@" + s.Addr}, "w1", 7)
	eventually(t, "not written", func() bool { return testutil.ToFloat64(only(t, w.metrics, "written")) > 0 })

	var log strings.Builder
	client, err := redislink.Open(redislink.Config{URL: "redis://:hunter3@" + s.Addr})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	redisreg.New(redisreg.Config{
		Client: client, Current: w.current, Log: slog.New(slog.NewTextHandler(&log, nil)),
	}).Run(ctx)
	if got := log.String(); !strings.Contains(got, "WRONGPASS") || strings.Contains(got, "hunter3") {
		t.Errorf("log: %s", got)
	}
}
