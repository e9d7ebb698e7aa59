package picker

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/policy"
)

const policyYAML = `
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: big}
spec: {engine: sim, model: big-1}
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: small}
spec: {engine: sim, model: small-1}
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  models: [chat]
  tiers:
  - {pool: big, maxTokens: 100}
  - {pool: small, model: other-name}
`

var t0 = time.Unix(1_700_000_000, 0)

func newPicker(t testing.TB, cfg Config) *Picker {
	t.Helper()
	if cfg.Policy == nil {
		set, err := policy.Parse(policy.File{Name: "test.yaml", Data: []byte(policyYAML)})
		if err != nil {
			t.Fatal(err)
		}
		cfg.Policy = set
	}
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// worker makes a healthy worker of pool big with weight 100.
func testWorker(id, zone string, running, most uint32) *fleetpb.Worker {
	return &fleetpb.Worker{
		Id: id, Address: "10.0.0." + id[1:] + ":8000", Pool: "big", Zone: zone, Incarnation: 1,
		Status: int32(health.Healthy), Weight: 100,
		Load: &fleetpb.Load{Running: running, MaxRunning: most},
	}
}

// with changes a worker in place and returns it.
func with(w *fleetpb.Worker, change func(*fleetpb.Worker)) *fleetpb.Worker {
	change(w)
	return w
}

func status(s health.Status) func(*fleetpb.Worker) {
	return func(w *fleetpb.Worker) { w.Status = int32(s) }
}

func ids(d Decision) string {
	var out []string
	for _, c := range d.Candidates {
		out = append(out, c.ID)
	}
	return strings.Join(out, " ")
}

func TestOrder(t *testing.T) {
	for _, tc := range []struct {
		name  string
		fleet []*fleetpb.Worker
		req   Request
		want  string
	}{
		{"least loaded first", []*fleetpb.Worker{
			testWorker("w1", "", 3, 10), testWorker("w2", "", 1, 10), testWorker("w3", "", 2, 10),
		}, Request{}, "w2 w3 w1"},
		{"own zone first while it has room", []*fleetpb.Worker{
			testWorker("w1", "b", 0, 10), testWorker("w2", "a", 7, 10), testWorker("w3", "b", 1, 10),
		}, Request{}, "w2 w1 w3"},
		{"own zone is one of many without room", []*fleetpb.Worker{
			testWorker("w1", "b", 1, 10), testWorker("w2", "a", 8, 10), testWorker("w3", "b", 2, 10),
		}, Request{}, "w1 w3 w2"},
		{"reported utilization counts as room", []*fleetpb.Worker{
			with(testWorker("w1", "a", 0, 10), func(w *fleetpb.Worker) { w.Load.Utilization = 0.9 }), testWorker("w2", "b", 5, 10),
		}, Request{}, "w1 w2"},
		{"capacity scales load", []*fleetpb.Worker{
			testWorker("w1", "", 4, 10), testWorker("w2", "", 8, 100),
		}, Request{}, "w2 w1"},
		{"weight scales load", []*fleetpb.Worker{
			with(testWorker("w1", "", 1, 10), func(w *fleetpb.Worker) { w.Weight = 10 }), testWorker("w2", "", 8, 10),
		}, Request{}, "w2 w1"},
		{"unknown capacity is the mean", []*fleetpb.Worker{
			testWorker("w1", "", 9, 10), with(testWorker("w2", "", 0, 0), func(w *fleetpb.Worker) { w.Load = nil }),
		}, Request{}, "w2 w1"},
		{"waiting counts", []*fleetpb.Worker{
			with(testWorker("w1", "", 1, 10), func(w *fleetpb.Worker) { w.Load.Waiting = 5 }), testWorker("w2", "", 2, 10),
		}, Request{}, "w2 w1"},
		{"degraded comes last", []*fleetpb.Worker{
			with(testWorker("w1", "a", 0, 10), status(health.Degraded)), testWorker("w2", "b", 9, 10),
		}, Request{}, "w2 w1"},
		{"only those that take requests", []*fleetpb.Worker{
			with(testWorker("w1", "", 0, 10), status(health.Draining)), with(testWorker("w2", "", 0, 10), status(health.Unhealthy)),
			with(testWorker("w3", "", 0, 10), status(health.Timeout)), with(testWorker("w4", "", 0, 10), status(health.Unknown)),
			testWorker("w5", "", 9, 10),
		}, Request{}, "w5"},
		{"excluded", []*fleetpb.Worker{
			testWorker("w1", "", 0, 10), testWorker("w2", "", 1, 10), testWorker("w3", "", 2, 10),
		}, Request{Exclude: []string{"w2", "w1"}}, "w3"},
		{"not a number", []*fleetpb.Worker{
			with(testWorker("w1", "", 1, 10), func(w *fleetpb.Worker) { w.Load.Utilization = math.NaN() }), testWorker("w2", "", 0, 10),
		}, Request{}, "w2 w1"},
		{"two at one address: the younger", []*fleetpb.Worker{
			testWorker("w1", "", 0, 10),
			with(testWorker("w2", "", 5, 10), func(w *fleetpb.Worker) { w.Address, w.Incarnation = "10.0.0.1:8000", 2 }),
		}, Request{}, "w2"},
		{"at most five", []*fleetpb.Worker{
			testWorker("w1", "", 6, 10), testWorker("w2", "", 5, 10), testWorker("w3", "", 4, 10), testWorker("w4", "", 3, 10),
			testWorker("w5", "", 2, 10), testWorker("w6", "", 1, 10), testWorker("w7", "", 0, 10),
		}, Request{}, "w7 w6 w5 w4 w3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPicker(t, Config{Zone: "a"})
			p.Update(tc.fleet)
			tc.req.Model = "chat"
			d := p.Pick(t0, tc.req)
			if got := ids(d); got != tc.want {
				t.Errorf("order %q, want %q\n%+v", got, tc.want, d.Candidates)
			}
		})
	}
}

