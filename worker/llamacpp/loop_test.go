package llamacpp

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
)

// rig drives a loop turn by turn, without goroutines.
type rig struct {
	*testing.T
	*loop
	fake *fakeContext
}

func newRig(t *testing.T, cfg Config, cells int) *rig {
	t.Helper()
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	f := newFakeContext(t, cells)
	return &rig{T: t, fake: f, loop: newLoop(cfg.withDefaults(), f, fakeVocabulary(), new(gauges), new(atomic.Bool))}
}

// stream is a sequence with what its consumer has taken.
type stream struct {
	*sequence
	got []worker.Token
}

func (r *rig) start(prompt []int32, p worker.Params) *stream {
	s := newSequence(prompt, p)
	r.g.waiting.Add(1)
	r.enqueue(s)
	return &stream{sequence: s}
}

// take reads up to n tokens that are ready.
func (s *stream) take(n int) {
	for range n {
		select {
		case tok, ok := <-s.out:
			if !ok {
				return
			}
			s.got = append(s.got, tok)
		default:
			return
		}
	}
}

func (s *stream) ids() []int32 {
	out := make([]int32, len(s.got))
	for i, t := range s.got {
		out[i] = t.ID
	}
	return out
}

// finish turns the loop until the streams have ended, their consumers keeping up.
func (r *rig) finish(streams ...*stream) {
	r.Helper()
	for range 100_000 {
		open := 0
		for _, s := range streams {
			s.take(outBuffer)
			if !s.ended {
				open++
			}
		}
		if open == 0 {
			return
		}
		if !r.turn() {
			r.Fatalf("the loop rests with %d streams open", open)
		}
	}
	r.Fatal("streams do not end")
}

// idle checks that everything was given back, in the loop's books and in the context.
func (r *rig) idle() {
	r.Helper()
	if used := r.fake.used(); used != 0 || r.g.cells.Load() != 0 || r.g.running.Load() != 0 || r.g.waiting.Load() != 0 {
		r.Errorf("not idle: %d cells used, counted %d, running %d, waiting %d", used, r.g.cells.Load(), r.g.running.Load(), r.g.waiting.Load())
	}
	if n := r.g.saved.Load(); n != 0 || r.g.last.Load() != nobody {
		r.Errorf("not idle: %d bytes of KV are kept, a request of priority %d waits", n, r.g.last.Load())
	}
	if len(r.free) != r.cfg.MaxSeqs || len(r.running)+len(r.loop.waiting) != 0 {
		r.Errorf("not idle: %d of %d slots free, %d running, %d waiting", len(r.free), r.cfg.MaxSeqs, len(r.running), len(r.loop.waiting))
	}
}

// alone is what a generation gives with the context to itself.
func alone(t *testing.T, prompt []int32, p worker.Params, contextLen int) []int32 {
	t.Helper()
	r := newRig(t, Config{LibDir: "x", ModelPath: "x", ContextLen: contextLen, MaxSeqs: 1}, contextLen)
	s := r.start(prompt, p)
	r.finish(s)
	return s.ids()
}

// prompt is n tokens, different for each seed.
func prompt(n int, seed uint64) []int32 {
	r := rand.New(rand.NewPCG(seed, 1))
	out := make([]int32, n)
	for i := range out {
		out[i] = r.Int32N(256)
	}
	return out
}

func exactly(n int) worker.Params {
	return worker.Params{MaxTokens: n, TopP: 1, TopLogprobs: -1}
}

func tight() Config {
	return Config{LibDir: "x", ModelPath: "x", ContextLen: 48, Cells: 64, MaxSeqs: 3, BatchTokens: 16, PrefillTokens: 4}
}

func TestGivingWayChangesNoToken(t *testing.T) {
	r := newRig(t, tight(), 64)
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
	}
	if got := r.g.prompt.Load(); got <= 50 {
		t.Errorf("%d tokens were prefilled: none gave way, so this test shows nothing", got)
	}
	r.idle()
}

func TestOldestIsNeverInterrupted(t *testing.T) {
	r := newRig(t, tight(), 64)
	first := r.start(prompt(10, 1), exactly(38))
	rest := []*stream{r.start(prompt(10, 2), exactly(38)), r.start(prompt(10, 3), exactly(38))}
	for !first.ended {
		r.turn()
		if first.slot < 0 && !first.ended {
			t.Fatal("the oldest sequence gave way")
		}
		first.take(outBuffer)
		for _, s := range rest {
			s.take(outBuffer)
		}
	}
	r.finish(rest...)
	r.idle()
}

