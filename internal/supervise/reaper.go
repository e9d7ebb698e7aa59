package supervise

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
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
// removes folders. One that dies itself is started again with all it was told. A nil
// *Reaper does nothing; the methods are safe for concurrent use.
type Reaper struct {
	log  *slog.Logger
	path string
	args []string
	done chan struct{} // closed when the last process has ended and the folders are gone

	mu     sync.Mutex
	dirs   []string       // guarded by mu; all it was told
	pids   map[int]bool   // guarded by mu
	in     io.WriteCloser // guarded by mu; of the running process
	cmd    *exec.Cmd      // guarded by mu
	ending chan struct{}  // closed by Close
	err    error          // of the end; set before done is closed
}

// StartReaper starts the executable with args, which must call Reap on its
// standard input. dir is removed with all its content when the parent is gone.
func StartReaper(log *slog.Logger, path string, args []string, dir string) (*Reaper, error) {
	r := &Reaper{
		log: log, path: path, args: args, dirs: []string{dir}, pids: map[int]bool{},
		done: make(chan struct{}), ending: make(chan struct{}),
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.startLocked(); err != nil {
		return nil, err
	}
	go r.guard()
	return r, nil
}

// startLocked starts a process and tells it everything.
func (r *Reaper) startLocked() error {
	cmd := exec.Command(r.path, r.args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		return fmt.Errorf("pipe to the reaper: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the reaper: %w", err)
	}
	r.in, r.cmd = in, cmd
	for _, dir := range r.dirs {
		r.sendLocked("dir " + dir)
	}
	for pid := range r.pids {
		r.sendLocked("+" + strconv.Itoa(pid))
	}
	return nil
}

// guard waits for the process, and starts another one unless Close ended it.
func (r *Reaper) guard() {
	defer close(r.done)
	wait := first
	for {
		r.mu.Lock()
		cmd := r.cmd
		r.mu.Unlock()
		err := cmd.Wait()
		select {
		case <-r.ending:
		case <-time.After(wait):
		}
		r.mu.Lock()
		if r.closed() {
			if err != nil { // it did not do its work
				err = clean(r.pids, r.dirs)
			}
			r.err = err
			r.mu.Unlock()
			return
		}
		r.log.Warn("child ended, starting it again", "child", "reaper", "err", err)
		if err := r.startLocked(); err != nil {
			r.log.Error("nothing cleans up if this process is killed now", "err", err)
		}
		r.mu.Unlock()
		wait = min(2*wait, most)
	}
}

// closed reports whether Close was called.
func (r *Reaper) closed() bool {
	select {
	case <-r.ending:
		return true
	default:
		return false
	}
}

// RemoveDir tells the reaper of one more folder to remove with all its content when
// the parent is gone.
func (r *Reaper) RemoveDir(dir string) {
	r.tell("dir "+dir, func() { r.dirs = append(r.dirs, dir) })
}

// Add tells the reaper of a child.
func (r *Reaper) Add(pid int) { r.tell("+"+strconv.Itoa(pid), func() { r.pids[pid] = true }) }

// Remove tells the reaper that a child has ended.
func (r *Reaper) Remove(pid int) { r.tell("-"+strconv.Itoa(pid), func() { delete(r.pids, pid) }) }

// tell keeps something for the next process, and sends it to this one.
func (r *Reaper) tell(line string, keep func()) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	keep()
	r.sendLocked(line)
}

func (r *Reaper) sendLocked(line string) {
	// One that just died is started again, and told again.
	_, _ = io.WriteString(r.in, line+"\n")
}

// PID returns the process id of the reaper.
func (r *Reaper) PID() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cmd.Process.Pid
}

// Close ends the reaper after it removed the folders. It may be called once.
func (r *Reaper) Close() error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	close(r.ending)
	_ = r.in.Close() // closed already when its process died
	r.mu.Unlock()
	<-r.done
	return r.err
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
	return errors.Join(lines.Err(), clean(pids, dirs))
}

// clean kills the process groups and removes the folders.
func clean(pids map[int]bool, dirs []string) (err error) {
	for pid := range pids {
		_ = syscall.Kill(-pid, syscall.SIGKILL) // gone already is as good
	}
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
