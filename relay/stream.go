package relay

import (
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// tailTime is how long a worker may take to close a stream after its [DONE].
const tailTime = time.Second

// errTail ends the wait for that; the answer was complete.
var errTail = errors.New("no end of the stream after [DONE]")

// streamed passes a stream on, event by event, unchanged. [DONE] is passed on only
// when every choice had its finish_reason: clients take it for the promise that the
// answer is whole. Comments of the worker are dropped
// until its first token, so that until then another worker can take over unseen.
func (j *job) streamed(resp *http.Response, w worker) outcome {
	events := openai.NewEventReader(resp.Body, j.r.cfg.MaxEvent)
	t := progress{multi: j.multi}
	var first time.Time
	for {
		ev, err := events.Next()
		switch {
		case err != nil:
			return j.broken(&t, !first.IsZero())
		case ev.Data == nil && first.IsZero():
			continue
		case ev.Data != nil && !ev.Done():
			t.observe(ev.Data)
		case ev.Done() && !t.complete():
			return j.broken(&t, !first.IsZero())
		}
		if first.IsZero() {
			if t.failed != nil {
				return failedEarly(ev.Data, w, resp)
			}
			first = time.Now()
			j.beginStream(resp, w)
		}
		if ev.Data != nil { // a comment of the worker is no token: it waits on
			j.watch.busy()
		}
		if err := j.out.event(ev.Raw); err != nil {
			j.cancel(err)
			return outcome{result: resultGone, delivered: true}
		}
		j.state.events.Add(1)
		switch {
		case t.failed != nil: // the worker's own error event ends it
			j.r.metrics.truncated.Inc()
			return outcome{result: resultTruncated, delivered: true, blame: failed}
		case ev.Done():
			j.complete(events, &t, first)
			return outcome{result: resultOK, delivered: true, blame: fine}
		case ev.Data != nil:
			j.watch.wait(time.Now())
		}
	}
}

// first notes that the client gets its answer from this attempt.
func (j *job) first() {
	j.give()
	j.body.release()
}

// beginStream sends the worker's headers.
func (j *job) beginStream(resp *http.Response, w worker) {
	j.first()
	j.watch.set(j.route.Timeouts.StreamIdle.D(), errIdle)
	h := answerHeader(resp.Header, w.id)
	if h.Get("Cache-Control") == "" {
		h.Set("Cache-Control", "no-cache")
	}
	j.out.begin(http.StatusOK, h)
}

// complete records a stream that ended well and lets the worker close its side:
// were it reset now, Envoy would count a cancelled request.
func (j *job) complete(events *openai.EventReader, t *progress, first time.Time) {
	j.out.close()
	j.r.metrics.answered(operation(j.endpoint), j.model, first.Sub(j.start), time.Since(j.start), t.count())
	j.watch.set(tailTime, errTail)
	for {
		if _, err := events.Next(); err != nil {
			return
		}
	}
}

// broken is the end of a stream that is not complete. Partial events were never
// passed on, so the error event that follows stands at the right place.
func (j *job) broken(t *progress, begun bool) outcome {
	if !begun {
		return j.beforeFirst()
	}
	o := outcome{result: resultTruncated, delivered: true, blame: failed}
	e := j.endedBy()
	switch {
	case e != nil:
	case j.ctx.Err() != nil:
		return o // the client left
	default:
		e = broke()
		e.Message = "The worker broke off its answer; what came before is incomplete."
	}
	j.r.metrics.truncated.Inc()
	j.out.fail(e)
	return o
}

// beforeFirst is the outcome of an answer that broke before any of it was passed
// on.
func (j *job) beforeFirst() outcome {
	return outcome{result: resultBroken, retry: true, blame: failed, err: broke()}
}

// failedEarly is the outcome of a stream whose first event is an error: servers
// that have sent 200 already report a failed prefill like that. The error becomes
// an ordinary answer; its code is a status where it looks like one.
func failedEarly(data []byte, w worker, resp *http.Response) outcome {
	status := http.StatusBadGateway
	var body struct {
		Error struct{ Code any }
	}
	if json.Unmarshal(data, &body) == nil {
		if n, ok := body.Error.Code.(float64); ok && n >= 400 && n < 600 {
			status = int(n)
		}
	}
	h := answerHeader(resp.Header, w.id)
	h.Set("Content-Type", "application/json")
	o := outcome{result: resultStatus, retry: status >= 500, blame: failed, err: broke()}
	if status < 500 {
		o.result, o.blame = resultRefused, fine
	}
	o.saved = &answer{status, h, append([]byte(nil), data...)}
	return o
}
