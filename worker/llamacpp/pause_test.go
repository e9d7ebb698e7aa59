package llamacpp

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/worker"
)

// TestPausedGoesOnFromItsKV: five sequences that need more than twice the cells: all
// tokens are right, and no token is prefilled twice.
func TestPausedGoesOnFromItsKV(t *testing.T) {
	r := newRig(t, tight(), 64).withKV()
	var streams []*stream
	for i := range 5 {
		p := exactly(35)
		p.Temperature, p.Seed, p.Frequency = 1, uint64(i), 0.5
		streams = append(streams, r.start(prompt(10, uint64(i)), p))
	}
	r.finish(streams...)
	for i, s := range streams {
		if want := alone(t, prompt(10, uint64(i)), s.params, 48); !slices.Equal(s.ids(), want) {
			t.Errorf("stream %d: %v\nalone: %v", i, s.ids(), want)
		}
		if s.got[0].Cached != 0 || s.got[0].Restored != 0 {
			t.Errorf("stream %d: %+v, want none of its tokens cached or restored by others", i, s.got[0])
		}
	}
	if got := r.g.prompt.Load(); got != 50 {
		t.Errorf("%d tokens were prefilled, want the 50 of the prompts", got)
	}
	if p, n := r.g.preempted.Load(), r.g.resumed.Load(); p == 0 || n != p {
		t.Errorf("%d times one gave way, %d times it went on from its KV", p, n)
	}
	r.idle()
}

// TestPauseWithinItsMemory: without memory for copies everything is as right, and
// prefilled again.
func TestPauseWithinItsMemory(t *testing.T) {
	for _, limit := range []int64{-1, 60, 150} {
		cfg := tight()
		cfg.PauseBytes = limit
		r := newRig(t, cfg, 64).withKV()
		var streams []*stream
		for i := range 5 {
			streams = append(streams, r.start(prompt(10, uint64(i)), exactly(35)))
		}
		for more := true; more; {
			more = false
			for _, s := range streams {
				s.take(outBuffer)
				more = more || !s.ended
			}
			r.turn()
			// The size of a first copy is not known before it is made.
			if n := r.g.saved.Load(); limit < 0 && n != 0 || limit > 0 && n > limit+200 {
				t.Fatalf("%d bytes of KV are kept, at most %d are allowed", n, limit)
			}
		}
		for i, s := range streams {
			if want := alone(t, prompt(10, uint64(i)), s.params, 48); !slices.Equal(s.ids(), want) {
				t.Errorf("limit %d, stream %d: %v\nalone: %v", limit, i, s.ids(), want)
			}
		}
		if limit < 0 && (r.g.resumed.Load() != 0 || r.g.prompt.Load() <= 50) {
			t.Errorf("no memory for copies, and %d times one went on from a copy", r.g.resumed.Load())
		}
		r.idle()
	}
}

// TestHigherPriorityGoesFirst: requests of three priorities end in their order, and
// within one in that of their arrival, whatever came first.
func TestHigherPriorityGoesFirst(t *testing.T) {
	cfg := tight()
	cfg.MaxSeqs = 1
	r := newRig(t, cfg, 64).withKV()
	priorities := []int{-1, 0, 5, 0, 5, -1}
	var streams []*stream
	for i, priority := range priorities {
		p := exactly(20)
		p.Priority = priority
		streams = append(streams, r.start(prompt(18, uint64(i)), p))
		for range 3 { // the first is at work when the second comes
			r.turn()
		}
	}
	var ended []int
	for len(ended) < len(streams) {
		for i, s := range streams {
			s.take(outBuffer)
			if s.ended && !slices.Contains(ended, i) {
				ended = append(ended, i)
			}
		}
		r.turn()
	}
	if want := []int{2, 4, 1, 3, 0, 5}; !slices.Equal(ended, want) {
		t.Errorf("ended in the order %v, want %v", ended, want)
	}
	for i, s := range streams {
		if want := alone(t, prompt(18, uint64(i)), s.params, 48); !slices.Equal(s.ids(), want) {
			t.Errorf("stream %d: %v\nalone: %v", i, s.ids(), want)
		}
	}
	if got := r.g.prompt.Load(); got != 108 {
		t.Errorf("%d tokens were prefilled, want the 108 of the prompts", got)
	}
	r.idle()
}

