package relay

import (
	"cmp"
	"errors"
	"time"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// Causes of an attempt, the values of the label "cause".
const (
	causeFirst     = "first"     // the request arrived
	causeRetry     = "retry"     // an attempt failed before the first token
	causeLost      = "lost"      // the worker broke off
	causeStall     = "stall"     // it is silent for longer than it ever is
	causeTimeout   = "timeout"   // the control plane does not hear it
	causeUnhealthy = "unhealthy" // the control plane says so
	causeDraining  = "draining"  // it is to be empty
	causeMigrate   = "migrate"   // an operator's wish
	causeGateway   = "gateway"   // the client came back to another one
)

// byWish reports whether a move was somebody's wish: such a one is not among those that
// an answer may make.
func byWish(cause string) bool {
	return cause == causeGateway || cause == causeMigrate || cause == causeDraining
}

// leaving says that an answer should go on elsewhere.
type leaving struct {
	cause  string
	worker string // that is to be left; "" = whichever gives the answer
	to     string // id of the worker to go to, "" = the best
	// answer is told why it does not, "" when it is under way; nil tells nobody.
	answer chan<- string
}

// tell says what came of it.
func (l leaving) tell(why string) {
	if l.answer != nil {
		l.answer <- why // has room for the one
	}
}

// Pauses of a job that cannot do what it wants yet.
const (
	lookAgain = 250 * time.Millisecond // for another worker
	lookLong  = time.Second            // at the state of its own
)

// arm has the job look after itself once d is over.
func (j *job) arm(d time.Duration) { j.timer.Reset(d) }

// limitOf is how long the attempt may be silent until it is taken for hung.
func (j *job) limitOf(a *attempt) time.Duration {
	s := j.route.Stream
	if s.StallMax.D() == 0 {
		return never
	}
	if !j.begun() {
		d := a.pace.silence(s.StallMin.D())
		if d > 0 && j.r.works(a) {
			d = max(d, j.route.Timeouts.FirstByte.D()/workingShare)
		}
		if d == 0 {
			return never
		}
		return d
	}
	return a.pace.stall(s.StallMin.D(), s.StallMax.D())
}

// workingShare is the part of the time for the first byte that an engine of ours may be
// silent before its first token while it works: a prompt may be longer than those from
// which its pace is known. Half of that time is left to another worker.
const workingShare = 2

// works reports whether an engine of ours says that it runs requests. Such a worker is
// slow, and not hung: were it away, its reports would stop, or Envoy's pings fail.
func (r *Relay) works(a *attempt) bool {
	info, ok := r.cfg.Picker.Info(a.w.id)
	return ok && a.engine && info.Running > 0 && r.sick(a.w.id) == ""
}

// ticked looks at how things stand. It reports whether the job is over.
func (j *job) ticked() (over bool) {
	if j.hunt.turn != nil {
		return false
	}
	if len(j.running) == 0 {
		return !j.replace(nil)
	}
	a := j.running[0]
	limit := j.limitOf(a) << min(j.hunt.asked, 10) // others were no faster: it is slow, and not hung
	if limit <= 0 {
		limit = never
	}
	j.arm(min(limit, lookLong))
	if len(j.running) > 1 {
		j.arm(lookAgain)
		j.watchNew(j.running[1])
		return false
	}
	if a.ended.Load() {
		return j.end(a)
	}
	if cause := j.r.sick(a.w.id); cause != "" {
		j.leave(leaving{cause: cause, worker: a.w.id})
		return false
	}
	now := time.Now()
	a.taken(now)
	if j.waits(a, now) {
		j.elsewhere(a, now)
		return false
	}
	since := a.since.Load()
	if since == 0 { // the client is slow, or the attempt has not begun
		return false
	}
	if left := limit - now.Sub(time.Unix(0, since)); left > 0 {
		j.arm(min(left, lookLong))
	} else if why := j.judge(a, limit, now); why == slow {
		j.arm(lookAgain)
	} else {
		a.hung = why == hung
		j.leave(leaving{cause: causeStall, worker: a.w.id})
	}
	return false
}

// watchNew ends an attempt that is to take over and is itself silent for too long, waits at a
// full worker while another is free or while the old one could go on, or turns out to be sick:
// the next look finds another.
func (j *job) watchNew(a *attempt) {
	since, now := a.since.Load(), time.Now()
	if cause := j.r.sick(j.running[0].w.id); cause == causeTimeout || cause == causeUnhealthy {
		a.taken(now) // the other one is as good as dead, so these are not two for one
	}
	limit := max(a.pace.silence(j.route.Stream.StallMin.D()), firstFactor*j.route.Stream.StallMin.D())
	switch cause := j.r.sick(a.w.id); {
	case cause == causeDraining:
		a.cancel(errSlow)
	case cause != "":
		a.cancel(errSilent)
	case j.waits(a, now):
		if !j.elsewhere(a, now) && j.running[0].thaw != nil {
			j.unqueue(a)
		}
	case since != 0 && now.Sub(time.Unix(0, since)) > limit<<min(j.hunt.asked, 10):
		j.hunt.asked++
		a.cancel(errSlow)
	}
}

// sick says why a worker should be left, "" for no reason.
func (r *Relay) sick(id string) string {
	info, ok := r.cfg.Picker.Info(id)
	switch {
	case !ok: // it left the fleet, and what it still says is heard
	case info.Status == health.Draining && !info.KeepStreams:
		return causeDraining
	case info.Status == health.Unhealthy:
		return causeUnhealthy
	case info.Status == health.Timeout:
		return causeTimeout
	}
	return ""
}

// leave begins to have the answer go on elsewhere.
func (j *job) leave(why leaving) {
	why.tell(j.depart(why))
}

// depart is leave; it returns why the answer stays.
func (j *job) depart(why leaving) (stays string) {
	if len(j.running) == 2 && j.running[1].w.id == why.worker {
		j.watchNew(j.running[1])
	}
	if stays := j.r.unknown(why.to); stays != "" {
		return stays
	}
	if len(j.running) != 1 || j.ctx.Err() != nil {
		return "it is about to move already"
	}
	a := j.running[0]
	if a.ctx.Err() != nil {
		return "it is about to move already"
	}
	if why.worker != "" && a.w.id != why.worker {
		return "another worker gives it"
	}
	<-j.pen
	defer j.put()
	switch {
	case j.owner == nil && why.cause == causeMigrate:
		return "it has no token yet"
	case j.owner == nil:
		j.hedge(a, why)
		return ""
	case j.finishes():
		return "nothing but its end is missing"
	case !j.movable(a):
		return "it cannot go on elsewhere"
	}
	silent := time.Since(j.last)
	awaits := a.since.Load() == 0 // for the client to read
	flows := why.cause != causeStall && (awaits || silent < a.pace.stall(j.route.Stream.StallMin.D(), j.route.Stream.StallMax.D()))
	if flows && (why.cause == causeTimeout || why.cause == causeUnhealthy) && j.r.exodus(j.pool) {
		return "most of its pool is sick"
	}
	if stays := j.r.refuses(why.to, a.w); stays != "" {
		return stays
	}
	if !flows && !j.r.retries.try() {
		if !j.denied { // once for each that is put off, not for each look
			j.r.metrics.denied.Inc()
		}
		j.denied = true
		j.arm(lookAgain / 5)
		return "too many answers are being moved"
	}
	w, ok := j.target(a, []string{a.w.id}, why.to, flows) // it would wait there, and here it goes on
	if !ok {
		if j.arm(lookAgain); !flows {
			j.r.retries.leave()
		}
		return nobody(why.to, flows)
	}
	b := j.newAttempt(w, why.cause)
	if flows {
		a.thaw = make(chan struct{}) // what it says from here on waits
		a.frozen.Store(true)
	} else {
		b.free = once(j.r.retries.leave)
	}
	j.hedged, j.denied = true, false
	j.launch(b)
	j.arm(lookAgain)
	return ""
}

// nobody says that no worker takes an answer, or that only those do where it would wait, although
// it flows.
func nobody(to string, flows bool) string {
	switch {
	case to != "" && flows:
		return to + " has no room for it"
	case to != "":
		return to + " does not take it"
	case flows:
		return "no other worker with the same weights has room for it"
	}
	return "no other worker with the same weights takes it"
}

// refuses says why an answer of from cannot go on at the worker that an operator named,
// "" when it can or none is named.
func (r *Relay) refuses(to string, from worker) string {
	info, ok := r.cfg.Picker.Info(to)
	switch {
	case to == "":
		return ""
	case to == from.id:
		return "it is at " + to + " already"
	case !ok:
		return r.unknown(to)
	case info.Fingerprint != from.fingerprint:
		return to + " has other weights than " + from.id
	case info.Status == health.Draining:
		return to + " is being drained"
	case info.Status != health.Healthy && info.Status != health.Degraded:
		return to + " takes no requests, it is " + info.Status.String()
	}
	return ""
}

// unknown says that there is no worker of that name, if one is named.
func (r *Relay) unknown(to string) string {
	if to == "" {
		return ""
	}
	if _, ok := r.cfg.Picker.Info(to); ok {
		return ""
	}
	return "there is no worker " + to
}

// hedge has another worker try beside one that is silent before the first token:
// whichever answers first wins. The pen is held.
func (j *job) hedge(a *attempt, why leaving) {
	if j.hunt.more >= retries(j.route) || !j.r.retries.try() {
		return
	}
	list := j.choose(append(j.failed(), a.w.id))
	if len(list) == 0 {
		j.r.retries.leave()
		return
	}
	j.hunt.more++
	b := j.newAttempt(list[0], why.cause)
	b.free = once(j.r.retries.leave)
	j.launch(b)
	j.arm(lookLong)
}

// movable reports whether another worker can go on with what a began. The pen is held.
func (j *job) movable(a *attempt) bool {
	return a.w.mark != "" && a.w.mark == j.r.mark && j.led.resumable() && j.moves < moves(j)
}

func moves(j *job) int {
	if j.route.Stream.Moves == nil {
		return 0
	}
	return *j.route.Stream.Moves
}

// target is the worker that goes on with what a began: one of the same weights, by its
// load and free KV. Those with room come first, and those that failed last; room leaves
// out all that have none.
func (j *job) target(a *attempt, exclude []string, to string, room bool) (worker, bool) {
	if w := j.hunt.to; w.id != "" {
		if j.hunt.to = (worker{}); to == "" || to == w.id {
			return w, true
		}
	}
	failed := append(j.failed(), exclude...)
	if w, ok := j.withRoom(a, failed, to); ok || room {
		return w, ok
	}
	req := j.resembling(a)
	req.Only = to
	for _, req.Exclude = range [][]string{failed, append(j.resting(time.Now()), exclude...)} {
		if list := j.r.workers(j.r.cfg.Picker.Choose(time.Now(), req)); len(list) > 0 {
			return list[0], true
		}
	}
	return worker{}, false
}

// resembling asks for workers that can go on with what a began, or begin it.
func (j *job) resembling(a *attempt) picker.Request {
	return picker.Request{Pool: a.place.pool, Model: a.place.only, Fingerprint: a.w.fingerprint, RelayMark: j.r.mark, AnyWeights: !j.begun()}
}

// withRoom is target, where the answer would not wait for a sequence.
func (j *job) withRoom(a *attempt, exclude []string, to string) (worker, bool) {
	req := j.resembling(a)
	req.Exclude, req.Only, req.Room = exclude, to, true
	list := j.r.workers(j.r.cfg.Picker.Choose(time.Now(), req))
	if len(list) == 0 {
		return worker{}, false
	}
	list[0].room = true
	return list[0], true
}

// mostBroken is how many workers may break in a row over one answer without a token of
// theirs: it may be what kills them.
const mostBroken = 3

// replace goes on with an answer that nobody gives any more. It returns false when that
// cannot be.
func (j *job) replace(after *attempt) bool {
	h := &j.hunt
	now := time.Now()
	if h.since.IsZero() {
		h.since = now
	}
	<-j.pen
	defer j.put()
	a := j.owner
	switch {
	case !j.movable(a):
		j.explain(a)
		return false
	case h.broken > mostBroken:
		h.last.err = lost("every worker that went on with it broke off, too")
		return false
	}
	w, ok := j.target(a, nil, "", false)
	if !ok {
		if now.Sub(h.since) >= j.route.Stream.Wait.D() {
			h.last.err = lost("no other worker with the same weights takes it")
			return false
		}
		j.arm(min(lookAgain, j.route.Stream.Wait.D()))
		return true
	}
	if h.row > 1 && now.Sub(h.since) >= j.route.Stream.Wait.D() {
		h.last.err = lost("no other worker could go on with it in time")
		return false
	}
	b := j.newAttempt(w, cmp.Or(h.cause, causeLost))
	if h.row > 1 {
		b.delay = max(backOff(j.r.cfg.BackOff, h.row-1), min(h.last.wait, lookLong))
	}
	j.launch(b)
	j.arm(lookAgain)
	return true
}

// explain words the end of an answer that cannot move. The pen is held.
func (j *job) explain(a *attempt) {
	own := j.hunt.last.own
	j.hunt.last.own = nil
	switch {
	case a.w.mark == "" || a.w.mark != j.r.mark, moves(j) == 0:
		j.hunt.last.err, j.hunt.last.own = lost(""), own
	case j.led.loose != "":
		j.hunt.last.err = lost("it cannot go on elsewhere, because " + j.led.loose)
	case !j.led.resumable():
		j.hunt.last.err = lost("it cannot go on elsewhere, because the server gives no token ids")
	default:
		j.hunt.last.err = lost("it has changed its worker as often as it may")
	}
}

// lost is the error that ends an answer which has begun.
func lost(why string) *openai.Error {
	e := broke()
	e.Message = "The worker broke off its answer; what came before is incomplete."
	if why != "" {
		e.Message = "The worker broke off its answer, and " + why + "; what came before is incomplete."
	}
	return e
}

// keep goes on with the attempt that is left after the other ended: a move that failed
// leaves the answer where it is.
func (j *job) keep(a *attempt) {
	<-j.pen
	defer j.put()
	if a.thaw != nil {
		close(a.thaw)
		a.thaw = nil
		a.frozen.Store(false)
	}
	j.arm(lookAgain)
}

// settle takes note that the answer comes from another attempt than before, or that one
// which had been silent is back.
func (j *job) settle() {
	<-j.pen
	owner := j.owner
	j.put()
	for _, a := range j.running {
		if a != owner && owner.cause == causeStall && a.n < owner.n {
			a.cancel(j.faultOf(a))
		} else if a != owner {
			a.cancel(errLost)
		}
	}
	h := &j.hunt
	h.failed, h.queue, h.row, h.broken, h.asked, h.since, h.cause = nil, nil, 0, 0, 0, time.Time{}, ""
	h.queued, h.to, h.seen = 0, worker{}, false
	j.state.worker.Store(&owner.w.id)
	j.state.next.Store(nil)
	j.arm(min(j.limitOf(owner), lookLong))
	if owner.ended.Load() {
		j.arm(j.tailWait())
	}
}

// Causes that end an attempt: its worker hangs; it was not fast enough, which is no fault;
// it waited at a full worker.
var (
	errSilent = errors.New("silent for too long")
	errSlow   = errors.New("no faster")
	errQueued = errors.New("waits for a free sequence")
)
