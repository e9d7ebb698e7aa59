package relay

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// worker is one candidate.
type worker struct {
	id, address string
	// engine, mark and fingerprint are those of its registration, see fleet.Registration.
	engine, mark, fingerprint string

	incarnation uint64
	room        bool      // it was chosen for a free sequence
	until       time.Time // it has asked not to be asked again before
	refused     bool      // it has said no itself
}

// hunt is how a job looks for a worker. It belongs to the goroutine that runs the job.
type hunt struct {
	queue  []worker  // candidates not tried
	failed []worker  // that failed the request here
	more   int       // further attempts made at this place
	row    int       // attempts that failed in a row, for the back-off
	broken int       // those of them that broke off, and did not just refuse
	since  time.Time // that nobody gives the answer; zero while somebody does
	cause  string    // why nobody gives it, "" = who did broke off
	asked  int       // others asked because of the same silence, without success
	queued int       // times that it waited at a full worker since the last token
	to     worker    // that has kept a sequence for it, its id "" for none
	seen   bool      // a free sequence was, which others may need more

	turn  chan bool // says whether a share of the retry budget came in time, nil while none is waited for
	here  bool      // the attempt that waits for it is one more at the same place
	share bool      // there is one for the next attempt

	delivered bool    // the client has its answer
	last      outcome // of the last attempt that failed
	tooLong   *answer // of a worker whose context is too short
}

// candidates looks up who is at the addresses that the edge chose; those that
// left since are skipped.
func (r *Relay) candidates(list string) []worker {
	var out []worker
	for address := range strings.SplitSeq(list, ",") {
		address = strings.TrimSpace(address)
		if id, ok := r.cfg.Picker.WorkerAt(address); ok {
			out = append(out, r.worker(id, address))
		}
	}
	return out
}

// worker adds what the fleet says of a worker.
func (r *Relay) worker(id, address string) worker {
	info, _ := r.cfg.Picker.Info(id) // one that left is known by its address only
	return worker{
		id: id, address: address, engine: info.Engine, mark: info.RelayMark, fingerprint: info.Fingerprint, incarnation: info.Incarnation,
	}
}

// workers are the candidates of a decision.
func (r *Relay) workers(d picker.Decision) []worker {
	out := make([]worker, len(d.Candidates))
	for i, c := range d.Candidates {
		out[i] = r.worker(c.ID, c.Address)
	}
	return out
}

// begin makes the first attempt. It returns false when there is nobody to ask.
func (j *job) begin() bool {
	w, ok := j.next()
	for !ok {
		if !j.nextTier() {
			return false
		}
		w, ok = j.next()
	}
	j.attempt(w, causeFirst, nil)
	return true
}

// next returns the next worker to try at this place: of the list, else of a new one.
// Workers that failed the request are left out.
func (j *job) next() (worker, bool) {
	if len(j.hunt.queue) == 0 {
		j.hunt.queue = j.choose(j.failed())
	}
	failed := j.failed()
	for len(j.hunt.queue) > 0 {
		w := j.hunt.queue[0]
		j.hunt.queue = j.hunt.queue[1:]
		if !slices.Contains(failed, w.id) {
			return w, true
		}
	}
	return worker{}, false
}

// failed lists the workers that failed the request here and were not started anew since.
func (j *job) failed() []string { return j.resting(time.Time{}) }

// resting lists those of them that do not want to be asked again yet; all of them at time zero.
func (j *job) resting(now time.Time) []string {
	var out []string
	for _, w := range j.hunt.failed {
		if !now.IsZero() && !w.until.After(now) {
			continue
		}
		if info, ok := j.r.cfg.Picker.Info(w.id); !ok || info.Incarnation == w.incarnation {
			out = append(out, w.id)
		}
	}
	return out
}

// choose asks the picker for workers of this place.
func (j *job) choose(exclude []string) []worker {
	return j.r.workers(j.r.cfg.Picker.Choose(time.Now(), j.wants(exclude)))
}

// wants is what choose asks for.
func (j *job) wants(exclude []string) picker.Request {
	return picker.Request{Pool: j.pool, Model: j.only, Session: j.session, Exclude: exclude}
}

