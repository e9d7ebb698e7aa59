package relay

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// job is one client's request on its way through the relay. The goroutine of the
// handler runs it; each attempt has one of its own, which reads from its worker and
// writes to the client. Who writes holds the pen.
type job struct {
	r     *Relay
	in    *http.Request
	start time.Time
	body  *heldBody // released when no other worker can be asked any more
	out   *client
	watch watch

	trace  context.Context // of the request's trace
	ctx    context.Context // ends with the client, a time-out or the gateway
	cancel context.CancelCauseFunc
	unlink func() bool // stops listening for the gateway's end

	// What the request says.
	req      *openai.Request // aliases body, nil once that is released
	endpoint openai.Endpoint
	stream   bool
	usage    bool   // the stream is to end with it
	keepIDs  bool   // the client wants token ids
	expect   int    // choices of all prompts, 0 = not known
	named    string // model as the request names it
	metered  string // model for metrics, bounded by the policy
	session  string
	route    policy.ModelRoute

	place // where the request is tried now
	hunt  hunt

	// Of the goroutine that runs the job.
	n       int        // attempts made
	running []*attempt // at most two
	timer   *time.Timer
	ends    chan ended    // one for each attempt
	turned  chan struct{} // the answer comes from another attempt than before, or one came back
	asked   chan leaving  // others want the answer to go on elsewhere

	pen chan struct{} // holds one element while nobody has it
	// Of whoever holds the pen.
	led    ledger
	owner  *attempt   // whose answer the client gets, nil before its first token
	whole  *assembler // of an answer without streaming that comes as a stream
	moves  int        // to other workers, after the first token
	from   string     // id of the worker before the last move
	hedged bool       // another attempt was made because of the owner's silence
	denied bool       // one was put off, for the budget of retries is used up
	buf    []byte     // of the event being written
	first  time.Time  // when the first token came
	last   time.Time  // when the last one did

	state state
}

// newJob reads what the edge decided out of the headers.
func (r *Relay) newJob(w http.ResponseWriter, in *http.Request, req *openai.Request, start time.Time) *job {
	j := &job{
		r: r, in: in, start: start, req: req, endpoint: req.Endpoint, stream: req.Stream, usage: req.IncludeUsage,
		keepIDs: isTrue(req.Raw("return_token_ids")), named: req.Model,
		session: in.Header.Get(names.SessionToken), place: place{tier: -1, pool: in.Header.Get(names.Pool)},
		ends: make(chan ended, 2), turned: make(chan struct{}, 1), asked: make(chan leaving, 4), pen: make(chan struct{}, 1),
		timer: time.NewTimer(never),
	}
	j.pen <- struct{}{}
	j.led.plain = req.Raw("tools") == nil && req.TopLogprobs < 0 && !req.Echo
	j.led.echo = req.Echo && req.Endpoint == openai.Completions
	if j.expect = req.N; req.Endpoint == openai.Completions {
		j.expect *= prompts(req.Raw("prompt"))
	}
	if j.expect > mostChoices {
		j.expect = 0
	}
	if j.session == "" {
		j.session = in.Header.Get(names.SessionID)
	}
	if j.led.stream = in.Header.Get(names.Stream); j.led.stream == "" {
		j.led.stream = rand.Text()
	}
	j.route, j.metered = r.routeOf(in.Header.Get(names.ModelRoute), req.Model)
	if i := slices.IndexFunc(j.route.Tiers, func(t policy.Tier) bool { return t.Pool == j.pool }); i >= 0 {
		if j.tier = i; j.route.Tiers[i].Model == "" {
			j.only = req.Model
		}
	}
	j.trace = traced(context.WithoutCancel(in.Context()), in.Header)
	j.ctx, j.cancel = context.WithCancelCause(in.Context())
	j.watch.cancel = j.cancel
	j.unlink = context.AfterFunc(r.cut, func() { j.cancel(errDraining) })
	j.out = newClient(w, r.cfg.KeepAlive, r.cfg.ClientStall, func() { j.cancel(errStalled) }, j.state.at)
	j.hunt.queue = r.candidates(in.Header.Get(names.Destination))
	r.retries.running.Add(1)
	r.live.add(j)
	return j
}

// prompts counts the prompts of a request: one text, one list of token ids, several of
// either, or a chat.
func prompts(raw []byte) int {
	if len(raw) == 0 || raw[0] != '[' {
		return 1
	}
	d := jsontext.NewDecoder(bytes.NewReader(raw))
	n := 0
	for _, err := d.ReadToken(); err == nil && d.PeekKind() != ']'; n++ {
		if d.PeekKind() == '0' {
			return 1
		}
		err = d.SkipValue()
	}
	return n
}

// routeOf returns the route of that name, else the one that serves the model, and
// the model's name for metrics.
func (r *Relay) routeOf(name, model string) (policy.ModelRoute, string) {
	set := r.cfg.Policy
	i := slices.IndexFunc(set.Routes, func(m policy.ModelRoute) bool { return m.Name == name })
	switch {
	case i >= 0:
		return set.Routes[i], label(set.Routes[i], model)
	case set.Route(model) != nil:
		return *set.Route(model), label(*set.Route(model), model)
	}
	// Without a route nothing is repeated and nothing limited; ext_proc sends none.
	return policy.ModelRoute{}, otherModel
}

