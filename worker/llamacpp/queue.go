package llamacpp

import (
	"math"
	"slices"

	"github.com/kvmesh/kvmesh/worker"
)

// nobody is the priority of a request that is not there.
const nobody = math.MaxInt64

// enqueue takes a new sequence, already counted in g.waiting.
func (l *loop) enqueue(s *sequence) {
	s.age = l.arrived
	l.arrived++
	l.queue(s)
	if s.params.Request.Refused() { // while s was on its way
		l.fail(s, worker.ErrBusy)
	}
}

// queue puts a sequence into its place among those that wait.
func (l *loop) queue(s *sequence) {
	l.waiting = insert(l.waiting, s)
	l.noteLast()
}

// leaveQueue takes the waiting sequence i out.
func (l *loop) leaveQueue(i int) {
	l.waiting = slices.Delete(l.waiting, i, i+1)
	l.g.waiting.Add(-1)
	l.noteLast()
}

// insert adds a sequence to a list that is in order.
func insert(list []*sequence, s *sequence) []*sequence {
	i, _ := slices.BinarySearchFunc(list, s, order)
	return slices.Insert(list, i, s)
}

// isNew reports that a waiting sequence can be refused for a request of a higher
// priority: nobody has seen anything of its own request yet, of whichever choice, here
// or elsewhere.
func (s *sequence) isNew() bool {
	return !s.preempted && s.params.Delivered == 0 && !s.params.Request.Begun()
}

// noteLast notes the lowest priority that can be displaced.
func (l *loop) noteLast() {
	last := int64(nobody)
	for _, s := range slices.Backward(l.waiting) {
		if s.isNew() {
			last = int64(s.params.Priority)
			break
		}
	}
	l.g.last.Store(last)
}

// displaceable are waiting requests of lower priorities, the last ones first, that have
// at least n places together; none when all of them have fewer.
func (l *loop) displaceable(priority, n int) (refused []*worker.Request) {
	for _, s := range slices.Backward(l.waiting) {
		if n <= 0 || s.params.Priority >= priority {
			break
		}
		if r := s.params.Request; s.isNew() && !slices.Contains(refused, r) {
			refused = append(refused, r)
			n -= r.Places()
		}
	}
	if n > 0 {
		return nil
	}
	return refused
}

// refuse ends all choices of a request, unless it has begun.
func (l *loop) refuse(r *worker.Request) {
	if !r.Refuse() {
		return // a comment has just been sent
	}
	for _, s := range slices.Concat(l.running, l.waiting) {
		if s.params.Request == r {
			l.fail(s, worker.ErrBusy)
		}
	}
}

// admit starts waiting sequences in order. One whose consumer has not made room
// since it gave way does not count as waiting.
func (l *loop) admit() {
	for {
		i := slices.IndexFunc(l.waiting, (*sequence).back)
		if i < 0 {
			return
		}
		s := l.waiting[i]
		if len(l.free) == 0 || !l.fits(s, math.MinInt) {
			// Nobody overtakes s: a stream of small requests would starve a large one.
			v := l.victim(s)
			if v == nil {
				return
			}
			l.yield(v)
			continue
		}
		l.leaveQueue(i)
		l.begin(s)
	}
}

// begin gives a sequence a slot.
func (l *loop) begin(s *sequence) {
	s.slot = l.free[len(l.free)-1]
	l.free = l.free[:len(l.free)-1]
	l.running = insert(l.running, s)
	l.g.running.Add(1)
	s.slow = false
	if s.preempted {
		l.recall(s)
	}
	l.share(s)
}

// victim is the running sequence that gives its place to s: one that does nothing with
// it, else the last one of those with a lower priority, provided that s can start
// when all of them have gone. nil = s must wait.
func (l *loop) victim(s *sequence) *sequence {
	if i := l.lastResting(); i >= 0 {
		return l.running[i]
	}
	if len(l.running) == 0 {
		return nil
	}
	last := l.running[len(l.running)-1]
	if last.params.Priority >= s.params.Priority || !l.fits(s, s.params.Priority) {
		return nil
	}
	return last
}

// lastResting is the index of the last running sequence whose consumer is behind,
// -1 when there is none.
func (l *loop) lastResting() int {
	for i := len(l.running) - 1; i >= 0; i-- {
		if l.running[i].resting() {
			return i
		}
	}
	return -1
}

// headroom is how many tokens each sequence should be able to generate after an
// admission before cells run out. It keeps one that gave way from returning at
// once, only to give way again: it comes back when another has ended.
const headroom = 16

// fits reports whether s can start beside those that run with at least the given
// priority.
func (l *loop) fits(s *sequence, least int) bool {
	need := min(len(s.tokens)+headroom, l.cfg.ContextLen)
	for _, r := range l.running {
		if r.params.Priority >= least {
			need += min(len(r.tokens)+headroom, l.cfg.ContextLen)
		}
	}
	return need <= l.cfg.Cells
}

// makeRoom frees the cells of one sequence: one that rests, else the last one. There
// are at least two, since one alone fits, so the first one always advances.
func (l *loop) makeRoom() {
	at := l.lastResting()
	if at < 0 {
		at = len(l.running) - 1
	}
	l.yield(l.running[at])
}
