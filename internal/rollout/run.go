package rollout

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// Config says within which bounds a rollout goes on. Zero values take the default
// named at the field.
type Config struct {
	// Drain is how a worker is emptied. KeepStreams is decided worker by worker
	// unless set.
	Drain DrainConfig
	// Ready is how long a worker may take from its restart until it takes requests;
	// 600 s. A pool below its minimum is waited for as long.
	Ready time.Duration
	// Observe is how long a new worker is watched before the next one's turn; 10 s.
	Observe time.Duration
	// MaxErrorRate is the largest share of failed requests meanwhile, 0..1; 0.05.
	MaxErrorRate float64
	// Poll is the time between two looks; 200 ms.
	Poll time.Duration
	// Save stores the plan before each step; nil for nowhere.
	Save func(Plan) error
	// Progress is told what happens, for people; nil for nobody.
	Progress func(worker, what string)
}

func (c *Config) setDefaults() {
	c.Ready = cmp.Or(c.Ready, 600*time.Second)
	c.Observe = cmp.Or(c.Observe, 10*time.Second)
	c.MaxErrorRate = cmp.Or(c.MaxErrorRate, 0.05)
	c.Poll = cmp.Or(c.Poll, 200*time.Millisecond)
	if c.Save == nil {
		c.Save = func(Plan) error { return nil }
	}
	if c.Progress == nil {
		c.Progress = func(string, string) {}
	}
}

// BoundError is the end of a rollout at a worker that missed a bound.
type BoundError struct {
	Worker string
	Reason string
}

// Error names the worker and the bound.
func (e *BoundError) Error() string { return fmt.Sprintf("%s: %s", e.Worker, e.Reason) }

