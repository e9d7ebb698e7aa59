package checkpoint

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/codec"
	"github.com/kvmesh/kvmesh/worker"
)

// session keeps the KV of one generation. The first paragraph does not change; the
// second belongs to the engine's goroutine, after Restore has returned; the third to
// the keeper's writer, but for fail, which carries news back.
type session struct {
	k     *Keeper
	space kvcache.Space
	label kvcache.Label // of the space
	// resumed says that the stream has begun elsewhere, or before.
	resumed bool
	// within is the most time that restoring may take.
	within time.Duration

	given   int         // tokens with which the generation began
	next    int         // where the next full block begins
	parent  kvcache.Key // of that block
	tailTo  int         // end of what was queued for the tail
	unkeyed bool        // parent must be found again, from the tokens
	perTok  int         // bytes of a token, as measured, 0 = not known
	wait    int         // nothing is copied before the KV has so many tokens
	resting bool        // nothing is kept any more

	tail tail
	fail failure
}

// tail is the open end of a stream, as the writer sees it.
type tail struct {
	spec kvcache.TailSpec
	w    kvcache.TailWriter // nil until the first append
}

// failure says that something was not stored, so that the session begins there again.
type failure struct {
	mu     sync.Mutex
	any    bool
	stale  bool // a higher attempt has taken over
	first  int  // position from which everything is missing, when block is set
	parent kvcache.Key
	block  bool
}

// job is one copy on its way to the store.
type job struct {
	s      *session
	kind   jobKind
	first  int
	ids    []int32
	parent kvcache.Key // of the block, or of the block before the tail
	base   int         // where the tail began when the copy was made
	data   []byte      // for a block behind room for a frame's header
	room   int         // the length of that
}

type jobKind int

// The kinds of jobs.
const (
	blockJob jobKind = iota
	tailJob
	endJob  // close the tail
	nameJob // say whose KV it will be
)

// String names what is stored.
func (k jobKind) String() string { return [...]string{"blocks", "tails", "ends", "names"}[k] }

// Step implements worker.KVSession.
func (s *session) Step(tokens []int32, held int, last bool, take worker.KVCopy) {
	if s.resting || !s.recover(held) {
		return
	}
	switch {
	case held >= s.wait || last:
		s.copy(tokens, held, last, take)
	case s.tail.spec.Attempt > 0 && (held-s.tailTo)%s.k.cfg.Interval == 0:
		s.k.metrics.skipped.WithLabelValues("tail").Inc()
	}
	if last {
		s.resting = true
		s.k.queue(job{s: s, kind: endJob}) // refused only by a keeper that closes all tails
	}
}

// copy copies what is due.
func (s *session) copy(tokens []int32, held int, last bool, take worker.KVCopy) {
	begin := time.Now()
	if s.unkeyed {
		s.unkeyed, s.parent = false, s.keyAt(tokens, s.next)
	}
	copied := s.blocks(tokens, held, take)
	first := held >= s.given && s.tailTo < s.given
	due := held - s.tailTo
	// A stream that nobody can continue has no use for a tail.
	if s.tail.spec.Attempt > 0 && (due >= s.k.cfg.Interval || due > 0 && (last || first)) {
		copied = s.append(tokens, held, take) || copied
	}
	if copied {
		s.k.metrics.copyTime.Observe(time.Since(begin).Seconds())
	}
}

// keyAt is the key of the block that ends at position to, a multiple of the block.
func (s *session) keyAt(ids []int32, to int) kvcache.Key {
	key, size := s.space.Root, s.k.cfg.Block
	for at := 0; at < to; at += size {
		key = s.space.Key(key, ids[at:at+size])
	}
	return key
}

// recover takes note of what the writer could not store; false = keep nothing more.
func (s *session) recover(held int) bool {
	s.fail.mu.Lock()
	defer s.fail.mu.Unlock()
	if !s.fail.any {
		return true
	}
	s.fail.any = false
	if s.fail.stale {
		s.resting = true
		return false
	}
	if s.fail.block {
		s.next, s.parent, s.fail.block = s.fail.first, s.fail.parent, false
	}
	s.tailTo = s.next
	s.wait = held + s.k.cfg.Block // a store that is broken is not asked at every token
	return true
}

// blocks copies the full blocks that are due. A prefill completes several at once;
// after that one per step is enough to make good what was skipped.
func (s *session) blocks(tokens []int32, held int, take worker.KVCopy) (copied bool) {
	size := s.k.cfg.Block
	for s.next+size <= held {
		if !s.k.room(int64(size * s.perTok)) {
			s.k.metrics.skipped.WithLabelValues("block").Inc()
			return copied
		}
		ids := slices.Clone(tokens[s.next : s.next+size])
		room := kvcache.HeaderLen(size, int(s.k.parts.Load()))
		buf := s.k.buffers.get(max(room+size*s.perTok, smallCopy+1))
		buf, err := take(slices.Grow(buf, room)[:room], s.next, s.next+size)
		if err != nil {
			s.broken(err)
			return copied
		}
		s.perTok = (len(buf) - room) / size
		if !s.k.queue(job{s: s, kind: blockJob, first: s.next, ids: ids, parent: s.parent, data: buf, room: room}) {
			s.k.metrics.skipped.WithLabelValues("block").Inc()
			s.k.buffers.put(buf)
			return copied
		}
		copied = true
		s.parent = s.space.Key(s.parent, ids)
		s.next += size
		s.tailTo = max(s.tailTo, s.next)
	}
	return copied
}

