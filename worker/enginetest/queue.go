package enginetest

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/worker"
)

// asked is one choice on its way. It keeps no KV; as a session it sees when the engine
// has let it in.
type asked struct {
	in    chan struct{} // closed when it is in the queue, or runs
	begun chan struct{} // closed at the first token
	end   chan error    // what it ended with, nil for its own end
}

// Restore implements worker.KVSession.
func (a *asked) Restore(context.Context, []int32, time.Duration) worker.KVChain {
	close(a.in)
	return worker.KVChain{}
}

// Step implements worker.KVSession.
func (a *asked) Step([]int32, int, bool, worker.KVCopy) {}

// ask begins a generation. Its consumer leaves after one token, when hold has ended.
func (s *suite) ask(hold context.Context, prompt []int32, p worker.Params) *asked {
	a := &asked{in: make(chan struct{}), begun: make(chan struct{}), end: make(chan error, 1)}
	p.KV = a
	go func() {
		for _, err := range s.e.Generate(s.ctx, prompt, p) {
			if err != nil {
				a.end <- err
				return
			}
			close(a.begun)
			<-hold.Done()
			break
		}
		a.end <- nil
	}()
	return a
}

// letIn waits until the engine has decided about a, and returns its error.
func (s *suite) letIn(a *asked) error {
	s.Helper()
	select {
	case <-a.in:
		return nil
	case err := <-a.end:
		return err
	case <-s.ctx.Done():
		s.Fatal("a generation is neither let in nor refused")
		return nil
	}
}

// crowd fills the queue until somebody is refused. Those inside stay until hold ends;
// done waits for all.
func (s *suite) crowd(hold context.Context, prompt []int32) (done func()) {
	const most = 1024
	ctx, cancel := context.WithCancel(s.ctx)
	context.AfterFunc(hold, cancel)
	var busy atomic.Int64
	refused := make(chan struct{})
	var wg sync.WaitGroup
	for range most {
		wg.Go(func() {
			for _, err := range s.e.Generate(ctx, prompt, greedy(10000)) {
				if errors.Is(err, worker.ErrBusy) {
					if busy.Add(1) == 1 {
						close(refused)
					}
				} else if err != nil && !errors.Is(err, context.Canceled) {
					s.Errorf("generation ended with %v", err)
				}
				if err == nil {
					<-ctx.Done() // keep the place
				}
			}
		})
	}
	select {
	case <-refused:
	case <-ctx.Done():
		s.Errorf("%d requests at once and no ErrBusy", most)
	}
	return wg.Wait
}

// queueFull: requests past the queue get ErrBusy, never more run than MaxRunning,
// and the engine is as good as new afterwards.
func (s *suite) queueFull() {
	hold, leave := context.WithCancel(s.ctx)
	defer leave()
	prompt := s.prompt("me too")
	done := s.crowd(hold, prompt)
	l := s.e.Load()
	if l.Running > l.MaxRunning {
		s.Errorf("%d sequences run, at most %d are allowed", l.Running, l.MaxRunning)
	}
	leave()
	done()
	s.idle("a full queue")
	s.generate(prompt, greedy(2))
}

// laterChoices: a request of more choices than run at once is let in or refused as a
// whole, at its first choice, whichever that is. One that has begun is refused nothing
// later: not when the queue has filled up before its other choices' turn, nor for a
// request of a higher priority.
func (s *suite) laterChoices() {
	if _, ok := s.e.(worker.Resumer); !ok {
		s.Skip("the engine keeps no KV, so that nobody sees when it lets somebody in")
	}
	hold, leave := context.WithCancel(s.ctx)
	defer leave()
	prompt := s.prompt("and another one")
	n := s.e.Load().MaxRunning + 2
	choice := func(r *worker.Request, i, priority int) *asked {
		p := greedy(4)
		p.Request, p.Choice, p.Priority = r, i, priority
		return s.ask(hold, prompt, p)
	}
	r := worker.NewRequest(n, n-2)
	all := []*asked{choice(r, n-1, -1)}
	select {
	case <-all[0].begun:
	case <-s.ctx.Done():
		s.Fatal("the first choice does not begin")
	}
	done := s.crowd(hold, prompt)
	for i := range n - 1 {
		a := choice(r, i, -1)
		if err := s.letIn(a); err != nil {
			s.Errorf("choice %d of a request that has begun: %v", i, err)
		}
		all = append(all, a)
	}
	fresh := worker.NewRequest(2, 2)
	for i := range 2 {
		if err := s.letIn(choice(fresh, i, -2)); !errors.Is(err, worker.ErrBusy) {
			s.Errorf("choice %d of a request that finds the queue full: %v, want ErrBusy", i, err)
		}
	}
	var higher []*asked
	for range 3 {
		a := choice(nil, 0, 5)
		if err := s.letIn(a); err == nil {
			higher = append(higher, a)
		} else if !errors.Is(err, worker.ErrBusy) {
			s.Errorf("a request of a higher priority: %v", err)
		}
	}
	leave()
	for i, a := range append(all, higher...) {
		if err := <-a.end; err != nil && i < n {
			s.Errorf("choice %d of a request that had begun ends with %v", i, err)
		}
	}
	done()
	r.End()
	fresh.End()
	s.idle("choices that came later")
}

// placesComeBack: what a request took for choices that are never generated is given
// back at its end.
func (s *suite) placesComeBack() {
	if _, ok := s.e.(worker.Resumer); !ok {
		s.Skip("the engine keeps no KV, so that nobody sees when it lets somebody in")
	}
	prompt := s.prompt("one of two")
	for range 80 { // more than a queue has places
		ctx, leave := context.WithCancel(s.ctx)
		p := greedy(10000)
		p.Request, p.KV = worker.NewRequest(3, 2), quitter{leave}
		if _, err := collect(ctx, s.e, prompt, p); !errors.Is(err, context.Canceled) {
			s.Fatalf("a generation that is left at once ends with %v", err)
		}
		leave()
		p.Request.End()
	}
	s.idle("requests that left at once")
}

// quitter is a session that ends its generation as soon as that is let in.
type quitter struct{ leave func() }

// Restore implements worker.KVSession.
func (q quitter) Restore(context.Context, []int32, time.Duration) worker.KVChain {
	q.leave()
	return worker.KVChain{}
}

// Step implements worker.KVSession.
func (quitter) Step([]int32, int, bool, worker.KVCopy) {}
