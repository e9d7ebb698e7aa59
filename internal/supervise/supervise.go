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
	Grace   time.Duration // between SIGTERM and SIGKILL at the end, default 5 s
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

	mu   sync.Mutex
	pids map[string]int // guarded by mu; running children
}

// NewGroup returns an empty group. reaper may be nil.
func NewGroup(log *slog.Logger, reaper *Reaper) *Group {
	return &Group{log: log, reaper: reaper, exits: make(chan Exit, 64), pids: map[string]int{}}
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
// SIGKILL. It returns once the child is gone.
func (g *Group) Run(ctx context.Context, s Spec) {
	// The parent-death signal follows the thread that started the child, so the
	// thread must live exactly as long as this function.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	wait := first
	for ctx.Err() == nil {
		start := time.Now()
		err := g.once(ctx, s)
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

// once starts the child and waits for its end.
func (g *Group) once(ctx context.Context, s Spec) error {
	if s.Prepare != nil {
		if err := s.Prepare(); err != nil {
			return fmt.Errorf("prepare %s: %w", s.Name, err)
		}
	}
	cmd := exec.Command(s.Path, s.Args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = s.Env, s.Log, s.Log
	cmd.SysProcAttr = Attr()
	// A grandchild that holds the log pipe must not keep Wait from returning.
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", s.Name, err)
	}
	pid := cmd.Process.Pid
	g.reaper.Add(pid)
	g.setPID(s.Name, pid)
	g.log.Debug("child started", "child", s.Name, "pid", pid)
	done := make(chan struct{})
	stopped := context.AfterFunc(ctx, func() { terminate(pid, s.Grace, done) })
	err := cmd.Wait()
	close(done)
	stopped()
	g.setPID(s.Name, 0)
	g.reaper.Remove(pid)
	return err
}

func (g *Group) setPID(name string, pid int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if pid == 0 {
		delete(g.pids, name)
		return
	}
	g.pids[name] = pid
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