func TestTiers(t *testing.T) {
	big := testWorker("w1", "", 0, 10)
	small := with(testWorker("w2", "", 0, 10), func(w *fleetpb.Worker) { w.Pool = "small" })
	dead := with(testWorker("w1", "", 0, 10), status(health.Unhealthy))
	type outcome struct {
		Tier        int
		Pool, Model string
		MaxTokens   int
		IDs         string
		Why         bool
	}
	for _, tc := range []struct {
		name  string
		model string
		fleet []*fleetpb.Worker
		want  outcome
	}{
		{"first tier", "chat", []*fleetpb.Worker{big, small}, outcome{0, "big", "big-1", 100, "w1", false}},
		{"second tier", "chat", []*fleetpb.Worker{dead, small}, outcome{1, "small", "other-name", 0, "w2", false}},
		{"none", "chat", []*fleetpb.Worker{dead}, outcome{0, "big", "big-1", 100, "", true}},
		{"empty fleet", "chat", nil, outcome{0, "big", "big-1", 100, "", true}},
		{"no route", "nope", []*fleetpb.Worker{big}, outcome{Why: true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPicker(t, Config{})
			p.Update(tc.fleet)
			d := p.Pick(t0, Request{Model: tc.model})
			if diff := cmp.Diff(tc.want, outcome{d.Tier, d.Pool, d.Model, d.MaxTokens, ids(d), d.Why != ""}); diff != "" {
				t.Error(diff)
			}
			if !d.Known {
				t.Error("Known is false after Update")
			}
		})
	}
	p := newPicker(t, Config{})
	if d := p.Pick(t0, Request{Model: "chat"}); d.Known || p.Known() || len(d.Candidates) > 0 {
		t.Errorf("before the first Update: %+v", d)
	}
}

// TestTiesSpread: equal workers get equal numbers of requests, in turn.
func TestTiesSpread(t *testing.T) {
	p := newPicker(t, Config{})
	fleet := []*fleetpb.Worker{testWorker("w1", "", 0, 1000), testWorker("w2", "", 0, 1000), testWorker("w3", "", 0, 1000), testWorker("w4", "", 900, 1000)}
	p.Update(fleet)
	won := map[string]int{}
	for range 300 {
		d := p.Choose(t0, Request{Model: "chat"})
		won[d.Candidates[0].ID]++
		if len(d.Candidates) < 2 || d.Candidates[0].ID == d.Candidates[1].ID {
			t.Fatalf("candidates %v: want two that differ", ids(d))
		}
	}
	if diff := cmp.Diff(map[string]int{"w1": 100, "w2": 100, "w3": 100}, won); diff != "" {
		t.Error(diff)
	}
}

// TestNearTiesSpread: one at a time, idle workers of nearly the same weight take
// turns, while one of half the weight is left for busier times.
func TestNearTiesSpread(t *testing.T) {
	p := newPicker(t, Config{})
	weight := func(id string, weight uint32) *fleetpb.Worker {
		return with(testWorker(id, "", 0, 64), func(w *fleetpb.Worker) { w.Weight = weight })
	}
	p.Update([]*fleetpb.Worker{weight("w1", 957), weight("w2", 914), weight("w3", 1000), weight("w4", 500)})
	won := map[string]int{}
	for i := range 30 {
		now := t0.Add(time.Duration(i) * time.Minute)
		d := p.Choose(now, Request{Model: "chat"})
		won[d.Candidates[0].ID]++
		p.Acquire(d.Candidates[0].ID)()
	}
	if diff := cmp.Diff(map[string]int{"w1": 10, "w2": 10, "w3": 10}, won); diff != "" {
		t.Error(diff)
	}
}