func TestBatchBounds(t *testing.T) {
	cfg := tight()
	cfg.Cells = 200
	r := newRig(t, cfg, 200)
	first := r.start(prompt(40, 1), exactly(8))
	for r.g.generated.Load() == 0 {
		r.turn()
	}
	if got := sizes(r.fake.batches); !slices.Equal(got, []int{16, 16, 8}) {
		t.Errorf("prefill of 40 alone took batches of %v, want 16 16 8", got)
	}
	for i, b := range r.fake.batches {
		for j, e := range b {
			if last := i == 2 && j == 7; e.logits != last {
				t.Errorf("entry %d of batch %d asks for logits: %v, want %v", j, i, e.logits, last)
			}
		}
	}
	r.fake.batches = nil
	second, third := r.start(prompt(9, 2), exactly(2)), r.start(prompt(9, 3), exactly(2))
	r.finish(first, second, third)
	for i, b := range r.fake.batches {
		if len(b) > 3+4 {
			t.Errorf("batch %d beside a generating sequence has %d entries, want at most one each and 4 of a prompt", i, len(b))
		}
	}
	if got := slices.IndexFunc(r.fake.batches, func(b []entry) bool { return len(b) == 5 && b[4].slot == second.lastSlot(r) }); got != 0 {
		t.Errorf("first shared batch is %v, want one token of the first and four of the second stream", r.fake.batches[0])
	}
}

func sizes(batches [][]entry) []int {
	out := make([]int, len(batches))
	for i, b := range batches {
		out[i] = len(b)
	}
	return out
}

// lastSlot is the slot whose history begins with the stream's prompt.
func (s *stream) lastSlot(r *rig) int {
	for _, b := range r.fake.batches {
		for _, e := range b {
			if e.pos == 0 && e.id == s.tokens[0] {
				return e.slot
			}
		}
	}
	return -1
}

func TestNoOvertaking(t *testing.T) {
	r := newRig(t, tight(), 64)
	big := r.start(prompt(30, 1), exactly(18))
	r.turn()
	alsoBig, small := r.start(prompt(30, 2), exactly(2)), r.start(prompt(2, 3), exactly(2))
	r.turn()
	if alsoBig.slot >= 0 || small.slot >= 0 {
		t.Errorf("slots %d and %d: the second does not fit, and the third must not pass it", alsoBig.slot, small.slot)
	}
	r.finish(big, alsoBig, small)
	r.idle()
}

func TestRestingSequenceGivesItsPlace(t *testing.T) {
	cfg := tight()
	cfg.MaxSeqs, cfg.Cells, cfg.ContextLen = 1, 100, 100
	r := newRig(t, cfg, 100)
	slow := r.start(prompt(4, 1), exactly(60))
	for r.turn() {
	}
	if len(slow.out) != outBuffer || slow.slot < 0 {
		t.Fatalf("a stream without a reader has %d tokens and slot %d, want %d and a slot: nobody else waits", len(slow.out), slow.slot, outBuffer)
	}
	quick := r.start(prompt(4, 2), exactly(5))
	r.finish(quick)
	if slow.ended || len(quick.got) != 5 {
		t.Errorf("slow ended: %v; quick has %d tokens, want 5", slow.ended, len(quick.got))
	}
	if r.turn() {
		t.Error("the loop works for a stream without a reader")
	}
	r.finish(slow)
	if want := alone(t, prompt(4, 1), exactly(60), 100); !slices.Equal(slow.ids(), want) {
		t.Errorf("slow stream: %v\nalone: %v", slow.ids(), want)
	}
	r.idle()
}

func TestFailedDecodeEndsItsBatchOnly(t *testing.T) {
	r := newRig(t, tight(), 64)
	boom := errors.New("boom")
	var n int
	r.fake.onDecode = func([]entry, func() bool) error {
		if n++; n == 3 {
			return boom
		}
		return nil
	}
	one, two := r.start(prompt(4, 1), exactly(10)), r.start(prompt(4, 2), exactly(10))
	r.finish(one, two)
	for i, s := range []*stream{one, two} {
		if !errors.Is(s.err, boom) {
			t.Errorf("stream %d of the failed batch ended with %v, want %v", i, s.err, boom)
		}
	}
	r.idle()
	three := r.start(prompt(4, 3), exactly(10))
	r.finish(three)
	if three.err != nil || len(three.got) != 10 {
		t.Errorf("after a failed decode: %d tokens, %v", len(three.got), three.err)
	}
}

