package checkpoint

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/kvcache"
)

// wrapped is a store that can be held up or broken.
type wrapped struct {
	Store
	gate   chan struct{} // nil = open
	broken atomic.Bool
	puts   atomic.Int64
}

func (w *wrapped) Put(ctx context.Context, f *kvcache.Frame) error {
	if w.gate != nil {
		<-w.gate
	}
	if w.broken.Load() {
		return errBroken
	}
	w.puts.Add(1)
	return w.Store.Put(ctx, f)
}

var errBroken = errors.New("no space left")

func (w *wrapped) OpenTail(ctx context.Context, spec kvcache.TailSpec) (kvcache.TailWriter, error) {
	if w.broken.Load() {
		return nil, errBroken
	}
	return w.Store.OpenTail(ctx, spec)
}

// TestBrokenStore: what could not be stored is stored later, chain and tail whole.
func TestBrokenStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	broken := &wrapped{}
	var lines strings.Builder // of the writer, and read when it is done
	cfg := Config{Block: 16, Interval: 4, Log: slog.New(slog.NewTextHandler(&lines, nil))}
	one := newRig(t, dir, "m", cfg, func(s Store) Store { broken.Store = s; return broken })
	broken.broken.Store(true)
	ids := one.prompt(20)
	n := 0
	var want []int32
	for tok, err := range one.e.Generate(t.Context(), ids, one.with(params(200), stream(1))) {
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, tok.ID)
		one.drain()
		if n++; n == 70 {
			if why := one.k.Degraded(); !strings.Contains(why, "takes no blocks") || !strings.Contains(why, errBroken.Error()) {
				t.Errorf("degraded: %q", why)
			}
			broken.broken.Store(false)
		}
	}
	one.flush()
	if testutil.ToFloat64(one.k.metrics.failed.WithLabelValues("put")) == 0 {
		t.Error("no failure is counted")
	}
	// Of 70 tokens with a checkpoint every 4, those that were not tried are counted, too.
	tried, skipped := testutil.ToFloat64(one.k.metrics.failed.WithLabelValues("append")), testutil.ToFloat64(one.k.metrics.skipped.WithLabelValues("tail"))
	if skipped < 10 || skipped+tried > 30 {
		t.Errorf("%v checkpoints of the tail failed and %v were skipped", tried, skipped)
	}
	if why := one.k.Degraded(); why != "" {
		t.Errorf("degraded in the end: %q", why)
	}
	if got := lines.String(); strings.Count(got, "takes no checkpoints") != 2 || strings.Count(got, "takes checkpoints again") != 2 {
		t.Errorf("log:\n%s", got)
	}
	two := newRig(t, dir, "m", cfg, nil)
	got, first := two.generate(slices.Concat(ids, want[:190]), two.with(resumed(params(200), 190), stream(2)), 20)
	if !slices.Equal(got, want[190:]) || first.Restored != len(ids)+189 {
		t.Errorf("%v with %d tokens restored, want %v and %d", got, first.Restored, want[190:], len(ids)+189)
	}
}
