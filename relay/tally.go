package relay

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// tally counts what came of one worker's attempts, for who has to judge the worker.
type tally struct {
	id         string
	ok, broken atomic.Int64
}

func newTally(id string) *tally { return &tally{id: id} }

// count notes an attempt that ended. What says nothing about the worker is in neither.
func (t *tally) count(b blame) {
	switch b {
	case fine:
		t.ok.Add(1)
	case failed, absent:
		t.broken.Add(1)
	}
}

// Attempts counts the attempts of each worker of the fleet that ended, sorted by the
// worker's id. Safe for concurrent use.
func (r *Relay) Attempts() []fleet.AttemptView {
	var out []fleet.AttemptView
	r.tallies.each(func(t *tally) {
		out = append(out, fleet.AttemptView{Gateway: r.name, Worker: t.id, OK: t.ok.Load(), Broken: t.broken.Load()})
	})
	slices.SortFunc(out, func(a, b fleet.AttemptView) int { return cmp.Compare(a.Worker, b.Worker) })
	return out
}
