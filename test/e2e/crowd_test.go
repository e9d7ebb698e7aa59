package e2e

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// roomy is a mesh of three simulated workers that take more streams each than Envoy lets
// end at once where it fears a flood.
const roomy = `apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: sim}
spec:
  engine: sim
  model: sim-1
  local: [{id: worker-1}, {id: worker-2}, {id: worker-3}]
  worker: {maxNumSeqs: 3000}
  sim: {ttft: 5ms, itl: 20ms}
`

const (
	crowded     = 1300  // streams: Envoy's limits are 1,000 and a little
	crowdTokens = 10000 // of each, more than any says
)

// crowd is many clients with slow answers, of few connections, that leave all at once.
type crowd struct {
	failover
	mu    sync.Mutex
	conns []net.Conn
	heard []*heard
	flow  sync.WaitGroup // until each has a token
	gone  sync.WaitGroup // until each has ended
}

// gather begins n streams, so many at a time until they flow.
func (f failover) gather(n, atOnce int, sim string) *crowd {
	f.Helper()
	c := &crowd{failover: f, heard: make([]*heard, n)}
	turns := make(chan struct{}, atOnce)
	c.flow.Add(n)
	for from := 0; from < n; from += 500 {
		client := c.client()
		for i := from; i < min(n, from+500); i++ {
			c.gone.Go(func() {
				turns <- struct{}{}
				began := sync.OnceFunc(func() { <-turns; c.flow.Done() })
				defer began()
				h, err := c.listen(client, i, sim, began)
				if err == nil || h.failure != "" { // it was to end with its connection
					f.Errorf("stream %d of the crowd ended: %s", i, h.failure)
				}
			})
		}
	}
	return c
}

// client has all its streams on one connection.
func (c *crowd) client() *http.Client {
	p := &http.Protocols{}
	p.SetUnencryptedHTTP2(true)
	return &http.Client{Transport: &http.Transport{Protocols: p, MaxConnsPerHost: 1, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err == nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.conns = append(c.conns, nc)
		}
		return nc, err
	}}}
}

// listen reads one stream of the crowd.
func (c *crowd) listen(client *http.Client, i int, sim string, began func()) (*heard, error) {
	h := newHeard()
	body := fmt.Sprintf(`{"model":"sim-1","prompt":"crowd","max_tokens":%d,"ignore_eos":true,"stream":true,"temperature":0,"sim":{"max":0,%s}}`, crowdTokens, sim)
	req, err := http.NewRequestWithContext(c.Context(), http.MethodPost, c.m.OpenAI+"/completions", strings.NewReader(body))
	if err != nil {
		return h, err
	}
	req.Header.Set("Content-Type", "application/json")
	c.heard[i] = h
	return h, h.hear(client, req, func(*heard) { began() })
}

// leave ends all connections at once, and holds what was heard against the undisturbed
// answer.
func (c *crowd) leave(want *heard) {
	c.Helper()
	c.mu.Lock()
	for _, nc := range c.conns {
		_ = nc.(*net.TCPConn).SetLinger(0) // it ends with a reset, or without
		_ = nc.Close()                     // the crowd's streams fail with it
	}
	c.mu.Unlock()
	c.gone.Wait()
	for i, h := range c.heard {
		if !strings.HasPrefix(want.text[0], h.text[0]) {
			c.Errorf("stream %d of the crowd said %q", i, h.text[0])
		}
		for n, id := range h.ids {
			if !strings.HasSuffix(id, fmt.Sprint(":", n+1)) {
				c.Errorf("stream %d of the crowd: event %d has the id %s", i, n+1, id)
			}
		}
	}
}

// floods are Envoy's counts of connections that it has ended, or was sent the end of, for
// too much on them.
func (f failover) floods() map[string]uint64 {
	f.Helper()
	stats, err := admin.NewClient(f.m.Admin).Stats(f.Context(), `outbound_(control_)?flood|too_many_premature_resets|egress\.downstream_cx_protocol_error|upstream_cx_protocol_error`)
	if err != nil {
		f.Fatal(err)
	}
	maps.DeleteFunc(stats, func(_ string, n uint64) bool { return n == 0 })
	return stats
}

