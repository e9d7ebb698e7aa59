package rollout

import (
	"context"
	"fmt"
	"slices"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// Room is what a pool's minimum leaves to a rollout.
type Room struct {
	Pool    string `json:"pool"`
	Workers int    `json:"workers"` // of the pool
	Taking  int    `json:"taking"`  // of them that take requests now
	Minimum int    `json:"minimum"` // other workers that must take requests while one is restarted
	// Never are workers of the plan that can never be restarted: even if all others took
	// requests, they would be too few.
	Never []string `json:"never,omitempty"`
}

// Rooms looks at the pools of a plan, sorted by name.
func Rooms(ctx context.Context, m Mesh, p Plan) ([]Room, error) {
	list, err := m.Workers(ctx)
	if err != nil {
		return nil, err
	}
	var rooms []Room
	for _, pool := range p.Pools() {
		r := Room{Pool: pool}
		if r.Minimum, err = m.Minimum(ctx, pool); err != nil {
			return nil, err
		}
		for _, s := range p.Away(list) {
			if s.Pool == pool {
				r.Workers++
			}
		}
		r.count(list)
		for _, s := range p.open() {
			i := slices.IndexFunc(list, func(w fleet.WorkerView) bool { return w.ID == s.Worker })
			if s.Pool == pool && i >= 0 && takes(list[i]) && r.Workers-1 < r.Minimum {
				r.Never = append(r.Never, s.Worker)
			}
		}
		rooms = append(rooms, r)
	}
	return rooms, nil
}

// count adds the pool's workers of list.
func (r *Room) count(list []fleet.WorkerView) {
	for _, w := range list {
		if w.Pool != r.Pool {
			continue
		}
		if r.Workers++; takes(w) {
			r.Taking++
		}
	}
}

// String says it for people.
func (r Room) String() string {
	s := fmt.Sprintf("pool %s: %d of %d workers take requests; while one is restarted, at least %d others must", r.Pool, r.Taking, r.Workers, r.Minimum)
	if len(r.Never) > 0 {
		s += ", which can never be"
	}
	return s
}
