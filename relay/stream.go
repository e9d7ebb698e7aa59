package relay

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// streamed passes a stream on, event by event. [DONE] is passed on only when every
// choice had its finish_reason: clients take it for the promise that the answer is
// whole. Until its first token nothing of it is, so that until then another worker can
// take over unseen.
func (a *attempt) streamed(resp *http.Response) outcome {
	p := newPump(a, resp)
	defer p.close()
	for {
		ev, err := p.next()
		if err != nil {
			return a.cutOff()
		}
		var o outcome
		over := false
		switch {
		case p.over:
			return p.o
		case ev.Done():
			o, over = a.done(p), true
		case ev.Data != nil:
			o, over = a.event(ev, resp)
		case a.mine:
			o, over = a.comment(ev)
		}
		if over {
			return o
		}
	}
}

// hold takes the pen for an attempt whose answer the client gets, or may get from now
// on. While the answer is about to go on elsewhere it waits for what comes of that. It
// returns false when another attempt answers. One whose answer it is waits for the client
// before, and not with the pen: meanwhile the answer may go on elsewhere, which then waits.
func (a *attempt) hold() bool {
	j := a.j
	if a.mine && j.out.full() {
		j.watch.busy()
		a.since.Store(0)
		j.out.await(a.ctx)
	}
	for j.take(a.ctx) {
		switch {
		case a.ctx.Err() != nil, j.owner != nil && j.owner != a && a.epoch != j.led.events:
			j.put()
			return false
		case a.thaw == nil:
			return true
		}
		thaw := a.thaw
		j.put()
		select {
		case <-thaw:
		case <-a.ctx.Done():
			return false
		}
	}
	return false
}

// comment passes a comment of the worker on, where the client gets a stream.
func (a *attempt) comment(ev openai.Event) (outcome, bool) {
	if !a.hold() {
		return outcome{result: resultLost}, true
	}
	defer a.j.put()
	if a.j.whole != nil {
		return outcome{}, false
	}
	defer func() {
		if a.since.Load() == 0 { // it has waited for the client
			now := time.Now()
			a.j.watch.wait(now)
			a.since.Store(now.UnixNano())
		}
	}()
	return a.send(ev.Raw)
}

// event takes an event with data.
func (a *attempt) event(ev openai.Event, resp *http.Response) (outcome, bool) {
	v, err := a.scan(ev.Data)
	switch {
	case err == nil || json.Valid(ev.Data):
	case len(bytes.TrimSpace(ev.Data)) == 0: // clients skip it as well
		return outcome{}, false
	default: // no client could read it
		return a.cutOff(), true
	}
	if err == nil && v.isFailure() {
		if v.failed.to > 0 {
			return a.reported(ev.Data, resp), true
		}
		return a.cutOff(), true
	}
	if !a.hold() {
		return outcome{result: resultLost}, true
	}
	defer a.j.put()
	if !a.mine {
		if err != nil && (a.later || a.engine) {
			return a.broken(broke()), true
		}
		if (err != nil || !a.j.led.wants(v)) && len(a.early) < mostEarly {
			a.early = append(a.early, bytes.Clone(ev.Data))
			return outcome{}, false
		}
		if err == nil && a.resumed && a.check(&a.j.led, v) != nil {
			return a.broken(broke()), true
		}
		if o, over := a.begin(resp); over {
			return o, over
		}
		v, err = a.scan(ev.Data)
	}
	return a.pass(ev, v, err)
}

// mostEarly bounds the events before the first token.
const mostEarly = 64

// wants reports whether an event holds something that the client has not.
func (l *ledger) wants(v *chunkView) bool {
	for i := range v.choices {
		if c := &v.choices[i]; !c.bare() && (c.index >= len(l.choices) || !l.choices[c.index].finished) {
			return true
		}
	}
	return len(v.choices) == 0 && v.usage.to > 0 && len(l.choices) > 0 && !l.usage
}

// begin makes this attempt's answer the client's, from its first token on. The pen is
// held.
func (a *attempt) begin(resp *http.Response) (outcome, bool) {
	j := a.j
	a.mine = true
	a.speaks.Store(true)
	a.free()
	was := j.owner
	j.owner = a
	now := time.Now()
	if was == nil {
		j.first = now
		a.pace.begun(now.Sub(a.began))
		j.state.begun.Store(true)
		if !j.movable(a) {
			j.letGo()
		}
		j.watch.set(j.route.Timeouts.StreamIdle.D(), errIdle)
		if a.assemble {
			j.whole = &assembler{header: resp.Header}
		} else {
			h := answerHeader(resp.Header, a.w.id)
			if h.Get("Cache-Control") == "" {
				h.Set("Cache-Control", "no-cache")
			}
			j.out.begin(http.StatusOK, h)
		}
	} else {
		if !byWish(a.cause) {
			j.moves++
		}
		j.from = was.w.id
	}
	j.turn()
	for _, data := range a.early {
		v, err := a.scan(data)
		if o, over := a.pass(openai.Event{Data: data}, v, err); over {
			return o, over
		}
	}
	a.early = nil
	return outcome{}, false
}

