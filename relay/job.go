package relay

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// job is one client's request on its way through the relay. One goroutine, that
// of the handler, runs it.
type job struct {
	r     *Relay
	in    *http.Request
	start time.Time
	body  *heldBody // released at the first byte
	out   *client
	watch watch

	ctx    context.Context // ends with the client, a time-out or the gateway
	cancel context.CancelCauseFunc
	unlink func() bool // stops listening for the gateway's end

	// What the request says.
	endpoint openai.Endpoint
	stream   bool
	multi    bool   // may have several choices
	model    string // for metrics, bounded by the policy
	named    string // as the request names it
	only     string // the model that workers must have, "" where the policy vouches for them
	session  string
	route    policy.ModelRoute
	pool     string

	queue  []worker // candidates not tried
	failed []string // ids of workers that failed this request
	give   func()   // gives the running attempt's share of the retry budget back

	state state
}

// worker is one candidate.
type worker struct{ id, address string }

// newJob reads what the edge decided out of the headers.
func (r *Relay) newJob(w http.ResponseWriter, in *http.Request, req *openai.Request, start time.Time) *job {
	j := &job{
		r: r, in: in, start: start, give: func() {},
		endpoint: req.Endpoint, stream: req.Stream, multi: req.N > 1 || strings.HasPrefix(string(req.Raw("prompt")), "["),
		session: in.Header.Get(names.SessionToken), pool: in.Header.Get(names.Pool),
	}
	if j.session == "" {
		j.session = in.Header.Get(names.SessionID)
	}
	j.route, j.model = r.routeOf(in.Header.Get(names.ModelRoute), req.Model)
	j.named = req.Model
	if i := slices.IndexFunc(j.route.Tiers, func(t policy.Tier) bool { return t.Pool == j.pool }); i >= 0 && j.route.Tiers[i].Model == "" {
		j.only = req.Model
	}
	j.ctx, j.cancel = context.WithCancelCause(in.Context())
	j.watch.cancel = j.cancel
	j.unlink = context.AfterFunc(r.cut, func() { j.cancel(errDraining) })
	j.out = newClient(w, r.cfg.KeepAlive, r.cfg.ClientStall, func() { j.cancel(errStalled) })
	j.queue = r.candidates(in.Header.Get(names.Destination))
	r.retries.running.Add(1)
	r.live.add(j)
	return j
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

// candidates looks up who is at the addresses that the edge chose; those that
// left since are skipped.
func (r *Relay) candidates(list string) []worker {
	var out []worker
	for address := range strings.SplitSeq(list, ",") {
		address = strings.TrimSpace(address)
		if id, ok := r.cfg.Picker.WorkerAt(address); ok {
			out = append(out, worker{id, address})
		}
	}
	return out
}

// workers are the candidates of a decision.
func workers(d picker.Decision) []worker {
	out := make([]worker, len(d.Candidates))
	for i, c := range d.Candidates {
		out[i] = worker{c.ID, c.Address}
	}
	return out
}

// run makes attempts until one delivers, and else says why none did.
func (j *job) run() {
	if j.stream {
		j.r.metrics.streams.Inc()
		defer j.r.metrics.streams.Dec()
		j.out.keepOpen()
	}
	j.watch.set(j.route.Timeouts.FirstByte.D(), errFirstByte)
	if d := j.route.Timeouts.Request.D(); d > 0 {
		t := time.AfterFunc(d, func() { j.cancel(errRequest) })
		defer t.Stop()
	}
	more := 0
	if j.route.Retries != nil {
		more = *j.route.Retries
	}
	last := outcome{err: openai.Unavailable(time.Second, "No worker takes requests for this model at the moment. Please try again.")}
	// Each round ends in a delivered answer, in an outcome that another worker may
	// better, or in one that none can.
	for n := 1; n <= 1+more; n++ {
		if n > 1 && !j.again(n-1) {
			break
		}
		w, ok := j.next()
		if !ok {
			break
		}
		last = j.attempt(n, w)
		j.give()
		if last.delivered {
			return
		}
		j.failed = append(j.failed, w.id)
		if !last.retry {
			break
		}
	}
	j.giveUp(last)
}

// again asks whether one more attempt may be made, and pauses before it.
func (j *job) again(n int) bool {
	if j.ctx.Err() != nil {
		return false
	}
	if !j.r.retries.take() {
		j.r.metrics.denied.Inc()
		return false
	}
	j.give = sync.OnceFunc(j.r.retries.give)
	return pause(j.ctx, j.r.cfg.BackOff, n)
}

// next returns the next worker to try: of the list, else of a new one without
// those that failed, else of a new one with them. The last is for the pool of one
// worker, which may have been restarted since it failed.
func (j *job) next() (worker, bool) {
	for _, exclude := range [][]string{j.failed, nil} {
		if len(j.queue) == 0 {
			d := j.r.cfg.Picker.Choose(time.Now(), picker.Request{Pool: j.pool, Model: j.only, Session: j.session, Exclude: exclude})
			j.queue = workers(d)
		}
		for len(j.queue) > 0 {
			w := j.queue[0]
			j.queue = j.queue[1:]
			if !slices.Contains(exclude, w.id) {
				return w, true
			}
		}
	}
	return worker{}, false
}

// giveUp says why no attempt delivered.
func (j *job) giveUp(last outcome) {
	if e := j.endedBy(); e != nil {
		j.out.fail(e)
		return
	}
	if j.ctx.Err() != nil { // nobody is there to be told
		return
	}
	if a := last.saved; a == nil {
		j.out.fail(last.err)
	} else if j.out.whole(a.status, a.header, a.body) != nil {
		j.out.fail(inStream(a))
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

// finish frees what the job holds.
func (j *job) finish() {
	j.out.close()
	j.watch.stop()
	j.unlink()
	j.cancel(nil)
	j.give()
	j.r.retries.running.Add(-1)
	j.r.live.remove(j)
}