// TestOnlyLowerOnesGiveWay: when cells run out, the lowest priority gives way, and
// among equals the youngest; a large request takes places only if that is enough.
func TestOnlyLowerOnesGiveWay(t *testing.T) {
	cfg := tight()
	cfg.Cells = 96
	r := newRig(t, cfg, 96).withKV()
	with := func(n, priority int, seed uint64) *stream {
		p := exactly(30)
		p.Priority = priority
		return r.start(prompt(n, seed), p)
	}
	low, high := with(10, 0, 1), with(10, 2, 2)
	for high.cached < 25 {
		r.turn()
		low.take(1)
		high.take(1)
	}
	middle := with(18, 1, 3) // fits beside high, in low's place
	r.turn()
	if low.slot >= 0 || high.slot < 0 || middle.slot < 0 {
		t.Errorf("slots %d, %d and %d, want the lowest to wait", low.slot, high.slot, middle.slot)
	}
	large := with(40, 1, 4) // as high as middle, which it does not displace
	r.turn()
	if large.slot >= 0 || middle.slot < 0 {
		t.Errorf("slots %d and %d: one of the same priority gave way", large.slot, middle.slot)
	}
	r.finish(low, high, middle, large)
	r.idle()
}

// TestSlowReaderDoesNotComeAndGo: one whose consumer is behind gives its place once
// for half a buffer, not for each token.
func TestSlowReaderDoesNotComeAndGo(t *testing.T) {
	cfg := tight()
	cfg.MaxSeqs, cfg.Cells, cfg.ContextLen = 1, 400, 400
	r := newRig(t, cfg, 400).withKV()
	p := exactly(100)
	p.Priority = 1
	slow := r.start(prompt(20, 1), p)
	for r.turn() {
	}
	other := r.start(prompt(20, 2), exactly(300))
	for !slow.ended {
		for range 20 {
			r.turn()
			other.take(outBuffer)
		}
		slow.take(1)
	}
	r.finish(slow, other)
	if n := r.g.preempted.Load(); n > 2*100/(outBuffer/2) {
		t.Errorf("100 tokens for a slow reader took %d changes of place", n)
	}
	for _, s := range []*stream{slow, other} {
		if want := alone(t, s.tokens[:s.prompt], s.params, 400); !slices.Equal(s.ids(), want) {
			t.Errorf("%v\nalone: %v", s.ids(), want)
		}
	}
	r.idle()
}

// bookcase is a session that gives back what it took.
type bookcase struct{ notebook }

func (b *bookcase) Restore(ctx context.Context, ids []int32, _ time.Duration) worker.KVChain {
	b.stored = b.upTo(len(ids) - 1)
	return b.notebook.Restore(ctx, ids, 0)
}