// otherModel stands for the names that the policy does not list.
const otherModel = "other"

// label is the model's name where the route lists it, by a client's name or a
// worker's; a route for every name would else make a time series of each.
func label(r policy.ModelRoute, model string) string {
	if slices.Contains(r.Models, model) || slices.ContainsFunc(r.Tiers, func(t policy.Tier) bool { return t.Model == model }) {
		return model
	}
	return otherModel
}

// run makes attempts until the answer is whole, and else says why there is none.
func (j *job) run() {
	if j.stream {
		j.r.metrics.streams.Inc()
		defer j.r.metrics.streams.Dec()
		j.out.keepOpen()
	}
	j.watch.set(j.route.Timeouts.FirstByte.D(), errFirstByte)
	if j.begun() { // elsewhere
		j.watch.set(j.route.Timeouts.StreamIdle.D(), errIdle)
	}
	if d := j.route.Timeouts.Request.D(); d > 0 {
		t := time.AfterFunc(d-time.Since(j.start), func() { j.cancel(errRequest) })
		defer t.Stop()
	}
	j.hunt.last = outcome{err: openai.Unavailable(time.Second, "No worker takes requests for this model at the moment. Please try again.")}
	for over := !j.open(); !over; {
		select {
		case e := <-j.ends:
			over = j.ended(e)
		case <-j.turned:
			j.settle()
		case why := <-j.asked:
			j.leave(why)
		case in := <-j.hunt.turn:
			over = !j.shared(in)
		case <-j.timer.C:
			over = j.ticked()
		case <-j.ctx.Done():
			over = true
		}
	}
	j.stop()
	if !j.hunt.delivered {
		j.giveUp()
	}
}

// open makes the first attempt, or the first here of an answer that was begun elsewhere.
// It returns false when there is nothing to do or nobody to ask.
func (j *job) open() bool {
	a := j.owner
	switch {
	case a == nil:
		return j.begin()
	case !j.finishes():
		return j.replace(nil)
	}
	j.hunt.delivered = a.conclude().delivered
	return false
}

// stop ends the attempts that still run and waits for them.
func (j *job) stop() {
	for _, a := range j.running {
		a.cancel(errLost)
	}
	for len(j.running) > 0 {
		j.remove(<-j.ends)
	}
	if j.hunt.turn != nil && <-j.hunt.turn { // the job's end has ended that wait
		j.r.retries.leave()
	}
}

// remove takes the end of an attempt.
func (j *job) remove(e ended) {
	j.running = slices.DeleteFunc(j.running, func(a *attempt) bool { return a == e.a })
	if j.state.next.Store(nil); len(j.running) == 1 {
		j.state.worker.Store(&j.running[0].w.id)
	}
	if e.delivered {
		j.hunt.delivered = true
	}
}

// take waits for the pen. It returns false when ctx ends first.
func (j *job) take(ctx context.Context) bool {
	select {
	case <-j.pen:
		return true
	default:
	}
	select {
	case <-j.pen:
		return true
	case <-ctx.Done():
		return false
	}
}

// put gives the pen back.
func (j *job) put() { j.pen <- struct{}{} }

// begun reports whether the client has a part of its answer.
func (j *job) begun() bool { return j.state.begun.Load() }

// giveUp says why there is no answer, or no more of it.
func (j *job) giveUp() {
	e := j.endedBy()
	if e == nil && j.ctx.Err() != nil { // nobody is there to be told
		return
	}
	last := j.hunt.last
	if j.begun() && j.whole == nil {
		j.r.metrics.truncated.Inc()
		if e == nil {
			e = last.err
		}
		if j.endedBy() == nil && last.own != nil {
			j.out.last(last.own)
			return
		}
		j.out.fail(e)
		return
	}
	saved := last.saved
	if j.hunt.tooLong != nil {
		saved = j.hunt.tooLong
	}
	switch {
	case e != nil:
		j.out.fail(e)
	case saved == nil:
		j.out.fail(last.err)
	case j.out.whole(saved.status, saved.header, saved.body) != nil:
		j.out.fail(inStream(saved))
	}
}

// endedBy is the error for a cause of the relay's own that ended the job; nil when
// it still runs, or when the client left.
func (j *job) endedBy() *openai.Error {
	cause := context.Cause(j.ctx)
	switch {
	case errors.Is(cause, errFirstByte), errors.Is(cause, errIdle), errors.Is(cause, errRequest):
		e := openai.Errorf(http.StatusGatewayTimeout, "The worker did not answer in time: %v.", cause)
		e.Code = "timeout"
		return e
	case errors.Is(cause, errDraining):
		return openai.Unavailable(time.Second, "The gateway is stopping. Please try again.")
	}
	return nil
}

// left reports whether the answer is not whole and nobody was told, because the client is
// taken for gone. One that has only closed its sending side must not read it as a success.
func (j *job) left() bool { return !j.hunt.delivered && j.ctx.Err() != nil && j.endedBy() == nil }

// finish frees what the job holds.
func (j *job) finish() {
	j.out.close()
	j.watch.stop()
	j.timer.Stop()
	j.unlink()
	j.cancel(nil)
	j.body.release()
	j.r.retries.running.Add(-1)
	j.r.live.remove(j)
}