// nextTier goes on to the next tier of the route that has workers.
func (j *job) nextTier() bool {
	for t := j.tier + 1; j.tier >= 0 && t < len(j.route.Tiers); t++ {
		p := placeOf(t, j.route.Tiers[t], j.named)
		d := j.r.cfg.Picker.Choose(time.Now(), picker.Request{Pool: p.pool, Model: p.only, Session: j.session})
		if len(d.Candidates) == 0 {
			continue
		}
		j.place = p
		j.hunt.queue, j.hunt.failed, j.hunt.more = j.r.workers(d), nil, 0
		j.state.pool.Store(&p.pool)
		return true
	}
	return false
}

// place is a pool with the model that is asked for there.
type place struct {
	tier int    // index in the route, -1 for none of it
	pool string // of workers
	only string // the model that workers must have, "" where the policy vouches for them
	// model and most are put into the body: the model's name, and the limit of tokens
	// where the tier has one. model is "" where the edge has done it.
	model string
	most  int
}

// placeOf is a tier for a client's model.
func placeOf(i int, t policy.Tier, named string) place {
	p := place{tier: i, pool: t.Pool, model: t.Model, most: t.MaxTokens}
	if t.Model == "" {
		p.model, p.only = named, named
	}
	return p
}

// restOf is the body for a place, without its first brace. Without stream where the
// relay decides about that.
func (j *job) restOf(p place, assemble bool) []byte {
	req := j.req
	body := req.Rewritten(req.Model, 0)
	if p.model != "" {
		body = req.Rewritten(p.model, req.Clamp(p.most))
	}
	if assemble && (req.Has("stream") || req.Has("stream_options")) {
		if again, err := openai.Parse(req.Endpoint, body); err == nil { // as it did before
			body = again.Without("stream", "stream_options")
		}
	}
	return body[strings.IndexByte(string(body[:min(len(body), 64)]), '{')+1:]
}

// ended takes the end of an attempt and sees to what comes next. It reports whether
// the job is over.
func (j *job) ended(e ended) (over bool) {
	j.remove(e)
	if e.delivered {
		return true
	}
	h := &j.hunt
	switch e.result {
	case resultLost, resultQueued:
	default:
		h.last = e.outcome
		w := e.a.w
		w.refused = e.result == resultStatus
		if e.wait > 0 {
			w.until = time.Now().Add(e.wait)
		}
		h.failed = append(h.failed, w)
		h.row++
		if e.blame == failed {
			h.broken++
		}
	}
	if j.ctx.Err() != nil {
		return true
	}
	if e.result == resultQueued && !j.begun() && j.jumped(e.a) {
		return false
	}
	if len(j.running) > 0 {
		j.keep(j.running[0])
		if h.to.id != "" && e.a.later {
			j.leave(leaving{cause: e.a.cause, worker: j.running[0].w.id})
		}
		if j.begun() || !errors.Is(context.Cause(j.running[0].ctx), errQueued) { // else it is that one's
			h.to = worker{}
		}
		return false
	}
	return !j.goOn(e.a)
}

// jumped makes the attempt for which a has left a queue, if there is one. Where it is one of two,
// or follows a refusal, it needs a share of the retry budget again.
func (j *job) jumped(a *attempt) bool {
	w, needs := j.hunt.to, a.after || len(j.running) > 0
	j.hunt.to = worker{}
	if w.id == "" || needs && !j.r.retries.try() {
		return false
	}
	j.attempt(w, a.cause, func(b *attempt) {
		if b.after = a.after; needs {
			b.free = once(j.r.retries.leave)
		}
	})
	return true
}

// attempt makes an attempt before the first token; change prepares it, nil does not. It makes
// none where another one has just begun the answer.
func (j *job) attempt(w worker, cause string, change func(*attempt)) {
	<-j.pen
	if j.owner != nil {
		j.put()
		return
	}
	a := j.newAttempt(w, cause)
	j.put()
	if change != nil {
		change(a)
	}
	j.launch(a)
	j.arm(a.delay + min(j.limitOf(a), lookLong))
}

// goOn finds somebody to go on with the answer after nobody was left. It returns false
// when there is none.
func (j *job) goOn(after *attempt) bool {
	h := &j.hunt
	if j.begun() {
		return j.replace(after)
	}
	h.to = worker{}
	switch {
	case h.last.tooLong:
		h.tooLong = h.last.saved
		if !j.nextTier() {
			return false
		}
	case !h.last.retry:
		return false
	}
	return j.find(!h.last.tooLong)
}

