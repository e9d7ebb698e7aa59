package relay

import (
	"context"
	"crypto/rand"
	"log/slog"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// sharer writes the streams that clients may come back to into a store, from where
// another gateway can go on with them.
//
//	keptStream.Write ──▶ pending ──▶ sharer.run, one round trip at a time ──▶ store
//	                                      └──▶ stored ──▶ the listener sends
//
// As long as the store keeps up, an event goes to the client only when the store has it:
// so a client never has what its next gateway does not know. An event waits for that no
// longer than the policy's shareWait. If that was in vain, none waits until the store keeps up again;
// if the store fails, none is written until it answers again, and each stream is then
// told anew.
type sharer struct {
	k     *retained
	store streamStore
	seal  sealer
	log   *slog.Logger
	wake  chan struct{}
	gauge shareMetrics

	// Guarded by k.mu.
	dirty  map[*keptStream]bool // the store lacks something of them
	all    map[*keptStream]bool // that are in the store
	gone   []put                // records to delete
	late   bool                 // the store does not keep up
	down   bool                 // it failed
	frozen bool                 // what comes from now on is the gateway's end, and not the stream's
	waits  *time.Timer          // fires when an event has waited for too long
	wait   time.Duration        // that is; 0 waits for nothing
}

// shareMetrics are those of the shared store.
type shareMetrics struct {
	events  prometheus.Counter
	trouble *prometheus.CounterVec
}

// What can be wrong with the store, the values of the label "what".
const (
	troubleSlow = "slow" // an event went out before the store had it
	troubleDown = "down" // a write failed
	troubleLost = "lost" // the store forgot a stream
	troubleSize = "size" // a stream is too large for it
)

// Times of sharing.
const (
	shareTouch = 5 * time.Second // between two signs of life
	shareSlack = 3 * shareTouch  // that the store keeps a stream for longer than its gateway would
	downFirst  = 100 * time.Millisecond
	downMost   = 2 * time.Second
	lastWrite  = time.Second // for what is unwritten when the gateway ends
)

// mostPut bounds the bytes of events that one round trip carries.
const mostPut = 1 << 20

// sharing is a stream's part in the store. all.mu guards it.
type sharing struct {
	key, gen string
	fresh    bool        // the store is to be told everything
	off      bool        // it is never told anything any more
	head     *recordHead // that is unwritten
	pending  []frame     // that are
	stored   int         // events that the store has
	chunks   []chunk     // there, in order
	bytes    int64       // of chunks
	since    int64       // bytes since the ledger was written as a whole
	whole    int         // the event with which that was
}

// chunk is one field of frames in the store.
type chunk struct {
	from, to int // events
	bytes    int64
}

func newSharer(cfg *Config, k *retained, seal sealer) (*sharer, error) {
	w := &sharer{
		k: k, store: streamStore{cfg.Streams}, seal: seal, log: cfg.Log, wake: make(chan struct{}, 1),
		dirty: map[*keptStream]bool{}, all: map[*keptStream]bool{}, wait: cfg.Policy.Mesh.ShareWait.D(),
		gauge: shareMetrics{
			events: prometheus.NewCounter(prometheus.CounterOpts{
				Name: "kvmesh_relay_shared_events_total", Help: "Events written to the store that gateways share.",
			}),
			trouble: prometheus.NewCounterVec(prometheus.CounterOpts{
				Name: "kvmesh_relay_share_trouble_total", Help: "Times that streams could not be shared as they should: the store was slow (events went out first), down, has lost a stream, or a stream was too large (size).",
			}, []string{"what"}),
		},
	}
	w.waits = time.AfterFunc(never, w.tooSlow)
	w.late = w.wait == 0
	for _, c := range []prometheus.Collector{w.gauge.events, w.gauge.trouble} {
		if err := cfg.Registerer.Register(c); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// newSharing makes a stream one that is shared; nil without a store.
func (w *sharer) newSharing(stream string) *sharing {
	if w == nil {
		return nil
	}
	return &sharing{key: keyOf(stream), gen: rand.Text(), fresh: true}
}

// noteLocked takes in the event that a stream got last, with what the ledger gained by
// it. The job's pen is held.
func (w *sharer) noteLocked(s *keptStream, last bool) {
	h := s.share
	switch {
	case h == nil, h.off, w.frozen && last:
		return
	case w.down:
		h.fresh = true
		return
	case !last && s.job.owner != nil && !s.job.movable(s.job.owner): // nobody could go on with it
		w.quitLocked(s, "")
		return
	case h.fresh && int64(len(s.job.body.data)) > s.size:
		w.quitLocked(s, troubleSize)
		return
	}
	n := s.first + len(s.events) - 1
	if h.fresh {
		h.fresh, h.head, h.chunks, h.bytes, h.stored = false, s.record(), nil, 0, s.first
		h.pending = h.pending[:0]
		for i, e := range s.events[:len(s.events)-1] {
			h.pending = append(h.pending, frame{N: s.first + i, Event: e})
		}
		w.all[s] = true
	}
	whole := h.head != nil && n == h.stored+len(h.pending) || h.since > s.size/2
	event := s.events[len(s.events)-1]
	h.pending = append(h.pending, frame{N: n, Event: event, Last: last, Gain: s.steps.next(s.job, whole)})
	if h.since += cost(event); whole {
		h.since, h.whole = 0, n
	}
	w.dirtyLocked(s)
}

// againLocked tells the store all of a stream that has ended and that it does not have: no
// event comes any more with which that would happen.
func (w *sharer) againLocked(s *keptStream) {
	h, n := s.share, s.first+len(s.events)-1
	if h == nil || h.off || !h.fresh || !s.over || w.frozen || n != s.numbered || !s.streams() {
		return
	}
	head := *s.record()
	head.Body = nil // nobody asks a worker again
	h.fresh, h.head, h.chunks, h.bytes, h.stored, h.pending = false, &head, nil, 0, s.first, nil
	for i, e := range s.events {
		h.pending = append(h.pending, frame{N: s.first + i, Event: e, Last: s.first+i == n})
	}
	w.all[s] = true
	w.dirtyLocked(s)
}

// dirtyLocked has what waits of a stream written.
func (w *sharer) dirtyLocked(s *keptStream) {
	if len(w.dirty) == 0 && !w.late {
		w.waits.Reset(w.wait)
	}
	w.dirty[s] = true
	w.poke()
}

// heldLocked says up to which event a stream's client may be sent. The end of a stream
// that the gateway's own end cut is not stored: it goes out after what is.
func (w *sharer) heldLocked(s *keptStream) int {
	end := s.first + len(s.events)
	h := s.share
	if h == nil || h.off || h.fresh || w.late || w.down || w.frozen && h.stored >= s.numbered {
		return end
	}
	return min(end, h.stored)
}

// quitLocked ends the sharing of a stream that goes on here. why is the trouble, "" for
// none.
func (w *sharer) quitLocked(s *keptStream, why string) {
	if why != "" {
		w.gauge.trouble.WithLabelValues(why).Inc()
	}
	w.forgetLocked(s, true)
	s.at.poke()
}

// forgetLocked lets go of a stream, and of its record where that is to be deleted.
func (w *sharer) forgetLocked(s *keptStream, record bool) {
	if w == nil || s.share == nil || s.share.off {
		return
	}
	h := s.share
	if record && w.all[s] && !w.down {
		w.gone = append(w.gone, put{key: h.key, gen: h.gen, del: true})
		w.poke()
	}
	h.off, h.pending, h.head = true, nil, nil
	delete(w.all, s)
	delete(w.dirty, s)
}

// tooSlow lets events go out before the store has them.
func (w *sharer) tooSlow() {
	w.k.mu.Lock()
	defer w.k.mu.Unlock()
	if len(w.dirty) == 0 || w.late || w.down {
		return
	}
	w.late = true
	w.gauge.trouble.WithLabelValues(troubleSlow).Inc()
	w.pokeAllLocked()
}

// freezeLocked ends sharing but for tokens that are on their way: how the streams end from
// now on, they end because the gateway does.
func (w *sharer) freezeLocked() {
	if w != nil {
		w.frozen = true
		w.pokeAllLocked()
	}
}

func (w *sharer) pokeAllLocked() {
	for s := range w.all {
		s.at.poke()
	}
}

func (w *sharer) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// run writes until ctx ends, and then what is left.
func (w *sharer) run(ctx context.Context) {
	defer w.waits.Stop()
	tick := time.NewTicker(shareTouch)
	defer tick.Stop()
	for {
		touch := false
		select {
		case <-w.wake:
		case <-tick.C:
			touch = true
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWrite)
			defer cancel()
			_ = w.round(last, false) // is logged
			return
		}
		if w.round(ctx, touch) != nil {
			w.awaitStore(ctx)
		}
	}
}

// work is what one round trip writes of a stream.
type work struct {
	s      *keptStream
	put    put
	head   *recordHead
	frames []frame
	drop   int // chunks
}

// round writes what there is.
func (w *sharer) round(ctx context.Context, touch bool) error {
	works, gone := w.collect(touch)
	if len(works)+len(gone) == 0 {
		return nil
	}
	puts := make([]put, 0, len(works)+len(gone))
	for i := range works {
		if err := works[i].encode(w.seal); err != nil {
			w.log.Error("a stream cannot be shared", "err", err)
		}
		puts = append(puts, works[i].put)
	}
	began := time.Now()
	results, err := w.store.write(ctx, append(puts, gone...))
	if err != nil {
		w.failed(err)
		return err
	}
	w.settle(works, results, time.Since(began))
	return nil
}

// collect takes the unwritten together, as much as one round trip may carry.
func (w *sharer) collect(touch bool) (works []work, gone []put) {
	w.k.mu.Lock()
	defer w.k.mu.Unlock()
	gone, w.gone = w.gone, nil
	size := int64(0)
	for s := range w.dirty {
		if size > mostPut {
			w.poke()
			break
		}
		h := s.share
		frames := h.pending
		for i, f := range frames {
			if size += cost(f.Event); size > mostPut {
				frames = frames[:i+1]
				break
			}
		}
		works = append(works, w.work(s, frames))
	}
	for s := range w.all {
		if touch && !w.dirty[s] {
			works = append(works, w.work(s, nil))
		}
	}
	return works, gone
}

// work prepares one write; k.mu is held.
func (w *sharer) work(s *keptStream, frames []frame) work {
	h := s.share
	out := work{s: s, head: h.head, frames: frames}
	out.put = put{key: h.key, gen: h.gen, ttl: s.time + shareSlack, numbered: h.stored}
	if len(frames) > 0 {
		last := frames[len(frames)-1]
		out.put.numbered = last.N + 1
		if last.Last {
			out.put.numbered--
		}
	} else if s.numbered < h.stored {
		out.put.numbered = s.numbered
	}
	for left := h.bytes; left > s.size/2 && h.bytes > s.size && out.drop < len(h.chunks); out.drop++ {
		c := h.chunks[out.drop]
		if c.to > min(h.whole, h.stored, s.sent) { // the ledger, or a client, needs it
			break
		}
		left -= c.bytes
		out.put.drop = append(out.put.drop, strconv.Itoa(c.from))
	}
	return out
}

// encode seals what is written.
func (o *work) encode(seal sealer) (err error) {
	if o.head != nil {
		if o.put.head, err = seal.seal(o.put.key+"/h", o.head); err != nil {
			return err
		}
	}
	if len(o.frames) == 0 {
		return nil
	}
	o.put.field = strconv.Itoa(o.frames[0].N)
	o.put.frames, err = seal.seal(o.put.key+"/"+o.put.field, o.frames)
	return err
}

// settle takes in what came of a round trip.
func (w *sharer) settle(works []work, results []int, took time.Duration) {
	w.k.mu.Lock()
	defer w.k.mu.Unlock()
	w.late = w.late && took > w.wait
	for i, o := range works {
		if !o.s.share.off {
			w.settleOne(o, results[i])
		}
	}
	w.waits.Stop()
	if len(w.dirty) > 0 {
		w.poke()
		if !w.late {
			w.waits.Reset(w.wait)
		}
	}
}

func (w *sharer) settleOne(o work, result int) {
	s, h := o.s, o.s.share
	switch result {
	case putTaken:
		w.k.gauge.passed.WithLabelValues(byStore, passedAway).Inc()
		w.forgetLocked(s, false)
		if s.at != nil {
			s.at.replaceLocked()
		}
		w.k.dropLocked(s, "")
		return
	case putLost:
		w.gauge.trouble.WithLabelValues(troubleLost).Inc()
		h.fresh, h.pending, h.head = true, nil, nil
		delete(w.dirty, s)
		w.againLocked(s)
		s.at.poke()
		return
	}
	for _, c := range h.chunks[:o.drop] {
		h.bytes -= c.bytes
	}
	h.chunks = h.chunks[o.drop:]
	if o.head != nil {
		h.head = nil
	}
	if n := len(o.frames); n > 0 {
		c := chunk{o.frames[0].N, o.frames[n-1].N + 1, int64(len(o.put.frames))}
		h.chunks, h.bytes, h.stored = append(h.chunks, c), h.bytes+c.bytes, c.to
		h.pending = append([]frame(nil), h.pending[n:]...)
		w.gauge.events.Add(float64(n))
		s.at.poke()
	}
	if len(h.pending) == 0 {
		delete(w.dirty, s)
	}
	if h.bytes > 2*s.size {
		w.quitLocked(s, troubleSize)
	}
}

// failed lets all streams go on without the store.
func (w *sharer) failed(err error) {
	w.k.mu.Lock()
	defer w.k.mu.Unlock()
	w.log.Warn("streams are not shared for now: the store fails", "err", err)
	w.gauge.trouble.WithLabelValues(troubleDown).Inc()
	w.down = true
	w.waits.Stop()
	for s := range w.all {
		s.share.fresh, s.share.pending, s.share.head = true, nil, nil
		s.at.poke()
	}
	clear(w.dirty)
	w.gone = nil // they expire
}

// awaitStore returns when the store answers again, or ctx ends.
func (w *sharer) awaitStore(ctx context.Context) {
	for pause := downFirst; sleep(ctx, pause); pause = min(2*pause, downMost) {
		if w.store.ping(ctx) {
			w.log.Info("streams are shared again")
			w.k.mu.Lock()
			w.down = false
			for _, s := range w.k.streams {
				w.againLocked(s)
			}
			w.k.mu.Unlock()
			return
		}
	}
}

// share runs the sharer, if there is one, until the function it returns is called, which
// waits for the last write.
func (k *retained) share(ctx context.Context) (stop func()) {
	if k.shared == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.shared.run(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// freeze is freezeLocked.
func (k *retained) freeze() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.shared.freezeLocked()
}
