//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hybridgroup/yzma/pkg/llama"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/checkpoint"
)

// churn is a worker with little memory under random requests.
type churn struct {
	*testing.T
	e      *Engine
	reg    *prometheus.Registry
	base   string
	client *http.Client
}

func newChurn(t *testing.T) *churn {
	cfg := tinyConfig(t)
	cfg.ContextLen, cfg.Cells, cfg.MaxSeqs, cfg.MaxQueue = 256, 384, 6, 40
	cfg.PauseBytes = 256 << 10 // for some of those that give way
	c := &churn{T: t, e: openReal(t, cfg), reg: prometheus.NewRegistry(), client: &http.Client{Transport: &http.Transport{}}}
	store, err := dirstore.Open(dirstore.Config{Dir: filepath.Join(t.TempDir(), "kv"), Limit: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	keeper, err := checkpoint.New(checkpoint.Config{Store: store, Block: 32, Interval: 4, Registry: c.reg, Parts: StateParts})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		keeper.Close()
		store.Close()
	})
	c.base = serveKV(t, c.e, keeper, c.reg)
	return c
}

// request is one random request: prompt, n, streaming, priority and length are drawn,
// and in two of three cases when its client leaves: before or during the prefill,
// while it waits or is paused, or in its answer, after a time or some text.
func (c *churn) request(rnd *rand.Rand, i int) {
	ctx, cancel := context.WithCancel(c.Context())
	defer cancel()
	prompt := strings.Repeat("the old tale ", 1+rnd.IntN(14)) + fmt.Sprint(rnd.IntN(6))
	ep, input := openai.Completions, fmt.Sprintf(`"prompt":%q`, prompt)
	if rnd.IntN(3) == 0 {
		ep, input = openai.Chat, fmt.Sprintf(`"messages":[{"role":"user","content":%q}]`, prompt)
	}
	body := fmt.Sprintf(`{"model":"m",%s,"n":%d,"stream":%v,"max_tokens":%d,"temperature":%g,"seed":%d,"ignore_eos":%v}`,
		input, 1+rnd.IntN(3), rnd.IntN(3) > 0, 1+rnd.IntN(60), float64(rnd.IntN(2)), i, rnd.IntN(2) == 0)
	read := int64(1 << 40)
	switch rnd.IntN(3) {
	case 0:
		read = rnd.Int64N(10000)
	case 1:
		after := time.AfterFunc(time.Duration(rnd.IntN(200))*time.Millisecond, cancel)
		defer after.Stop()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+string(ep), strings.NewReader(body))
	if err != nil {
		c.Error(err)
		return
	}
	req.Header.Set("X-Kvmesh-Relay", "secret")
	req.Header.Set("X-Kvmesh-Stream", fmt.Sprint("s", i))
	req.Header.Set("X-Kvmesh-Attempt", "1")
	req.Header.Set("X-Kvmesh-Priority", fmt.Sprint(rnd.IntN(3)))
	resp, err := c.client.Do(req)
	if err != nil {
		if ctx.Err() == nil {
			c.Errorf("request %d: %v", i, err)
		}
		return
	}
	defer resp.Body.Close()
	n, err := io.Copy(io.Discard, io.LimitReader(resp.Body, read))
	if err != nil && ctx.Err() == nil || resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusTooManyRequests {
		c.Errorf("request %d: status %d, %v after %d bytes", i, resp.StatusCode, err, n)
	}
}

// run has n requests, at most sixteen at once.
func (c *churn) run(n int, seed uint64) {
	var wg sync.WaitGroup
	places := make(chan struct{}, 16)
	for i := range n {
		places <- struct{}{}
		rnd := rand.New(rand.NewPCG(seed, uint64(i)))
		wg.Go(func() {
			c.request(rnd, int(seed)*1000+i)
			<-places
		})
	}
	wg.Wait()
	c.client.CloseIdleConnections()
}

