package llamacpp

import "sync"

// inbox carries functions to the loop, which runs them between two decodes, in the
// order in which they came. It is the only way in: whatever needs the context, now
// or later, is a function sent here. It holds a handful at most, because senders
// wait for their call or are bounded by the queue.
type inbox struct {
	// wake has one element when the loop should look. It may have one although
	// there is nothing new, never the other way round.
	wake chan struct{}

	mu     sync.Mutex
	calls  []func(*loop)
	closed bool
}

func newInbox() *inbox { return &inbox{wake: make(chan struct{}, 1)} }

// poke makes an idle loop look for work.
func (in *inbox) poke() {
	select {
	case in.wake <- struct{}{}:
	default:
	}
}

// send queues f; false when the loop has ended, and then f never runs.
func (in *inbox) send(f func(*loop)) bool {
	in.mu.Lock()
	if in.closed {
		in.mu.Unlock()
		return false
	}
	in.calls = append(in.calls, f)
	in.mu.Unlock()
	in.poke()
	return true
}

// call runs f on the loop's goroutine and waits for it; false as for send. The wait
// is that for the end of the running decode. It must not be used by the loop.
func (in *inbox) call(f func(*loop)) bool {
	done := make(chan struct{})
	ok := in.send(func(l *loop) {
		defer close(done)
		f(l)
	})
	if ok {
		<-done
	}
	return ok
}

// take returns the queued functions.
func (in *inbox) take() []func(*loop) {
	in.mu.Lock()
	defer in.mu.Unlock()
	calls := in.calls
	in.calls = nil
	return calls
}

// close refuses further functions and returns those still queued.
func (in *inbox) close() []func(*loop) {
	in.mu.Lock()
	in.closed = true
	in.mu.Unlock()
	return in.take()
}
