package rollout

import (
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
	// Incarnation and Fingerprint are those of the worker before its restart.
	Incarnation uint64 `json:"incarnation"`
	Fingerprint string `json:"fingerprint,omitempty"`
	// Now is the fingerprint after it, and Reason says why it failed.
	Now    string `json:"now,omitempty"`
	Reason string `json:"reason,omitempty"`
}

// Plan is a rollout: which workers, in which order, and how far it came.
type Plan struct {
	Steps []Step `json:"steps"`
}

// NewPlan orders the workers as ids does. Every id must be a worker of list.
func NewPlan(list []fleet.WorkerView, ids []string) (Plan, error) {
	var p Plan
	for i, id := range ids {
		at := slices.IndexFunc(list, func(w fleet.WorkerView) bool { return w.ID == id })
		switch {
		case at < 0:
			return p, fmt.Errorf("%w: %s", ErrUnknown, id)
		case slices.Contains(ids[:i], id):
			return p, fmt.Errorf("worker %s is named twice", id)
		}
		w := list[at]
		p.Steps = append(p.Steps, Step{Worker: id, Pool: w.Pool, State: Pending, Incarnation: w.Incarnation, Fingerprint: w.Fingerprint})
	}
	return p, nil
}

// Left are the steps that are not done.
func (p Plan) Left() int {
	n := 0
	for _, s := range p.Steps {
		if s.State != Done {
			n++
		}
	}
	return n
}

// Back is the plan that undoes this one: the workers that were restarted, the last
// first. A worker that was not touched is not in it.
func (p Plan) Back() Plan {
	var back Plan
	for _, s := range slices.Backward(p.Steps) {
		if s.State == Pending || s.State == Draining {
			continue
		}
		back.Steps = append(back.Steps, Step{Worker: s.Worker, Pool: s.Pool, State: Pending})
	}
	return back
}
