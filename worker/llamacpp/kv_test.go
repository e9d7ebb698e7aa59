package llamacpp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/worker"
)

// notebook is a KVSession in memory: it copies every `every` tokens and restores what
// it was given.
type notebook struct {
	every  int
	taken  []worker.KVRange
	stored []worker.KVRange

	restored int
	refused  error
	dones    int
	lasts    int
	fail     error // of a copy
}

func (n *notebook) Restore(context.Context, []int32, time.Duration) worker.KVChain {
	return worker.KVChain{Ranges: n.stored, Done: func(tokens int, _ time.Duration, err error) {
		n.restored, n.refused = tokens, err
		n.dones++
	}}
}

func (n *notebook) Step(_ []int32, held int, last bool, take worker.KVCopy) {
	if last {
		n.lasts++
	}
	from := 0
	if k := len(n.taken); k > 0 {
		from = n.taken[k-1].To
	}
	for ; n.every > 0 && held-from >= n.every; from += n.every {
		data, err := take(nil, from, from+n.every)
		if err != nil {
			n.fail = err
			return
		}
		n.taken = append(n.taken, worker.KVRange{From: from, To: from + n.every, Data: data})
	}
}

// upTo are the ranges taken for the first n tokens, the last one perhaps longer.
func (n *notebook) upTo(tokens int) []worker.KVRange {
	i := slices.IndexFunc(n.taken, func(r worker.KVRange) bool { return r.To >= tokens })
	if i < 0 {
		return n.taken
	}
	return n.taken[:i+1]
}

func (r *rig) withKV() *rig {
	r.kv = r.fake
	return r
}

// resumed are the parameters of a generation that goes on after n of its tokens.
func resumed(p worker.Params, n int, kv worker.KVSession) worker.Params {
	p.MaxTokens -= n
	p.Delivered, p.KV = n, kv
	return p
}

// TestResumeAtEveryOffset cuts a short run at every token and goes on from KV and
// without: tokens are those of the undisturbed run, since the fake's do not depend on
// the shape of batches.
func TestResumeAtEveryOffset(t *testing.T) {
	ids := prompt(21, 4)
	for _, temperature := range []float64{0, 1.1} {
		p := exactly(24)
		p.Temperature, p.Seed, p.Frequency = temperature, 7, 0.5
		want := alone(t, ids, p, 128)
		for _, every := range []int{1, 5, 16} {
			first := newRig(t, fakeConfig(), 256).withKV()
			book := &notebook{every: every}
			whole := p
			whole.KV = book
			s := first.start(ids, whole)
			first.finish(s)
			first.idle()
			if book.fail != nil || book.lasts != 1 {
				t.Fatalf("copy: %v, %d last steps", book.fail, book.lasts)
			}
			for cut := range want {
				next := &notebook{stored: book.upTo(len(ids) + cut)}
				second := newRig(t, fakeConfig(), 256).withKV()
				given := slices.Concat(ids, want[:cut])
				n := resumed(p, cut, next)
				u := second.start(given, n)
				u.stored = next.Restore(t.Context(), given, 0)
				second.finish(u)
				second.idle()
				if !slices.Equal(u.ids(), want[cut:]) {
					t.Fatalf("temperature %g, copied every %d, cut at %d: %v, want %v", temperature, every, cut, u.ids(), want[cut:])
				}
				if next.dones != 1 || next.refused != nil || next.restored == 0 || next.restored > len(given)-1 {
					t.Errorf("cut at %d: restored %d of %d, %v, told %d times", cut, next.restored, len(given), next.refused, next.dones)
				}
				for _, b := range second.fake.batches {
					if next.restored >= len(ids) && len(b) != 1 {
						t.Errorf("cut at %d: a batch of %d while catching up", cut, len(b))
					}
				}
				if got := u.got[0].Cached; got != min(next.restored, len(ids)) {
					t.Errorf("cut at %d: %d tokens cached, restored %d", cut, got, next.restored)
				}
			}
		}
	}
}

// TestExactIsOfOne: of two choices beside each other none is said to go on exactly.
func TestExactIsOfOne(t *testing.T) {
	ids := prompt(10, 3)
	p := exactly(20)
	book := &notebook{every: 10}
	first := newRig(t, fakeConfig(), 256).withKV()
	p.KV = book
	first.finish(first.start(ids, p))
	want := alone(t, ids, exactly(20), 128)
	for _, tt := range []struct {
		request *worker.Request
		exact   bool
	}{{worker.NewRequest(1, 4), true}, {worker.NewRequest(2, 1), true}, {worker.NewRequest(2, 4), false}} {
		r := newRig(t, fakeConfig(), 256).withKV()
		n := resumed(exactly(20), 8, nil)
		n.Request = tt.request
		u := r.start(slices.Concat(ids, want[:8]), n)
		u.stored = worker.KVChain{Ranges: book.upTo(18)}
		r.finish(u)
		if got := u.got[0]; got.Exact != tt.exact || got.Restored == 0 {
			t.Errorf("%d places: exact %v with %d restored, want %v", tt.request.Places(), got.Exact, got.Restored, tt.exact)
		}
	}
}

