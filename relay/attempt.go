package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/internal/h2"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// attempt is one worker's try at a job, in a goroutine of its own.
type attempt struct {
	splicer
	j      *job
	n      int // from 1
	w      worker
	place  place
	cause  string        // why it is made
	delay  time.Duration // before it is
	after  bool          // a worker that refused; then its share of the retry budget is its own until this one answers
	ctx    context.Context
	cancel context.CancelCauseFunc
	free   func() // gives back its share of the retry budget and of the target's time; may be called twice

	prefix   []byte // what the relay adds to the body's beginning
	rest     []byte // of the body
	engine   bool   // the worker is one of ours with an engine of its own
	assemble bool   // the answer comes as a stream and goes out whole
	epoch    int64  // events that the client had when it was made
	pace     *pace  // of the worker

	made  time.Time    // when it was launched
	began time.Time    // when the worker was asked
	since atomic.Int64 // since when the worker has let us wait, Unix ns; 0 while it does not

	speaks atomic.Bool // it has given a token
	ended  atomic.Bool // nothing but the end is missing of what the client has of it
	hung   bool        // its silence is its worker's fault; of the job's goroutine

	// Of its own goroutine.
	mine  bool // it was the owner at its last event
	moved bool // its first token was counted as a move
	took  takeover
	early [][]byte // data of events before its first token
	now   *inBatch // where its event is handled without waiting, else nil

	// thaw is not nil while the answer is about to go on elsewhere: then it waits. It is
	// closed when the answer stays after all. Whoever holds the pen changes it.
	thaw chan struct{}
	// frozen says the same to everybody.
	frozen atomic.Bool
}

// outcome is how an attempt ended.
type outcome struct {
	result    string // for metrics
	delivered bool   // the client has its answer
	retry     bool   // another worker may do better
	blame     blame

	// What the client is told when there is no further attempt: the worker's own
	// answer, else err.
	saved   *answer
	own     []byte // data of the worker's error event, in an answer that had begun
	err     *openai.Error
	tooLong bool          // the prompt does not fit; a tier with a longer context may take it
	wait    time.Duration // that the worker asks for
}