// TestInFlight follows the estimate of one worker's load through choices,
// arrivals, reports and ends.
func TestInFlight(t *testing.T) {
	p := newPicker(t, Config{})
	loadOf := func(now time.Time) int64 { return p.Pick(now, Request{Pool: "big"}).Candidates[0].Load }
	step := func(what string, now time.Time, want int64) {
		t.Helper()
		if got := loadOf(now); got != want {
			t.Errorf("%s: load %d, want %d", what, got, want)
		}
	}
	p.Update([]*fleetpb.Worker{testWorker("w1", "", 2, 10)})
	step("as reported", t0, 2)
	p.Choose(t0, Request{Pool: "big"})
	step("chosen", t0, 3)
	step("chosen long ago", t0.Add(2*time.Second), 2)
	release := p.Acquire("w1")
	step("arrived", t0, 3)
	p.Update([]*fleetpb.Worker{testWorker("w1", "", 2, 10)})
	step("same report again", t0, 3)
	p.Update([]*fleetpb.Worker{testWorker("w1", "", 3, 10)})
	step("reported with it", t0, 3)
	release()
	release()
	step("ended", t0, 2)
	p.Acquire("w1")
	p.Acquire("w1")
	p.Update([]*fleetpb.Worker{testWorker("w1", "", 0, 10)})
	step("never fewer than its own", t0, 2)
}

func TestBreaker(t *testing.T) {
	p := newPicker(t, Config{BreakAfter: 2, BreakFor: time.Second})
	fleet := func(incarnation uint64) []*fleetpb.Worker {
		w := testWorker("w1", "", 0, 10)
		w.Incarnation = incarnation
		return []*fleetpb.Worker{w, testWorker("w2", "", 5, 10)}
	}
	p.Update(fleet(1))
	expect := func(what string, after time.Duration, want string) {
		t.Helper()
		if got := ids(p.Pick(t0.Add(after), Request{Pool: "big"})); got != want {
			t.Errorf("%s: order %q, want %q", what, got, want)
		}
	}
	p.Failed(t0, "w1", false)
	expect("one failure", 0, "w1 w2")
	p.Succeeded("w1")
	p.Failed(t0, "w1", false)
	expect("failures not in a row", 0, "w1 w2")
	p.Failed(t0, "w1", false)
	expect("two in a row", 0, "w2 w1")
	expect("still open", 999*time.Millisecond, "w2 w1")
	expect("over", time.Second, "w1 w2")
	p.Failed(t0.Add(time.Second), "w1", false)
	expect("again, twice as long", 2900*time.Millisecond, "w2 w1")
	p.Update(fleet(1))
	expect("an update is no restart", 2900*time.Millisecond, "w2 w1")
	p.Update(fleet(2))
	expect("a new incarnation", 2900*time.Millisecond, "w1 w2")
	p.Failed(t0, "w1", true)
	expect("certain", 0, "w2 w1")
	p.Failed(t0, "w2", true)
	expect("all broken still serves", 0, "w1 w2")
	p.Failed(t0, "w2", true)
	for i := range 20 {
		now := t0.Add(time.Duration(i) * time.Hour)
		p.Failed(now, "w2", true)
		expect("never longer than 30 times", now.Sub(t0)+30*time.Second, "w1 w2")
	}
}