// Run replaces the workers of p one after the other and notes in p how far it came.
// Steps that are done are skipped; one that was interrupted goes on. It ends at the
// first worker that misses a bound, with a *BoundError; that worker stays drained.
func Run(ctx context.Context, m Mesh, p *Plan, c Config) error {
	c.setDefaults()
	r := runner{m: m, p: p, c: c}
	for i := range p.Steps {
		s := &p.Steps[i]
		if s.State == Done {
			continue
		}
		err := r.replace(ctx, s)
		bound, ok := errors.AsType[*BoundError](err)
		if ok {
			s.State, s.Reason = Failed, bound.Reason
			// Users should not meet it while somebody decides. Its own streams stay: they
			// are of the new version, which may run nowhere else.
			err = errors.Join(err, r.c.Save(*p), m.SetDrain(ctx, s.Worker, true, true))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// runner is one Run.
type runner struct {
	m Mesh
	p *Plan
	c Config
}

// enter notes a step's next state.
func (r *runner) enter(s *Step, state State) error {
	s.State = state
	return r.c.Save(*r.p)
}

// replace takes one worker through all of its states.
func (r *runner) replace(ctx context.Context, s *Step) error {
	w, err := find(ctx, r.m, s.Worker)
	away := errors.Is(err, ErrUnknown) // in the middle of its restart, for instance
	if err != nil && !away {
		return err
	}
	restarted := !away && w.Incarnation != s.Incarnation
	if s.State == Failed || s.State == Pending {
		// Anew, from what the worker is by now.
		s.State, s.Reason, s.Incarnation, s.Fingerprint, restarted = Pending, "", w.Incarnation, w.Fingerprint, false
	}
	if away && s.State != Restarting {
		return fmt.Errorf("%w: %s", ErrUnknown, s.Worker)
	}
	if (s.State == Pending || s.State == Draining) && !restarted {
		if err := r.empty(ctx, s); err != nil {
			return err
		}
	}
	// A restart that was asked for before an interruption is not asked for again,
	// unless the worker of before is plainly still there.
	if s.State != Observing && !restarted && !away {
		if err := r.restart(ctx, s); err != nil {
			return err
		}
	}
	if s.State != Observing {
		if err := r.ready(ctx, s); err != nil {
			return err
		}
	}
	if err := r.observe(ctx, s); err != nil {
		return err
	}
	r.c.Progress(s.Worker, "done")
	return r.enter(s, Done)
}

// empty waits until the pool can do without the worker and drains it.
func (r *runner) empty(ctx context.Context, s *Step) error {
	others, err := r.room(ctx, s)
	if err != nil {
		return err
	}
	if err := r.enter(s, Draining); err != nil {
		return err
	}
	c := r.c.Drain
	what := "draining; its streams move"
	if c.KeepStreams = c.KeepStreams || !heir(others, *s); c.KeepStreams {
		what = "draining; its streams end here, since no other worker has its weights"
	}
	r.c.Progress(s.Worker, what)
	_, err = Drain(ctx, r.m, s.Worker, c)
	if _, ok := errors.AsType[*NotEmptyError](err); ok {
		return errors.Join(err, r.m.SetDrain(ctx, s.Worker, false, false), r.enter(s, Pending))
	}
	return err
}

// heir reports whether another worker can go on with the streams of s.
func heir(others []fleet.WorkerView, s Step) bool {
	for _, o := range others {
		if o.Fingerprint == s.Fingerprint {
			return true
		}
	}
	return false
}

// room waits until enough other workers of the pool take requests, and returns them.
func (r *runner) room(ctx context.Context, s *Step) ([]fleet.WorkerView, error) {
	least, err := r.m.Minimum(ctx, s.Pool)
	if err != nil {
		return nil, err
	}
	for begin, said := time.Now(), false; ; said = true {
		list, err := r.m.Workers(ctx)
		if err != nil {
			return nil, err
		}
		var others []fleet.WorkerView
		for _, w := range list {
			if w.Pool == s.Pool && w.ID != s.Worker && takes(w) {
				others = append(others, w)
			}
		}
		if len(others) >= least {
			return others, nil
		}
		if !said {
			r.c.Progress(s.Worker, fmt.Sprintf("waiting: without it %d workers of pool %s would take requests, at least %d must", len(others), s.Pool, least))
		}
		if time.Since(begin) >= r.c.Ready {
			return nil, fmt.Errorf("pool %s has %d other workers that take requests after %v, %d are needed to restart %s", s.Pool, len(others), r.c.Ready, least, s.Worker)
		}
		if err := sleep(ctx, r.c.Poll); err != nil {
			return nil, err
		}
	}
}

// takes reports whether a worker takes new requests.
func takes(w fleet.WorkerView) bool { return w.Status == "HEALTHY" || w.Status == "DEGRADED" }

// restart has the worker started anew.
func (r *runner) restart(ctx context.Context, s *Step) error {
	w, err := find(ctx, r.m, s.Worker)
	if err != nil {
		return err
	}
	if err := r.enter(s, Restarting); err != nil {
		return err
	}
	r.c.Progress(s.Worker, "restarting")
	if err := r.m.Restart(ctx, w); err != nil {
		return &BoundError{s.Worker, fmt.Sprintf("restart: %v", err)}
	}
	return nil
}

// ready waits for a new start of the worker that takes requests.
func (r *runner) ready(ctx context.Context, s *Step) error {
	begin, undrained, seen := time.Now(), false, "it did not come back"
	for {
		w, err := find(ctx, r.m, s.Worker)
		switch {
		case errors.Is(err, ErrUnknown): // it left, and has not come back
		case err != nil:
			return err
		case w.Incarnation == s.Incarnation: // the old one still
		case !undrained:
			if err := r.m.SetDrain(ctx, s.Worker, false, false); err != nil {
				return err
			}
			undrained = true
			r.c.Progress(s.Worker, "started; waiting until it is ready")
			continue
		case takes(w):
			s.Now = w.Fingerprint
			return r.enter(s, Observing)
		default:
			seen = "it is " + w.Status
			if w.Reason != "" {
				seen += ", " + w.Reason
			}
		}
		if time.Since(begin) >= r.c.Ready {
			return &BoundError{s.Worker, fmt.Sprintf("not ready %v after its restart: %s", r.c.Ready, seen)}
		}
		if err := sleep(ctx, r.c.Poll); err != nil {
			return err
		}
	}
}

// observe watches the new worker under traffic.
func (r *runner) observe(ctx context.Context, s *Step) error {
	r.c.Progress(s.Worker, fmt.Sprintf("ready; watched for %v", r.c.Observe))
	for begin := time.Now(); ; {
		w, err := find(ctx, r.m, s.Worker)
		switch {
		case errors.Is(err, ErrUnknown):
			return &BoundError{s.Worker, "it left again"}
		case err != nil:
			return err
		case !takes(w):
			return &BoundError{s.Worker, fmt.Sprintf("it was ready and is %s now, %s", w.Status, cmp.Or(w.Reason, "no reason given"))}
		case w.ErrorRate > r.c.MaxErrorRate:
			return &BoundError{s.Worker, fmt.Sprintf("%.1f %% of its requests fail, at most %.1f %% may", w.ErrorRate*100, r.c.MaxErrorRate*100)}
		}
		if time.Since(begin) >= r.c.Observe {
			return nil
		}
		if err := sleep(ctx, r.c.Poll); err != nil {
			return err
		}
	}
}
