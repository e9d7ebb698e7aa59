package relay

import (
	"errors"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// tailTime is how long a worker may take to close a stream after its [DONE].
const tailTime = time.Second

// errTail ends the wait for that; the answer was complete.
var errTail = errors.New("no end of the stream after [DONE]")

// endTime is how long a worker may be silent between the last thing that it has to say and
// its [DONE], at most half of what it may be silent otherwise. Some never say it, and keep
// the connection open.
const endTime = 2 * time.Second

// errEnded ends an attempt whose answer was whole, but for the end.
var errEnded = errors.New("no end of the stream after the last choice's")

// tailWait is endTime for this job.
func (j *job) tailWait() time.Duration {
	if d := j.route.Timeouts.StreamIdle.D(); d > 0 {
		return min(endTime, d/2)
	}
	return endTime
}

// end says the end of an answer of which nothing else is missing once its worker has been
// silent for long enough. It reports whether the job is over. The worker is neither praised
// nor blamed for it.
func (j *job) end(a *attempt) (over bool) {
	since := a.since.Load()
	if since == 0 { // the client is slow
		return false
	}
	if left := j.tailWait() - time.Since(time.Unix(0, since)); left > 0 {
		j.arm(left)
		return false
	}
	<-j.pen
	defer j.put()
	if j.owner != a || a.thaw != nil || a.ctx.Err() != nil || !a.ended.Load() || !j.finishes() {
		return false
	}
	j.hunt.delivered = a.conclude().delivered
	a.cancel(errEnded)
	return true
}

// done takes the end of a stream.
func (a *attempt) done(p *pump) outcome {
	p.alone = true
	if !a.mine || !a.hold() {
		return a.broken(broke())
	}
	j := a.j
	least := 0 // some servers ignore n
	if a.engine {
		least = j.expect
	}
	if !j.led.complete(least) {
		j.put()
		return a.broken(broke())
	}
	o := a.conclude()
	j.put()
	if !o.delivered {
		return o
	}
	// The worker gets to close its side: were it reset now, Envoy would count a
	// cancelled request.
	j.watch.set(tailTime, errTail)
	for {
		if _, err := p.next(); err != nil {
			return o
		}
	}
}

// conclude ends the answer, which is complete. The pen is held.
func (a *attempt) conclude() outcome {
	j := a.j
	a.ended.Store(false)
	if j.whole != nil {
		if err := j.whole.write(j, a.w.id); err != nil {
			j.cancel(err)
			return outcome{result: resultGone}
		}
		j.r.metrics.answered(operation(j.endpoint), j.metered, -1, time.Since(j.start), 0)
		return outcome{result: resultOK, delivered: true, blame: fine}
	}
	if o, over := a.send([]byte(openai.Done)); over {
		return o
	}
	j.out.close()
	j.r.metrics.answered(operation(j.endpoint), j.metered, j.first.Sub(j.start), time.Since(j.start), int(j.led.tokens))
	return outcome{result: resultOK, delivered: true, blame: fine}
}

// cutOff is the end of a stream without [DONE]. Partial events were never passed on, so
// whatever follows stands at the right place. Where nothing but the end is missing, the
// relay says it itself.
func (a *attempt) cutOff() outcome {
	if a.mine && a.hold() {
		defer a.j.put()
		if a.j.finishes() {
			o := a.conclude()
			o.blame = failed
			return o
		}
	}
	return a.broken(broke())
}

// finishes reports whether the client has all of the answer but its end, which the
// relay can then say itself. The pen is held.
func (j *job) finishes() bool {
	return j.expect > 0 && j.led.complete(j.expect) && (j.led.usage || !j.usage && j.whole == nil)
}