// find makes a further attempt before the first token: here, as long as the route's retries last,
// else at the next tier. It returns false when there is nobody.
func (j *job) find(here bool) bool {
	h := &j.hunt
	for ; ; here = false {
		if !here || h.more < retries(j.route) {
			if w, ok := j.next(); ok {
				return j.retry(w, here, 0)
			}
		}
		if !j.nextTier() {
			break
		}
	}
	return j.again()
}

// again asks one more time who has failed, where nobody else is left: it may have been started
// again. Who has said no himself is asked again only where he is the only one, and not before
// the time that he named. A client waits for that no longer than an answer waits for a worker.
func (j *job) again() bool {
	h := &j.hunt
	list := j.r.workers(j.r.cfg.Picker.Pick(time.Now(), j.wants(nil))) // a choice would count at who is not asked after all
	if len(list) > 1 {
		list = slices.DeleteFunc(list, func(w worker) bool {
			return slices.ContainsFunc(h.failed, func(f worker) bool { return f.id == w.id && f.refused })
		})
	}
	if len(list) == 0 || h.more >= retries(j.route) {
		return false
	}
	now := time.Now()
	pause := time.Duration(0)
	for _, w := range h.failed {
		if w.id == list[0].id {
			pause = max(pause, w.until.Sub(now))
		}
	}
	if pause > 0 && now.Sub(j.start)+pause > j.route.Stream.Wait.D() {
		return false
	}
	if pause > 0 && !h.share { // the share is for the attempt, not for the pause before it
		j.await(true, pause)
		return true
	}
	return j.retry(list[0], true, pause)
}

func retries(r policy.ModelRoute) int {
	if r.Retries == nil {
		return 0
	}
	return *r.Retries
}

// retry makes a further attempt before the first token, where the gateway's budget
// allows it. here says that it is one more at the same place. A worker that dies leaves
// many requests at once, and they wait for their turn; one that refuses for its load must
// not get more of it. The attempt is made once the pause is over.
func (j *job) retry(w worker, here bool, pause time.Duration) bool {
	h := &j.hunt
	refused := h.last.result == resultStatus
	if !h.share && !j.r.retries.try() {
		if refused {
			j.r.metrics.denied.Inc()
			return false
		}
		j.await(here, 0)
		return true
	}
	if h.share = false; here {
		h.more++
	}
	j.attempt(w, causeRetry, func(a *attempt) {
		a.free, a.after = once(j.r.retries.leave), refused
		a.delay = max(pause, backOff(j.r.cfg.BackOff, max(h.row, 1)))
	})
	return true
}

// await waits for a share of the retry budget, as long as an answer waits for a worker; or for a
// pause, after which it takes one if there is one.
func (j *job) await(here bool, pause time.Duration) {
	turn := make(chan bool, 1)
	j.hunt.turn, j.hunt.here = turn, here
	ctx, cancel := context.WithTimeout(j.ctx, j.route.Stream.Wait.D())
	go func() {
		defer cancel()
		if pause > 0 {
			turn <- sleep(j.ctx, pause) && j.r.retries.try()
			return
		}
		turn <- j.r.retries.enter(ctx, j.route.Priority)
	}()
}

// shared takes the end of that wait. The next worker is who is the best by now, one that was
// started again meanwhile included. It returns false when the wait was in vain.
func (j *job) shared(in bool) bool {
	h := &j.hunt
	h.turn = nil
	if !in {
		if j.ctx.Err() == nil {
			j.r.metrics.denied.Inc()
		}
		return false
	}
	h.share, h.queue = true, nil
	found := j.find(h.here)
	if h.share {
		h.share = false
		j.r.retries.leave()
	}
	return found
}

// taken gives the share of the retry budget back once the worker has the request for so long that
// it has not refused it. When its turn comes there may be long after, and is no more load for
// anybody. One that follows a refusal has its share until it is answered: where requests are
// refused late, too, repeating them may not become the load.
func (a *attempt) taken(now time.Time) {
	if !a.later && !a.after && a.since.Load() != 0 && now.Sub(a.made)-a.delay >= lookLong {
		a.free()
	}
}
