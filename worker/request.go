package worker

import (
	"sync"
	"sync/atomic"
)

// Request is what the choices of one request share at an engine's door: the places that
// it takes in the queue, once, at its start. Its first choice is let in for all of them,
// so one whose turn comes later is not refused, however full the queue is by then. It
// is safe for concurrent use.
type Request struct {
	state   atomic.Int32
	single  bool          // choices are generated one at a time
	entered chan struct{} // closed when places were taken

	mu     sync.Mutex
	left   int         // choices that have not left
	places int         // to be taken, and held from then on
	give   func(n int) // of the engine that was entered, nil = none yet
	err    error       // of the engine that refused
}

// The states of a Request.
const (
	requestOpen    int32 = iota // nobody has seen anything of it
	requestBegun                // somebody has: it is not refused any more
	requestRefused              // by Refuse
)

// NewRequest makes the Request of so many choices, of which at most atOnce are
// generated at a time: that is how many places it takes.
func NewRequest(choices, atOnce int) *Request {
	n := min(choices, atOnce)
	return &Request{left: choices, places: n, single: n == 1, entered: make(chan struct{})}
}

// Enter lets a choice into an engine, which calls it at the beginning of Generate. The
// first choice takes the places of all, by take; an error of take is that of every
// choice. leave must be called when the choice has ended, and gives back, by give, the
// places for which no choice is left.
func (r *Request) Enter(take func(n int) error, give func(n int)) (leave func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.err != nil:
		return nil, r.err
	case r.Refused():
		return nil, ErrBusy
	case r.give == nil:
		if r.err = take(r.places); r.err != nil {
			return nil, r.err
		}
		r.give = give
		close(r.entered)
	}
	return sync.OnceFunc(r.leave), nil
}

// leave is the end of one choice.
func (r *Request) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left--
	r.hold(r.left)
}

// hold gives back all places but n; r.mu is held.
func (r *Request) hold(n int) {
	if more := r.places - max(n, 0); more > 0 && r.give != nil {
		r.give(more)
		r.places -= more
	}
}

// End gives back what is left, of choices that were never generated. It is called when
// all of those that entered have left.
func (r *Request) End() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hold(0)
}

// Places is how many places the request takes or holds.
func (r *Request) Places() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.places
}

// Single reports whether no two choices of the request are generated beside each other,
// and so share batches.
func (r *Request) Single() bool { return r.single }

// Entered is closed when the request has its places.
func (r *Request) Entered() <-chan struct{} { return r.entered }

// Begin notes that something of the request has been seen, and reports whether it may
// be: not when it was refused before.
func (r *Request) Begin() bool {
	return r.state.CompareAndSwap(requestOpen, requestBegun) || r.state.Load() == requestBegun
}

// Begun reports whether Begin was called in time.
func (r *Request) Begun() bool { return r.state.Load() == requestBegun }

// Refuse takes the places of a request that has not begun away from it: choices that
// enter later get ErrBusy, and the engine ends those inside with it. It reports whether
// the request had not begun.
func (r *Request) Refuse() bool {
	return r.state.CompareAndSwap(requestOpen, requestRefused) || r.Refused()
}

// Refused reports whether Refuse was called in time.
func (r *Request) Refused() bool { return r.state.Load() == requestRefused }
