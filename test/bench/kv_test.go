//go:build linux

package bench

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
	"github.com/kvmesh/kvmesh/test/testmesh"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/checkpoint"
	"github.com/kvmesh/kvmesh/worker/llamacpp"
)

var (
	kvWriter = flag.String("kv-writer", "", "directory in which TestKVWriter publishes the KV of the long prompt")
	kvRounds = flag.Int("kv-rounds", 80, "rounds of BenchmarkCheckpoint")
	kvTokens = flag.Int("kv-most", 8192, "longest context of BenchmarkRestore in tokens")
)

// openModel opens the real engine.
func openModel(tb testing.TB, contextLen, seqs int) *llamacpp.Engine {
	tb.Helper()
	lib, model := filepath.Join(testmesh.Root(), ".tools", "llama"), filepath.Join(testmesh.Root(), ".tools", "model.gguf")
	for _, path := range []string{lib, model} {
		if _, err := os.Stat(path); err != nil {
			tb.Skipf("no real model here (%v): run make tools", err)
		}
	}
	e, err := llamacpp.Open(tb.Context(), llamacpp.Config{LibDir: lib, ModelPath: model, ContextLen: contextLen, MaxSeqs: seqs})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { e.Close() })
	return e
}

// openKeeper opens a store in dir and a keeper over it.
func openKeeper(tb testing.TB, dir string, interval int) *checkpoint.Keeper {
	tb.Helper()
	return openKeeperIn(tb, dir, interval, nil)
}

// openKeeperIn is openKeeper with metrics in reg.
func openKeeperIn(tb testing.TB, dir string, interval int, reg prometheus.Registerer) *checkpoint.Keeper {
	tb.Helper()
	store, err := dirstore.Open(dirstore.Config{Dir: dir})
	if err != nil {
		tb.Fatal(err)
	}
	k, err := checkpoint.New(checkpoint.Config{Store: store, Interval: interval, MaxRestore: time.Minute, QueueBytes: 512 << 20, Parts: llamacpp.StateParts, Registry: reg})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		k.Close()
		store.Close()
	})
	return k
}

// sharedMemory is a directory in shared memory that goes away with the test.
func sharedMemory(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvmesh-bench-")
	if err != nil {
		dir = tb.TempDir()
	}
	tb.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "kv")
}

// longPrompt is a prompt of n tokens that does not repeat itself.
func longPrompt(tb testing.TB, e *llamacpp.Engine, n int) []int32 {
	tb.Helper()
	var ids []int32
	for i := 0; len(ids) < n; i++ {
		text := fmt.Sprintf("On day %d the caravan counted %d bags of salt, %d of pepper, and rested beside well number %d. ", i, i*i%997, i*7%61, i%13)
		req, bad := openai.Parse(openai.Completions, fmt.Appendf(nil, `{"model":"m","prompt":%q}`, text))
		if bad != nil {
			tb.Fatal(bad)
		}
		more, err := e.Tokenize(req, 0)
		if err != nil {
			tb.Fatal(err)
		}
		if i > 0 {
			more = more[1:] // the mark of the beginning
		}
		ids = append(ids, more...)
	}
	return ids[:n]
}

func greedy(n int) worker.Params {
	return worker.Params{MaxTokens: n, TopP: 1, TopLogprobs: -1, IgnoreEOS: true}
}

// generate runs a generation and returns its ids, the first token, and the times to it
// and to the end.
func generate(tb testing.TB, e worker.Engine, ids []int32, p worker.Params) (out []int32, first worker.Token, ttft, all time.Duration) {
	begin := time.Now()
	for tok, err := range e.Generate(tb.Context(), ids, p) {
		if err != nil {
			tb.Error(err)
			return
		}
		if len(out) == 0 {
			first, ttft = tok, time.Since(begin)
		}
		out = append(out, tok.ID)
	}
	return out, first, ttft, time.Since(begin)
}

// TestKVWriter is the process that computes the KV which BenchmarkRestore restores.
// Alone it does nothing.
func TestKVWriter(t *testing.T) {
	if *kvWriter == "" {
		t.Skip("is the child process of BenchmarkRestore")
	}
	e := openModel(t, *kvTokens+64, 1)
	k := openKeeper(t, *kvWriter, 16)
	p := greedy(2)
	p.KV = k.Session(e.Model(), worker.KVStream{ID: "bench", Attempt: 1})
	generate(t, e, longPrompt(t, e, *kvTokens), p)
	k.Close()
}

const (
	boundAt   = 4096                   // tokens at which restoring is held to the next two
	leastGain = 100                    // times the time of prefill
	mostWait  = 150 * time.Millisecond // beside a decode step, on a machine not busier than its cores
)

