package llamacpp

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/worker/sampling"
)

// ErrClosed ends every generation when the engine is closed.
var ErrClosed = errors.New("the engine is closed")

// errNoCells is a decoder's report that the batch does not fit its KV.
var errNoCells = errors.New("no free KV cells")

// errAborted is a decoder's report that stop told it to leave the batch.
var errAborted = errors.New("decode aborted")

// entry is one token of a batch.
type entry struct {
	slot, pos int
	id        int32
	logits    bool // wanted after this token
}

// decoder is the part of a llama.cpp context that the loop drives.
type decoder interface {
	// Decode runs a batch; errNoCells when it does not fit, errAborted when stop
	// returned true, which it is asked now and then in a long batch. After an
	// error the tokens of the batch may or may not be in the KV.
	Decode(batch []entry, stop func() bool) error
	// Logits returns those of entry i of the last batch; valid and writable
	// until the next Decode.
	Logits(i int) ([]float32, error)
	// Keep drops what slot holds from token n on.
	Keep(slot, n int) error
	// Close frees the context and the model.
	Close()
}

// gauges are what Load reads; the loop writes them, but waiting is also
// incremented by those who queue.
type gauges struct {
	running, waiting atomic.Int64
	// cells is the loop's own count of cells in use. It can differ from
	// llama.cpp's only by a bug on either side; see failed.
	cells atomic.Int64
	// Totals since the start. A token that is prefilled again counts again.
	prompt, generated atomic.Uint64
	perToken          atomic.Int64 // of prefill in nanoseconds, 0 = not measured yet

	// preempted counts the times that a sequence gave way, and resumed those after
	// which its KV was restored; saved is the memory of the copies kept now, in bytes.
	preempted, resumed atomic.Uint64
	saved              atomic.Int64
	// last is the priority of the waiting request that would be refused for a higher
	// one, nobody when there is none.
	last atomic.Int64
}

// loop owns the context. All of it belongs to the goroutine in run.
//
// A sequence is in exactly one of these places:
//
//	          enqueue         admit            choose, fail
//	(nowhere) ------> waiting -----> running ---------------> ended
//	                     ^              |
//	                     +--- yield ----+
//
// and holds cells and a slot only while it is running.
type loop struct {
	cfg Config // with defaults
	dec decoder
	kv  keeper // nil = KV cannot be moved
	voc *vocabulary
	g   *gauges

	running []*sequence // in order, see sequence.before
	waiting []*sequence // likewise
	arrived uint64      // sequences so far, the age of the next one
	free    []int       // slots

	// send hands a function to the loop from another goroutine; nil in tests without
	// one, which then fetch nothing.
	send     func(func(*loop)) bool
	perToken int64 // bytes of a token's KV, as measured, 0 = not known
	closing  bool
	leaving  *atomic.Bool // set by Close before it sends closing

	// The turn's batch and whose tokens are in it; rebuilt each turn, kept for
	// their memory.
	batch []entry
	parts []part

	scratch sampling.Buffer // shared by all samplers
}

// part is one sequence's run of tokens in the batch.
type part struct {
	seq *sequence
	n   int
	end int // index after its last entry
}

func newLoop(cfg Config, dec decoder, voc *vocabulary, g *gauges, leaving *atomic.Bool) *loop {
	l := &loop{cfg: cfg, dec: dec, voc: voc, g: g, leaving: leaving, batch: make([]entry, 0, cfg.BatchTokens)}
	for slot := cfg.MaxSeqs - 1; slot >= 0; slot-- {
		l.free = append(l.free, slot)
	}
	g.last.Store(nobody)
	return l
}

// run executes commands and decodes until a command sets closing. Commands come
// first in every turn, so that a sequence that has left is never decoded again,
// and they may use the context: no decode is running.
func (l *loop) run(in *inbox) {
	for {
		for _, f := range in.take() {
			f(l)
		}
		if l.closing {
			// What was sent before the door shut is still answered.
			for _, f := range in.close() {
				f(l)
			}
			l.shutdown()
			return
		}
		if !l.turn() {
			<-in.wake
		}
	}
}

// turn runs one decode; false when there is nothing to decode.
func (l *loop) turn() bool {
	l.admit()
	l.restore()
	l.plan()
	if len(l.batch) == 0 {
		return false
	}
	l.step()
	return true
}

// shutdown ends every sequence.
func (l *loop) shutdown() {
	for _, s := range slices.Concat(l.running, l.waiting) {
		l.drop(s)
		s.end(ErrClosed)
	}
}

// drop forgets a sequence and frees its cells and slot. Sequences that have ended
// are gone already: their consumer may say good-bye late.
func (l *loop) drop(s *sequence) {
	if s.ended {
		return
	}
	l.unsave(s)
	if s.slot >= 0 {
		l.keep(s, true)
		l.release(s)
		return
	}
	if i := slices.Index(l.waiting, s); i >= 0 {
		l.leaveQueue(i)
	}
	s.forget()
	l.keep(s, true)
}

// fail ends a sequence with an error.
func (l *loop) fail(s *sequence, err error) {
	l.drop(s)
	s.end(err)
}

// release takes a running sequence's cells and slot back.
func (l *loop) release(s *sequence) {
	s.forget()
	if err := l.dec.Keep(s.slot, 0); err != nil {
		l.cfg.Log.Error("free the KV of a sequence", "slot", s.slot, "err", err)
	}
	l.running = slices.Delete(l.running, slices.Index(l.running, s), slices.Index(l.running, s)+1)
	l.free = append(l.free, s.slot)
	l.g.running.Add(-1)
	l.g.cells.Add(-int64(s.cached))
	s.slot, s.cached = -1, 0
	s.exactFrom, s.exactTo = 0, 0 // unless its KV comes back
}