// ended is the end of an attempt.
type ended struct {
	a *attempt
	outcome
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

// errLost is the cause that ends an attempt whose answer is not needed: another has
// been faster, or the job is over.
var errLost = errors.New("another attempt answers")

// newAttempt prepares one more attempt. The caller holds the pen.
func (j *job) newAttempt(w worker, cause string) *attempt {
	j.n++
	a := &attempt{
		j: j, n: j.n, w: w, place: j.place, cause: cause, free: func() {}, epoch: j.led.events, pace: j.r.paces.of(w.id),
	}
	a.later, a.keepIDs = j.owner != nil, j.keepIDs
	a.ctx, a.cancel = context.WithCancelCause(j.ctx)
	ours := w.mark != "" && w.mark == j.r.mark
	a.engine = ours && w.engine != policy.EngineOpenAI
	a.assemble = a.engine && !j.stream
	a.rest = j.restOf(a.place, a.assemble)
	if ours && (j.stream || a.assemble) {
		a.prefix = append(a.prefix, `"kvmesh":{"token_ids":true`...)
		if a.resumed = j.led.begun(); a.resumed {
			a.byText = j.led.byText()
			a.prefix = j.led.appendResume(append(a.prefix, `,"resume":`...), a.n)
		}
		if d := j.route.Timeouts.KVLookup.D(); d > 0 {
			a.prefix = strconv.AppendInt(append(a.prefix, `,"kv_within_ms":`...), max(d.Milliseconds(), 1), 10)
		}
		if salt := j.req.Raw("cache_salt"); len(salt) > 2 && salt[0] == '"' && len(salt) < mostSalt {
			a.prefix = append(append(a.prefix, `,"salt":`...), salt...)
		}
		a.prefix = append(a.prefix, "},"...)
	}
	if a.assemble {
		a.prefix = append(a.prefix, `"stream":true,"stream_options":{"include_usage":true},`...)
	}
	return a
}

// mostSalt bounds the cache_salt of a request, vLLM's field: KV of requests with another
// one is not used.
const mostSalt = 256

func isTrue(raw []byte) bool { return string(raw) == "true" }

// tells reports whether the worker is one of ours that gives the answer token by token.
func (a *attempt) tells() bool { return len(a.prefix) > 0 }

// launch runs an attempt. The worker's sequence is free when its end arrives.
func (j *job) launch(a *attempt) {
	a.made = time.Now()
	j.running = append(j.running, a)
	release := j.r.cfg.Picker.Acquire(a.w.id)
	j.r.live.carry(a, true)
	if len(j.running) == 1 {
		j.state.worker.Store(&a.w.id)
	} else {
		j.state.next.Store(&a.w.id)
	}
	j.state.attempt.Store(int64(a.n))
	go func() {
		o := a.run()
		a.free()
		a.cancel(nil)
		release()
		j.r.live.carry(a, false)
		j.ends <- ended{a, o}
	}()
}

// run waits until the attempt may be made and makes it.
func (a *attempt) run() outcome {
	if !sleep(a.ctx, a.delay) {
		return outcome{result: resultLost}
	}
	if a.later && !a.enter() {
		return outcome{result: resultLost}
	}
	a.began = time.Now()
	a.since.Store(a.began.UnixNano())
	req := a.request()
	span := a.span(req.Header)
	resp, err := a.j.r.egress.RoundTrip(req)
	if err != nil {
		o := unreachable(err)
		a.account(&o)
		a.endSpan(span, &o)
		return o
	}
	o := a.answer(resp)
	a.account(&o)
	a.endSpan(span, &o)
	// Cancelling first makes Close reset the stream instead of reading the rest,
	// and the reset is what frees the worker's sequence.
	a.cancel(nil)
	_ = resp.Body.Close() // what is left of it is of no use
	return o
}

// request builds the request to the worker. Destination names that one only, so
// that Envoy has nobody else to turn to, and ExpectWorker makes a worker that got
// the address of a dead one refuse.
func (a *attempt) request() *http.Request {
	j := a.j
	h := outHeader(j.in.Header)
	h.Set(names.Destination, a.w.address)
	h.Set(names.Pool, a.place.pool)
	h.Set(names.ExpectWorker, a.w.id)
	h.Set(names.Attempt, strconv.Itoa(a.n))
	h.Set(names.Stream, j.led.stream)
	if a.w.mark != "" && a.w.mark == j.r.mark {
		h.Set(names.Relay, j.r.cfg.Secret)
		if p := j.route.Priority; p != 0 {
			h.Set(names.Priority, strconv.Itoa(int(p)))
		}
	}
	body := func() io.ReadCloser { return newSending([]byte{'{'}, a.prefix, a.rest) }
	req := &http.Request{
		Method: http.MethodPost,
		URL:    &url.URL{Scheme: "http", Host: "egress", Path: j.in.URL.Path, RawQuery: j.in.URL.RawQuery},
		Host:   j.in.Host, Header: h, ContentLength: int64(1 + len(a.prefix) + len(a.rest)),
		Body:    body(),
		GetBody: func() (io.ReadCloser, error) { return body(), nil }, // asked for until headers come
	}
	return req.WithContext(a.ctx)
}

// unreachable is the outcome when no response came. A failure to reach Envoy's own
// socket says nothing about any worker.
func unreachable(err error) outcome {
	if errors.Is(err, h2.ErrConnect) {
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

// account counts the attempt and tells the picker. What ended from outside says
// nothing about the worker, but for its own slowness.
func (a *attempt) account(o *outcome) {
	j := a.j
	if !o.delivered && a.ctx.Err() != nil && j.ctx.Err() == nil {
		o.retry, o.result, o.blame = false, resultLost, nothing
		switch cause := context.Cause(a.ctx); {
		case errors.Is(cause, errSilent):
			o.result, o.blame, o.retry = resultStalled, failed, true
		case errors.Is(cause, errSlow):
			o.result, o.retry = resultStalled, true
		case errors.Is(cause, errQueued):
			o.result = resultQueued
		case errors.Is(cause, errEnded):
			o.result = resultOK
		}
	}
	if j.ctx.Err() != nil && !o.delivered {
		o.retry, o.result, o.blame = false, resultGone, nothing
		switch cause := context.Cause(j.ctx); {
		case errors.Is(cause, errFirstByte), errors.Is(cause, errIdle):
			o.result = resultTimeout
			if !a.frozen.Load() && !j.queues(a, time.Now()) {
				o.blame = failed
			}
		case errors.Is(cause, errRequest):
			o.result = resultTimeout
		}
	}
	j.r.metrics.attempts.WithLabelValues(o.result).Inc()
	j.r.tallies.of(a.w.id).count(o.blame)
	if o.blame == failed || o.blame == absent {
		// A dead worker fails many attempts at once, and most of them unseen by
		// clients: only what a client may see is worth a warning.
		level := slog.LevelDebug
		if !o.delivered && !o.retry {
			level = slog.LevelWarn
		}
		j.r.cfg.Log.Log(j.ctx, level, "attempt failed", "worker", a.w.id, "result", o.result, "pool", a.place.pool, "request", j.in.Header.Get(names.RequestID))
	}
	switch o.blame {
	case fine:
		j.r.cfg.Picker.Succeeded(a.w.id)
	case failed, absent:
		j.r.cfg.Picker.Failed(time.Now(), a.w.id, o.blame == absent)
	}
}

// left is the answer to a client whose worker is not where it was.
func left() *openai.Error {
	return openai.Unavailable(time.Second, "The chosen worker left. Please try again.")
}

// answer handles a response by its head. Envoy says in names.Upstream which
// address it really used; it names none, or "-", where it used none. An engine of ours
// says who it is in all that it answers; whoever does not is another program that
// listens where the worker has died.
func (a *attempt) answer(resp *http.Response) outcome {
	at := resp.Header.Get(names.Upstream)
	switch {
	case resp.StatusCode == http.StatusMisdirectedRequest, at != "" && at != "-" && at != a.w.address:
		return outcome{result: resultWrong, retry: true, err: left()}
	case a.engine && resp.StatusCode < 500 && at != "" && at != "-" && resp.Header.Get(names.Worker) != a.w.id:
		return outcome{result: resultWrong, retry: true, blame: absent, err: left()}
	case resp.StatusCode == http.StatusNotFound && resp.Header.Get(names.Fault) != "": // it does not know the pool yet
		return outcome{result: resultEgress, retry: true, err: left()}
	case crowded(resp.Header):
		e := broke()
		e.Message = fmt.Sprintf("The header of the worker's answer is too large: at most %d bytes in %d fields are passed on.", mostAnswerHeader, mostAnswerFields)
		return outcome{result: resultBroken, retry: true, blame: failed, err: e}
	case resp.StatusCode >= 500, resp.StatusCode == http.StatusTooManyRequests:
		return a.serverError(resp)
	}
	if a.cause == causeRetry && !a.after { // it is not refused; who refused before may yet do so in the stream
		a.free()
	}
	switch {
	case resp.StatusCode == http.StatusOK && (a.j.stream || a.assemble) && isEvents(resp.Header):
		return a.streamed(resp)
	}
	return a.complete(resp)
}

// mostErrorBody is how much of an error's body is kept.
const mostErrorBody = 64 << 10

// serverError keeps a 5xx or 429 in case that nobody does better. Envoy says 503, too,
// where it cannot reach the worker, and marks that with names.Fault; a server that is only
// busy, or a proxy in front of it, says it itself, in JSON or not.
func (a *attempt) serverError(resp *http.Response) outcome {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, mostErrorBody)) // what came is enough
	o := outcome{result: resultStatus, retry: true, blame: failed, err: broke(), wait: retryAfter(resp.Header, time.Now())}
	o.err.RetryAfter = o.wait
	if isJSON(resp.Header) && json.Valid(body) {
		o.saved = &answer{resp.StatusCode, answerHeader(resp.Header, a.w.id), body}
	}
	busy := openai.Unavailable(max(o.wait, time.Second), "All workers are busy. Please try again.")
	envoys := resp.Header.Get(names.Fault) != ""
	switch {
	case resp.StatusCode == http.StatusTooManyRequests:
		o.blame, o.err = nothing, busy
		o.err.Status = http.StatusTooManyRequests
	case resp.StatusCode == http.StatusServiceUnavailable && envoys:
		o.result, o.blame = resultConnect, absent
		o.err = openai.Unavailable(time.Second, "No worker can be reached at the moment. Please try again.")
	case resp.StatusCode == http.StatusServiceUnavailable:
		o.blame, o.err = nothing, busy
	case envoys:
		o.result = resultBroken
		o.err.Message = "The worker's answer is no HTTP that can be read, or its header is too large."
	}
	return o
}