// turn tells the job that an attempt has shown that it gives the answer. The pen is
// held.
func (j *job) turn() {
	j.hedged = false
	select {
	case j.turned <- struct{}{}:
	default: // it has not looked at the last one yet
	}
}

// pass sends what the client gets of an event. The pen is held.
func (a *attempt) pass(ev openai.Event, v *chunkView, err error) (outcome, bool) {
	j := a.j
	j.watch.busy()
	now := time.Now()
	since := a.since.Swap(0)
	got := spliced{data: ev.Data}
	if err == nil {
		got, err = a.splice(&j.led, ev.Data)
	} else if a.later || a.engine {
		err = errSplice
	} else { // JSON of another kind is not ours to judge; it passes, and the answer stays with its worker
		j.led.loose, err = "the server's events are not understood", nil
	}
	if err != nil {
		return a.broken(broke()), true
	}
	if got.token {
		a.tokenCame(got, now, since)
	}
	o, over := outcome{}, false
	switch {
	case got.data == nil:
	case j.whole != nil:
		j.led.events++
		o, over = a.collect(got.data)
	default:
		j.led.events++
		j.state.events.Add(1)
		o, over = a.send(j.frame(ev, got.data))
	}
	now = time.Now()
	j.watch.wait(now)
	a.since.Store(now.UnixNano())
	switch {
	case over:
	case got.ends && j.finishes():
		a.ended.Store(true)
		j.turn() // it looks at the clock
	case a.ended.Load() && !j.finishes(): // it goes on with a choice more
		a.ended.Store(false)
	}
	return o, over
}

// tokenCame notes the time of a token, and the move where it is the first of one.
func (a *attempt) tokenCame(got spliced, now time.Time, since int64) {
	j := a.j
	a.pace.heard.Store(now.UnixNano())
	if a.later && !a.moved {
		a.moved = true
		j.moved(a, got, now)
	} else if !j.last.IsZero() && since > 0 {
		a.pace.token(now.Sub(time.Unix(0, since)))
	}
	if j.hedged { // it had been silent, and another was asked
		j.turn()
	}
	j.last = now
}

// frame is an event as the client gets it, with an id of ours.
func (j *job) frame(ev openai.Event, data []byte) []byte {
	b := append(j.buf[:0], "id: "...)
	b = append(append(b, j.led.stream...), ':')
	b = append(strconv.AppendInt(b, j.led.events, 10), '\n')
	if ev.Raw != nil && ev.ID == nil && len(data) > 0 && &data[0] == &ev.Data[0] {
		b = append(b, ev.Raw...)
		j.buf = b
		return b
	}
	if ev.Name != nil {
		b = append(append(append(b, "event: "...), ev.Name...), '\n')
	}
	for line := range bytes.SplitSeq(data, []byte{'\n'}) {
		b = append(append(append(b, "data: "...), line...), '\n')
	}
	j.buf = append(b, '\n')
	return j.buf
}

// send writes to the client. The pen is held.
func (a *attempt) send(raw []byte) (outcome, bool) {
	err := error(nil)
	if a.now != nil {
		err = a.j.out.eventNow(a.now.batch, a.now.w, raw)
	} else {
		err = a.j.out.event(raw)
	}
	if err != nil {
		a.j.cancel(err)
		return outcome{result: resultGone}, true
	}
	return outcome{}, false
}

// broken is the outcome of a stream that is not complete.
func (a *attempt) broken(e *openai.Error) outcome {
	o := outcome{result: resultBroken, retry: true, blame: failed, err: e}
	if !a.mine {
		return o
	}
	o.result = resultTruncated
	return o
}

// reported is the outcome of an error event. Servers that have sent 200 already report
// a failed prefill like that; before the first token it becomes an ordinary answer, and
// its code is a status where it looks like one.
func (a *attempt) reported(data []byte, resp *http.Response) outcome {
	status := http.StatusBadGateway
	var body struct {
		Error struct{ Code any }
	}
	if json.Unmarshal(data, &body) == nil {
		if n, ok := body.Error.Code.(float64); ok && n >= 400 && n < 600 {
			status = int(n)
		}
	}
	if a.mine {
		o := a.cutOff()
		o.own = bytes.Clone(data)
		return o
	}
	h := answerHeader(resp.Header, a.w.id)
	h.Set("Content-Type", "application/json")
	o := outcome{result: resultStatus, retry: status >= 500, blame: failed, err: broke()}
	if status < 500 {
		o.result, o.blame = resultRefused, fine
	}
	o.saved = &answer{status, h, bytes.Clone(data)}
	return o
}

// letGo drops the body of a request that nobody else will be asked. The pen is held.
func (j *job) letGo() {
	j.body.release()
	j.req = nil
}
