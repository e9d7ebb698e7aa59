package relay

import (
	"container/list"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// retained holds the streams whose clients may come back, and the budget that they
// share. Safe for concurrent use: one lock guards it and all of its streams, and is
// never held while anybody is written to.
type retained struct {
	limit   int64 // bytes of all streams that somebody may still ask for
	gauge   retainMetrics
	running sync.WaitGroup // the jobs
	shared  *sharer        // nil without a store

	mu      sync.Mutex
	streams map[string]*keptStream // by stream id
	away    list.List              // those without a client, the one that is longest without first
	bytes   int64
	closing bool // nobody can come back any more

	// Of a gateway that was replaced: give hands a stream whose job is over to the next
	// one, closeOld ends the listening for it.
	give     func(s *keptStream, gen string) error
	closeOld func()
}

// retainMetrics are those of retained streams.
type retainMetrics struct {
	streams, bytes prometheus.Gauge
	resumed        prometheus.Counter
	dropped        *prometheus.CounterVec
	passed         *prometheus.CounterVec
}

// Labels of streams that change their gateway.
const (
	byStore    = "store"
	byRestart  = "restart"
	passedHere = "here"
	passedAway = "away"
)

// Reasons to let go of a stream before its client had all of it, the values of the
// label "reason".
const (
	droppedExpired = "expired" // its time is over
	droppedEvicted = "evicted" // the budget of all was needed
	droppedSize    = "size"    // it grew beyond its own limit
	droppedStopped = "stopped" // the gateway ends
)

func newRetained(limit int64, r prometheus.Registerer) (*retained, error) {
	k := &retained{limit: limit, streams: map[string]*keptStream{}, gauge: retainMetrics{
		streams: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvmesh_relay_retained_streams", Help: "Streams that are kept without a client.",
		}),
		bytes: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvmesh_relay_retained_bytes", Help: "Bytes of events kept for clients that may come back.",
		}),
		resumed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvmesh_relay_resumed_total", Help: "Clients that came back to their stream.",
		}),
		dropped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvmesh_relay_retained_dropped_total", Help: "Streams let go of before a client had all of them, by reason: expired, evicted, size, stopped.",
		}, []string{"reason"}),
		passed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvmesh_relay_passed_total", Help: "Kept streams that changed their gateway, here or away, by the shared store or by a planned restart.",
		}, []string{"by", "to"}),
	}}
	for _, c := range []prometheus.Collector{k.gauge.streams, k.gauge.bytes, k.gauge.resumed, k.gauge.dropped, k.gauge.passed} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// owner is who may come back to a stream: whoever sends the same credentials, as the
// same tenant, to the same path.
type owner [sha256.Size]byte

func ownerOf(in *http.Request) owner {
	h := sha256.New()
	put := func(s string) {
		_, _ = h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(s)))) // a hash never fails
		_, _ = h.Write([]byte(s))
	}
	put(in.URL.Path)
	for _, name := range []string{"Authorization", "X-Api-Key", names.Tenant} {
		values := in.Header.Values(name)
		put(strconv.Itoa(len(values)))
		for _, v := range values {
			put(v)
		}
	}
	return owner(h.Sum(nil))
}

// keeps says for how long and how much of an answer is kept when its client leaves; it
// is zero for one that ends with its client. req is nil for an answer that is over.
func (r *Relay) keeps(in *http.Request, req *openai.Request) policy.Stream {
	model := ""
	if req != nil {
		model = req.Model
	}
	if in.Header.Get(names.Resumable) != "1" || req != nil && !req.Stream {
		return policy.Stream{}
	}
	route, _ := r.routeOf(in.Header.Get(names.ModelRoute), model)
	return route.Stream
}

// keep carries a request whose answer outlives its client's connection: the job writes
// to memory, and whoever is connected reads from there.
func (r *Relay) keep(w http.ResponseWriter, in *http.Request, b *heldBody, req *openai.Request, limits policy.Stream) {
	start := time.Now()
	ctx, cancel := context.WithCancel(context.WithoutCancel(in.Context()))
	own := in.Clone(ctx)
	own.Body = http.NoBody // it is read
	if own.Header.Get(names.Stream) == "" {
		own.Header.Set(names.Stream, rand.Text())
	}
	s := r.newKept(own, cancel, limits)
	l := newListener(s, w, r.cfg.ClientStall)
	s.at = l
	r.kept.add(s)
	j := r.newJob(s, own, req, start)
	j.body, j.out.stall = b, never // the listener has the client's
	s.job = j
	r.kept.carry(s, j)
	l.serveOrAbort(in.Context())
}

// resume serves the rest of a stream to a client that comes back. Whatever is wrong with
// what it asks for, the answer is the same.
func (r *Relay) resume(w http.ResponseWriter, in *http.Request) {
	r.discardBody(w, in)
	id, n, ok := parseEventID(in.Header.Get(names.LastEventID))
	l := newListener(nil, w, r.cfg.ClientStall)
	who := ownerOf(in)
	if ok && !r.kept.attach(l, id, n, who) {
		err := r.lookElsewhere(in.Context(), id, n, who)
		if err != nil && !errors.Is(err, errAbsent) {
			r.cfg.Log.Warn("a client that comes back is put off", "err", err, "request", in.Header.Get(names.RequestID))
			openai.Unavailable(time.Second, "Streams of other gateways cannot be looked up at the moment. Please try again.").Write(w)
			return
		}
		ok = err == nil && r.kept.attach(l, id, n, who)
	}
	if !ok && r.kept.ends() { // another one has it, or will have
		openai.Unavailable(time.Second, "The gateway is stopping. Please try again.").Write(w)
		return
	}
	if !ok {
		e := openai.Errorf(http.StatusNotFound, "There is no such stream for you to go on with. It may have expired; please ask again without Last-Event-ID.")
		e.Code = "stream_not_found"
		e.Write(w)
		return
	}
	l.serveOrAbort(in.Context())
}

