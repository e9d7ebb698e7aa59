package rollout

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// Mesh is what a drain and a rollout need of the running mesh.
type Mesh interface {
	// Workers lists all workers the control plane knows.
	Workers(ctx context.Context) ([]fleet.WorkerView, error)
	// Streams lists the requests that the gateway carries now, and what came of those
	// that it has carried. The error of a gateway that is away, which carries none, matches
	// ErrNoGateway.
	Streams(ctx context.Context) (fleet.StreamList, error)
	// Minimum is how many workers of a pool must keep taking requests.
	Minimum(ctx context.Context, pool string) (int, error)
	// SetDrain sets or lifts a worker's drain. It is stored when SetDrain returns.
	SetDrain(ctx context.Context, id string, on, keepStreams bool) error
	// Restart has a worker started anew. It may return before that is done. The worker may
	// be away: then its incarnation and its process are 0.
	Restart(ctx context.Context, w fleet.WorkerView) error
}

// ErrUnknown says that the control plane knows no such worker.
var ErrUnknown = errors.New("no such worker")

// ErrNoGateway says that nobody listens where the gateway should.
var ErrNoGateway = errors.New("the gateway is away")

// Left is what a worker that is being emptied still has to do.
type Left struct {
	Worker string `json:"worker"`
	// Streams are the gateway's at this worker. Requests are what the worker itself
	// counts, running and waiting: those that came by the direct path too.
	Streams  int `json:"streams"`
	Requests int `json:"requests"`
}

// Drained is the end of a drain.
type Drained struct {
	Worker string `json:"worker"`
	// Streams were at the worker when it began.
	Streams int     `json:"streams"`
	Seconds float64 `json:"seconds"`
	// KeptStreams says that they ended there instead of moving.
	KeptStreams bool `json:"kept_streams"`
}

// NotEmptyError is the end of a drain that took too long. The worker stays drained.
type NotEmptyError struct {
	Left
	After time.Duration
}

// Error says what is left.
func (e *NotEmptyError) Error() string {
	return fmt.Sprintf("%s still has %d streams and %d requests after %v", e.Worker, e.Streams, e.Requests, e.After)
}

// Drain drains a worker and returns when nothing runs there any more. The drain
// stays set, whatever Drain returns.
func Drain(ctx context.Context, m Mesh, id string, c DrainConfig) (Drained, error) {
	d := Drained{Worker: id, KeptStreams: c.KeepStreams}
	if err := c.Validate(); err != nil {
		return d, err
	}
	left, err := leftAt(ctx, m, id)
	if err != nil {
		return d, err
	}
	d.Streams = left.Streams
	begin := time.Now()
	if err := m.SetDrain(ctx, id, true, c.KeepStreams); err != nil {
		return d, err
	}
	// A request that was chosen for the worker a moment before the drain is seen a
	// moment later, so one look at an empty worker does not count.
	for empty, said := 0, (Left{Streams: -1}); ; {
		if left, err = leftAt(ctx, m, id); err != nil {
			return d, err
		}
		if c.Progress != nil && left != said {
			c.Progress(left)
			said = left
		}
		if left.Streams+left.Requests > 0 {
			empty = 0
		} else if empty++; empty == 2 {
			d.Seconds = time.Since(begin).Seconds()
			return d, nil
		}
		if time.Since(begin) >= c.Timeout {
			return d, &NotEmptyError{left, c.Timeout}
		}
		if err := sleep(ctx, c.Poll); err != nil {
			return d, err
		}
	}
}

// leftAt counts what a worker has to do.
func leftAt(ctx context.Context, m Mesh, id string) (Left, error) {
	w, err := find(ctx, m, id)
	if err != nil {
		return Left{}, err
	}
	list, err := m.Streams(ctx)
	if err != nil && !errors.Is(err, ErrNoGateway) {
		return Left{}, err
	}
	return Left{Worker: id, Requests: int(w.Running) + int(w.Waiting), Streams: carried(list, id)}, nil
}

// carried counts the requests that a worker carries for the gateway.
func carried(list fleet.StreamList, id string) int {
	n := 0
	for _, s := range list.Streams {
		if s.Worker == id {
			n++
		}
	}
	return n
}

// find looks one worker up.
func find(ctx context.Context, m Mesh, id string) (fleet.WorkerView, error) {
	list, err := m.Workers(ctx)
	if err != nil {
		return fleet.WorkerView{}, err
	}
	if i := slices.IndexFunc(list, func(w fleet.WorkerView) bool { return w.ID == id }); i >= 0 {
		return list[i], nil
	}
	return fleet.WorkerView{}, fmt.Errorf("%w: %s", ErrUnknown, id)
}

// sleep waits, or returns why ctx ended.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
