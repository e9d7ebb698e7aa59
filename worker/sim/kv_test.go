package sim

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/worker"
)

// kept is a KVSession that keeps everything up to the last step.
type kept struct {
	all      worker.KVRange
	restored int
	refused  error
}

// Restore implements worker.KVSession.
func (k *kept) Restore(context.Context, []int32, time.Duration) worker.KVChain {
	if k.all.Data == nil {
		return worker.KVChain{}
	}
	return worker.KVChain{Ranges: []worker.KVRange{k.all}, Done: func(tokens int, _ time.Duration, err error) {
		k.restored, k.refused = tokens, err
	}}
}

// Step implements worker.KVSession.
func (k *kept) Step(_ []int32, held int, last bool, take worker.KVCopy) {
	if data, err := take(nil, 0, held); last && err == nil {
		k.all = worker.KVRange{To: held, Data: data}
	}
}

// TestCorruptKV: what a faulty worker publishes looks whole; whoever loads it notices,
// and prefills.
func TestCorruptKV(t *testing.T) {
	e := newEngine(t, Config{})
	ids := e.tok.encode(nil, "once upon a time there was a mill")
	want, _ := collect(t, e, ids, greedy(20))
	for _, fault := range []string{`{}`, `{"corrupt_kv":true}`} {
		one, two := new(kept), new(kept)
		p := greedy(20)
		p.KV, p.Sim = one, []byte(fault)
		if got, _ := collect(t, e, ids, p); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", fault, got, want)
		}
		two.all = one.all
		p = greedy(10)
		p.KV, p.Delivered = two, 10
		if got, _ := collect(t, e, slices.Concat(ids, want[:10]), p); !slices.Equal(got, want[10:]) {
			t.Errorf("%s: goes on with %v, want %v", fault, got, want[10:])
		}
		if corrupt := fault != `{}`; (two.refused != nil) != corrupt || (two.restored == 0) != corrupt {
			t.Errorf("%s: %d tokens restored, %v", fault, two.restored, two.refused)
		}
	}
}
