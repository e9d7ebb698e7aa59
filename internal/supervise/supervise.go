// Package supervise runs child processes that must live as long as their parent
// and no longer: restarted with back-off when they die, stopped in order at the
// end, and killed when the parent itself dies, even by SIGKILL.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// Spec describes one child.
type Spec struct {
	Name string    // for logs, unique in its Group
	Path string    // executable
	Args []string  // without the executable's name
	Env  []string  // full environment; nil inherits
	Log  io.Writer // takes stdout and stderr
	// Prepare, when not nil, runs before every start, for example to write a
	// fresh configuration.
	Prepare func() error
	// MoreArgs, when not nil, adds arguments at every start, after Prepare.
	MoreArgs func() []string
	Grace    time.Duration // between SIGTERM and SIGKILL at the end, default 5 s
}

// Exit is one unplanned end of a child.
type Exit struct {
	Name string
	Err  error
	Ran  time.Duration // how long it had run
}

// Reason is why the child ended, for people.
func (e Exit) Reason() error {
	if e.Err == nil {
		return errors.New("exit status 0")
	}
	return e.Err
}

// Group runs children. Its methods are safe for concurrent use.
type Group struct {
	log    *slog.Logger
	reaper *Reaper // nil = rely on the parent-death signal alone
	exits  chan Exit

	mu       sync.Mutex
	pids     map[string]int               // guarded by mu; running children
	replaces map[string]chan *replacement // guarded by mu; of the children in Run
}

// NewGroup returns an empty group. reaper may be nil.
func NewGroup(log *slog.Logger, reaper *Reaper) *Group {
	return &Group{log: log, reaper: reaper, exits: make(chan Exit, 64), pids: map[string]int{}, replaces: map[string]chan *replacement{}}
}

// Exits delivers unplanned ends of children, the newest dropped when nobody
// reads.
func (g *Group) Exits() <-chan Exit { return g.exits }

// PID returns the process id of a running child, or 0.
func (g *Group) PID(name string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.pids[name]
}

// Back-off between restarts: doubled from first to most, and back to first
// once a child has run for steady.
const (
	first  = 100 * time.Millisecond
	most   = 10 * time.Second
	steady = 30 * time.Second
)

// Run keeps the child running until ctx ends, then stops it: SIGTERM, Grace,
// SIGKILL. It returns once the child is gone, and those that Replace retired.
func (g *Group) Run(ctx context.Context, s Spec) {
	// The parent-death signal follows the thread that started the child, so the
	// thread must live exactly as long as this function.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	replace := g.take(s.Name)
	defer g.leave(s.Name)
	var retired sync.WaitGroup
	defer retired.Wait()
	wait := first
	for ctx.Err() == nil {
		start := time.Now()
		err := g.once(ctx, s, replace, &retired)
		if ctx.Err() != nil {
			return
		}
		ran := time.Since(start)
		if ran > steady {
			wait = first
		}
		if err == nil { // for instance a worker that somebody asked to drain
			g.log.Info("child ended as asked, starting it again", "child", s.Name, "ran", ran.Round(time.Millisecond), "in", wait)
		} else {
			g.log.Warn("child ended, starting it again", "child", s.Name, "err", err, "ran", ran.Round(time.Millisecond), "in", wait)
		}
		select {
		case g.exits <- Exit{Name: s.Name, Err: err, Ran: ran}:
		default:
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, most)
	}
}

// once runs the child, and those that replace it, until the last of them ends.
func (g *Group) once(ctx context.Context, s Spec, replace <-chan *replacement, retired *sync.WaitGroup) error {
	p, err := g.start(s, s.Args)
	if err != nil {
		return err
	}
	for {
		select {
		case <-p.done:
			return p.err
		case <-ctx.Done():
			terminate(p.pid, s.Grace, p.done)
			<-p.done
			return p.err
		case r := <-replace:
			next, err := g.hand(ctx, s, p, r)
			if err == nil {
				old := p
				retired.Go(func() { retire(ctx, old, s.Grace, r.Handover) })
				p = next
			}
			r.result <- err
		}
	}
}

// process is one started child.
type process struct {
	pid  int
	done chan struct{} // closed when it is gone; err is set then
	err  error
}

// start starts a child; the calling goroutine must keep its thread.
func (g *Group) start(s Spec, args []string) (*process, error) {
	if s.Prepare != nil {
		if err := s.Prepare(); err != nil {
			return nil, fmt.Errorf("prepare %s: %w", s.Name, err)
		}
	}
	if s.MoreArgs != nil {
		args = append(args[:len(args):len(args)], s.MoreArgs()...)
	}
	cmd := exec.Command(s.Path, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = s.Env, s.Log, s.Log
	cmd.SysProcAttr = Attr()
	// A grandchild that holds the log pipe must not keep Wait from returning.
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Name, err)
	}
	p := &process{pid: cmd.Process.Pid, done: make(chan struct{})}
	g.reaper.Add(p.pid)
	g.setPID(s.Name, p.pid)
	g.log.Debug("child started", "child", s.Name, "pid", p.pid)
	go func() {
		p.err = cmd.Wait()
		g.unsetPID(s.Name, p.pid)
		g.reaper.Remove(p.pid)
		close(p.done)
	}()
	return p, nil
}

func (g *Group) setPID(name string, pid int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pids[name] = pid
}

// unsetPID forgets a child that is gone, unless another one has its name by now.
func (g *Group) unsetPID(name string, pid int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pids[name] == pid {
		delete(g.pids, name)
	}
}

// terminate asks a child's process group to stop, and kills it after grace.
func terminate(pid int, grace time.Duration, done <-chan struct{}) {
	if grace == 0 {
		grace = 5 * time.Second
	}
	// The group may be gone already; there is nothing to do about it then.
	_ = syscall.Kill(-pid, syscall.SIGTERM)
	// A stopped process takes SIGTERM only when it is continued.
	_ = syscall.Kill(-pid, syscall.SIGCONT)
	select {
	case <-done:
	case <-time.After(grace):
		_ = syscall.Kill(-pid, syscall.SIGKILL)
	}
}
