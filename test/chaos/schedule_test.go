package chaos

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// fault is what can be done to a worker, or to the control plane.
type fault int

const (
	kill    fault = iota
	stop          // and go on
	drain         // and be there again
	control       // the control plane is killed
	line          // the first trouble of the worker's line, and from here on its others
)

// lineTroubles is how many faults of a line there are; one that knows fewer begins again
// with its first.
const lineTroubles = 3

// event is one fault of a schedule.
type event struct {
	fault  fault
	worker string        // "" = none of them
	pause  time.Duration // from the end of the one before
	length time.Duration
}

// deck are the faults of one lane, in no order. Each has workers of its own, so that two
// lanes never take more than two of the five workers away.
func deck(lane int) []event {
	near, far := fmt.Sprintf("near-%d", lane+1), fmt.Sprintf("far-%d", lane+1)
	all := []event{
		{fault: kill, worker: near},
		{fault: stop, worker: near},
		{fault: drain, worker: near},
		{fault: control},
		{fault: control},
		{fault: stop, worker: far},
		{fault: drain, worker: far},
	}
	for i := range lineTroubles {
		all = append(all, event{fault: line + fault(i), worker: far})
	}
	return all
}

// schedule is what happens in a lane, without end: its faults in a random order, and again
// in another, so that each has its turn. It depends on the seed alone.
func schedule(seed uint64, lane int) iter.Seq[event] {
	return func(yield func(event) bool) {
		r := rand.New(rand.NewPCG(seed, uint64(100+lane)))
		for {
			round := deck(lane)
			r.Shuffle(len(round), func(i, j int) { round[i], round[j] = round[j], round[i] })
			for _, e := range round {
				e.pause = time.Duration(300+r.IntN(1700)) * time.Millisecond
				e.length = time.Duration(500+r.IntN(4500)) * time.Millisecond
				if !yield(e) {
					return
				}
			}
		}
	}
}

// first are the first n events of a schedule.
func first(n int, seed uint64, lane int) (out []event) {
	for e := range schedule(seed, lane) {
		if out = append(out, e); len(out) == n {
			return out
		}
	}
	return out
}

// TestSchedule: a seed gives one schedule, also in another process and on another machine,
// and another one gives another; in each round of it every fault happens to every worker of
// the lane, its line's down, slow and lossy among them.
func TestSchedule(t *testing.T) {
	for lane := range 2 {
		n := len(deck(lane))
		got := first(10*n, 7, lane)
		if !slices.Equal(got, first(10*n, 7, lane)) {
			t.Errorf("lane %d: a seed gives two schedules", lane)
		}
		if slices.Equal(got, first(10*n, 8, lane)) || slices.Equal(got, first(10*n, 7, 1-lane)) {
			t.Errorf("lane %d: two seeds, or lanes, give one schedule", lane)
		}
		for round := range slices.Chunk(got, n) {
			left := deck(lane)
			for _, e := range round {
				i := slices.Index(left, event{fault: e.fault, worker: e.worker})
				if i < 0 || e.pause < 300*time.Millisecond || e.length < 500*time.Millisecond || e.pause+e.length > 7*time.Second {
					t.Fatalf("lane %d: %+v of %+v", lane, e, round)
				}
				left = slices.Delete(left, i, i+1)
			}
		}
	}
	want := []event{
		{stop, "far-2", 517 * time.Millisecond, 3962 * time.Millisecond},
		{line + 2, "far-2", 487 * time.Millisecond, 2008 * time.Millisecond},
		{drain, "near-2", 1903 * time.Millisecond, 3226 * time.Millisecond},
		{stop, "near-2", 757 * time.Millisecond, 1731 * time.Millisecond},
	}
	if got := first(len(want), 3524413043, 1); !slices.Equal(got, want) {
		t.Errorf("the schedule of a seed begins with %+v, not %+v", got, want)
	}
}