// parseEventID reads "<stream>:<number of the last event>".
func parseEventID(s string) (stream string, n int, ok bool) {
	i := strings.LastIndexByte(s, ':')
	if i <= 0 || len(s)-i-1 > 9 {
		return "", 0, false
	}
	v, err := strconv.ParseUint(s[i+1:], 10, 31)
	return s[:i], int(v), err == nil
}

// ends reports whether the gateway takes nothing new.
func (k *retained) ends() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.closing
}

// add takes a stream in.
func (k *retained) add(s *keptStream) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if old := k.streams[s.id]; old != nil {
		k.dropLocked(old, droppedEvicted)
	}
	k.streams[s.id] = s
}

// attach connects a client to a stream of its own, from the n-th event on. Another
// connection that has it is told and ends.
func (k *retained) attach(l *listener, id string, n int, who owner) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.streams[id]
	if s == nil || s.given != nil || !s.hasLocked(who, n) {
		return false
	}
	if s.at != nil {
		s.at.replaceLocked()
	}
	k.backLocked(s)
	l.s, l.next = s, n
	for _, e := range s.events[n-s.first:] {
		l.unsent += cost(e)
	}
	s.at = l
	k.gauge.resumed.Inc()
	s.poke()
	return true
}

// hasLocked reports whether a client may go on with the stream after n events.
func (s *keptStream) hasLocked(who owner, n int) bool {
	return subtle.ConstantTimeCompare(s.owner[:], who[:]) == 1 && n >= s.first && n <= s.numbered && s.streams()
}

// detach ends a connection. Without another one the stream is kept for its time, if its
// client can know that there is one.
func (k *retained) detach(l *listener) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := l.s
	l.over = true
	if s.at != l || s.gone {
		return
	}
	s.at = nil
	switch {
	case s.given != nil: // it goes, with or without
	case !l.begun || !s.streams():
		k.dropLocked(s, "")
	case k.closing && k.give != nil:
		k.giveLocked(s)
	case k.closing:
		k.dropLocked(s, droppedStopped)
	default:
		k.parkLocked(s)
	}
	s.poke()
}

// parkLocked begins a stream's time without client.
func (k *retained) parkLocked(s *keptStream) {
	s.away = k.away.PushBack(s)
	s.until = time.Now().Add(s.time)
	s.timer = time.AfterFunc(s.time, func() { k.expire(s) })
	k.gauge.streams.Set(float64(k.away.Len()))
	k.fitLocked(s)
}

// backLocked ends a stream's time without client.
func (k *retained) backLocked(s *keptStream) {
	if s.away == nil {
		return
	}
	s.timer.Stop()
	k.away.Remove(s.away)
	s.away = nil
	k.gauge.streams.Set(float64(k.away.Len()))
}

func (k *retained) expire(s *keptStream) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s.away != nil && !time.Now().Before(s.until) { // it may have been away a second time since
		k.dropLocked(s, droppedExpired)
	}
}

// dropLocked lets go of a stream, which ends its generation. It is counted unless reason
// is "", or some client had all of it.
func (k *retained) dropLocked(s *keptStream, reason string) {
	if s.gone {
		return
	}
	if reason != "" && !(s.over && s.sent == s.first+len(s.events)) {
		k.gauge.dropped.WithLabelValues(reason).Inc()
	}
	k.backLocked(s)
	k.shared.forgetLocked(s, !k.closing)
	k.take(-s.bytes)
	s.gone, s.events, s.plain, s.bytes = true, nil, nil, 0
	if k.streams[s.id] == s {
		delete(k.streams, s.id)
	}
	s.at.poke()
	s.cancel()
	s.poke()
}

// take counts bytes; mu is held.
func (k *retained) take(n int64) {
	k.bytes += n
	k.gauge.bytes.Set(float64(k.bytes))
}

// fitLocked brings a stream and the sum of all back under their limits after s grew or
// lost its client. Events that a client was sent go first; of a stream without client
// half the limit of those is kept, for a part of them may never have arrived.
func (k *retained) fitLocked(s *keptStream) {
	for s.bytes > s.size && s.shedLocked() {
	}
	if s.bytes > s.size && s.at == nil {
		k.dropLocked(s, droppedSize)
	}
	for k.bytes > k.limit && k.away.Len() > 0 {
		k.dropLocked(k.away.Front().Value.(*keptStream), droppedEvicted)
	}
	for k.bytes > k.limit && !s.gone && s.shedLocked() {
	}
}

// close ends what nobody can come back to.
func (k *retained) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closing = true
	for k.away.Len() > 0 {
		s := k.away.Front().Value.(*keptStream)
		if k.give != nil {
			k.giveLocked(s)
		} else {
			k.dropLocked(s, droppedStopped)
		}
	}
}