// metric is the sum of a metric over its labels.
func (c *churn) metric(name string) (sum float64) {
	families, err := c.reg.Gather()
	if err != nil {
		c.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return sum
}

// resident is the process's memory in bytes, 0 where that is not known.
func (c *churn) resident() int64 {
	debug.FreeOSMemory()
	raw, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var all, pages int64
	if _, err := fmt.Sscan(string(raw), &all, &pages); err != nil {
		c.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

// settle waits until the worker has noticed that its last clients have left.
func (c *churn) settle(goroutines int) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.After(time.Minute); ; {
		l := c.e.Load()
		if l.Running == 0 && l.Waiting == 0 && c.metric("kvmesh_kv_queue_bytes") == 0 && runtime.NumGoroutine() <= goroutines {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			buf := make([]byte, 1<<20)
			c.Fatalf("after a minute: %+v, %g bytes wait for the store, %d goroutines, %d at first\n%s",
				l, c.metric("kvmesh_kv_queue_bytes"), runtime.NumGoroutine(), goroutines, buf[:runtime.Stack(buf, true)])
		}
	}
}

// TestNothingIsLeftOver: 200 random requests, two thirds of which leave at random
// points, leave nothing behind.
func TestNothingIsLeftOver(t *testing.T) {
	c := newChurn(t)
	c.client.CloseIdleConnections()
	goroutines := runtime.NumGoroutine() + 2 // the runtime may start some of its own
	c.run(40, 1)                             // until pools and caches have their size
	c.settle(goroutines)
	before := c.resident()
	c.run(200, 2)
	c.settle(goroutines)
	l := c.e.Load()
	if l.KVUsage != 0 || l.PausedBytes != 0 || c.e.inside.Load() != 0 || c.e.g.last.Load() != nobody {
		t.Errorf("load is %+v; %d generations are inside", l, c.e.inside.Load())
	}
	if l.Preempted == 0 || l.Resumed == 0 {
		t.Errorf("%d gave way, %d went on: this shows little", l.Preempted, l.Resumed)
	}
	for name, want := range map[string]float64{
		"vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0, "vllm:kv_cache_usage_perc": 0, "kvmesh_worker_paused_bytes": 0, "kvmesh_kv_queue_bytes": 0,
	} {
		if got := c.metric(name); got != want {
			t.Errorf("%s is %g, want %g", name, got, want)
		}
	}
	if c.metric("kvmesh_kv_blocks_total") == 0 || c.metric("kvmesh_kv_failed_total") != 0 {
		t.Errorf("%g blocks were stored, %g operations failed", c.metric("kvmesh_kv_blocks_total"), c.metric("kvmesh_kv_failed_total"))
	}
	c.e.in.call(func(l *loop) {
		for slot := range c.e.cfg.MaxSeqs + 1 { // and the one for ranges
			if last, err := llama.MemorySeqPosMax(l.dec.(*native).mem, llama.SeqId(slot)); err != nil || last != -1 {
				t.Errorf("sequence %d of llama.cpp holds tokens up to %d, %v", slot, last, err)
			}
		}
		if len(l.running)+len(l.waiting) != 0 || len(l.free) != c.e.cfg.MaxSeqs {
			t.Errorf("%d run, %d wait, %d slots are free", len(l.running), len(l.waiting), len(l.free))
		}
	})
	after := c.resident()
	t.Logf("resident %d MiB before, %d MiB after; %d gave way, %d went on from their KV; %g choices ended",
		before>>20, after>>20, l.Preempted, l.Resumed, c.metric("vllm:request_success_total"))
	if after > before+32<<20 {
		t.Errorf("the process grew from %d to %d MiB", before>>20, after>>20)
	}
	if n, err := drain(t.Context(), c.e, []int32{1, 70, 80}, worker.Params{MaxTokens: 5, TopP: 1, TopLogprobs: -1, IgnoreEOS: true}); n != 5 || err != nil {
		t.Errorf("afterwards: %d tokens, %v", n, err)
	}
}
