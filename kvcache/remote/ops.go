package remote

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvmetrics"
)

// ErrAway says that a server failed several calls in a row and is left alone for a
// while. It is a miss.
var ErrAway = errors.New("server does not answer and is left alone for a while")

// OpsConfig describes the calls of a store.
type OpsConfig struct {
	// Tier is the store's name in messages and metrics.
	Tier string
	// Timeout is the most that a call takes which reads.
	Timeout time.Duration
	// PutTimeout is the most that a call takes which writes.
	PutTimeout time.Duration
	// Away is how long a server is left alone that does not answer.
	Away time.Duration
	// Limit is the store's limit in bytes, for Stats.
	Limit int64
	// Registry gets the metrics kvmesh_kv_tier_*; nil = none.
	Registry prometheus.Registerer
}

// Ops admits the calls of a store, bounds them and counts them. It is safe for
// concurrent use.
type Ops struct {
	cfg   OpsConfig
	Count kvmetrics.Counters
	// used is asked for the bytes in use.
	used func() int64
	took *prometheus.HistogramVec

	life    sync.Mutex
	closed  bool
	running sync.WaitGroup

	gate gate
}

// NewOps makes the calls of one store. used is asked for Stats.Used.
func NewOps(cfg OpsConfig, used func() int64) *Ops {
	o := &Ops{cfg: cfg, used: used, gate: gate{away: cfg.Away}}
	o.took = register(cfg, o)
	return o
}

// Op is one call.
type Op struct {
	ops   *Ops
	name  string
	begin time.Time
	end   context.CancelFunc
	outer context.Context
}

// Begin admits a call under a name of its kind. The context that it returns ends at the
// caller's deadline or the store's; End must be called, unless there is an error.
func (o *Ops) Begin(ctx context.Context, name string) (context.Context, *Op, error) {
	limit := o.cfg.Timeout
	if name == OpPut || name == OpDrop {
		limit = o.cfg.PutTimeout
	}
	return o.begin(ctx, name, limit)
}

// BeginLong is Begin for a call that takes as long as there is something to do: it is for
// the store to find out that the server has stopped. The context ends with the caller's.
func (o *Ops) BeginLong(ctx context.Context, name string) (context.Context, *Op, error) {
	return o.begin(ctx, name, 0)
}

// begin admits a call, and bounds it unless limit is 0.
func (o *Ops) begin(ctx context.Context, name string, limit time.Duration) (context.Context, *Op, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	o.life.Lock()
	defer o.life.Unlock()
	if o.closed {
		return nil, nil, kvcache.ErrClosed
	}
	begin := time.Now()
	if !o.gate.pass(begin) {
		o.Count.Late.Add(1)
		return nil, nil, fmt.Errorf("%s: %w", o.cfg.Tier, ErrAway)
	}
	o.running.Add(1)
	op := &Op{ops: o, name: name, begin: begin, outer: ctx}
	if limit > 0 {
		ctx, op.end = context.WithTimeout(ctx, limit)
	} else {
		ctx, op.end = context.WithCancel(ctx)
	}
	return ctx, op, nil
}

// Answered notes that the server has answered something that no call was: it is left alone
// no longer.
func (o *Ops) Answered() { o.gate.report(false, time.Now()) }

// The names of calls.
const (
	OpPut    = "put"
	OpGet    = "get"
	OpLookUp = "lookup"
	OpDrop   = "drop"
	OpRemove = "remove"
	OpAppend = "append"
)

// End counts how a call went and returns its error with what was attempted. What a
// caller acts on, a miss or a refusal, is the server's right answer.
func (c *Op) End(err error) error {
	defer c.ops.running.Done()
	c.end()
	took := time.Since(c.begin)
	c.ops.took.WithLabelValues(c.name).Observe(took.Seconds())
	if err == nil || answered(err) {
		c.ops.gate.report(false, c.begin)
		return err
	}
	late := c.outer.Err() != nil || timedOut(err)
	if late {
		c.ops.Count.Late.Add(1)
	} else {
		c.ops.Count.Failed.Add(1)
	}
	// A caller that left, or had no time to give, says nothing about the server.
	if !errors.Is(c.outer.Err(), context.Canceled) && !(late && took < c.ops.cfg.Timeout/4) {
		c.ops.gate.report(true, time.Now())
	}
	switch outer := c.outer.Err(); {
	case outer != nil && !errors.Is(err, outer):
		err = fmt.Errorf("%w: %w", outer, err)
	case timedOut(err) && !errors.Is(err, context.DeadlineExceeded):
		// A socket's deadline is the call's, and may come a moment before it.
		err = fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
	}
	return fmt.Errorf("%s: %s: %w", c.ops.cfg.Tier, c.name, err)
}

