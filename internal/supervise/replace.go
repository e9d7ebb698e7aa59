package supervise

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// Handover says how one process of a child takes over from another while both run.
type Handover struct {
	// Ready reports whether the new process, of that pid, does the child's work.
	Ready func(ctx context.Context, pid int) bool
	// Within is how long it may take to get ready; 30 s.
	Within time.Duration
	// Retire returns when the old process may be sent SIGTERM, or when ctx ends; nil
	// for at once. It has Grace to end after that.
	Retire func(ctx context.Context, pid int)
	// Grace is the time between SIGTERM and SIGKILL of the old one.
	Grace time.Duration
}

// replacement is one call of Replace.
type replacement struct {
	Handover
	result chan error
}

// ErrNotRunning says that there is no child of that name.
var ErrNotRunning = errors.New("not running")

// readyEvery is the time between two questions whether a new process is ready.
const readyEvery = 50 * time.Millisecond

// Replace starts a second process of a running child, waits until it is ready, and
// retires the first one in the background. When the new one does not get ready it is
// killed, the old one goes on, and Replace says why. A child that is replaced already
// is waited for.
func (g *Group) Replace(ctx context.Context, name string, h Handover) error {
	if h.Within == 0 {
		h.Within = 30 * time.Second
	}
	g.mu.Lock()
	to := g.replaces[name]
	g.mu.Unlock()
	if to == nil {
		return fmt.Errorf("replace %s: %w", name, ErrNotRunning)
	}
	r := &replacement{Handover: h, result: make(chan error, 1)}
	select {
	case to <- r:
	case <-ctx.Done():
		return fmt.Errorf("replace %s: %w", name, context.Cause(ctx))
	}
	if err := <-r.result; err != nil {
		return fmt.Errorf("replace %s: %w", name, err)
	}
	return nil
}

// take makes the child known to Replace.
func (g *Group) take(name string) <-chan *replacement {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := make(chan *replacement)
	g.replaces[name] = c
	return c
}

// leave undoes take. Whoever waits in Replace is told by its own context.
func (g *Group) leave(name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.replaces, name)
}

// hand starts the new process and waits until it is ready. On an error the old one is
// the child's process as before.
func (g *Group) hand(ctx context.Context, s Spec, old *process, r *replacement) (*process, error) {
	next, err := g.start(s, s.Args)
	if err != nil {
		return nil, err
	}
	err = ready(ctx, next, r.Handover)
	if err == nil {
		g.log.Info("child replaced", "child", s.Name, "pid", next.pid, "old", old.pid)
		return next, nil
	}
	_ = syscall.Kill(-next.pid, syscall.SIGKILL) // it may have ended by itself
	<-next.done
	g.setPID(s.Name, old.pid)
	return nil, err
}

// ready waits until a new process is ready.
func ready(ctx context.Context, p *process, h Handover) error {
	ctx, cancel := context.WithTimeoutCause(ctx, h.Within, fmt.Errorf("the new process is not ready after %v", h.Within))
	defer cancel()
	for !h.Ready(ctx, p.pid) {
		select {
		case <-p.done:
			return fmt.Errorf("the new process ended: %w", Exit{Err: p.err}.Reason())
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(readyEvery):
		}
	}
	return nil
}

// retire ends an old process when its work is done. When the child itself is stopped
// it has grace left.
func retire(ctx context.Context, p *process, grace time.Duration, r Handover) {
	rctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-p.done:
			cancel()
		case <-rctx.Done():
		}
	}()
	if r.Retire != nil {
		r.Retire(rctx, p.pid)
	}
	select {
	case <-p.done:
		return
	default:
	}
	done := make(chan struct{})
	go func() {
		select {
		case <-p.done:
		case <-ctx.Done(): // the time is up earlier then
			terminate(p.pid, grace, p.done)
		}
		close(done)
	}()
	terminate(p.pid, r.Grace, p.done)
	<-p.done
	<-done
}
