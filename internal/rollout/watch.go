package rollout

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// ready waits for a new start of the worker that takes requests, or that could if an
// operator did not hold it drained.
func (r *runner) ready(ctx context.Context, s *Step) error {
	begin, undrained, seen := time.Now(), false, "it did not come back"
	for {
		w, err := find(ctx, r.m, s.Worker)
		if err == nil && w.Drained && !s.Drained && !undrained {
			s.Held = true // by an operator, while it was away
		}
		switch {
		case errors.Is(err, ErrUnknown): // it left, and has not come back
		case err != nil:
			return err
		case w.Incarnation == s.Incarnation: // the old one still
		case !undrained && !s.Held:
			if err := r.m.SetDrain(ctx, s.Worker, false, false); err != nil {
				return err
			}
			undrained = true
			r.c.Progress(s.Worker, "started; waiting until it is ready")
			continue
		case takes(w), s.Held && w.State == fleet.StateReady:
			s.Now, s.Drained = w.Fingerprint, false
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

// observe watches the new worker under traffic: what it says of itself, and what became
// of the answers that the gateway had from it.
func (r *runner) observe(ctx context.Context, s *Step) error {
	r.c.Progress(s.Worker, fmt.Sprintf("ready; watched for %v", r.c.Observe))
	var since seen
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
		if err := r.answers(ctx, s, &since); err != nil {
			return err
		}
		if time.Since(begin) >= r.c.Observe {
			return nil
		}
		if err := sleep(ctx, r.c.Poll); err != nil {
			return err
		}
	}
}

// seen is what became of a worker's answers while it was watched.
type seen struct {
	ok, broken int64
	// counts are the gateways' at the last look; nil before the first.
	counts map[string]fleet.AttemptView
}

// answers adds what became of the answers since the last look. A gateway that is away
// tells nothing.
func (r *runner) answers(ctx context.Context, s *Step, since *seen) error {
	list, err := r.m.Streams(ctx)
	if errors.Is(err, ErrNoGateway) {
		return nil
	}
	if err != nil {
		return err
	}
	since.look(list, s.Worker)
	all := since.ok + since.broken + int64(carried(list, s.Worker))
	if float64(since.broken) > r.c.MaxErrorRate*float64(all) {
		return &BoundError{s.Worker, fmt.Sprintf("it broke %d of the %d answers that the gateway asked it for, at most %.1f %% may break", since.broken, all, r.c.MaxErrorRate*100)}
	}
	return nil
}

// look takes one list in. What was counted before the first look is not this worker's, nor
// what a gateway counted that was replaced and is seen only later. One that counts less
// than before counts anew; one that took over after the first look has from the beginning.
func (b *seen) look(list fleet.StreamList, worker string) {
	first := b.counts == nil
	if first {
		b.counts = map[string]fleet.AttemptView{}
	}
	gateways := list.Gateways
	if len(gateways) == 0 {
		gateways = []string{""} // of a version that has no names
	}
	for i, g := range gateways {
		now := list.AttemptsAt(g, worker)
		last, known := b.counts[g]
		b.counts[g] = now
		if (known || i == 0 && !first) && now.OK >= last.OK && now.Broken >= last.Broken {
			b.ok += now.OK - last.OK
			b.broken += now.Broken - last.Broken
		}
	}
}