// append copies the tokens behind what the tail has.
func (s *session) append(tokens []int32, held int, take worker.KVCopy) bool {
	// A block that had to be skipped leaves more to the tail than its own length.
	to := min(held, s.tailTo+mostBlock)
	if !s.k.room(int64((to - s.tailTo) * s.perTok)) {
		s.k.metrics.skipped.WithLabelValues("tail").Inc()
		return false
	}
	buf, err := take(s.k.buffers.get((to-s.tailTo)*s.perTok), s.tailTo, to)
	if err != nil {
		s.broken(err)
		return false
	}
	j := job{s: s, kind: tailJob, first: s.tailTo, ids: slices.Clone(tokens[s.tailTo:to]), parent: s.parent, base: s.next, data: buf}
	if !s.k.queue(j) {
		s.k.metrics.skipped.WithLabelValues("tail").Inc()
		s.k.buffers.put(buf)
		return false
	}
	s.tailTo = to
	return true
}

// broken ends the keeping after the engine could not copy.
func (s *session) broken(err error) {
	s.k.metrics.failed.WithLabelValues("copy").Inc()
	s.k.cfg.Log.Error("copy KV out of the engine", "err", err)
	s.resting = true
}

// store does one job, on the writer's goroutine.
func (s *session) store(ctx context.Context, j job) error {
	var err error
	op := "append"
	switch j.kind {
	case blockJob:
		op, err = "put", s.put(ctx, j)
	case tailJob:
		err = s.extend(ctx, j)
	case endJob:
		if s.tail.w != nil {
			err = s.tail.w.Close()
			s.tail.w = nil
		}
	case nameJob:
		s.name(ctx)
	}
	if err == nil {
		return nil
	}
	s.report(j, err)
	if errors.Is(err, kvcache.ErrStale) {
		s.k.metrics.stale.Inc()
		return err
	}
	s.k.metrics.failed.WithLabelValues(op).Inc()
	s.k.cfg.Log.Debug("store KV", "op", op, "first", j.first, "tokens", len(j.ids), "err", err)
	return err
}

// report tells the engine's side that a job was not done. Of several blocks the
// first counts: those behind it are of no use without it.
func (s *session) report(j job, err error) {
	f := &s.fail
	f.mu.Lock()
	defer f.mu.Unlock()
	f.any = true
	f.stale = f.stale || errors.Is(err, kvcache.ErrStale)
	if j.kind == blockJob && (!f.block || j.first < f.first) {
		f.block, f.first, f.parent = true, j.first, j.parent
	}
}

// put publishes a block and begins the tail anew behind it.
func (s *session) put(ctx context.Context, j job) error {
	f, err := s.seal(j)
	if err == nil {
		s.name(ctx)
		err = s.k.cfg.Store.Put(ctx, f)
	}
	if err != nil {
		return err
	}
	s.k.metrics.blocks.Inc()
	s.k.metrics.bytes.WithLabelValues("block").Add(float64(f.Total - f.Len))
	if s.tail.w == nil {
		return nil
	}
	return s.tail.w.Rotate(f.Key, j.first+len(j.ids))
}

// seal makes a frame of a copy. The copy is in place but for the first block, before which
// nobody knew how many parts there are, and where a codec makes another one of it.
func (s *session) seal(j job) (*kvcache.Frame, error) {
	data := j.data[j.room:]
	meta := kvcache.Meta{Space: s.space, Parent: j.parent, First: j.first, IDs: j.ids}
	parts := s.k.cut(data, len(j.ids))
	room := kvcache.HeaderLen(len(j.ids), len(parts))
	switch {
	case s.k.cfg.Codec != kvcache.CodecRaw:
		buf := slices.Grow(s.k.packed[:0], room+len(data))[:room]
		shape := s.k.cfg.Shape
		if j.first == 0 {
			shape = codec.FirstBlock(s.k.cfg.Codec, shape)
		}
		s.k.packed, parts = codec.Pack(buf, s.k.cfg.Codec, parts, data, shape)
		return kvcache.Seal(s.k.packed, meta, parts)
	case room != j.room:
		s.k.parts.Store(int64(len(parts)))
		return kvcache.Encode(nil, meta, parts, data)
	}
	return kvcache.Seal(j.data, meta, parts)
}

// name labels the space for those who look at the store, before each block, because
// they may have dropped it. A space without a label works as well.
func (s *session) name(ctx context.Context) {
	if l, ok := s.k.cfg.Store.(kvcache.Labeled); ok {
		if err := l.Label(ctx, s.space.Fingerprint, s.label); err != nil {
			s.k.cfg.Log.Debug("label KV", "err", err)
		}
	}
}

// extend appends to the tail. Where the tail and the copy do not join, because
// something before it was not stored, the tail is begun again.
func (s *session) extend(ctx context.Context, j job) error {
	r := kvcache.Range{First: j.first, IDs: j.ids, Data: j.data}
	var err error
	if s.tail.w == nil {
		if j.first != j.base {
			return kvcache.ErrGap
		}
		spec := s.tail.spec
		spec.Parent, spec.First = j.parent, j.base
		if s.tail.w, err = s.k.cfg.Store.OpenTail(ctx, spec); err != nil {
			s.tail.w = nil
			return err
		}
	}
	err = s.tail.w.Append(r)
	if errors.Is(err, kvcache.ErrGap) && j.first == j.base {
		if err = s.tail.w.Rotate(j.parent, j.base); err == nil {
			err = s.tail.w.Append(r)
		}
	}
	if err != nil {
		return err
	}
	s.k.metrics.appends.Inc()
	s.k.metrics.bytes.WithLabelValues("tail").Add(float64(len(j.data)))
	return nil
}
