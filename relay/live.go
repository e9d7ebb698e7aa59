package relay

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
)

// live holds the requests that run now, for an operator to look at, and the attempts of
// each worker.
type live struct {
	mu       sync.Mutex
	jobs     map[*job]bool
	byWorker map[string]map[*attempt]bool
}

func (l *live) add(j *job) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.jobs == nil {
		l.jobs, l.byWorker = map[*job]bool{}, map[string]map[*attempt]bool{}
	}
	l.jobs[j] = true
}

func (l *live) remove(j *job) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.jobs, j)
}

// carry notes that a worker carries an attempt, or does no more.
func (l *live) carry(a *attempt, on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	of := l.byWorker[a.w.id]
	switch {
	case !on:
		if delete(of, a); len(of) == 0 {
			delete(l.byWorker, a.w.id)
		}
	case of == nil:
		l.byWorker[a.w.id] = map[*attempt]bool{a: true}
	default:
		of[a] = true
	}
}

// workers lists those that carry attempts.
func (l *live) workers() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Keys(l.byWorker))
}

// leave asks all answers of a worker to go on elsewhere. It never waits.
func (l *live) leave(id, cause string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for a := range l.byWorker[id] {
		a.j.ask(leaving{cause: cause, worker: id})
	}
}

// standing is how the answers of a worker that have begun and wait for its next token stand,
// and those at other workers of its pool.
type standing struct {
	half        time.Duration // of the silence that is too long there
	brisk, slow int           // other answers, by whether their silence is nothing special
	others      int           // other workers that give answers
	flow        int           // those of them that are not silent as a whole for half of theirs
}

// sample is how many answers of a worker are looked at.
const sample = 64

// standing looks at the answers beside a's. least and most bound the silence that is learned.
func (l *live) standing(a *attempt, now time.Time, least, most time.Duration) standing {
	s := standing{half: a.pace.stall(least, most) / 2}
	brisk := min(max(a.pace.brisk(), least/10), s.half)
	l.mu.Lock()
	defer l.mu.Unlock()
	for b := range l.byWorker[a.w.id] {
		since := b.since.Load()
		if b == a || !b.speaks.Load() || b.frozen.Load() || since == 0 { // its client is slow
			continue
		}
		if now.Sub(time.Unix(0, since)) <= brisk {
			s.brisk++
		} else {
			s.slow++
		}
		if s.brisk+s.slow == sample {
			break
		}
	}
	for id, of := range l.byWorker {
		for b := range of {
			if id == a.w.id || b.place.pool != a.place.pool || !b.speaks.Load() || b.frozen.Load() || b.since.Load() == 0 {
				continue
			}
			if s.others++; b.pace.quiet(now) < b.pace.stall(least, most)/2 {
				s.flow++
			}
			break
		}
	}
	return s
}

// behind counts the answers of attempts that have given nothing and that a's worker may let wait
// longer than a: they came after it, or are less important.
func (l *live) behind(a *attempt) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for b := range l.byWorker[a.w.id] {
		ahead := b.j.route.Priority - a.j.route.Priority
		if !b.speaks.Load() && (ahead < 0 && b.tells() || ahead <= 0 && b.made.After(a.made)) {
			n += max(b.j.expect, 1)
		}
	}
	return n
}

// outranks reports whether a more important request has no token either in a's pool.
func (l *live) outranks(a *attempt) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, of := range l.byWorker {
		for b := range of {
			if b.place.pool == a.place.pool && b.j.route.Priority > a.j.route.Priority && !b.speaks.Load() {
				return true
			}
		}
	}
	return false
}

// find returns the request with that stream id.
func (l *live) find(stream string) *job {
	l.mu.Lock()
	defer l.mu.Unlock()
	for j := range l.jobs {
		if j.led.stream == stream {
			return j
		}
	}
	return nil
}

// ask tells a job to go on elsewhere. It never waits: a job that has much to do looks
// after itself anyway.
func (j *job) ask(why leaving) bool {
	select {
	case j.asked <- why:
		return true
	default:
		return false
	}
}

// state is what others may read of a job while its goroutine runs it.
type state struct {
	worker  atomic.Pointer[string] // that gives the answer, or is asked for it
	next    atomic.Pointer[string] // that is asked beside it
	pool    atomic.Pointer[string] // where, when not where the edge said
	attempt atomic.Int64
	events  atomic.Int64 // passed on to the client
	begun   atomic.Bool  // the client has its first token

	mu    sync.Mutex
	moves []fleet.MoveView // to other workers, after the first token
}

// at is the id of the worker that is at work, "" before any is asked.
func (s *state) at() string { return said(&s.worker) }

// said is what p points at, "" for nothing.
func said(p *atomic.Pointer[string]) string {
	if s := p.Load(); s != nil {
		return *s
	}
	return ""
}

// movesSoFar is a copy of the moves.
func (s *state) movesSoFar() []fleet.MoveView {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.moves)
}

// move notes one more.
func (s *state) move(v fleet.MoveView) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.moves = append(s.moves, v)
}

// Streams lists the requests that run in this process now, the oldest first. Safe for concurrent
// use.
func (r *Relay) Streams(now time.Time) []fleet.StreamView {
	r.live.mu.Lock()
	out := make([]fleet.StreamView, 0, len(r.live.jobs))
	for j := range r.live.jobs {
		v := fleet.StreamView{
			ID: j.led.stream, Model: j.named, Request: j.in.Header.Get(names.RequestID), Pool: j.in.Header.Get(names.Pool), Stream: j.stream,
			Attempt: j.state.attempt.Load(), Moves: j.state.movesSoFar(), Events: j.state.events.Load(), Seconds: now.Sub(j.start).Seconds(),
		}
		v.Worker, v.Next, v.Gateway = j.state.at(), said(&j.state.next), r.name
		v.Pool = cmp.Or(said(&j.state.pool), v.Pool)
		out = append(out, v)
	}
	r.live.mu.Unlock()
	oldestFirst(out)
	return out
}

func oldestFirst(list []fleet.StreamView) {
	slices.SortFunc(list, func(a, b fleet.StreamView) int {
		return cmp.Or(-cmp.Compare(a.Seconds, b.Seconds), cmp.Compare(a.ID, b.ID))
	})
}
