package relay

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// outcome is how an attempt ended.
type outcome struct {
	result    string // for metrics
	delivered bool   // the client has its answer, or what there is of it
	retry     bool   // another worker may do better
	blame     blame

	// What the client is told when there is no further attempt: the worker's own
	// answer, else err.
	saved *answer
	err   *openai.Error
}

// blame is what an attempt says about the worker.
type blame int

const (
	nothing blame = iota // it may be busy, or is not at fault
	fine                 // it serves
	failed               // it failed
	absent               // nobody is there
)

// answer is a whole answer of a worker.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// attempt has the request served by one worker. The worker's sequence is free
// when it returns.
func (j *job) attempt(n int, w worker) outcome {
	release := j.r.cfg.Picker.Acquire(w.id)
	defer release()
	j.state.worker.Store(&w.id)
	j.state.attempt.Store(int64(n))
	ctx, cancel := context.WithCancel(j.ctx)
	defer cancel()
	var o outcome
	resp, err := j.r.egress.RoundTrip(j.request(ctx, n, w))
	if err != nil {
		o = unreachable(err)
	} else {
		o = j.answer(resp, w)
		// Cancelling first makes Close reset the stream instead of reading the rest,
		// and the reset is what frees the worker's sequence.
		cancel()
		_ = resp.Body.Close() // what is left of it is of no use
	}
	j.account(w, &o)
	return o
}

// request builds the request to one worker. Destination names that one only, so
// that Envoy has nobody else to turn to, and ExpectWorker makes a worker that got
// the address of a dead one refuse.
func (j *job) request(ctx context.Context, n int, w worker) *http.Request {
	h := outHeader(j.in.Header)
	h.Set(names.Destination, w.address)
	h.Set(names.Pool, j.pool)
	h.Set(names.ExpectWorker, w.id)
	h.Set(names.Attempt, strconv.Itoa(n))
	if id := j.in.Header.Get(names.Stream); id != "" {
		h.Set(names.Stream, id)
	}
	body := j.body // the transport may ask for it again until headers come
	req := &http.Request{
		Method: http.MethodPost,
		URL:    &url.URL{Scheme: "http", Host: "egress", Path: j.in.URL.Path, RawQuery: j.in.URL.RawQuery},
		Host:   j.in.Host, Header: h, ContentLength: int64(len(body.data)),
		Body:    newSending(body.data),
		GetBody: func() (io.ReadCloser, error) { return newSending(body.data), nil },
	}
	return req.WithContext(ctx)
}

// unreachable is the outcome when no response came. A failure to reach Envoy's own
// socket says nothing about any worker.
func unreachable(err error) outcome {
	if errors.Is(err, errEgress) {
		return outcome{result: resultEgress, retry: true, err: openai.Unavailable(time.Second, "The mesh's proxy cannot be reached at the moment. Please try again.")}
	}
	return outcome{result: resultBroken, retry: true, blame: failed, err: broke()}
}

// broke is the answer to a client whose worker broke off and nobody replaced it.
func broke() *openai.Error {
	e := openai.Errorf(http.StatusBadGateway, "The worker broke off its answer.")
	e.Code = "upstream_broken"
	return e
}

// account counts the attempt and tells the picker. A request that was ended from
// outside says nothing about the worker, but for its own slowness.
func (j *job) account(w worker, o *outcome) {
	if j.ctx.Err() != nil && !o.delivered || o.result == resultTruncated && j.ctx.Err() != nil {
		o.retry, o.result, o.blame = false, resultGone, nothing
		switch cause := context.Cause(j.ctx); {
		case errors.Is(cause, errFirstByte), errors.Is(cause, errIdle):
			o.result, o.blame = resultTimeout, failed
		case errors.Is(cause, errRequest):
			o.result = resultTimeout
		}
	}
	j.r.metrics.attempts.WithLabelValues(o.result).Inc()
	if o.blame == failed || o.blame == absent {
		// A dead worker fails many attempts at once, and most of them unseen by
		// clients: only what a client saw is worth a warning.
		level := slog.LevelDebug
		if o.delivered || !o.retry {
			level = slog.LevelWarn
		}
		j.r.cfg.Log.Log(j.ctx, level, "attempt failed", "worker", w.id, "result", o.result, "pool", j.pool, "request", j.in.Header.Get(names.RequestID))
	}
	switch o.blame {
	case fine:
		j.r.cfg.Picker.Succeeded(w.id)
	case failed, absent:
		j.r.cfg.Picker.Failed(time.Now(), w.id, o.blame == absent)
	}
}

// answer handles a response by its head. Envoy says in names.Upstream which
// address it really used; it names none, or "-", where it used none.
func (j *job) answer(resp *http.Response, w worker) outcome {
	at := resp.Header.Get(names.Upstream)
	switch {
	case resp.StatusCode == http.StatusMisdirectedRequest, at != "" && at != "-" && at != w.address:
		return outcome{result: resultWrong, retry: true, err: openai.Unavailable(time.Second, "The chosen worker left. Please try again.")}
	case resp.StatusCode >= 500:
		return j.serverError(resp, w)
	case resp.StatusCode == http.StatusOK && j.stream && isEvents(resp.Header):
		return j.streamed(resp, w)
	}
	return j.whole(resp, w)
}

// mostErrorBody is how much of an error's body is kept.
const mostErrorBody = 64 << 10

// serverError keeps a 5xx in case that nobody does better. Envoy says 503 in
// plain text where it cannot reach the worker; a worker that is only busy says it
// in JSON.
func (j *job) serverError(resp *http.Response, w worker) outcome {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, mostErrorBody)) // what came is enough
	o := outcome{result: resultStatus, retry: true, blame: failed, err: broke()}
	o.err.RetryAfter = retryAfter(resp.Header)
	if isJSON(resp.Header) && json.Valid(body) {
		o.saved = &answer{resp.StatusCode, answerHeader(resp.Header, w.id), body}
	}
	if resp.StatusCode != http.StatusServiceUnavailable {
		return o
	}
	wait := max(o.err.RetryAfter, time.Second)
	if o.saved != nil {
		o.blame = nothing
		o.err = openai.Unavailable(wait, "All workers are busy. Please try again.")
		return o
	}
	o.result, o.blame = resultConnect, absent
	o.err = openai.Unavailable(wait, "No worker can be reached at the moment. Please try again.")
	return o
}

// retryAfter reads a Retry-After in seconds, 0 when there is none.
func retryAfter(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil || n < 0 || n > 86400 {
		return 0
	}
	return time.Duration(n) * time.Second
}
