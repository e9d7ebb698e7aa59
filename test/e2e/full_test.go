package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// mostSilent is for how long an answer may be silent while a worker has room for it, on a machine
// that is slow and busy.
const mostSilent = 4 * time.Second

// Answers that leave a worker spread over the sequences that are free, and one that has to wait goes on
// as soon as one is free. Nobody is blamed for being full.
func TestMovesAmongFewSlots(t *testing.T) {
	const slots, tokens = 8, 450 // for at least nine seconds
	m := testmesh.StartPolicy(t, bin, strings.Replace(quick, "256", "8", 1))
	f := failover{t, m}
	api := fleet.NewClient(m.API)
	t.Run("drained with room for all", func(t *testing.T) {
		f := failover{t, m}
		got := f.crowd(2*slots-1, tokens, func() {
			if err := api.Drain(t.Context(), "worker-2", true); err != nil {
				t.Error(err)
			}
			testmesh.Eventually(t, "worker-2 to be empty", 6*time.Second, func() bool { return f.at("worker-2") == 0 })
			if one, three := f.at("worker-1"), f.at("worker-3"); one > slots || three > slots {
				t.Errorf("%d streams at worker-1 and %d at worker-3, which run %d at once", one, three, slots)
			}
		})
		f.within(got, mostSilent)
	})
	t.Run("drained without room", func(t *testing.T) {
		f := failover{t, m}
		if err := api.Drain(t.Context(), "worker-2", false); err != nil {
			t.Error(err)
		}
		f.ready()
		got := f.crowd(3*slots, tokens, func() {
			if err := api.Drain(t.Context(), "worker-2", true); err != nil {
				t.Error(err)
			}
		})
		f.within(got, mostSilent)
	})
	t.Run("killed and back", func(t *testing.T) {
		f := failover{t, m}
		if err := api.Drain(t.Context(), "worker-2", false); err != nil {
			t.Error(err)
		}
		f.ready()
		var away time.Duration
		got := f.crowd(3*slots-2, tokens, func() {
			m.Signal(t, "worker-2", syscall.SIGKILL)
			start := time.Now()
			testmesh.Eventually(t, "worker-2 to take those that wait", time.Minute, func() bool {
				return strings.Count(m.Log.String(), "from=worker-2 to=worker-2") >= slots-2
			})
			away = time.Since(start)
		})
		f.within(got, away+mostSilent)
		t.Logf("worker-2 had the last of them again after %v", away)
	})
	t.Run("killed with a queue", func(t *testing.T) { failover{t, m}.queueKilled("worker-2", slots) })
	for _, v := range f.attempts() {
		if v.Worker != "worker-2" && v.Broken > 0 {
			t.Errorf("%s is blamed for %d answers; it was only full", v.Worker, v.Broken)
		}
	}
}

