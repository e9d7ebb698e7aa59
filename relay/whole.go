package relay

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// complete passes an answer on that is no stream: a whole one, or a client's error. It
// is read to its end first, so that a broken one is never begun; JSON that is none
// counts as broken, because a worker that dies behind a server without Content-Length
// looks like that.
func (a *attempt) complete(resp *http.Response) outcome {
	j := a.j
	j.watch.set(j.route.Timeouts.StreamIdle.D(), errIdle)
	b := &heldBody{budget: j.r.cfg.Held}
	defer b.release()
	switch err := b.read(watchedReader{resp.Body, &j.watch, a}, resp.ContentLength, j.r.cfg.MaxAnswer); {
	case errors.Is(err, errTooLarge):
		return outcome{result: resultBroken, err: tooLargeAnswer(j.r.cfg.MaxAnswer)}
	case errors.Is(err, errNoRoom):
		return outcome{result: resultBroken, err: openai.Unavailable(time.Second, "The server holds as many answers as it can. Please try again.")}
	case err != nil:
		return a.broken(broke())
	}
	if a.later { // it was asked to go on with a stream, and refuses
		return outcome{result: resultRefused, retry: true, err: broke()}
	}
	whole := &answer{resp.StatusCode, answerHeader(resp.Header, a.w.id), b.data}
	ok := resp.StatusCode < 300
	valid := isJSON(resp.Header) && json.Valid(b.data)
	if ok && !(valid && finished(b.data)) {
		return a.broken(broke())
	}
	if valid && resp.StatusCode == http.StatusBadRequest && tooLong(b.data) && j.hasTier() {
		whole.body = bytes.Clone(b.data)
		return outcome{result: resultRefused, tooLong: true, saved: whole, blame: fine}
	}
	return a.deliver(whole, ok, valid)
}

// deliver sends a whole answer, unless another attempt has begun one.
func (a *attempt) deliver(whole *answer, ok, valid bool) outcome {
	j := a.j
	if !a.hold() {
		return outcome{result: resultLost}
	}
	defer j.put()
	if j.owner != nil {
		return outcome{result: resultLost}
	}
	j.watch.stop()
	j.owner = a
	a.free()
	j.letGo()
	if !ok && !valid {
		e := openai.Errorf(whole.status, "The worker refused the request with status %d.", whole.status)
		e.RetryAfter = retryAfter(whole.header, time.Now())
		j.out.fail(e)
	} else if j.out.whole(whole.status, whole.header, whole.body) != nil && j.out.started() {
		j.out.fail(inStream(whole))
	}
	if !ok {
		return outcome{result: resultRefused, delivered: true, blame: fine}
	}
	j.r.metrics.answered(operation(j.endpoint), j.metered, -1, time.Since(j.start), 0)
	return outcome{result: resultOK, delivered: true, blame: fine}
}

// tooLargeAnswer is the error for an answer beyond the limit.
func tooLargeAnswer(limit int64) *openai.Error {
	return openai.Errorf(http.StatusBadGateway, "The worker's answer is larger than %d bytes.", limit)
}

// tooLong reports whether an error says that the prompt does not fit.
func tooLong(body []byte) bool {
	var e struct {
		Error struct{ Code any }
	}
	return json.Unmarshal(body, &e) == nil && e.Error.Code == "context_length_exceeded"
}

// hasTier reports whether the route has a tier after the one that is tried.
func (j *job) hasTier() bool { return j.tier >= 0 && j.tier+1 < len(j.route.Tiers) }

// finished reports whether a 200 is an answer to its end: it has choices, each with
// its finish_reason, and none that the server gave up. Anything else under a 200 is a broken worker's.
func finished(data []byte) bool {
	var c struct {
		Choices []struct {
			FinishReason *string `json:"finish_reason"`
		} `json:"choices"`
	}
	if json.Unmarshal(data, &c) != nil || len(c.Choices) == 0 {
		return false
	}
	for _, ch := range c.Choices {
		if ch.FinishReason == nil || *ch.FinishReason == "" || openai.Dropped(*ch.FinishReason) {
			return false
		}
	}
	return true
}

// inStream is a worker's whole answer as the error that ends a stream which had
// begun with keep-alives.
func inStream(a *answer) *openai.Error {
	var body struct {
		Error struct {
			Message, Type, Param string
			Code                 any
		} `json:"error"`
	}
	_ = json.Unmarshal(a.body, &body) // another shape leaves it empty
	if body.Error.Message == "" {
		return openai.Errorf(http.StatusBadGateway, "The worker answered without a stream, with status %d.", a.status)
	}
	e := openai.Errorf(a.status, "%s", body.Error.Message)
	e.Param = body.Error.Param
	if body.Error.Type != "" {
		e.Type = body.Error.Type
	}
	if code, ok := body.Error.Code.(string); ok {
		e.Code = code
	}
	return e
}

// watchedReader tells the watch of each read, so that an answer which flows
// slowly is not taken for a silent one.
type watchedReader struct {
	r io.Reader
	w *watch
	a *attempt
}

func (r watchedReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if n > 0 {
		now := time.Now()
		r.w.wait(now)
		r.a.since.Store(now.UnixNano())
	}
	return n, err
}