// beside are live answers during which something happens; they are as without it.
func (f failover) beside(want []*heard, question func(i int) ask, happen func()) {
	f.Helper()
	var flowing sync.WaitGroup
	flowing.Add(len(want))
	happened := make(chan struct{})
	go func() {
		defer close(happened)
		flowing.Wait()
		happen()
	}()
	each(len(want), func(i int) {
		began := sync.OnceFunc(flowing.Done)
		defer began()
		got, err := streamed(f.Context(), f.m, question(i), func(h *heard) {
			if h.events == 10 {
				began()
			}
		})
		if err != nil {
			f.Errorf("live answer %d: %v", i, err)
		} else if why := got.same(want[i]); why != "" {
			f.Errorf("live answer %d, begun by %s: %s", i, got.worker, why)
		}
	})
	<-happened
}

// leaveEarly has n clients leave that wait for their first token.
func (f failover) leaveEarly(n int, want *heard) {
	f.Helper()
	c := f.gather(n, n, `"ttft_ms":60000`)
	testmesh.Eventually(f, "the clients wait for workers' answers", time.Minute, func() bool {
		waiting := 0
		for _, s := range streamList(f.m).Streams {
			if s.Worker != "" && s.Events == 0 {
				waiting++
			}
		}
		return waiting >= n
	})
	c.leave(want)
}

// only has one worker take what comes, until the returned func is called.
func (f failover) only(worker string) (all func()) {
	f.Helper()
	c := fleet.NewClient(f.m.API)
	drain := func(on bool) {
		f.Helper()
		for _, w := range []string{"worker-1", "worker-2", "worker-3"} {
			if w != worker {
				if err := c.Drain(f.Context(), w, on); err != nil {
					f.Fatal(err)
				}
			}
		}
	}
	drain(true)
	return func() { f.Helper(); drain(false); f.ready() }
}

// More streams that end at once than Envoy lets strangers end are no flood inside of the
// mesh: whether a crowd's worker dies or its clients leave, with tokens or before the
// first, no stream of another's is lost.
func TestCrowdEndsAtOnce(t *testing.T) {
	f := failover{t, testmesh.StartPolicy(t, bin, roomy)}
	const live, tokens = 20, 150
	question := func(i int) ask { return simAsk(i, tokens) }
	want := f.undisturbed(live, question)
	whole, err := streamed(t.Context(), f.m, ask{path: "/completions", body: `{"model":"sim-1","prompt":"crowd","max_tokens":500,"ignore_eos":true,"stream":true,"temperature":0,"sim":{"max":0,"itl_ms":0.1}}`}, nil)
	if err != nil || !whole.done {
		t.Fatalf("undisturbed: %v, %+v", err, whole)
	}
	lost := func() float64 { return relayMetric(f, f.m, `kvmesh_relay_moves_total{cause="lost"`) }
	quiet := func(t *testing.T, lostBefore float64) {
		t.Helper()
		if n := lost() - lostBefore; n != 0 {
			t.Errorf("%v streams lost their worker", n)
		}
		if n := f.floods(); len(n) > 0 {
			t.Errorf("Envoy ended connections: %v", n)
		}
	}
	t.Run("before the first token", func(t *testing.T) {
		f := failover{t, f.m}
		before := lost()
		f.beside(want, question, func() { f.leaveEarly(400, whole) })
		quiet(t, before)
	})
	const home = "worker-1"
	all := f.only(home)
	c := f.gather(crowded, 64, `"itl_ms":1000`)
	c.flow.Wait()
	all()
	t.Run("worker killed", func(t *testing.T) {
		f := failover{t, f.m}
		before := lost()
		f.beside(want, question, func() { f.m.Signal(t, home, syscall.SIGKILL) })
		testmesh.Eventually(t, "the crowd is elsewhere", 2*time.Minute, func() bool {
			list := streamList(f.m).Streams
			return len(list) >= crowded && !slices.ContainsFunc(list, func(s fleet.StreamView) bool { return s.Worker == home && len(s.Moves) == 0 })
		})
		moved, causes := 0, map[string]int{}
		for _, s := range streamList(f.m).Streams {
			for _, m := range s.Moves {
				if m.Cause == "lost" && m.From != home {
					t.Errorf("%s killed: a stream of %s was lost", home, m.From)
				}
				moved++
				causes[m.Cause]++
			}
		}
		if moved < crowded*8/10 {
			t.Errorf("%d streams moved", moved)
		}
		t.Logf("%d streams of the crowd moved, %v were lost in all %v", moved, lost()-before, causes)
		quiet(t, lost())
	})
	t.Run("clients gone", func(t *testing.T) {
		f := failover{t, f.m}
		before := lost()
		f.beside(want, question, func() { c.leave(whole) })
		quiet(t, before)
	})
}
