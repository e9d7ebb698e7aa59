package supervise

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestMain lets the test binary play the processes of these tests.
func TestMain(m *testing.M) {
	switch os.Getenv("SUPERVISE_ROLE") {
	case "":
		os.Exit(m.Run())
	case "reaper":
		if err := Reap(os.Stdin); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case "locker": // holds a lock and has a child that would inherit it
		if _, err := Take(os.Getenv("LOCK")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		child := exec.Command(os.Args[0])
		child.Env = roleEnv("child")
		child.SysProcAttr = Attr()
		_ = child.Run() // it is killed with this process
	case "child": // ignores SIGTERM when told to
		if os.Getenv("STUBBORN") != "" {
			sigs := make(chan os.Signal, 1)
			notifyTerm(sigs)
		}
		fmt.Println(os.Getpid())
		// An empty select is a deadlock to the runtime, which would end the process.
		<-time.After(time.Hour)
	case "parent": // runs one child and never ends
		g := NewGroup(slog.New(slog.DiscardHandler), nil)
		g.Run(context.Background(), Spec{Name: "c", Path: os.Args[0], Env: roleEnv("child"), Log: os.Stdout})
	}
}

func roleEnv(role string, more ...string) []string {
	env := []string{"SUPERVISE_ROLE=" + role}
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "SUPERVISE_ROLE=") {
			env = append(env, e)
		}
	}
	return append(env, more...)
}

// lockedBuffer is a Log that a test can read while the child writes.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) lines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Fields(l.b.String())
}

// eventually polls for a state of another process; there is no event to wait on.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("never: %s", what)
		}
	}
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil && !zombie(pid) }

func zombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && strings.Contains(string(stat), ") Z ")
}

func TestRestartsAndStops(t *testing.T) {
	out := &lockedBuffer{}
	g := NewGroup(slog.New(slog.DiscardHandler), nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.Run(ctx, Spec{Name: "c", Path: os.Args[0], Env: roleEnv("child"), Log: out})
	}()
	eventually(t, "first start", func() bool { return len(out.lines()) == 1 && g.PID("c") != 0 })
	if err := syscall.Kill(g.PID("c"), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "second start", func() bool { return len(out.lines()) == 2 })
	if exit := <-g.Exits(); exit.Name != "c" || exit.Err == nil {
		t.Errorf("exit = %+v, want the killed child's", exit)
	}
	pid, err := strconv.Atoi(out.lines()[1])
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	<-done
	if alive(pid) {
		t.Errorf("child %d outlived Run", pid)
	}
}

// A child that ends by itself without an error is started again and nobody is
// warned.
func TestNormalExitIsNoWarning(t *testing.T) {
	var log lockedBuffer
	g := NewGroup(slog.New(slog.NewTextHandler(&log, nil)), nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.Run(ctx, Spec{Name: "c", Path: "/bin/sh", Args: []string{"-c", "exit 0"}})
	}()
	exit := <-g.Exits()
	if exit.Err != nil || exit.Reason().Error() != "exit status 0" {
		t.Errorf("exit = %+v", exit)
	}
	cancel()
	<-done
	text := strings.Join(log.lines(), " ")
	if !strings.Contains(text, "starting it again") || strings.Contains(text, "WARN") || strings.Contains(text, "nil") {
		t.Errorf("log = %s", text)
	}
}

func TestKillsStubbornAndStopped(t *testing.T) {
	for _, stop := range []bool{false, true} {
		out := &lockedBuffer{}
		g := NewGroup(slog.New(slog.DiscardHandler), nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			g.Run(ctx, Spec{Name: "c", Path: os.Args[0], Env: roleEnv("child", "STUBBORN=1"), Log: out, Grace: 200 * time.Millisecond})
		}()
		eventually(t, "start", func() bool { return len(out.lines()) == 1 })
		pid := g.PID("c")
		if stop {
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
		}
		cancel()
		<-done
		if alive(pid) {
			t.Errorf("stop=%v: child %d outlived Run", stop, pid)
		}
	}
}

// A parent that is killed with SIGKILL takes its children with it.
func TestParentKilled(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = roleEnv("parent")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed: the error says so
	eventually(t, "the child dies with its parent", func() bool { return !alive(child) })
}

// The reaper kills what is left and removes the folder when its parent is gone.
func TestReaper(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	if err := os.MkdirAll(filepath.Join(dir, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	left := exec.Command(os.Args[0])
	left.Env = roleEnv("child")
	left.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SUPERVISE_ROLE", "reaper")
	r, err := StartReaper(slog.New(slog.DiscardHandler), os.Args[0], nil, dir)
	if err != nil {
		t.Fatal(err)
	}
	r.Add(left.Process.Pid)
	r.Add(1 << 22) // never exists
	r.Remove(1 << 22)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if err := left.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("left-over child ended with %v, want killed", err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("folder still there: %v", err)
	}
}

// A reaper that was killed is started again with all that the first one knew.
func TestReaperKilled(t *testing.T) {
	dir, more := filepath.Join(t.TempDir(), "run"), filepath.Join(t.TempDir(), "more")
	for _, d := range []string{dir, more} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	left := exec.Command(os.Args[0])
	left.Env = roleEnv("child")
	left.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SUPERVISE_ROLE", "reaper")
	var log lockedBuffer
	r, err := StartReaper(slog.New(slog.NewTextHandler(&log, nil)), os.Args[0], nil, dir)
	if err != nil {
		t.Fatal(err)
	}
	r.Add(left.Process.Pid)
	r.RemoveDir(more)
	for range 2 {
		old := r.PID()
		if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, "another reaper", func() bool { return r.PID() != old && alive(r.PID()) })
	}
	if text := strings.Join(log.lines(), " "); !strings.Contains(text, "child=reaper") {
		t.Errorf("log = %s", text)
	}
	// Closing its pipe is what the death of this process would do.
	if err := r.in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := left.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("left-over child ended with %v, want killed", err)
	}
	eventually(t, "the folders are removed", func() bool {
		_, a := os.Stat(dir)
		_, b := os.Stat(more)
		return os.IsNotExist(a) && os.IsNotExist(b)
	})
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

func TestReapRefusesGarbage(t *testing.T) {
	if err := Reap(strings.NewReader("+0\n")); err == nil {
		t.Error("pid 0 accepted: it would kill the reaper's own group")
	}
}

// TestPorts: no port is given out twice, here or by somebody else who holds some.
func TestPorts(t *testing.T) {
	var one, two Ports
	seen := map[string]bool{}
	for i := range 2000 {
		p := &one
		if i%2 == 1 {
			p = &two
		}
		addr, err := p.Free("127.0.0.1:0")
		if err != nil || seen[addr] {
			t.Fatalf("port %d: %s, %v", i, addr, err)
		}
		seen[addr] = true
	}
	for _, p := range []*Ports{&one, &two} {
		for _, c := range p.held {
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestFreePort(t *testing.T) {
	addr, err := FreePort("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := FreePort(addr); err == nil || !strings.Contains(err.Error(), addr) {
		t.Errorf("taken port: err = %v, want one that names %s", err, addr)
	}
	if _, err := FreePort("nonsense"); err == nil {
		t.Error("nonsense accepted")
	}
}