// TestPausedGoesOnFromItsSession: without memory for copies, what the session has
// stored is used, and the rest is decoded one token at a time.
func TestPausedGoesOnFromItsSession(t *testing.T) {
	cfg := tight()
	cfg.PauseBytes = -1
	f := newFakeContext(t, 64)
	arrived := make(chan struct{})
	f.onDecode = func([]entry, func() bool) error {
		<-arrived
		return nil
	}
	e := startFake(t, cfg, f)
	var wg sync.WaitGroup
	books := make([]bookcase, 5)
	for i := range books {
		books[i].every = 4
		p := exactly(35)
		p.Temperature, p.Seed, p.KV = 1, uint64(i), &books[i]
		wg.Go(func() {
			var got []int32
			for tok, err := range e.Generate(t.Context(), prompt(10, uint64(i)), p) {
				if err != nil {
					t.Errorf("stream %d: %v", i, err)
				}
				got = append(got, tok.ID)
			}
			p.KV = nil
			if want := alone(t, prompt(10, uint64(i)), p, 48); !slices.Equal(got, want) {
				t.Errorf("stream %d: %v\nalone: %v", i, got, want)
			}
		})
	}
	for l := e.Load(); l.Running+l.Waiting < 5; l = e.Load() {
		runtime.Gosched()
	}
	close(arrived)
	wg.Wait()
	for i := range books {
		if b := &books[i]; b.lasts != 1 || b.fail != nil || b.dones == 0 {
			t.Errorf("session %d: %d last steps, %v, told %d times", i, b.lasts, b.fail, b.dones)
		}
	}
	l := e.Load()
	if l.Preempted == 0 || l.Resumed == 0 || l.PausedBytes != 0 {
		t.Errorf("%d gave way, %d went on from KV, %d bytes are kept", l.Preempted, l.Resumed, l.PausedBytes)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// TestLeavingWhilePaused: sequences leave at any time, some while their session looks
// for their KV; each session is told of its end once.
func TestLeavingWhilePaused(t *testing.T) {
	cfg := tight()
	cfg.PauseBytes, cfg.MaxQueue = -1, 64
	e := startFake(t, cfg, newFakeContext(t, 64))
	defer e.Close()
	books := make([]bookcase, 40)
	var wg sync.WaitGroup
	for i := range books {
		books[i].every = 4
		rnd := rand.New(rand.NewPCG(uint64(i), 9))
		p := exactly(35)
		p.KV, p.Priority = &books[i], rnd.IntN(3)
		most := rnd.IntN(40)
		wg.Go(func() {
			n := 0
			for range e.Generate(t.Context(), prompt(10, uint64(i)), p) {
				if n++; n > most {
					break
				}
			}
			if b := &books[i]; b.lasts != 1 || b.fail != nil {
				t.Errorf("session %d: %d last steps, %v", i, b.lasts, b.fail)
			}
		})
	}
	wg.Wait()
	if l := e.Load(); l.Running != 0 || l.Waiting != 0 || l.KVUsage != 0 || l.PausedBytes != 0 {
		t.Errorf("load is %+v", l)
	}
}

// TestFullQueueKeepsTheHigher: a request that finds the queue full is refused, unless
// one of a lower priority waits, of which nobody has seen a token.
func TestFullQueueKeepsTheHigher(t *testing.T) {
	cfg := fakeConfig()
	cfg.MaxSeqs, cfg.MaxQueue, cfg.ContextLen, cfg.Cells = 1, 2, 1<<16, 1<<16
	f := newFakeContext(t, cfg.Cells)
	ctx, cancel := context.WithCancel(t.Context())
	gate := make(chan struct{})
	f.onDecode = func([]entry, func() bool) error {
		select {
		case gate <- struct{}{}:
		case <-ctx.Done():
		}
		return nil
	}
	e := startFake(t, cfg, f)
	defer e.Close()
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	var taken atomic.Uint64
	ask := func(tokens, priority int, r *worker.Request) chan error {
		end := make(chan error, 1)
		p := exactly(tokens)
		p.Priority, p.Request = priority, r
		all.Go(func() {
			var last error
			for _, err := range e.Generate(ctx, prompt(4, 2), p) {
				if last = err; err == nil {
					taken.Add(1)
				}
			}
			end <- last
		})
		return end
	}
	// until lets the engine decode, in which it takes requests, until ok. The consumer
	// keeps up: one that is behind would lose its place.
	until := func(ok func() bool) {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for !ok() {
			<-tick.C
			if e.g.generated.Load() > taken.Load() {
				continue
			}
			select {
			case <-gate:
			default:
			}
		}
	}
	busy := func(what string, end chan error) {
		t.Helper()
		until(func() bool { return len(end) > 0 })
		if err := <-end; !errors.Is(err, worker.ErrBusy) {
			t.Errorf("%s: %v, want ErrBusy", what, err)
		}
	}
	two := worker.NewRequest(2, 1)
	ends := []chan error{ask(60_000, 9, two)} // holds the only sequence
	until(func() bool { return e.g.generated.Load() > 0 })
	ends = append(ends, ask(4, 9, two)) // it has begun, so this choice is refused no more
	until(func() bool { return e.Load().Waiting == 1 })
	low := ask(4, -3, nil)
	until(func() bool { return e.g.last.Load() == -3 })
	pair := worker.NewRequest(2, 1)
	lows := []chan error{ask(4, -2, pair), ask(4, -2, pair)}
	until(func() bool { return e.Load().Waiting == 4 })
	busy("no higher than the last one", ask(4, -3, nil))
	busy("two for which one place can be had", ask(4, -2, worker.NewRequest(2, 2)))
	none := ask(4, -10, nil)
	busy("lower than all", none)
	ends = append(ends, ask(4, 5, nil))
	busy("the lowest one of a full queue", low)
	until(func() bool { return e.g.last.Load() == -2 })
	ends = append(ends, ask(4, 5, nil))
	for _, end := range lows {
		busy("a choice of the next lowest", end)
	}
	until(func() bool { return e.g.last.Load() == 5 })
	busy("no higher than all that may be refused", ask(4, 5, nil))
	cancel()
	for _, end := range ends {
		if err := <-end; !errors.Is(err, context.Canceled) {
			t.Errorf("one that runs or waits ends with %v", err)
		}
	}
}