// Admit is Begin for a call under the name of OpAppend, which bounds itself and must not
// allocate. Done must be called, unless there is an error.
func (o *Ops) Admit(begin time.Time) error {
	o.life.Lock()
	defer o.life.Unlock()
	if o.closed {
		return kvcache.ErrClosed
	}
	if !o.gate.pass(begin) {
		o.Count.Late.Add(1)
		return fmt.Errorf("%s: %w", o.cfg.Tier, ErrAway)
	}
	o.running.Add(1)
	return nil
}

// Done counts how a call went that Admit has let in.
func (o *Ops) Done(err error, begin time.Time) {
	defer o.running.Done()
	now := time.Now()
	o.took.WithLabelValues(OpAppend).Observe(now.Sub(begin).Seconds())
	switch {
	case err == nil || answered(err):
		o.gate.report(false, begin)
		return
	case timedOut(err):
		o.Count.Late.Add(1)
	default:
		o.Count.Failed.Add(1)
	}
	o.gate.report(true, now)
}

// answered says whether an error is about the block and not about the server.
func answered(err error) bool {
	_, refused := errors.AsType[*kvcache.Refusal](err)
	return refused || errors.Is(err, kvcache.ErrNotFound) || errors.Is(err, kvcache.ErrFull) || errors.Is(err, kvcache.ErrClosed) ||
		errors.Is(err, kvcache.ErrStale) || errors.Is(err, kvcache.ErrGap)
}

// timedOut says whether a deadline ended a call.
func timedOut(err error) bool {
	var n net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) || errors.As(err, &n) && n.Timeout()
}

// closeWait is how long Close waits for calls that run. A disk that hangs never ends them.
const closeWait = 5 * time.Second

// Close lets no more calls in and waits for those that are, 5 s at most. It says whether it
// was the first to close; an error says that calls still run, which use what they have.
func (o *Ops) Close() (first bool, err error) {
	o.life.Lock()
	first = !o.closed
	o.closed = true
	o.life.Unlock()
	ended := make(chan struct{})
	go func() {
		o.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return first, nil
	case <-time.After(closeWait):
		return first, fmt.Errorf("close %s: calls still run after %v", o.cfg.Tier, closeWait)
	}
}

// Refused counts a refusal and says whether err is one.
func (o *Ops) Refused(err error) bool {
	_, ok := o.Count.Refusal(err)
	return ok
}

// Keeps says whether a block that was refused is right all the same, and only the
// asker is of another model or tenant: it stays.
func Keeps(h kvcache.Header, ref kvcache.Ref) bool { return h.Key == ref.Key && h.Check(ref) != nil }

// gate leaves a server alone that failed several calls in a row.
type gate struct {
	away time.Duration

	mu    sync.Mutex
	fails int
	until time.Time
}

// mostFails is how many failures in a row a server is forgiven.
const mostFails = 3

// pass says whether a call may try. When the time has passed one may at a time.
func (g *gate) pass(now time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.fails < mostFails {
		return true
	}
	if now.Before(g.until) {
		return false
	}
	g.until = now.Add(g.away) // the others wait for what this one finds
	return true
}

// report notes how a call went that passed.
func (g *gate) report(failed bool, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !failed {
		g.fails = 0
		return
	}
	if g.fails++; g.fails >= mostFails {
		g.until = now.Add(g.away)
	}
}

// Stats implements kvcache.Counted for a store.
func (o *Ops) Stats() kvcache.Stats {
	st := o.Count.Stats()
	st.Used, st.Limit = o.used(), o.cfg.Limit
	return st
}
