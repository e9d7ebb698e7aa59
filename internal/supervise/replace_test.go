package supervise

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// runGroup runs one child until the test ends.
func runGroup(t *testing.T, out *lockedBuffer, more ...string) *Group {
	t.Helper()
	g := NewGroup(slog.New(slog.DiscardHandler), nil)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.Run(ctx, Spec{Name: "c", Path: os.Args[0], Env: roleEnv("child", more...), Log: out, Grace: 100 * time.Millisecond})
	}()
	t.Cleanup(func() { cancel(); <-done })
	eventually(t, "the child", func() bool { return len(out.lines()) == 1 })
	return g
}

// The old process runs until the new one is ready and Retire returned.
func TestReplace(t *testing.T) {
	var out lockedBuffer
	g := runGroup(t, &out)
	old := g.PID("c")
	free := make(chan struct{})
	err := g.Replace(t.Context(), "c", Handover{
		Ready:  func(_ context.Context, pid int) bool { return len(out.lines()) == 2 && alive(old) && pid != old },
		Retire: func(context.Context, int) { <-free },
	})
	if err != nil {
		t.Fatal(err)
	}
	next := g.PID("c")
	if next == old || !alive(old) || !alive(next) {
		t.Fatalf("old %d alive %v, new %d alive %v; want two living processes", old, alive(old), next, alive(next))
	}
	close(free)
	eventually(t, "the end of the old process", func() bool { return !alive(old) })
	if !alive(next) || g.PID("c") != next {
		t.Error("the new process went with the old one")
	}
	// The one that took over is restarted like the first.
	_ = syscall.Kill(next, syscall.SIGKILL)
	eventually(t, "a restart", func() bool { p := g.PID("c"); return p != 0 && p != next })
}

func TestReplaceKeepsTheOldOne(t *testing.T) {
	var out lockedBuffer
	g := runGroup(t, &out)
	old := g.PID("c")
	err := g.Replace(t.Context(), "c", Handover{Within: 300 * time.Millisecond, Ready: func(context.Context, int) bool { return false }})
	if err == nil {
		t.Fatal("a process that never gets ready took over")
	}
	if g.PID("c") != old || !alive(old) {
		t.Errorf("pid %d, want the old one %d, alive", g.PID("c"), old)
	}
	eventually(t, "the new process to print", func() bool { return len(out.lines()) == 2 })
	if next, err := strconv.Atoi(out.lines()[1]); err != nil || alive(next) {
		t.Errorf("the new process %d was left behind (%v)", next, err)
	}
	if err := g.Replace(t.Context(), "nobody", Handover{}); !errors.Is(err, ErrNotRunning) {
		t.Errorf("replace of nobody: %v", err)
	}
}

// An old process that still works when everything ends gets its grace and no more.
func TestReplaceAndStop(t *testing.T) {
	var out lockedBuffer
	g := NewGroup(slog.New(slog.DiscardHandler), nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.Run(ctx, Spec{Name: "c", Path: os.Args[0], Env: roleEnv("child", "STUBBORN=1"), Log: &out, Grace: 100 * time.Millisecond})
	}()
	eventually(t, "the child", func() bool { return len(out.lines()) == 1 })
	old := g.PID("c")
	err := g.Replace(t.Context(), "c", Handover{
		Ready: func(context.Context, int) bool { return len(out.lines()) == 2 },
		Grace: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	next := g.PID("c")
	cancel()
	<-done
	if alive(old) || alive(next) {
		t.Errorf("old alive %v, new alive %v after the end", alive(old), alive(next))
	}
}
