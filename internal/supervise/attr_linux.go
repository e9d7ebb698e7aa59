package supervise

import "syscall"

// Attr puts a child into a process group of its own, so that a terminal's Ctrl-C
// reaches only the parent, and lets the kernel kill it when the thread that
// started it dies: that thread must be locked for as long as the child may run.
func Attr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