// plan fills the batch. When there are fewer cells than it needs, sequences give
// way until what is left fits.
func (l *loop) plan() {
	for {
		l.fill()
		if int(l.g.cells.Load())+len(l.batch)+l.toLoad() <= l.cfg.Cells {
			return
		}
		l.makeRoom()
	}
}

// fill collects one token of each generating sequence, then prompt tokens. Room
// for the former is certain, since BatchTokens is at least MaxSeqs. A sequence whose
// stored KV is being loaded has no part yet.
func (l *loop) fill() {
	l.batch, l.parts = l.batch[:0], l.parts[:0]
	for _, s := range l.running {
		if s.chunk() == 1 && s.ready() {
			l.add(s, 1)
		}
	}
	room := l.cfg.BatchTokens - len(l.batch)
	if len(l.batch) > 0 {
		room = min(room, l.cfg.PrefillTokens)
	}
	for _, s := range l.running {
		if s.chunk() > 1 && s.ready() && room > 0 {
			n := min(s.chunk(), room)
			l.add(s, n)
			room -= n
		}
	}
}

// add puts the next n tokens of s into the batch.
func (l *loop) add(s *sequence, n int) {
	for pos := s.cached; pos < s.cached+n; pos++ {
		l.batch = append(l.batch, entry{slot: s.slot, pos: pos, id: s.tokens[pos], logits: pos == len(s.tokens)-1 || s.exactFrom <= pos && pos < s.exactTo})
	}
	l.parts = append(l.parts, part{seq: s, n: n, end: len(l.batch)})
}

// step decodes the batch and gives every sequence that is through its next token.
// A sequence in the middle of its prompt gets none.
func (l *loop) step() {
	begin := time.Now()
	if err := l.dec.Decode(l.batch, l.pointless); err != nil {
		l.failed(err)
		return
	}
	l.measure(time.Since(begin))
	for _, p := range l.parts {
		s := p.seq
		s.mixed = s.mixed || s.exactTo > s.cached && len(l.batch) > 1
		s.cached += p.n
		l.g.cells.Add(int64(p.n))
		// One token past the prompt is the one chosen last, fed back.
		if p.n > 1 || s.cached <= s.given {
			l.g.prompt.Add(uint64(p.n))
		}
		l.keep(s, false)
		if s.pending() > 0 {
			continue
		}
		if err := l.choose(s, p.end-1); err != nil {
			l.fail(s, err)
		}
	}
}

// measure notes the speed of prefill after a batch that was mostly that.
func (l *loop) measure(took time.Duration) {
	n := len(l.batch)
	if n < 32 {
		return
	}
	now := int64(took) / int64(n)
	if old := l.g.perToken.Load(); old > 0 {
		now = (3*old + now) / 4
	}
	l.g.perToken.Store(max(now, 1))
}

// pointless reports that nobody waits for the batch any more.
func (l *loop) pointless() bool {
	if l.leaving.Load() {
		return true
	}
	for _, p := range l.parts {
		if !p.seq.gone.Load() {
			return false
		}
	}
	return true
}

// failed deals with a batch that was not decoded. After an abort the sequences are
// about to be dropped. When the context is fuller than the loop counted, the
// youngest sequence gives way and the rest is tried again.
func (l *loop) failed(err error) {
	if errors.Is(err, errAborted) && l.undo() {
		return
	}
	if errors.Is(err, errNoCells) && len(l.running) > 1 && l.undo() {
		l.cfg.Log.Warn("KV is fuller than counted", "cells", l.g.cells.Load(), "batch", len(l.batch))
		l.makeRoom()
		return
	}
	l.cfg.Log.Error("decode", "sequences", len(l.parts), "tokens", len(l.batch), "err", err)
	for _, p := range l.parts {
		l.fail(p.seq, fmt.Errorf("decode: %w", err))
	}
}

// undo trims every sequence of the batch to what it held before, and reports
// whether that worked.
func (l *loop) undo() bool {
	for _, p := range l.parts {
		if l.dec.Keep(p.seq.slot, p.seq.cached) != nil {
			return false
		}
	}
	return true
}

// choose samples the next token of s from the logits of entry i and sends it.
func (l *loop) choose(s *sequence, i int) error {
	logits, err := l.dec.Logits(i)
	if err != nil {
		return err
	}
	l.voc.suppress(logits)
	pick, err := s.sampler.Next(logits, &l.scratch)
	if err != nil {
		return err
	}
	l.g.generated.Add(1)
	s.tokens = append(s.tokens, pick.ID)
	tok := l.voc.token(pick, s.params.TopLogprobs)
	if !s.begun {
		s.begun = true
		if r := s.params.Request; !r.Begun() {
			r.Begin()
			l.noteLast() // its other choices cannot be displaced any more
		}
		tok.Cached = min(max(s.restored, s.shared), s.prompt)
		tok.Restored, tok.Lossy = s.restored, s.lossy
		// Choices beside each other shared batches before the cut, and will again.
		tok.Exact = s.exactTo > 0 && !s.mixed && s.params.Request.Single()
	}
	switch {
	case !s.params.IgnoreEOS && l.voc.ends(pick.ID):
		tok.Finish, tok.Bytes = "stop", nil
	case len(s.tokens)-s.given >= s.params.MaxTokens || len(s.tokens) >= l.cfg.ContextLen:
		tok.Finish = "length"
	}
	if tok.Finish == "" {
		s.out <- tok // has room: a resting sequence is not decoded
		return nil
	}
	l.keep(s, true)
	l.release(s) // before the consumer can see the end
	s.out <- tok
	s.end(nil)
	return nil
}
