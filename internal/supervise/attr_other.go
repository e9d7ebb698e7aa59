//go:build unix && !linux

package supervise

import "syscall"

// Attr puts a child into a process group of its own. Without Linux's parent-death
// signal the Reaper alone ends children of a killed parent.
func Attr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}
