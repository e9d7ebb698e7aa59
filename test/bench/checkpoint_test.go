//go:build linux

package bench

import (
	"fmt"
	"math"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/checkpoint"
	"github.com/kvmesh/kvmesh/worker/llamacpp"
)

// mostCost is how much slower checkpoints may make decoding, in percent.
const mostCost = 3

// cpu is the processor time of this process so far, all threads.
func cpu(tb testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// timed is a session that measures what its Step takes of the engine's time.
type timed struct {
	worker.KVSession
	spent, longest time.Duration
}

// Step implements worker.KVSession.
func (t *timed) Step(tokens []int32, held int, last bool, take worker.KVCopy) {
	begin := time.Now()
	t.KVSession.Step(tokens, held, last, take)
	d := time.Since(begin)
	t.spent += d
	t.longest = max(t.longest, d)
}

// stored waits until the keeper has hashed and stored all copies.
func stored(b *testing.B, reg *prometheus.Registry) {
	b.Helper()
	for ; ; time.Sleep(time.Millisecond) {
		families, err := reg.Gather()
		if err != nil {
			b.Fatal(err)
		}
		at := slices.IndexFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == "kvmesh_kv_queue_bytes" })
		if at < 0 {
			b.Fatal("the keeper does not tell its queue")
		}
		if families[at].GetMetric()[0].GetGauge().GetValue() == 0 {
			return
		}
	}
}

// cost is one generation: its decoding, its processor time until all is stored, and
// the engine's time in Step.
type cost struct {
	wall, work time.Duration
	steps      timed
}

// BenchmarkCheckpoint compares decoding with checkpoints and without, in many short
// rounds of both in turn, the order turned around each time. The copies take time of
// the engine's goroutine, which is measured as it is; hashing and storing are done
// beside it, and are in the processor time. What is reported of that and of the wall
// time is the median over the rounds of the ratio within a round, with twice its
// standard error. It fails when the share of the engine's time, or either median, is above
// the bound, and when an error is larger than the bound, so that the run says nothing. What
// a run has shown at least is said: that a cost is below its median and error together.
func BenchmarkCheckpoint(b *testing.B) {
	for _, interval := range []int{1, 16} {
		b.Run(fmt.Sprintf("interval=%d", interval), func(b *testing.B) {
			e := openModel(b, 2048, 1)
			reg := prometheus.NewRegistry()
			k := openKeeperIn(b, sharedMemory(b), interval, reg)
			ids := longPrompt(b, e, 100)
			var wall, work []float64 // percent that a round with checkpoints takes more
			var steps timed
			var decode time.Duration
			for b.Loop() {
				for round := range *kvRounds {
					var c [2]cost // off, on
					for i := range 2 {
						on := (i + round) % 2
						c[on] = decodeOnce(b, e, ids, k, on == 1)
						stored(b, reg)
						c[on].work += cpu(b)
					}
					wall = append(wall, 100*(float64(c[1].wall)/float64(c[0].wall)-1))
					work = append(work, 100*(float64(c[1].work)/float64(c[0].work)-1))
					steps.spent += c[1].steps.spent
					steps.longest = max(steps.longest, c[1].steps.longest)
					decode += c[1].wall
				}
			}
			engine := 100 * float64(steps.spent) / float64(decode)
			b.ReportMetric(engine, "%engine")
			b.ReportMetric(float64(steps.longest.Microseconds())/1000, "longest-ms")
			b.Logf("copies take %.2f %% of the time of decoding, the longest %v", engine, steps.longest.Round(100*time.Microsecond))
			if engine > mostCost {
				b.Errorf("copies take %.2f %% of the time of decoding, at most %d are allowed", engine, mostCost)
			}
			hold(b, "wall", wall)
			hold(b, "cpu", work)
		})
	}
}

// decodeOnce decodes half a block of tokens, in which a block is completed, and returns
// the cost behind the first token; work lacks the processor time at the end, once all is
// stored.
func decodeOnce(b *testing.B, e *llamacpp.Engine, ids []int32, k *checkpoint.Keeper, on bool) (c cost) {
	const tokens = 33 // the first one is prefill
	p := greedy(tokens)
	if on {
		// A stream and a tenant of its own: nothing is restored.
		id := fmt.Sprint(time.Now().UnixNano())
		c.steps.KVSession = k.Session(e.Model(), worker.KVStream{ID: id, Attempt: 1, Salt: id})
		p.KV = &c.steps
	}
	var first time.Time
	for _, err := range e.Generate(b.Context(), ids, p) {
		if err != nil {
			b.Fatal(err)
		}
		if first.IsZero() {
			first, c.work = time.Now(), -cpu(b)
		}
	}
	c.wall = time.Since(first)
	return c
}

// hold reports the median of a cost in percent with its error, and holds both to the
// bound.
func hold(b *testing.B, what string, percent []float64) {
	b.Helper()
	mid := middle(percent)
	var off []float64
	for _, v := range percent {
		off = append(off, math.Abs(v-mid))
	}
	// The standard error of a median, its deviation taken from the middle half, which a
	// few disturbed rounds do not touch.
	twice := 2 * 1.2533 * 1.4826 * middle(off) / math.Sqrt(float64(len(percent)))
	b.Logf("%s time: %+.2f ± %.2f %% with checkpoints, %d rounds", what, mid, twice, len(percent))
	b.ReportMetric(mid, "%"+what)
	b.ReportMetric(twice, "±%"+what)
	switch {
	case mid > mostCost:
		b.Errorf("%s time: checkpoints cost %.2f ± %.2f %%, at most %d are allowed", what, mid, twice, mostCost)
	case twice > mostCost:
		b.Errorf("%s time: %.2f ± %.2f %% says nothing about a bound of %d: this machine is too busy, or there are too few rounds", what, mid, twice, mostCost)
	default:
		b.Logf("%s time: the median is within the bound of %d %%; the cost is at most %.2f %%, its median and error", what, mostCost, mid+twice)
	}
}

// middle is the median.
func middle(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[len(v)/2] + v[(len(v)-1)/2]) / 2
}
