package relay

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// whole passes an answer on that is no stream: a complete one, or a client's
// error. It is read to its end first, so that a broken one is never begun; JSON
// that is none counts as broken, because a worker that dies behind a server without
// Content-Length looks like that.
func (j *job) whole(resp *http.Response, w worker) outcome {
	j.watch.set(j.route.Timeouts.StreamIdle.D(), errIdle)
	b := &heldBody{budget: j.r.cfg.Held}
	defer b.release()
	switch err := b.read(watchedReader{resp.Body, &j.watch}, resp.ContentLength, j.r.cfg.MaxAnswer); {
	case errors.Is(err, errTooLarge):
		return outcome{result: resultBroken, err: openai.Errorf(http.StatusBadGateway, "The worker's answer is larger than %d bytes.", j.r.cfg.MaxAnswer)}
	case errors.Is(err, errNoRoom):
		return outcome{result: resultBroken, err: openai.Unavailable(time.Second, "The server holds as many answers as it can. Please try again.")}
	case err != nil:
		return j.beforeFirst()
	}
	j.watch.stop()
	a := &answer{resp.StatusCode, answerHeader(resp.Header, w.id), b.data}
	ok := resp.StatusCode < 300
	switch valid := isJSON(resp.Header) && json.Valid(b.data); {
	case ok && !(valid && finished(b.data)):
		return j.beforeFirst()
	case !ok && !valid:
		e := openai.Errorf(resp.StatusCode, "The worker refused the request with status %d.", resp.StatusCode)
		e.RetryAfter = retryAfter(resp.Header)
		j.out.fail(e)
		return outcome{result: resultRefused, delivered: true, blame: fine}
	}
	j.first()
	if j.out.whole(a.status, a.header, a.body) != nil && j.out.started() {
		j.out.fail(inStream(a))
	}
	if !ok {
		return outcome{result: resultRefused, delivered: true, blame: fine}
	}
	j.r.metrics.answered(operation(j.endpoint), j.model, -1, time.Since(j.start), 0)
	return outcome{result: resultOK, delivered: true, blame: fine}
}

// finished reports whether a 200 is an answer to its end: it has choices, each with
// its finish_reason. Anything else under a 200 is a broken worker's.
func finished(data []byte) bool {
	var c chunk
	if json.Unmarshal(data, &c) != nil || len(c.Choices) == 0 {
		return false
	}
	for _, ch := range c.Choices {
		if ch.FinishReason == nil {
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
}

func (r watchedReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if n > 0 {
		r.w.wait(time.Now())
	}
	return n, err
}
