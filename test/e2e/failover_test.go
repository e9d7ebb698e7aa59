package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// relayMetric is the sum of the gateway's samples whose name and labels begin so.
func relayMetric(t testing.TB, m *testmesh.Mesh, prefix string) float64 {
	t.Helper()
	return metricAt(t, m.Gateway(t)+"/metrics", prefix)
}

// quick is a mesh of three simulated workers.
const quick = `apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: sim}
spec:
  engine: sim
  model: sim-1
  local: [{id: worker-1}, {id: worker-2}, {id: worker-3}]
  worker: {maxNumSeqs: 256}
  sim: {ttft: 5ms, itl: 20ms}
`

// impatient is a route of it by which an answer does not wait for a worker.
const impatient = `---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: sim}
spec: {models: [sim-1], tiers: [{pool: sim}]}
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: impatient}
spec: {models: [impatient], tiers: [{pool: sim}], stream: {wait: 1s}}
`

// each runs f for 0 to n-1 at once and waits for all.
func each(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// failover is a mesh under test.
type failover struct {
	testing.TB
	m *testmesh.Mesh
}

// simAsk is the body of one of many streams, each with an answer of its own.
func simAsk(i, tokens int) ask {
	return ask{path: "/completions", body: fmt.Sprintf(`{"model":"sim-1","prompt":"number %d","max_tokens":%d,"ignore_eos":true,"stream":true,"temperature":0,"stream_options":{"include_usage":true},"sim":{"max":0}}`, i, tokens)}
}

// undisturbed are n answers while nothing happens.
func (f failover) undisturbed(n int, question func(i int) ask) []*heard {
	f.Helper()
	want := make([]*heard, n)
	each(n, func(i int) {
		var err error
		if want[i], err = streamed(f.Context(), f.m, question(i), nil); err != nil || !want[i].done {
			f.Errorf("undisturbed answer %d: %v %+v", i, err, want[i])
		}
	})
	if f.Failed() {
		f.FailNow()
	}
	return want
}

// disturbed are the same answers, all of one worker, to which something happens when each
// has so many events. They must be those of want.
func (f failover) disturbed(want []*heard, question func(i int) ask, events int, happen func(worker string)) (moved int, gap time.Duration) {
	f.Helper()
	f.ready()
	before := relayMetric(f, f.m, "kvmesh_relay_moves_total")
	home, err := streamed(f.Context(), f.m, ask{path: "/completions", body: `{"model":"sim-1","prompt":"where","max_tokens":1,"stream":true}`, session: f.Name()}, nil)
	if err != nil {
		f.Fatal(err)
	}
	var flowing sync.WaitGroup
	flowing.Add(len(want))
	happened := make(chan struct{})
	go func() {
		defer close(happened)
		flowing.Wait()
		happen(home.worker)
	}()
	got := make([]*heard, len(want))
	each(len(want), func(i int) {
		q := question(i)
		q.session = f.Name()
		var err error
		if got[i], err = streamed(f.Context(), f.m, q, func(h *heard) {
			if h.events == events {
				flowing.Done()
			}
		}); err != nil {
			f.Errorf("answer %d: %v", i, err)
		}
	})
	<-happened
	if f.Failed() {
		f.FailNow()
	}
	hit := 0
	for i := range got {
		if why := got[i].same(want[i]); why != "" {
			f.Errorf("answer %d, begun by %s: %s", i, got[i].worker, why)
		}
		if got[i].worker == home.worker {
			hit++
			gap = max(gap, got[i].longest)
		}
	}
	moved = int(relayMetric(f, f.m, "kvmesh_relay_moves_total") - before)
	if hit < len(want)*9/10 || moved < hit {
		f.Errorf("%d of %d answers were begun by %s, %d moved", hit, len(want), home.worker, moved)
	}
	return moved, gap
}

// ready waits until all workers are well.
func (f failover) ready() {
	f.Helper()
	testmesh.Eventually(f, "all workers are well again", time.Minute, func() bool {
		list, err := fleet.NewClient(f.m.API).Workers(f.Context())
		return err == nil && len(list) == 3 && !slices.ContainsFunc(list, func(w fleet.WorkerView) bool { return w.Status != "HEALTHY" })
	})
}

// serving is the worker that gives a stream, "" when the stream is not there.
func (f failover) serving(stream string) string { return f.view(stream).Worker }

// view is what the gateway lists of a stream, empty once it has ended.
func (f failover) view(stream string) (v fleet.StreamView) {
	f.Helper()
	for _, v := range f.list().Streams {
		if v.ID == stream {
			return v
		}
	}
	return v
}

// Whatever happens to the worker of a hundred answers, they go on at the others: nothing
// is lost and nothing repeated.
func TestStreamsOutliveWorker(t *testing.T) {
	m := testmesh.StartPolicy(t, bin, quick+impatient)
	const streams, tokens = 100, 120
	question := func(i int) ask { return simAsk(i, tokens) }
	want := failover{t, m}.undisturbed(streams, question)
	t.Run("killed", func(t *testing.T) {
		f := failover{t, m}
		moved, gap := f.disturbed(want, question, 20, func(worker string) { m.Signal(t, worker, syscall.SIGKILL) })
		t.Logf("%d answers moved; longest silence %v", moved, gap)
	})
	t.Run("stopped", func(t *testing.T) {
		f := failover{t, m}
		var worker string
		moved, gap := f.disturbed(want, question, 20, func(w string) { worker = w; m.Signal(t, w, syscall.SIGSTOP) })
		m.Signal(t, worker, syscall.SIGCONT)
		t.Logf("%d answers moved; longest silence %v", moved, gap)
	})
	t.Run("drained", func(t *testing.T) {
		f := failover{t, m}
		var worker string
		var empty time.Duration
		moved, gap := f.disturbed(want, question, 20, func(w string) {
			worker = w
			start := time.Now()
			if err := fleet.NewClient(m.API).Drain(t.Context(), w, true); err != nil {
				t.Error(err)
			}
			testmesh.Eventually(t, "the drained worker is empty", 10*time.Second, func() bool {
				list, err := fleet.NewClient(m.API).Workers(t.Context())
				i := slices.IndexFunc(list, func(v fleet.WorkerView) bool { return v.ID == w })
				return err == nil && i >= 0 && list[i].Running == 0
			})
			empty = time.Since(start)
		})
		if err := fleet.NewClient(m.API).Drain(t.Context(), worker, false); err != nil {
			t.Error(err)
		}
		if moved == 0 {
			t.Error("no answer moved: the worker was empty because they ended there")
		}
		t.Logf("%d answers moved, and the worker was empty after %v; longest silence %v", moved, empty, gap)
	})
	t.Run("stopped before the first token", func(t *testing.T) { stoppedEarly(failover{t, m}) })
	t.Run("killed twice", func(t *testing.T) { killedTwice(failover{t, m}, want[0]) })
	t.Run("killed while it restores", func(t *testing.T) { killedRestoring(failover{t, m}, want[1]) })
	t.Run("target killed", func(t *testing.T) {
		f := failover{t, m}
		f.ready()
		got := f.one(simAsk(1, tokens), 20, func(h *heard) {
			all := []string{"worker-1", "worker-2", "worker-3"}
			for _, w := range append([]string{f.serving(h.stream())}, all...)[:3] { // its own and one or two others
				if pid := m.PID(w); pid != 0 {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
		})
		if why := got.same(want[1]); why != "" {
			t.Error(why)
		}
	})
	t.Run("whole answers", func(t *testing.T) { wholeOutlives(failover{t, m}, want) })
	t.Run("all dead", func(t *testing.T) {
		f := failover{t, m}
		f.ready()
		var down sync.WaitGroup
		q := simAsk(1, 200)
		q.body = strings.Replace(q.body, "sim-1", "impatient", 1)
		got := f.one(q, 20, func(*heard) {
			for _, w := range []string{"worker-1", "worker-2", "worker-3"} {
				down.Go(func() { holdDown(t, m, w, 4*time.Second) })
			}
		})
		down.Wait()
		if got.done || !strings.Contains(got.failure, "The worker broke off its answer, and ") {
			t.Errorf("done %v, error %s", got.done, got.failure)
		}
	})
}

// one is one answer to which something happens when it has so many events.
func (f failover) one(q ask, events int, happen func(h *heard)) *heard {
	f.Helper()
	got, err := streamed(f.Context(), f.m, q, func(h *heard) {
		if h.events == events {
			happen(h)
		}
	})
	if err != nil {
		f.Fatal(err)
	}
	return got
}

// stoppedEarly stops the worker of an answer that has not begun: the control plane does
// not hear it any more, and another is asked.
func stoppedEarly(f failover) {
	f.ready()
	home, err := streamed(f.Context(), f.m, ask{path: "/completions", body: `{"model":"sim-1","prompt":"where","max_tokens":1,"stream":true}`, session: f.Name()}, nil)
	if err != nil {
		f.Fatal(err)
	}
	stop := time.AfterFunc(500*time.Millisecond, func() { f.m.Signal(f, home.worker, syscall.SIGSTOP) })
	defer stop.Stop()
	start := time.Now()
	got, err := streamed(f.Context(), f.m, ask{path: "/completions", body: `{"model":"sim-1","prompt":"x","max_tokens":3,"stream":true,"sim":{"ttft_ms":2000}}`, session: f.Name()}, nil)
	f.m.Signal(f, home.worker, syscall.SIGCONT)
	if err != nil || !got.done || got.worker == home.worker || time.Since(start) > 20*time.Second {
		f.Errorf("%v, %+v after %v; %s was stopped", err, got, time.Since(start), home.worker)
	}
}

// killedTwice kills the worker of an answer, and then the one that went on with it.
func killedTwice(f failover, want *heard) {
	f.ready()
	var first string
	got, err := streamed(f.Context(), f.m, simAsk(0, 120), func(h *heard) {
		switch h.events {
		case 20:
			first = f.serving(h.stream())
			f.m.Signal(f, first, syscall.SIGKILL)
		case 60:
			second := f.serving(h.stream())
			if second == first || second == "" {
				f.Errorf("the answer is %s's after %s was killed", second, first)
				return
			}
			f.m.Signal(f, second, syscall.SIGKILL)
		}
	})
	if err != nil {
		f.Fatal(err)
	}
	if why := got.same(want); why != "" {
		f.Error(why)
	}
}

// killedRestoring kills the worker of an answer, and the one that is to go on with it before
// that has said anything: the third one restores what the first had stored.
func killedRestoring(f failover, want *heard) {
	f.ready()
	var killed []string
	var moves []fleet.MoveView
	q := simAsk(1, 120)
	q.body = strings.Replace(q.body, `"sim":{`, `"sim":{"ttft_ms":1000,`, 1)
	got, err := streamed(f.Context(), f.m, q, func(h *heard) {
		switch h.events {
		case 20:
			for len(killed) < 2 {
				v := f.view(h.stream()) // the first may be heard of as sick before its stream breaks off
				if w := cmp.Or(v.Next, v.Worker); w != "" && !slices.Contains(killed, w) {
					f.m.Signal(f, w, syscall.SIGKILL)
					killed = append(killed, w)
				}
				time.Sleep(5 * time.Millisecond)
			}
		case 60:
			moves = f.view(h.stream()).Moves
		}
	})
	if err != nil {
		f.Fatal(err)
	}
	if why := got.same(want); why != "" {
		f.Error(why)
	}
	if len(moves) != 1 || moves[0].From != killed[0] || moves[0].To == killed[1] || moves[0].Restored == 0 {
		f.Errorf("moves %+v, killed were %v", moves, killed)
	}
}

// wholeOutlives kills the worker of answers without streaming.
func wholeOutlives(f failover, want []*heard) {
	f.ready()
	kill := time.AfterFunc(time.Second, func() { f.m.Signal(f, "worker-2", syscall.SIGKILL) })
	defer kill.Stop()
	before := relayMetric(f, f.m, "kvmesh_relay_moves_total")
	each(30, func(i int) {
		body := strings.Replace(simAsk(i, 120).body, `"stream":true,`, "", 1)
		body = strings.Replace(body, `"stream_options":{"include_usage":true},`, "", 1)
		req, err := http.NewRequestWithContext(f.Context(), http.MethodPost, f.m.OpenAI+"/completions", strings.NewReader(body))
		if err != nil {
			f.Error(err)
			return
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			f.Error(err)
			return
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		var c openai.Completion
		if err != nil || json.Unmarshal(text, &c) != nil || resp.StatusCode != http.StatusOK || len(c.Choices) != 1 || c.Usage == nil {
			f.Errorf("answer %d: %s %s, %v", i, resp.Status, text, err)
			return
		}
		if c.Choices[0].Text != want[i].text[0] || *c.Choices[0].FinishReason != "length" || c.Usage.CompletionTokens != 120 || c.Usage.PromptTokens != want[i].usage.PromptTokens {
			f.Errorf("answer %d: %s", i, text)
		}
	})
	if n := relayMetric(f, f.m, "kvmesh_relay_moves_total") - before; n < 5 {
		f.Errorf("%v answers moved", n)
	}
}

// Faults of the worker itself, at every kind of place: the answer is that of a run
// without.
func TestStreamsOutliveFaults(t *testing.T) {
	m := testmesh.StartPolicy(t, bin, quick)
	f := failover{t, m}
	const plain = `"model":"sim-1","prompt":"fault","max_tokens":50,"ignore_eos":true,"temperature":0,"stream":true,"stream_options":{"include_usage":true}`
	for _, tt := range []struct{ name, path, body, fault string }{
		{"cut at 20", "/completions", plain, `"cut_at":20`},
		{"cut inside an event", "/completions", plain, `"cut_at":20,"cut_inside":true`},
		{"error event", "/completions", plain, `"error_at":20`},
		{"end without finish", "/completions", plain, `"truncate_at":20`},
		{"no JSON", "/completions", plain, `"malformed_at":20,"attempt":1`},
		{"no [DONE]", "/completions", plain, `"no_done":true,"attempt":1`},
		{"before the first token", "/completions", plain, `"cut_at":0,"attempt":1`},
		{"stall", "/completions", plain, `"stall_at":20`},
		{"two choices", "/completions", plain + `,"n":2`, `"cut_at":20`},
		{"chat", "/chat/completions", strings.Replace(plain, `"prompt":"fault"`, `"messages":[{"role":"user","content":"fault"}]`, 1), `"cut_at":20`},
		{"logprobs", "/completions", plain + `,"logprobs":2`, `"cut_at":20`},
		{"sampled", "/completions", strings.Replace(plain, `"temperature":0`, `"temperature":0.9,"seed":7`, 1), `"cut_at":20`},
		{"stop string", "/completions", plain + `,"stop":["under"]`, `"cut_at":1`},
		{"echo", "/completions", plain + `,"echo":true`, `"cut_at":3`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want, err := streamed(t.Context(), m, ask{path: tt.path, body: "{" + tt.body + `,"sim":{"max":0}}`}, nil)
			if err != nil || !want.done {
				t.Fatalf("undisturbed: %v, %+v", err, want)
			}
			got, err := streamed(t.Context(), m, ask{path: tt.path, body: "{" + tt.body + `,"sim":{"max":0,` + tt.fault + `}}`}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if why := got.same(want); why != "" {
				t.Error(why)
			}
		})
	}
	t.Run("inside of every character", func(t *testing.T) {
		each(50, func(i int) {
			q := func(fault string) ask {
				return ask{path: "/completions", body: "{" + strings.Replace(plain, "fault", "characters", 1) + `,"sim":{"max":0` + fault + `}}`}
			}
			want, err := streamed(t.Context(), m, q(""), nil)
			if err != nil {
				t.Error(err)
				return
			}
			got, err := streamed(t.Context(), m, q(fmt.Sprintf(`,"cut_at":%d,"attempt":1`, i)), nil)
			if err != nil {
				t.Errorf("cut at %d: %v", i, err)
				return
			}
			if why := got.same(want); why != "" {
				t.Errorf("cut at %d: %s", i, why)
			}
			if got.usage == nil || got.usage.CompletionTokens != 50 {
				t.Errorf("cut at %d: usage %+v", i, got.usage)
			}
		})
	})
	if n := relayMetric(f, m, "kvmesh_relay_moves_total"); n < 55 {
		t.Errorf("only %v moves", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// A worker that dies each time is given up, with the reason, and without a false end.
	got, err := streamed(ctx, m, ask{path: "/completions", body: "{" + plain + `,"sim":{"max":0,"malformed_at":20}}`}, nil)
	if err != nil || got.done && got.failure != "" || !got.done && !strings.Contains(got.failure, "every worker that went on with it broke off") {
		t.Errorf("%v, done %v, %s", err, got.done, got.failure)
	}
}