func TestAffinity(t *testing.T) {
	fleet := make([]*fleetpb.Worker, 10)
	for i := range fleet {
		fleet[i] = testWorker(fmt.Sprintf("w%d", i), "", uint32(i), 100)
	}
	p := newPicker(t, Config{})
	p.Update(fleet)
	home := map[string]string{}
	won := map[string]int{}
	for i := range 1000 {
		s := fmt.Sprintf("session %d", i)
		d := p.Pick(t0, Request{Pool: "big", Session: s})
		if !d.Affinity || len(d.Candidates) != 5 {
			t.Fatalf("%s: %+v", s, d)
		}
		home[s] = d.Candidates[0].ID
		won[home[s]]++
	}
	for id, n := range won {
		if n < 50 || n > 150 {
			t.Errorf("%s is home of %d of 1000 sessions", id, n)
		}
	}
	p = newPicker(t, Config{}) // another gateway agrees, with one worker less
	p.Update(fleet[1:])
	for s, id := range home {
		got := p.Pick(t0, Request{Pool: "big", Session: s}).Candidates[0].ID
		if id != "w0" && got != id {
			t.Errorf("%s moved from %s to %s though its worker stayed", s, id, got)
		}
	}
	const s = "session 1"
	busy := home[s]
	for _, w := range fleet {
		if w.GetId() == busy {
			w.Load = &fleetpb.Load{Running: 100, MaxRunning: 100}
		}
	}
	p.Update(fleet)
	if d := p.Pick(t0, Request{Pool: "big", Session: s}); d.Affinity || d.Candidates[0].ID == busy {
		t.Errorf("a full worker keeps its sessions: %+v", d.Candidates[0])
	}
}

func TestWorkers(t *testing.T) {
	p := newPicker(t, Config{})
	if got := p.Workers(t0); got != nil {
		t.Errorf("before the first Update: %v", got)
	}
	w := testWorker("w1", "a", 2, 10)
	w.Load.Waiting, w.Load.Utilization = 1, 0.25
	p.Update([]*fleetpb.Worker{with(testWorker("w2", "b", 0, 0), status(health.Draining)), w})
	p.Acquire("w1")
	p.Failed(t0, "w2", true)
	want := []View{
		{ID: "w1", Address: "10.0.0.1:8000", Pool: "big", Zone: "a", Status: "HEALTHY", Active: true, Weight: 100, Running: 2, Waiting: 1, MaxRunning: 10, Utilization: 0.25, InFlight: 1},
		{ID: "w2", Address: "10.0.0.2:8000", Pool: "big", Zone: "b", Status: "DRAINING", Weight: 100, Broken: true},
	}
	if diff := cmp.Diff(want, p.Workers(t0)); diff != "" {
		t.Error(diff)
	}
	if id, ok := p.WorkerAt("10.0.0.2:8000"); id != "w2" || !ok {
		t.Errorf("worker at w2's address: %q, %v", id, ok)
	}
	if id, ok := p.WorkerAt("10.0.0.3:8000"); ok {
		t.Errorf("worker at nobody's address: %q", id)
	}
}

// TestForgets: the counters of workers that left go with them, once idle.
func TestForgets(t *testing.T) {
	p := newPicker(t, Config{})
	release := p.Acquire("gone")
	p.Update([]*fleetpb.Worker{testWorker("w1", "", 0, 10)})
	if len(p.counts) != 2 {
		t.Errorf("%d counters, want those of w1 and of the one in flight", len(p.counts))
	}
	release()
	p.Update(nil)
	if len(p.counts) != 0 {
		t.Errorf("%d counters of an empty fleet", len(p.counts))
	}
}

func TestConcurrentUse(t *testing.T) {
	p := newPicker(t, Config{})
	fleet := []*fleetpb.Worker{testWorker("w1", "", 0, 10), testWorker("w2", "", 0, 10)}
	p.Update(fleet)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 200 {
				d := p.Choose(t0, Request{Pool: "big", Session: fmt.Sprint(i % 2)})
				done := p.Acquire(d.Candidates[0].ID)
				if i%10 == 0 {
					p.Failed(t0, d.Candidates[0].ID, true)
					p.Update(fleet)
				}
				p.Succeeded(d.Candidates[0].ID)
				done()
			}
		})
	}
	wg.Wait()
	for _, v := range p.Workers(t0) {
		if v.InFlight != 0 || v.Broken {
			t.Errorf("after all ended: %+v", v)
		}
	}
}

func TestConfigValidate(t *testing.T) {
	for _, cfg := range []Config{{}, {Policy: &policy.Set{}, MaxCandidates: 1}, {Policy: &policy.Set{}, RoomBelow: -1}} {
		if _, err := New(cfg); err == nil {
			t.Errorf("New(%+v): no error", cfg)
		}
	}
}

func BenchmarkPick1000(b *testing.B) {
	p := newPicker(b, Config{Zone: "a"})
	fleet := make([]*fleetpb.Worker, 1000)
	for i := range fleet {
		fleet[i] = testWorker(fmt.Sprintf("w%d", i), string(rune('a'+i%3)), uint32(i*7919%64), 64)
	}
	p.Update(fleet)
	for _, session := range []string{"", "s"} {
		b.Run("session="+session, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if d := p.Choose(t0, Request{Pool: "big", Session: session}); len(d.Candidates) != 5 {
					b.Fatal(d)
				}
			}
		})
	}
}