// TestFastCatchUp feeds the missing tokens as one batch.
func TestFastCatchUp(t *testing.T) {
	ids := prompt(10, 3)
	p := exactly(20)
	want := alone(t, ids, p, 128)
	book := &notebook{every: 10}
	first := newRig(t, fakeConfig(), 256).withKV()
	whole := p
	whole.KV = book
	first.finish(first.start(ids, whole))
	second := newRig(t, fakeConfig(), 256).withKV()
	n := resumed(p, 8, nil)
	n.CatchUp = worker.CatchUpFast
	given := slices.Concat(ids, want[:8])
	u := second.start(given, n)
	u.stored = worker.KVChain{Ranges: book.upTo(10)}
	second.finish(u)
	if !slices.Equal(u.ids(), want[8:]) {
		t.Errorf("%v, want %v", u.ids(), want[8:])
	}
	if got := len(second.fake.batches[0]); got != 8 {
		t.Errorf("first batch has %d tokens, want the 8 to catch up", got)
	}
}

// TestRefusedKV: whatever is wrong with stored ranges, the answer is right.
func TestRefusedKV(t *testing.T) {
	ids := prompt(40, 5)
	p := exactly(10)
	want := alone(t, ids, p, 128)
	book := &notebook{every: 8}
	first := newRig(t, fakeConfig(), 256).withKV()
	whole := p
	whole.KV = book
	first.finish(first.start(ids, whole))
	other := &notebook{every: 8}
	foreign := newRig(t, fakeConfig(), 256).withKV()
	whole.KV = other
	foreign.finish(foreign.start(prompt(40, 6), whole))
	good := book.upTo(40)
	for name, c := range map[string]struct {
		stored []worker.KVRange
		keeps  int
	}{
		"truncated":     {[]worker.KVRange{good[0], {From: 8, To: 16, Data: good[1].Data[:3]}}, 8},
		"empty":         {[]worker.KVRange{{From: 0, To: 8}}, 0},
		"gap":           {[]worker.KVRange{good[0], good[2]}, 8},
		"other place":   {[]worker.KVRange{good[0], {From: 8, To: 16, Data: good[2].Data}}, 8},
		"beyond":        {[]worker.KVRange{good[0], {From: 8, To: 8, Data: good[1].Data}}, 8},
		"none":          {nil, 0},
		"all of it":     {good, 39},
		"more than all": {append(slices.Clone(good), book.taken[len(good):]...), 39},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, fakeConfig(), 256).withKV()
			restored := -1
			u := r.start(ids, p)
			u.stored = worker.KVChain{Ranges: c.stored, Done: func(n int, _ time.Duration, _ error) { restored = n }}
			r.finish(u)
			r.idle()
			if !slices.Equal(u.ids(), want) {
				t.Errorf("%v, want %v", u.ids(), want)
			}
			if restored != c.keeps {
				t.Errorf("restored %d, want %d", restored, c.keeps)
			}
		})
	}
}

// TestLoadingTakesTurns: while much KV is loaded, others go on.
func TestSharedPrefix(t *testing.T) {
	r := newRig(t, fakeConfig(), 256).withKV()
	base := prompt(50, 8)
	one := append(slices.Clone(base), 1, 2, 3)
	two := append(slices.Clone(base), 9)
	p := exactly(12)
	a := r.start(one, p)
	for range 10 {
		r.turn()
	}
	b := r.start(two, p)
	r.finish(a, b)
	r.idle()
	if want := alone(t, two, p, 128); !slices.Equal(b.ids(), want) {
		t.Errorf("%v, want %v", b.ids(), want)
	}
	if b.got[0].Cached != 50 {
		t.Errorf("%d tokens shared, want 50", b.got[0].Cached)
	}
}

// CopyRange, LoadRange and ShareRange make the fake a keeper. A state is text.
func (f *fakeContext) CopyRange(dst []byte, slot, from, to int) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.slots[slot]
	if to > len(s) {
		return dst, fmt.Errorf("slot %d holds %d tokens, not %d", slot, len(s), to)
	}
	dst = fmt.Appendf(dst, "%d %d", from, to)
	for _, id := range s[from:to] {
		dst = fmt.Appendf(dst, " %d", id)
	}
	return dst, nil
}

func (f *fakeContext) LoadRange(slot, from, to int, r worker.KVRange) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var fields []int
	for b := r.Data; len(b) > 0; {
		var n int
		if _, err := fmt.Sscan(string(b), &n); err != nil {
			return err
		}
		fields = append(fields, n)
		i := slices.Index(b, ' ')
		if i < 0 {
			break
		}
		b = b[i+1:]
	}
	if len(fields) < 2 || fields[0] != r.From || fields[1] != r.To || len(fields) != 2+r.To-r.From {
		return errors.New("bad state")
	}
	if len(f.slots[slot]) != from {
		f.tb.Errorf("load at %d into slot %d, which holds %d", from, slot, len(f.slots[slot]))
	}
	if f.used()+r.To-r.From > f.cells {
		return errNoCells
	}
	for _, id := range fields[2+from-r.From : 2+to-r.From] {
		f.slots[slot] = append(f.slots[slot], int32(id))
	}
	return nil
}

func (f *fakeContext) ShareRange(from, to, n int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.slots[to] = append([]int32(nil), f.slots[from][:n]...)
	return nil
}
