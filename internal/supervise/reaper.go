package supervise

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Reaper is a small process that outlives its parent: it holds the read end of a
// pipe, and when the parent dies it kills the children it was told of and
// removes folders. A nil *Reaper does nothing.
type Reaper struct {
	mu  sync.Mutex
	in  io.WriteCloser // guarded by mu
	cmd *exec.Cmd
}

// StartReaper starts the executable with args, which must call Reap on its
// standard input. dir is removed with all its content when the parent is gone.
func StartReaper(path string, args []string, dir string) (*Reaper, error) {
	cmd := exec.Command(path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("pipe to the reaper: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the reaper: %w", err)
	}
	r := &Reaper{in: in, cmd: cmd}
	r.RemoveDir(dir)
	return r, nil
}

// RemoveDir tells the reaper of one more folder to remove with all its content when
// the parent is gone.
func (r *Reaper) RemoveDir(dir string) { r.send("dir " + dir) }

// Add tells the reaper of a child.
func (r *Reaper) Add(pid int) { r.send("+" + strconv.Itoa(pid)) }

// Remove tells the reaper that a child has ended.
func (r *Reaper) Remove(pid int) { r.send("-" + strconv.Itoa(pid)) }

func (r *Reaper) send(line string) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	// A reaper that died is no reason to stop the children it guarded.
	_, _ = io.WriteString(r.in, line+"\n")
}

// Close ends the reaper after it removed the folders.
func (r *Reaper) Close() error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.in.Close(); err != nil {
		return fmt.Errorf("close the reaper's pipe: %w", err)
	}
	return r.cmd.Wait()
}

// Reap is the reaper's own main loop: it reads in until the parent's end closes
// it, then kills what is left and removes the folders.
func Reap(in io.Reader) error {
	pids := map[int]bool{}
	var dirs []string
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		line := lines.Text()
		if d, ok := strings.CutPrefix(line, "dir "); ok {
			dirs = append(dirs, d)
			continue
		}
		n, err := strconv.Atoi(strings.TrimLeft(line, "+-"))
		if err != nil || n <= 1 {
			return fmt.Errorf("reaper: line %q: want +PID or -PID", line)
		}
		if line[0] == '+' {
			pids[n] = true
		} else {
			delete(pids, n)
		}
	}
	for pid := range pids {
		_ = syscall.Kill(-pid, syscall.SIGKILL) // gone already is as good
	}
	err := lines.Err()
	for _, dir := range dirs {
		err = errors.Join(err, removeSoon(dir))
	}
	return err
}

// reapPatience is how long the killed may take to stop writing into the folder.
const reapPatience = 5 * time.Second

// removeSoon removes a folder in which processes that were just killed may still
// make files.
func removeSoon(dir string) error {
	for deadline := time.Now().Add(reapPatience); ; time.Sleep(20 * time.Millisecond) {
		err := os.RemoveAll(dir)
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}