// An answer of more choices than its worker runs at once moves while some of them have no token
// yet: once, and nobody but the worker that died is blamed.
func TestMovesWithWaitingChoices(t *testing.T) {
	const slots, choices = 4, 12
	m := testmesh.StartPolicy(t, bin, strings.Replace(quick, "256", "4", 1))
	f := failover{t, m}
	question := func(int) ask {
		q := simAsk(0, 40)
		q.body = strings.Replace(q.body, `"stream":true`, fmt.Sprintf(`"stream":true,"n":%d`, choices), 1)
		return q
	}
	want := f.undisturbed(1, question)[0]
	blamed := 0
	for _, kills := range []bool{true, false} {
		f.ready()
		at := ""
		before := relayMetric(t, m, "kvmesh_relay_moves_total")
		got, err := streamed(t.Context(), m, question(0), func(h *heard) {
			switch {
			case h.events != 6:
			case len(h.text) > slots:
				t.Errorf("%d choices have begun", len(h.text))
			default:
				at = f.serving(h.stream())
				if kills {
					m.Signal(t, at, syscall.SIGKILL)
				} else if err := fleet.NewClient(m.API).Drain(t.Context(), at, true); err != nil {
					t.Error(err)
				}
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		if why := got.same(want); why != "" {
			t.Error(why)
		}
		if n := relayMetric(t, m, "kvmesh_relay_moves_total") - before; n != 1 {
			t.Errorf("kills %v: %v moves from %s", kills, n, at)
		}
		if kills {
			blamed++
		}
	}
	for _, v := range f.attempts() {
		blamed -= int(v.Broken)
	}
	if blamed != 0 {
		t.Errorf("blame: %+v", f.attempts())
	}
}

// queueKilled kills a worker with a queue and starts it again when all its requests are in the queues of others. Every
// request is answered, and the worker gets some of those that wait.
func (f failover) queueKilled(id string, slots int) {
	f.Helper()
	const n, tokens = 90, 150 // three seconds each
	f.ready()
	moved := relayMetric(f, f.m, `kvmesh_relay_attempts_total{result="queued"`)
	var killed atomic.Bool
	var back atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		each(n, func(i int) {
			time.Sleep(time.Duration(i) * 2 * time.Millisecond)
			got, err := streamed(f.Context(), f.m, simAsk(i, tokens), func(h *heard) {
				if h.events == 1 && h.worker == id && killed.Load() {
					back.Add(1)
				}
			})
			if err != nil || !got.done {
				f.Errorf("answer %d: %v %+v", i, err, got)
			}
		})
	}()
	testmesh.Eventually(f, id+" to have a queue", 30*time.Second, func() bool { return f.at(id) >= 2*slots })
	f.m.Signal(f, "up", syscall.SIGSTOP) // which would start it at once
	f.m.Signal(f, id, syscall.SIGKILL)
	killed.Store(true)
	testmesh.Eventually(f, "the others to have all of "+id, 30*time.Second, func() bool { return f.at(id) == 0 })
	f.m.Signal(f, "up", syscall.SIGCONT)
	<-done
	moved = relayMetric(f, f.m, `kvmesh_relay_attempts_total{result="queued"`) - moved
	if back.Load() < int64(slots) || moved < float64(slots) {
		f.Errorf("%s gave %d answers once it was back, and %.0f requests left a queue", id, back.Load(), moved)
	}
	f.Logf("%s gave %d answers once it was back; %.0f left a queue", id, back.Load(), moved)
}

// crowd has so many answers given at once, and calls happen when each has a few events. They are asked
// for one after the other, so that the last of them find what is free.
func (f failover) crowd(n, tokens int, happen func()) []*heard {
	f.Helper()
	var flowing sync.WaitGroup
	flowing.Add(n)
	happened := make(chan struct{})
	go func() {
		defer close(happened)
		flowing.Wait()
		happen()
	}()
	got := make([]*heard, n)
	each(n, func(i int) {
		time.Sleep(time.Duration(i) * 20 * time.Millisecond)
		var err error
		if got[i], err = streamed(f.Context(), f.m, simAsk(i, tokens), func(h *heard) {
			if h.events == 20 {
				h.longest = 0 // the wait for the others is none of this
				flowing.Done()
			}
		}); err != nil || !got[i].done {
			f.Errorf("answer %d: %v %s", i, err, got[i].failure)
		}
	})
	<-happened
	return got
}

// within checks that no answer was silent for longer.
func (f failover) within(got []*heard, limit time.Duration) {
	f.Helper()
	longest := time.Duration(0)
	for i, h := range got {
		if longest = max(longest, h.longest); h.longest > limit {
			f.Errorf("answer %d was silent for %v", i, h.longest)
		}
	}
	f.Logf("longest silence of %d answers: %v", len(got), longest)
}

// attempts is what the gateway had from each worker.
func (f failover) attempts() []fleet.AttemptView { return f.list().Attempts }

// at counts the streams that a worker gives.
func (f failover) at(worker string) int {
	f.Helper()
	n := 0
	for _, v := range f.list().Streams {
		if v.Worker == worker {
			n++
		}
	}
	return n
}

// list is the gateway's list of streams.
func (f failover) list() (list fleet.StreamList) {
	f.Helper()
	resp, err := http.Get(f.m.Gateway(f) + "/v1/streams")
	if err != nil {
		f.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil {
		f.Fatal(err)
	}
	return list
}