func TestContextFullerThanCounted(t *testing.T) {
	r := newRig(t, tight(), 40) // the books say 64
	var streams []*stream
	for i := range 3 {
		streams = append(streams, r.start(prompt(8, uint64(i)), exactly(20)))
	}
	r.finish(streams...)
	for i, s := range streams {
		if want := alone(t, prompt(8, uint64(i)), exactly(20), 48); s.err != nil || !slices.Equal(s.ids(), want) {
			t.Errorf("stream %d: %v, %v\nalone: %v", i, s.ids(), s.err, want)
		}
	}
	whole := r.start(prompt(45, 9), exactly(2))
	r.finish(whole)
	if !errors.Is(whole.err, errNoCells) {
		t.Errorf("a prompt larger than the context ended with %v, want %v", whole.err, errNoCells)
	}
	r.idle()
}

func TestUnusableLogitsEndOneSequence(t *testing.T) {
	r := newRig(t, tight(), 64)
	bad, good := exactly(5), exactly(5)
	bad.LogitBias = make(map[int32]float64)
	for id := range int32(fakeVocab) {
		bad.LogitBias[id] = -1e39 // -Inf as a float32
	}
	one, two := r.start(prompt(4, 1), bad), r.start(prompt(4, 2), good)
	r.finish(one, two)
	if one.err == nil || two.err != nil || len(two.got) != 5 {
		t.Errorf("errors %v and %v, want one and none", one.err, two.err)
	}
	r.idle()
}

func TestEndOfGeneration(t *testing.T) {
	end := exactly(5)
	end.LogitBias = map[int32]float64{fakeEnd: 100}
	ignore := end
	ignore.IgnoreEOS = true
	last := end
	last.MaxTokens = 1
	for name, c := range map[string]struct {
		p      worker.Params
		n      int
		finish string
	}{"stops": {end, 1, "stop"}, "goes on": {ignore, 5, "length"}, "both at once": {last, 1, "stop"}} {
		r := newRig(t, tight(), 64)
		s := r.start(prompt(3, 1), c.p)
		r.finish(s)
		tok := s.got[len(s.got)-1]
		if len(s.got) != c.n || tok.Finish != c.finish || tok.ID != fakeEnd || len(tok.Bytes) != 0 {
			t.Errorf("%s: %d tokens, the last is %+v; want %d, %q", name, len(s.got), tok, c.n, c.finish)
		}
		r.idle()
	}
}

// TestRandomSchedules lets arrivals, slow readers and departures fall as they may:
// whatever the order, a stream's tokens are those it would have got alone.
func TestRandomSchedules(t *testing.T) {
	for seed := range uint64(150) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		cfg := tight()
		cfg.MaxSeqs, cfg.Cells = 1+rnd.IntN(4), 48+rnd.IntN(60)
		cfg.PauseBytes = []int64{-1, 200, 1 << 20}[seed%3]
		r := newRig(t, cfg, cfg.Cells-rnd.IntN(2)*rnd.IntN(8)) // sometimes fuller than counted
		if seed%2 == 0 {
			r.withKV()
		}
		var all []*stream
		for range 300 {
			switch k := rnd.IntN(10); {
			case k == 0 && len(all) < 12:
				i := uint64(len(all))
				p := exactly(1 + rnd.IntN(40))
				p.Priority = rnd.IntN(3) - 1
				all = append(all, r.start(prompt(1+rnd.IntN(30), i), p))
			case k == 1 && len(all) > 0:
				if s := all[rnd.IntN(len(all))]; rnd.IntN(4) == 0 && !s.ended {
					r.fail(s.sequence, ErrClosed)
				}
			case k < 6 && len(all) > 0:
				all[rnd.IntN(len(all))].take(rnd.IntN(40))
			default:
				r.turn()
			}
		}
		r.finish(all...)
		r.idle()
		for i, s := range all {
			full := alone(t, s.tokens[:s.prompt], s.params, cfg.ContextLen)
			if s.err == nil && !slices.Equal(s.ids(), full) || s.err != nil && !slices.Equal(s.ids(), full[:len(s.got)]) {
				t.Fatalf("seed %d, stream %d (%v): %v\nalone: %v", seed, i, s.err, s.ids(), full)
			}
		}
	}
}
