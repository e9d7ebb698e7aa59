package rollout

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// BoundError is the end of a rollout at a worker that missed a bound.
type BoundError struct {
	Worker string
	Reason string
}

// Error names the worker and the bound.
func (e *BoundError) Error() string { return fmt.Sprintf("%s: %s", e.Worker, e.Reason) }

// Run replaces the workers of p one after the other and notes in p how far it came.
// Steps that are done are skipped; one that was interrupted goes on, and one whose
// worker is away begins with its restart. It ends at the first worker that misses a
// bound, with a *BoundError; that worker stays drained. With any other error, a worker
// that was only drained is given back.
func Run(ctx context.Context, m Mesh, p *Plan, c Config) error {
	if err := c.Validate(); err != nil {
		return err
	}
	r := newRunner(m, p, c)
	for i := range p.Steps {
		s := &p.Steps[i]
		if s.State == Done {
			continue
		}
		err := r.replace(ctx, s)
		if bound, ok := errors.AsType[*BoundError](err); ok {
			return errors.Join(err, r.fail(ctx, s, bound.Reason))
		}
		if err != nil && s.State == Draining {
			err = errors.Join(err, r.giveBack(ctx, s))
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

func newRunner(m Mesh, p *Plan, c Config) *runner {
	if c.Save == nil {
		c.Save = func(Plan) error { return nil }
	}
	if c.Progress == nil {
		c.Progress = func(string, string) {}
	}
	return &runner{m: m, p: p, c: c}
}

// enter notes a step's next state.
func (r *runner) enter(s *Step, state State) error {
	s.State = state
	return r.c.Save(*r.p)
}

// fail ends a step. Users should not meet the worker while somebody decides. Its own
// streams stay: they are of the new version, which may run nowhere else.
func (r *runner) fail(ctx context.Context, s *Step, why string) error {
	s.Reason, s.Drained = why, !s.Held
	err := r.enter(s, Failed)
	if s.Held {
		return err
	}
	drained := r.m.SetDrain(ctx, s.Worker, true, true)
	if _, away := find(ctx, r.m, s.Worker); drained != nil && errors.Is(away, ErrUnknown) {
		drained = nil // it takes no requests as it is
	}
	return errors.Join(err, drained)
}

// giveBackTime is how long an ended rollout tries to give a worker back.
const giveBackTime = 5 * time.Second

// giveBack lets a worker that was only drained take requests again.
func (r *runner) giveBack(ctx context.Context, s *Step) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTime)
	defer cancel()
	if s.Drained {
		if err := r.m.SetDrain(ctx, s.Worker, false, false); err != nil {
			return fmt.Errorf("%s is still drained: %w", s.Worker, err)
		}
		s.Drained = false
		r.c.Progress(s.Worker, "takes requests again")
	}
	return r.enter(s, Pending)
}

// GiveBack lifts the drains that an interrupted rollout left at workers which it did not
// restart, and returns their ids.
func GiveBack(ctx context.Context, m Mesh, p *Plan, c Config) ([]string, error) {
	var ids []string
	r := newRunner(m, p, c)
	for i := range p.Steps {
		s := &p.Steps[i]
		if !s.lent() {
			continue
		}
		if err := r.giveBack(ctx, s); err != nil {
			return ids, err
		}
		ids = append(ids, s.Worker)
	}
	return ids, nil
}

// mostTries is how often one worker is drained until it can be restarted.
const mostTries = 10

// replace takes one worker through all of its states.
func (r *runner) replace(ctx context.Context, s *Step) error {
	switch s.State {
	case Failed: // anew, from what the worker is by now
		s.State, s.Reason = Pending, ""
	case Restarting:
		// A restart that was asked for before an interruption is not asked for again,
		// unless the worker of before is plainly still there.
		w, err := find(ctx, r.m, s.Worker)
		if err == nil && w.Incarnation == s.Incarnation {
			s.State = Draining
		}
	}
	for tries := 0; s.State == Pending || s.State == Draining; tries++ {
		if tries == mostTries {
			return fmt.Errorf("%s could not be emptied and restarted in %d tries: it keeps starting by itself, or its pool keeps losing others", s.Worker, tries)
		}
		counts, err := r.empty(ctx, s)
		if err == nil {
			err = r.restart(ctx, s, counts)
		}
		if err != nil {
			return err
		}
	}
	if s.State != Observing {
		if err := r.ready(ctx, s); err != nil {
			return err
		}
	}
	if s.Held {
		r.c.Progress(s.Worker, "ready; it stays drained, as an operator had drained it before")
	} else if err := r.observe(ctx, s); err != nil {
		return err
	}
	r.c.Progress(s.Worker, "done")
	return r.enter(s, Done)
}

// empty waits until the pool can do without the worker and drains it. counts says that
// the pool has one less by it: a worker that is away or took nothing is not missed.
func (r *runner) empty(ctx context.Context, s *Step) (counts bool, err error) {
	w, err := find(ctx, r.m, s.Worker)
	if errors.Is(err, ErrUnknown) {
		r.c.Progress(s.Worker, "is away; there is nothing to drain")
		return false, nil
	}
	if err != nil {
		return false, err
	}
	counts = takes(w) || s.State == Draining && s.Drained
	if s.see(w); !s.Drained {
		s.Held = w.Drained
	}
	others, err := r.room(ctx, s, counts)
	if err != nil {
		return counts, err
	}
	s.Drained = !s.Held
	if err := r.enter(s, Draining); err != nil {
		return counts, err
	}
	c := r.c.Drain
	what := "draining; its streams move"
	if c.KeepStreams {
		what = "draining; its streams end here"
	} else if c.KeepStreams = !heir(others, *s); c.KeepStreams {
		what = "draining; its streams end here, since no other worker has its weights"
	}
	r.c.Progress(s.Worker, what)
	if _, err = Drain(ctx, r.m, s.Worker, c); err == nil {
		return counts, nil
	}
	if _, gone := find(ctx, r.m, s.Worker); errors.Is(gone, ErrUnknown) {
		r.c.Progress(s.Worker, "left while it was being drained")
		return counts, nil
	}
	return counts, err
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

// room waits until enough other workers of the pool take requests, and returns them. The
// worker itself takes requests meanwhile. Nothing is waited for unless it counts.
func (r *runner) room(ctx context.Context, s *Step, counts bool) ([]fleet.WorkerView, error) {
	for begin, said := time.Now(), false; ; said = true {
		others, least, err := r.others(ctx, s)
		if err != nil || len(others) >= least || !counts {
			return others, err
		}
		if s.Drained {
			if err := r.giveBack(ctx, s); err != nil {
				return nil, err
			}
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

// others are the other workers of the pool that take requests, and how many must.
func (r *runner) others(ctx context.Context, s *Step) (others []fleet.WorkerView, least int, err error) {
	if least, err = r.m.Minimum(ctx, s.Pool); err != nil {
		return nil, 0, err
	}
	list, err := r.m.Workers(ctx)
	for _, w := range list {
		if w.Pool == s.Pool && w.ID != s.Worker && takes(w) {
			others = append(others, w)
		}
	}
	return others, least, err
}

// takes reports whether a worker takes new requests.
func takes(w fleet.WorkerView) bool { return w.Status == "HEALTHY" || w.Status == "DEGRADED" }

// restart has the worker started anew. When the pool lost others during the drain, it
// gives the worker back instead, and the step is pending again.
func (r *runner) restart(ctx context.Context, s *Step, counts bool) error {
	w, err := r.present(ctx, s)
	away := errors.Is(err, ErrUnknown)
	if err != nil && !away {
		return err
	}
	if !away && w.Incarnation != s.Incarnation {
		r.c.Progress(s.Worker, "started by itself while it was drained; that is no restart")
		return nil // to be emptied again
	}
	if counts && !away {
		others, least, err := r.others(ctx, s)
		if err != nil {
			return err
		}
		if len(others) < least {
			r.c.Progress(s.Worker, fmt.Sprintf("not restarted: while it was drained, pool %s fell to %d other workers that take requests, at least %d must", s.Pool, len(others), least))
			return r.giveBack(ctx, s)
		}
	}
	if away {
		w = fleet.WorkerView{ID: s.Worker, Pool: s.Pool, Model: s.Model, Address: s.Address, Fingerprint: s.Fingerprint}
	} else {
		s.see(w)
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

// comeback is how long a worker that died while it was drained is given to start again
// by itself: what comes back is the old version, and is to be restarted like any other.
const comeback = 5 * time.Second

// present finds the worker. One that left during its drain is waited for.
func (r *runner) present(ctx context.Context, s *Step) (fleet.WorkerView, error) {
	for begin := time.Now(); ; {
		w, err := find(ctx, r.m, s.Worker)
		if !errors.Is(err, ErrUnknown) || s.State != Draining || time.Since(begin) >= comeback {
			return w, err
		}
		if err := sleep(ctx, r.c.Poll); err != nil {
			return w, err
		}
	}
}
