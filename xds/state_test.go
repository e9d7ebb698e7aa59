package xds

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/xds/registry"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// twoPools makes a state with pools a and b and all health defaults.
func twoPools(t *testing.T) *state {
	t.Helper()
	s := newState()
	s.setPools(policies(t, "a", "b"))
	return s
}

func policies(t *testing.T, pools ...string) *policy.Set {
	t.Helper()
	var docs []string
	for _, p := range pools {
		docs = append(docs, fmt.Sprintf(
			"apiVersion: kvmesh.io/v1alpha1\nkind: WorkerPool\nmetadata: {name: %s}\nspec: {engine: sim, model: m}\n", p))
	}
	set, err := policy.Parse(policy.File{Name: "t.yaml", Data: []byte(strings.Join(docs, "---\n"))})
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// member is a worker that has been ready for an hour.
func member(id, pool string, incarnation uint64) registry.Member {
	return registry.Member{
		Registration: fleet.Registration{ID: id, Pool: pool, Address: "127.0.0.1:1", Incarnation: incarnation, Model: "m"},
		ReadySince:   t0.Add(-time.Hour), Heard: t0,
	}
}

// loaded reports a utilization.
func loaded(s *state, id string, incarnation uint64, at time.Time, utilization float64) {
	s.update(id, incarnation, at, func(w *worker) {
		w.in.Report = health.Report{At: at, Utilization: utilization}
		w.in.Heard = at
	})
}

// woken reports whether the pool's loop would run now, and takes the signal.
func woken(s *state, pool string) bool {
	select {
	case <-s.pools[pool].urgent:
		return true
	default:
		return false
	}
}

// Only what changes a verdict wakes the loop: at ten reports a second and worker
// everything else must wait for the tick.
func TestOnlyVerdictsWake(t *testing.T) {
	s := twoPools(t)
	s.put(member("w", "a", 1), origin{})
	loaded(s, "w", 1, t0, 0.5)
	woken(s, "a")
	woken(s, "b")
	s.decide(s.pools["a"], t0, true)
	for _, c := range []struct {
		name string
		do   func()
		want bool
	}{
		{"the same load", func() { loaded(s, "w", 1, t0.Add(time.Second), 0.5) }, false},
		{"a load within the hysteresis", func() { loaded(s, "w", 1, t0.Add(time.Second), 0.52) }, false},
		{"double the load", func() { loaded(s, "w", 1, t0.Add(time.Second), 1) }, true},
		{"a report of an earlier start", func() { loaded(s, "w", 0, t0.Add(time.Second), 9) }, false},
		{"a report of nobody", func() { loaded(s, "x", 1, t0.Add(time.Second), 9) }, false},
		{"a failure", func() {
			s.update("w", 1, t0.Add(time.Second), func(w *worker) { w.in.Failed = "broken" })
		}, true},
		{"a registration", func() { s.put(member("w", "a", 1), origin{}) }, true},
		{"a departure", func() { s.retain(nil) }, true},
	} {
		c.do()
		if got := woken(s, "a"); got != c.want {
			t.Errorf("%s: woken %v, want %v", c.name, got, c.want)
		}
		if woken(s, "b") {
			t.Errorf("%s woke the other pool", c.name)
		}
	}
}

// Load without change of verdict reaches gateways only at the tick, and Envoy
// never.
func TestDecisions(t *testing.T) {
	s := twoPools(t)
	p := s.pools["a"]
	s.put(member("w", "a", 1), origin{})
	loaded(s, "w", 1, t0, 0.5)
	d := s.decide(p, t0, false)
	if !d.changed || len(d.endpoints) != 1 || d.endpoints[0].Weight != 200 || len(d.fleet) != 1 {
		t.Fatalf("first decision %+v", d)
	}
	loaded(s, "w", 1, t0.Add(time.Second), 0.51)
	if d := s.decide(p, t0.Add(time.Second), false); d.changed || len(d.fleet) != 0 {
		t.Errorf("urgent decision without change: %+v", d)
	}
	if d := s.decide(p, t0.Add(time.Second), true); d.changed || len(d.fleet) != 1 {
		t.Errorf("decision at the tick: %+v", d)
	}
	if d := s.decide(p, t0.Add(time.Second), true); d.changed || len(d.fleet) != 0 {
		t.Errorf("nothing is new: %+v", d)
	}
	// Time alone changes verdicts.
	if d := s.decide(p, t0.Add(5*time.Second), false); !d.changed || len(d.fleet) != 1 {
		t.Errorf("silence: %+v", d)
	}
	s.retain(nil)
	if d := s.decide(p, t0.Add(6*time.Second), false); !d.changed || len(d.endpoints) != 0 || !slices.Equal(d.removed, []string{"w"}) {
		t.Errorf("departure: %+v", d)
	}
}

// A new start of a worker begins with a clean record; a renewal keeps it.
func TestIncarnations(t *testing.T) {
	s := twoPools(t)
	if !s.put(member("w", "a", 1), origin{}) {
		t.Error("a new worker is not fresh")
	}
	s.update("w", 1, t0, func(w *worker) { w.in.Failed = "connection refused" })
	if s.put(member("w", "a", 1), origin{}) {
		t.Error("a renewal is fresh")
	}
	if s.workers["w"].in.Failed == "" {
		t.Error("a renewal forgave the failure")
	}
	if !s.put(member("w", "a", 2), origin{}) {
		t.Error("a new start is not fresh")
	}
	if s.workers["w"].in.Failed != "" {
		t.Error("a new start inherited the failure")
	}
}

// A worker that moves to another pool leaves the first, and its fleet resource
// stays, whichever pool decides first.
func TestMoveToAnotherPool(t *testing.T) {
	for _, first := range []string{"a", "b"} {
		s := twoPools(t)
		s.put(member("w", "a", 1), origin{})
		s.decide(s.pools["a"], t0, true)
		s.put(member("w", "b", 2), origin{})
		second := map[string]string{"a": "b", "b": "a"}[first]
		got := map[string]decision{}
		for _, pool := range []string{first, second} {
			got[pool] = s.decide(s.pools[pool], t0, false)
		}
		if len(got["a"].endpoints) != 0 || len(got["a"].removed) != 0 || len(got["b"].endpoints) != 1 || len(got["b"].fleet) != 1 {
			t.Errorf("%s first: %+v", first, got)
		}
	}
}

// A policy without a pool forgets its workers.
func TestPoolsComeAndGo(t *testing.T) {
	s := twoPools(t)
	s.put(member("w", "a", 1), origin{})
	s.setPools(policies(t, "b", "c"))
	if s.hasPool("a") || !s.hasPool("c") || len(s.workers) != 0 {
		t.Errorf("pools %v, workers %v", s.pools, s.workers)
	}
	if s.put(member("w", "a", 1), origin{}) {
		t.Error("a worker of no pool is watched")
	}
}

// Workers judged by registrations alone are given their pace.
func TestHeartbeatPace(t *testing.T) {
	s := twoPools(t)
	p := s.pools["a"]
	s.put(member("own", "a", 1), origin{})
	s.put(member("server", "a", 1), origin{static: true})
	for _, id := range []string{"own", "server"} {
		s.update(id, 1, t0, func(w *worker) { w.in.Heartbeat, w.in.Heard = true, t0 })
	}
	s.decide(p, t0.Add(10*time.Second), true) // two heartbeats, ten probes
	if v := s.workers["own"].shown; v.Status != health.Healthy {
		t.Errorf("registered 10 s ago: %+v", v)
	}
	if v := s.workers["server"].raw; v.Status != health.Timeout {
		t.Errorf("probed 10 s ago: %+v", v)
	}
}

// What a probe finds, and what it leaves as it was.
func TestObserve(t *testing.T) {
	s := twoPools(t)
	m := member("s", "a", 1)
	m.Address, m.Heard = "", time.Time{}
	s.put(m, origin{static: true, hostname: "h"})
	if d := s.decide(s.pools["a"], t0, true); len(d.endpoints) != 0 {
		t.Errorf("an endpoint without address: %+v", d.endpoints)
	}
	if s.settled() {
		t.Error("settled before the first probe")
	}
	s.observe("s", registry.Observation{
		At: t0, Address: "127.0.0.1:9", Models: []string{"big", "alias"}, Load: &registry.Load{Running: 2, KVUsage: 0.5},
	})
	if !s.settled() {
		t.Error("not settled after the first probe")
	}
	d := s.decide(s.pools["a"], t0, true)
	if len(d.endpoints) != 1 || d.endpoints[0].Address != "127.0.0.1:9" || d.endpoints[0].Hostname != "h" || d.endpoints[0].Weight != 200 {
		t.Fatalf("%+v", d.endpoints)
	}
	if w := d.fleet[0]; w.GetModel() != "big" || !slices.Equal(w.GetAliases(), []string{"alias"}) || w.GetLoad().GetRunning() != 2 {
		t.Errorf("%v", w)
	}
	s.put(m, origin{static: true}) // the policy knows no address and no model
	s.observe("s", registry.Observation{At: t0.Add(time.Second), Address: "127.0.0.1:9", Silent: true})
	if w := s.workers["s"]; w.member.Model != "big" || w.member.Address != "127.0.0.1:9" || !w.in.Heard.Equal(t0) {
		t.Errorf("after a silent probe: %+v", w)
	}
	s.observe("s", registry.Observation{At: t0.Add(2 * time.Second), Address: "127.0.0.1:9", Failed: "status 500"})
	if d := s.decide(s.pools["a"], t0.Add(2*time.Second), true); d.endpoints[0].Status != health.Unhealthy {
		t.Errorf("after a failed probe: %+v", d.endpoints)
	}
}

// A server that Envoy would refuse is left out and named, and takes no other along; it
// is back as soon as it has an address.
func TestUnfitServer(t *testing.T) {
	s := twoPools(t)
	for _, id := range []string{"bad", "good"} {
		m := member(id, "a", 1)
		m.Address = ""
		s.put(m, origin{static: true})
	}
	for i, c := range []struct {
		addr, reason string
		published    []string
	}{
		{"0.0.0.0:8000", "not in Envoy: the address 0.0.0.0 is no host's: want 127.0.0.1 for this one", []string{"good"}},
		{"127.0.0.1:99999", `not in Envoy: address "127.0.0.1:99999": want ip:port`, []string{"good"}},
		{"127.0.0.2:8000", "", []string{"bad", "good"}},
	} {
		now := t0.Add(time.Duration(i) * time.Second)
		s.observe("good", registry.Observation{At: now, Address: "127.0.0.1:8000"})
		s.observe("bad", registry.Observation{At: now, Address: c.addr})
		d := s.decide(s.pools["a"], now, true)
		var got []string
		for _, e := range d.endpoints {
			got = append(got, e.Worker)
		}
		slices.Sort(got)
		if !d.changed || !slices.Equal(got, c.published) {
			t.Errorf("%s: published %v, want %v", c.addr, got, c.published)
		}
		if err := envoy.Endpoints("pool/a", d.endpoints).ValidateAll(); err != nil {
			t.Errorf("%s: %v", c.addr, err)
		}
		w := s.workers["bad"].resource()
		if w.GetReason() != c.reason || (w.GetStatus() == int32(health.Healthy)) != (c.reason == "") {
			t.Errorf("%s: status %d, reason %q", c.addr, w.GetStatus(), w.GetReason())
		}
		if told := len(d.unfit) == 1 && strings.HasPrefix(d.unfit[0], "bad: not in Envoy"); told != (c.reason != "") {
			t.Errorf("%s: logged %q", c.addr, d.unfit)
		}
		if again := s.decide(s.pools["a"], now, true); len(again.unfit) != 0 {
			t.Errorf("%s: logged again: %q", c.addr, again.unfit)
		}
		if !s.settled() {
			t.Errorf("%s: not settled", c.addr)
		}
	}
}

// Two replicas with the same facts publish the same bytes.
func TestReplicasAgree(t *testing.T) {
	load := map[string]float64{"w0": 0.1, "w1": 0.2, "w2": 0.3, "w3": 0.4}
	build := func(order ...string) string {
		s := twoPools(t)
		for _, id := range order {
			s.put(member(id, "a", 1), origin{})
			loaded(s, id, 1, t0, load[id])
		}
		return fmt.Sprint(s.decide(s.pools["a"], t0, true).endpoints)
	}
	if one, two := build("w0", "w1", "w2", "w3"), build("w2", "w0", "w3", "w1"); one != two {
		t.Errorf("%s\n%s", one, two)
	}
}
