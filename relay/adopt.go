package relay

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// newKept makes a stream that is kept, for a request without its body.
func (r *Relay) newKept(own *http.Request, cancel context.CancelFunc, limits policy.Stream) *keptStream {
	id := own.Header.Get(names.Stream)
	return &keptStream{
		all: r.kept, id: id, mark: []byte("id: " + id + ":"), owner: ownerOf(own), time: limits.Retain.D(), size: int64(limits.RetainSize),
		ctx: own.Context(), cancel: cancel, header: http.Header{}, room: make(chan struct{}, 1), share: r.kept.shared.newSharing(id), done: make(chan struct{}),
	}
}

// carry runs the job of a stream that is kept.
func (k *retained) carry(s *keptStream, j *job) {
	k.running.Go(func() {
		defer close(s.done)
		j.run()
		s.pack()
		j.finish()
		j.letGo()
		if j.owner != nil {
			j.owner.prefix, j.owner.rest = nil, nil
		}
		s.ended()
	})
}

// record is what another gateway needs to know of a stream's request. The job's pen is
// held, or the job is over.
func (s *keptStream) record() *recordHead {
	j := s.job
	if j == nil {
		return s.was
	}
	return &recordHead{
		Owner: s.owner[:], Stream: s.id, Start: j.start, Path: j.in.URL.Path, Query: j.in.URL.RawQuery, Host: j.in.Host,
		Header: j.in.Header, Body: j.body.data, Status: s.status, Answer: s.head,
	}
}

// errAbsent says that no stream of that id, owner and length is in the store.
var errAbsent = errors.New("no such stream")

// fetch looks in the store for a stream that its owner comes back to with n events, and
// takes it over.
func (r *Relay) fetch(ctx context.Context, id string, n int, who owner) error {
	w := r.kept.shared
	if w == nil {
		return errAbsent
	}
	key := keyOf(id)
	gen, numbered, sealed, ok, err := w.store.peek(ctx, key)
	if err != nil {
		return err
	}
	if !ok {
		return errAbsent
	}
	rec := &record{}
	if err := w.seal.open(key+"/h", sealed, &rec.head); err != nil {
		return fmt.Errorf("%w: %w", errAbsent, err)
	}
	if subtle.ConstantTimeCompare(rec.head.Owner, who[:]) != 1 || rec.head.Stream != id || n > numbered {
		return errAbsent
	}
	mine := rand.Text()
	fields, err := w.store.claim(ctx, key, gen, mine)
	if err != nil {
		return err
	}
	h := &sharing{key: key, gen: mine}
	for _, f := range fields {
		var frames []frame
		if err := w.seal.open(key+"/"+strconv.Itoa(f.from), f.sealed, &frames); err != nil {
			return fmt.Errorf("%w: %w", errAbsent, err)
		}
		rec.frames = append(rec.frames, frames...)
		h.chunks = append(h.chunks, chunk{f.from, f.from + len(frames), int64(len(f.sealed))})
		h.bytes += int64(len(f.sealed))
	}
	if err := r.adopt(rec, h, n); err != nil {
		return err
	}
	r.kept.gauge.passed.WithLabelValues(byStore, passedHere).Inc()
	return nil
}

// adopt goes on with another gateway's stream, of which a client has n events. It is kept
// without a client at first.
func (r *Relay) adopt(rec *record, h *sharing, n int) error {
	if err := rec.check(); err != nil {
		return fmt.Errorf("%w: %w", errAbsent, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	own, err := rec.head.request(ctx)
	if err != nil {
		cancel()
		return err
	}
	if err = r.goOnWith(own, cancel, rec, h, n); err != nil {
		cancel()
	}
	return err
}

// request is the client's as it was.
func (h *recordHead) request(ctx context.Context) (*http.Request, error) {
	in, err := http.NewRequestWithContext(ctx, http.MethodPost, (&url.URL{Scheme: "http", Host: "relay", Path: h.Path, RawQuery: h.Query}).String(), http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errAbsent, err)
	}
	in.Host, in.Header = h.Host, h.Header
	in.Header.Set(names.Stream, h.Stream)
	return in, nil
}

func (r *Relay) goOnWith(own *http.Request, cancel context.CancelFunc, rec *record, h *sharing, n int) error {
	var req *openai.Request // of an answer that is over nobody needs it
	if !rec.over() {
		ep, ok := openai.EndpointOf(own.URL.Path)
		var apiErr *openai.Error
		if req, apiErr = openai.Parse(ep, rec.head.Body); !ok || apiErr != nil {
			return fmt.Errorf("%w: its request is none", errAbsent)
		}
	}
	limits := r.keeps(own, req)
	if limits.Retain.D() == 0 {
		return fmt.Errorf("%w: its route keeps none", errAbsent)
	}
	s := r.newKept(own, cancel, limits)
	was := rec.head
	was.Body = nil // is the job's
	s.head, s.status, s.was = was.Answer, was.Status, &was
	for _, f := range rec.frames {
		s.events = append(s.events, f.Event)
		s.bytes += cost(f.Event)
		if f.N < n {
			s.isSent += cost(f.Event)
		}
	}
	s.first, s.numbered, s.sent, s.over = rec.frames[0].N, rec.numbered(), n, rec.over()
	if h != nil {
		h.stored = s.first + len(s.events)
		h.whole, h.since = s.first, h.bytes
		s.share = h
	}
	var j *job
	if !s.over {
		b := &heldBody{data: rec.head.Body, budget: r.cfg.Held}
		if !b.hold(int64(len(b.data))) {
			return errNoRoom
		}
		j = r.newJob(s, own, req, rec.head.Start)
		j.body, j.out.stall = b, never
		j.out.begin(s.status, s.head)
		if err := j.restore(rec); err != nil {
			j.finish()
			return fmt.Errorf("%w: %w", errAbsent, err)
		}
		s.job = j
		s.steps.next(j, true) // is in the record
	}
	r.kept.adopt(s)
	if j != nil {
		r.kept.carry(s, j)
	} else {
		close(s.done)
	}
	return nil
}

// lookElsewhere finds a stream that is not here, and brings it here.
func (r *Relay) lookElsewhere(ctx context.Context, id string, n int, who owner) error {
	// Two connections of one client must not take it from each other half way.
	_, err, _ := r.fetches.Do(fmt.Sprintf("%x %d %s", who, n, id), func() (any, error) {
		ctx := context.WithoutCancel(ctx)
		if r.askOld(ctx, id, n, who) {
			return nil, nil
		}
		return nil, r.fetch(ctx, id, n, who)
	})
	return err
}

// lead is how far the attempts of another gateway are counted on: it may make some more
// before it hears that it has the stream no longer, and a worker believes the highest.
const lead = 1000

// restore brings a new job to where a record ends.
func (j *job) restore(rec *record) error {
	if err := rec.restore(j); err != nil {
		return err
	}
	j.n += lead
	if j.owner == nil {
		return fmt.Errorf("%w: no worker gave it", errRecord)
	}
	j.hunt.queue, j.hunt.cause = nil, causeGateway
	j.last = time.Now()
	j.state.begun.Store(true)
	return nil
}

// adopt takes a stream in that nobody is connected to.
func (k *retained) adopt(s *keptStream) {
	k.add(s)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.take(s.bytes)
	if s.share != nil {
		k.shared.all[s] = true
	}
	k.parkLocked(s)
}
