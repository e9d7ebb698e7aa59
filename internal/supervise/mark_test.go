//go:build linux

package supervise

import (
	"os"
	"os/exec"
	"testing"
)

func TestProcessMark(t *testing.T) {
	mine := ProcessMark(os.Getpid())
	if mine == "" || mine != ProcessMark(os.Getpid()) {
		t.Errorf("own mark %q, then %q", mine, ProcessMark(os.Getpid()))
	}
	c := exec.Command("sleep", "600")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	alive := ProcessMark(c.Process.Pid)
	if alive == "" || alive == mine {
		t.Errorf("a child's mark is %q, its parent's %q", alive, mine)
	}
	_ = c.Process.Kill()
	_ = c.Wait() // it was killed
	if m := ProcessMark(c.Process.Pid); m == alive {
		t.Errorf("process %d is gone and still has the mark %q", c.Process.Pid, m)
	}
}
