package relay

import (
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/names"
)

// A silent attempt waits in the queue of a full worker, or all there are slow, or only it
// stands still, or the worker hangs. Only the last is the worker's fault.

// reportLag is for how long a worker's report may not show what was sent to it.
const reportLag = time.Second

// mostLonger is how many times the time doubles after which an answer leaves one queue for another.
const mostLonger = 3

// mostFrozen is for how long the old worker is held back for one that may only queue.
const mostFrozen = 8 * time.Second

// waits reports whether the attempt, which has given nothing, waits for its turn: here, where
// only so many begin at a worker at once, or in the queue of a worker that is full and works.
// That is no stall. Safe for concurrent use.
func (j *job) waits(a *attempt, now time.Time) bool {
	age := now.Sub(a.made) - a.delay
	if a.speaks.Load() || age < 0 {
		return false
	}
	if a.since.Load() == 0 {
		return a.later && age >= lookAgain
	}
	info, ok := j.r.cfg.Picker.Info(a.w.id)
	full := ok && (info.Waiting > 0 || info.MaxRunning > 0 && info.Running >= info.MaxRunning)
	if !full || !a.later {
		return full
	}
	if (a.w.room || age > reportLag) && int(info.Waiting) <= j.r.live.behind(a) {
		return false // those that wait came later; it has its sequence
	}
	least, most := j.stallBounds()
	s := j.r.live.standing(a, now, least, most)
	return s.brisk+s.slow == 0 || most == 0 || a.pace.quiet(now) < a.pace.stall(least, most)
}

// queues is waits, of an attempt whose time is over: a worker that has given nobody a token
// for long does not only have a queue.
func (j *job) queues(a *attempt, now time.Time) bool {
	least, most := j.stallBounds()
	return a.pace.quiet(now) < max(most, firstFactor*least) && j.waits(a, now)
}

// stallBounds are the route's bounds of the learned silence.
func (j *job) stallBounds() (least, most time.Duration) {
	return j.route.Stream.StallMin.D(), j.route.Stream.StallMax.D()
}

// elsewhere ends an attempt that waits once another worker has a free sequence, which is kept
// for the answer. Each time that the answer has to wait again it stays for longer. It
// reports whether it did.
func (j *job) elsewhere(a *attempt, now time.Time) bool {
	if !a.later {
		return j.requeue(a, now)
	}
	j.arm(lookAgain)
	age := now.Sub(a.made)
	if age < lookAgain<<min(j.hunt.queued, mostLonger) {
		return false
	}
	<-j.pen
	defer j.put()
	if a.speaks.Load() || a.ctx.Err() != nil {
		return false
	}
	var exclude []string
	if age < lookLong { // then those that failed may be well again
		exclude = j.failed()
	}
	for _, b := range j.running {
		exclude = append(exclude, b.w.id)
	}
	return j.jump(a, exclude, "", age)
}

// jump ends an attempt that has waited so long, if there is a worker with a free sequence. The pen
// is held.
func (j *job) jump(a *attempt, exclude []string, to string, waited time.Duration) bool {
	w, ok := j.withRoom(a, exclude, to)
	if !ok {
		return false
	}
	j.hunt.to, j.hunt.seen = w, false
	j.r.cfg.Log.Debug("answer waited at a full worker and goes to a free one", "request", j.in.Header.Get(names.RequestID),
		"cause", a.cause, "from", a.w.id, "to", w.id, "attempt", a.n, "waited", waited)
	j.endWait(a)
	return true
}

// mostLooks is how many times the time doubles after which a request without a token does.
const mostLooks = 10

// requeue is elsewhere, of a request that has no token. It gives up its place in a queue, so it
// stays for longer, twice as long each time, and goes only where a sequence is known to be free;
// where more important requests wait they get to see that one first. A worker that does not
// say by a token that it has begun keeps what it has, and a request whose retries are used up
// stays where nothing happens to it.
func (j *job) requeue(a *attempt, now time.Time) bool {
	h := &j.hunt
	age := now.Sub(a.made) - a.delay
	here, _ := j.r.cfg.Picker.Info(a.w.id)
	patience := lookLong
	if here.Foreign > 0 { // those who wait may have come later, and it may be computing
		patience = max(patience, a.pace.usual())
	}
	if !a.tells() || age < patience<<min(h.queued, mostLooks) || h.more > 0 && h.more >= retries(j.route) {
		return false
	}
	req := j.resembling(a)
	req.Exclude, req.Room = j.failed(), true
	for _, b := range j.running {
		req.Exclude = append(req.Exclude, b.w.id)
	}
	free := slices.DeleteFunc(j.r.cfg.Picker.Pick(now, req).Candidates, func(c picker.Candidate) bool {
		info, _ := j.r.cfg.Picker.Info(c.ID)
		return info.MaxRunning == 0 // it may be full as well
	})
	if len(free) == 0 {
		h.seen = false
		return false
	}
	if int(here.Waiting)-int(here.Left) <= j.r.live.behind(a) {
		return false
	}
	if !h.seen && j.r.live.outranks(a) {
		h.seen = true
		return false
	}
	<-j.pen
	defer j.put()
	if a.speaks.Load() || a.ctx.Err() != nil || j.owner != nil {
		return false
	}
	return j.jump(a, req.Exclude, free[0].ID, age)
}

// unqueue ends an attempt that waits while the old worker could go on, which it then does. One
// that has its sequence, and computes what it needs, may look the same for some time.
func (j *job) unqueue(a *attempt) {
	patient := min(max(lookAgain, a.pace.usual())<<min(j.hunt.queued, mostLonger), mostFrozen)
	if idle := j.route.Timeouts.StreamIdle.D(); idle > 0 {
		patient = min(patient, idle/4)
	}
	if time.Since(a.made) < patient {
		return
	}
	<-j.pen
	defer j.put()
	if !a.speaks.Load() {
		j.endWait(a)
	}
}

// endWait ends an attempt that waits, which was no failure of anybody. The pen is held.
func (j *job) endWait(a *attempt) {
	h := &j.hunt
	h.queued++
	h.row, h.since = 0, time.Time{}
	a.cancel(errQueued)
}

// verdict is what the silence of an attempt says about its worker.
type verdict int

const (
	slow  verdict = iota // all there are slow, or all of the pool
	stuck                // it stands still, and others there do not
	hung                 // the worker says nothing any more
)

// patience is how many times the usual silence an answer may be silent where all are slow:
// until then the pace is learned anew.
const patience = 4

// judge tells what the silence of an attempt, which has reached its limit, means.
func (j *job) judge(a *attempt, limit time.Duration, now time.Time) verdict {
	least, most := j.stallBounds()
	silent := now.Sub(time.Unix(0, a.since.Load()))
	s := j.r.live.standing(a, now, least, most)
	patient := silent < min(patience*limit, max(limit, most))
	switch quiet := a.pace.quiet(now) >= s.half; {
	case quiet && s.others > 0 && s.flow == 0: // not more than anybody else
		if patient {
			return slow
		}
	case quiet && (a.speaks.Load() || s.brisk+s.slow > 0 || silent >= max(a.pace.silence(least), firstFactor*least)):
		return hung
	case !quiet && a.speaks.Load() && s.slow > s.brisk && patient:
		return slow
	}
	return stuck
}

// faultOf is the cause that ends an attempt which another has replaced because of its silence:
// the worker is to blame if it hung then and still does.
func (j *job) faultOf(a *attempt) error {
	least, most := j.stallBounds()
	if a.hung && a.pace.quiet(time.Now()) >= a.pace.stall(least, most)/2 {
		return errSilent
	}
	return errSlow
}
