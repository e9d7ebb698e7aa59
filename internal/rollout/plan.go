package rollout

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// State is how far one worker's replacement came.
type State string

// States in their order. Failed is the end of one that missed a bound.
const (
	Pending    State = "pending"
	Draining   State = "draining"
	Restarting State = "restarting" // the restart was asked for, or is about to be
	Observing  State = "observing"  // the new one takes requests
	Done       State = "done"
	Failed     State = "failed"
)

// Step is the replacement of one worker.
type Step struct {
	Worker string `json:"worker"`
	Pool   string `json:"pool"`
	State  State  `json:"state"`
	// Model and Address are for whoever restarts the worker while it is away.
	Model   string `json:"model,omitempty"`
	Address string `json:"address,omitempty"`
	// Incarnation and Fingerprint are those of the worker in the moment of its restart,
	// and before that moment those seen last.
	Incarnation uint64 `json:"incarnation"`
	Fingerprint string `json:"fingerprint,omitempty"`
	// Drained says that the rollout drained the worker and has not given it back.
	Drained bool `json:"drained"`
	// Held says that an operator had drained it before: it is restarted and stays so.
	Held bool `json:"held,omitempty"`
	// Now is the fingerprint after it, and Reason says why it failed.
	Now    string `json:"now,omitempty"`
	Reason string `json:"reason,omitempty"`
}

// UnmarshalJSON reads a step. One that does not say whether it is drained was stored by a
// version that knew of no drains but its own: then its state says it.
func (s *Step) UnmarshalJSON(data []byte) error {
	type plain Step
	in := struct {
		*plain
		Drained *bool `json:"drained"`
	}{plain: (*plain)(s)}
	if err := json.Unmarshal(data, &in); err != nil {
		return fmt.Errorf("step of a rollout: %w", err)
	}
	s.Drained = !s.Held && (s.State == Draining || s.State == Restarting || s.State == Failed)
	if in.Drained != nil {
		s.Drained = *in.Drained
	}
	return nil
}

// Plan is a rollout: which workers, in which order, and how far it came.
type Plan struct {
	Steps []Step `json:"steps"`
}

// NewPlan orders the workers as ids does. Every id must be a worker of list that tells
// its starts, or one that the rollout before left in the middle of its restart.
func NewPlan(list []fleet.WorkerView, ids []string, before Plan) (Plan, error) {
	var p Plan
	for i, id := range ids {
		var old Step
		if at := slices.IndexFunc(before.Steps, func(s Step) bool { return s.Worker == id && s.State != Done }); at >= 0 {
			old = before.Steps[at]
		}
		at := slices.IndexFunc(list, func(w fleet.WorkerView) bool { return w.ID == id })
		switch {
		case slices.Contains(ids[:i], id):
			return p, fmt.Errorf("worker %s is named twice", id)
		case at < 0 && old.Worker == "":
			return p, fmt.Errorf("%w: %s", ErrUnknown, id)
		case at >= 0 && !tellsStarts(list[at]):
			return p, fmt.Errorf("%s is a server that tells nothing of its starts: nobody could see that it was replaced", id)
		}
		s := Step{
			Worker: id, Pool: old.Pool, State: Pending, Model: old.Model, Address: old.Address,
			Incarnation: old.Incarnation, Fingerprint: old.Fingerprint, Drained: old.Drained, Held: old.Held,
		}
		if at >= 0 {
			s.see(list[at])
		}
		p.Steps = append(p.Steps, s)
	}
	return p, nil
}

// tellsStarts reports whether a new start of the worker can be told from the old one.
func tellsStarts(w fleet.WorkerView) bool { return w.Incarnation > fleet.ForeignIncarnation }

// Replaceable are the workers of list that tell their starts.
func Replaceable(list []fleet.WorkerView) []fleet.WorkerView {
	return slices.DeleteFunc(slices.Clone(list), func(w fleet.WorkerView) bool { return !tellsStarts(w) })
}

// see notes what the worker is now.
func (s *Step) see(w fleet.WorkerView) {
	s.Pool, s.Model, s.Address, s.Incarnation, s.Fingerprint = w.Pool, w.Model, w.Address, w.Incarnation, w.Fingerprint
}

// Left are the steps that are not done.
func (p Plan) Left() int { return len(p.open()) }

// open are the steps that are not done.
func (p Plan) open() []Step {
	return slices.DeleteFunc(slices.Clone(p.Steps), func(s Step) bool { return s.State == Done })
}

// Away are the steps that are not done and whose workers list does not have.
func (p Plan) Away(list []fleet.WorkerView) []Step {
	return slices.DeleteFunc(p.open(), func(s Step) bool {
		return slices.ContainsFunc(list, func(w fleet.WorkerView) bool { return w.ID == s.Worker })
	})
}

// Pools are the names of the pools whose workers the plan replaces, sorted.
func (p Plan) Pools() []string {
	var pools []string
	for _, s := range p.Steps {
		pools = append(pools, s.Pool)
	}
	slices.Sort(pools)
	return slices.Compact(pools)
}

// Lent are the steps whose workers GiveBack lets take requests again.
func (p Plan) Lent() Plan {
	return Plan{slices.DeleteFunc(slices.Clone(p.Steps), func(s Step) bool { return !s.lent() })}
}

// lent reports whether the worker was drained by the rollout and not restarted.
func (s Step) lent() bool { return s.State == Draining && s.Drained }

// Back is the plan that undoes this one: the workers that were restarted, the last
// first. A worker that was not touched is not in it; one that is only drained is given
// back by GiveBack.
func (p Plan) Back() Plan {
	var back Plan
	for _, s := range slices.Backward(p.Steps) {
		if s.State == Pending || s.State == Draining {
			continue
		}
		s.State, s.Now, s.Reason = Pending, "", ""
		back.Steps = append(back.Steps, s)
	}
	return back
}