// BenchmarkRestore measures the time to the next token of contexts of growing length,
// with KV that another process has published, look-up and checksums included, and
// with prefill, in the same run. It fails when restoring gains less than leastGain,
// and when it takes longer than mostWait: on a machine that was busier than its cores while
// it ran, only when longer than four times that. The table is in docs/worker-kv.md.
func BenchmarkRestore(b *testing.B) {
	dir := sharedMemory(b)
	cmd := exec.Command(os.Args[0], "-test.run=^TestKVWriter$", "-kv-writer="+dir, fmt.Sprintf("-kv-most=%d", *kvTokens))
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	e := openModel(b, *kvTokens+64, 1)
	k := openKeeper(b, dir, 16)
	ids := longPrompt(b, e, *kvTokens)
	b.ResetTimer()
	for b.Loop() {
		step := decodeStep(b, e, ids[:256])
		b.Logf("one decode step: %v", step.Round(100*time.Microsecond))
		b.Logf("| tokens | restored | restore + next token, ms | without one decode step, ms | prefill + next token, ms | ratio |")
		for n := 256; n <= *kvTokens; n *= 2 {
			var best time.Duration
			restored := 0
			for range 5 {
				p := greedy(1)
				p.KV = k.Session(e.Model(), worker.KVStream{ID: "nobody's"})
				_, first, ttft, _ := generate(b, e, ids[:n], p)
				if best == 0 || ttft < best {
					best, restored = ttft, first.Restored
				}
			}
			_, _, prefill, _ := generate(b, e, ids[:n], greedy(1))
			if restored != n-1 {
				b.Errorf("%d tokens of %d were restored", restored, n)
			}
			ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
			b.Logf("| %d | %d | %.1f | %.1f | %.0f | %.0f |", n, restored, ms(best), ms(best-step), ms(prefill), ms(prefill)/ms(best))
			b.ReportMetric(ms(best), fmt.Sprintf("restore-%d-ms", n))
			b.ReportMetric(ms(prefill)/ms(best), fmt.Sprintf("ratio-%d", n))
			if n < boundAt {
				continue
			}
			if prefill < leastGain*best {
				b.Errorf("at %d tokens restoring is %.0f times faster than prefill, want %d", n, ms(prefill)/ms(best), leastGain)
			}
			if n == boundAt {
				holdWait(b, best-step)
			}
		}
	}
}

// holdWait holds the time that a restore takes beside a decode step to mostWait.
func holdWait(b *testing.B, took time.Duration) {
	b.Helper()
	load, known := hostLoad()
	most, why := mostWait, ""
	if !known || load > float64(runtime.NumCPU()) {
		most, why = 4*mostWait, fmt.Sprintf(" (four times %v: the load is %.1f on %d cores)", mostWait, load, runtime.NumCPU())
	}
	if took > most {
		b.Errorf("at %d tokens restoring takes %v beside a decode step, want at most %v%s", boundAt, took, most, why)
	} else if why != "" {
		b.Logf("restoring was held to %v%s; a quiet machine is held to %v", most, why, mostWait)
	}
}

// decodeStep is the shortest time between two tokens of a generation.
func decodeStep(tb testing.TB, e worker.Engine, ids []int32) (step time.Duration) {
	var last time.Time
	for _, err := range e.Generate(tb.Context(), ids, greedy(32)) {
		if err != nil {
			tb.Fatal(err)
		}
		if d := time.Since(last); !last.IsZero() && (step == 0 || d < step) {
			step = d
		}
		last = time.Now()
	}
	return step
}

// BenchmarkCatchUp compares the two ways to catch up a few tokens after a restore.
func BenchmarkCatchUp(b *testing.B) {
	e := openModel(b, 2048, 1)
	k := openKeeper(b, sharedMemory(b), 16)
	ids := longPrompt(b, e, 320)
	whole := greedy(40)
	whole.KV = k.Session(e.Model(), worker.KVStream{ID: "x"})
	want, _, _, _ := generate(b, e, ids, whole)
	for b.Loop() {
		for _, way := range []worker.CatchUp{worker.CatchUpExact, worker.CatchUpFast} {
			for _, n := range []int{1, 8, 15} {
				p := greedy(20)
				p.Delivered, p.CatchUp = n, way
				p.KV = k.Session(e.Model(), worker.KVStream{ID: "nobody's"})
				got, first, ttft, _ := generate(b, e, slices.Concat(ids, want[:n]), p)
				same := slices.Equal(got, want[n:n+20])
				b.Logf("catch-up %d, %d tokens: next token after %v, restored %d, same tokens %v", way, n, ttft.Round(time.Millisecond), first.Restored, same)
				if way == worker.CatchUpExact && !same {
					b.Errorf("exact catch-up of %d tokens: %v, want %v", n, got, want[n:n+20])
				}
			}
		}
	}
}

// BenchmarkBusyNeighbours counts how often a restored greedy answer differs from the
// undisturbed one when other streams share its batches, which exactness does not
// promise.
func BenchmarkBusyNeighbours(b *testing.B) {
	const tokens, at = 64, 20
	e := openModel(b, 2048, 4)
	k := openKeeper(b, sharedMemory(b), 1)
	differ, runs := 0, 0
	for b.Loop() {
		for i := range 10 {
			ids := longPrompt(b, e, 400)[i*20 : i*20+100]
			id := fmt.Sprint(i)
			p := greedy(tokens)
			p.KV = k.Session(e.Model(), worker.KVStream{ID: id, Attempt: 1, Salt: id})
			want, _, _, _ := generate(b, e, ids, p)
			ctx, cancel := context.WithCancel(b.Context())
			var busy sync.WaitGroup
			for n := range 2 {
				busy.Go(func() {
					for range e.Generate(ctx, ids[n+1:], greedy(1000)) { // until cancel
					}
				})
			}
			p = greedy(tokens - at)
			p.Delivered = at
			p.KV = k.Session(e.Model(), worker.KVStream{ID: id, Attempt: 2, Salt: id})
			got, _, _, _ := generate(b, e, slices.Concat(ids, want[:at]), p)
			cancel()
			busy.Wait()
			runs++
			if !slices.Equal(got, want[at:]) {
				differ++
			}
		}
	}
	b.Logf("%d of %d continuations beside two busy streams differ from the undisturbed run", differ, runs)
	b.ReportMetric(float64(differ)/float64(runs), "differ")
}
